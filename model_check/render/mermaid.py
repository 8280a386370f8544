"""A trace as a Mermaid sequence diagram: who sends what to whom, down to what broke (if it did)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from model_check.render.effects import Effect, Kind
from model_check.render.story import Told, in_short, told
from model_check.render.trace import Trace
from spec.world import (
    Activity,
    BreakGradient,
    Crash,
    Exchange,
    FailBatch,
    FailInput,
    Gradient,
    HearOfFailure,
    LosePeer,
    NextEpoch,
    NoticeStop,
    PutStep,
    Receive,
    SeeEnd,
    State,
    StopEarly,
    TakeStep,
)

EXCHANGE, GRADIENT = "X", "G"
WIDTH = 40


def as_mermaid(trace: Trace) -> str:
    """The diagram. Batchers stand left of the exchange, trainers right of it."""
    ranks = range(trace.world.world_size)
    lines = ["sequenceDiagram", f"title {_clean(trace.title)}"]
    lines += [f"participant B{rank} as rank {rank} batcher" for rank in ranks]
    lines.append(f"participant {EXCHANGE} as exchange")
    lines += [f"participant T{rank} as rank {rank} trainer" for rank in ranks]
    lines.append(f"participant {GRADIENT} as gradient")
    for step in told(trace):
        lines += _action(trace, step, trace.states[step.number - 1])
        lines += map(_effect, step.effects)
        if step.error is not None:
            lines.append(_note("B0", EXCHANGE, f"this raises {step.error}"))
    if trace.promise:
        broken = f"BROKEN: {trace.promise}: {in_short(trace)}"
        lines.append(_note("B0", GRADIENT, broken))
    head, *rest = lines
    return "\n".join([head, *(f"    {line}" for line in rest)]) + "\n"


def _action(trace: Trace, step: Told, before: State) -> Iterator[str]:
    action, text = step.action, f"{step.number}. {step.sentence.predicate}"
    match action:
        case Exchange():
            yield _note("B0", EXCHANGE, f"{step.number}. {step.sentence}")
            return
        case Gradient():
            for rank, node in enumerate(before.nodes):
                if node.trainer is Activity.IN_GRADIENT:
                    yield _arrow(GRADIENT, "-->>", f"T{rank}", f"{step.number}. {step.sentence}")
            return
    batcher, trainer = f"B{action.rank}", f"T{action.rank}"
    match action:
        case Receive():
            yield _arrow(EXCHANGE, "-->>", batcher, text)
        case LosePeer():
            yield _arrow(EXCHANGE, "--x", batcher, text)
        case PutStep():
            yield _arrow(batcher, "->>", trainer, text)
        case FailInput() | FailBatch():
            yield _arrow(batcher, "-x", batcher, text)
        case NoticeStop():
            yield _arrow(trainer, "-->>", batcher, text)
        case TakeStep():
            yield _arrow(trainer, "->>", GRADIENT if trace.world.coupled else trainer, text)
        case BreakGradient():
            yield _arrow(GRADIENT, "--x", trainer, text)
        case SeeEnd():
            yield _arrow(batcher, "-->>", trainer, text)
        case StopEarly():
            yield _arrow(trainer, "-x", batcher, text)
        case HearOfFailure():
            yield _arrow(batcher, "--x", trainer, text)
        case NextEpoch() | Crash():
            yield _note(batcher, batcher, text)
        case _:
            yield _arrow(batcher, "->>", batcher, text)


def _effect(effect: Effect) -> str:
    batcher = f"B{effect.rank}"
    if effect.kind is Kind.POST:
        return _arrow(batcher, "->>", EXCHANGE, effect.text)
    return _note(batcher, batcher, effect.text)


def _arrow(source: str, head: str, target: str, text: str) -> str:
    return f"{source}{head}{target}: {_folded(text)}"


def _note(first: str, last: str, text: str) -> str:
    over = first if first == last else f"{first},{last}"
    return f"Note over {over}: {_folded(text)}"


def _folded(text: str) -> str:
    return "<br/>".join(textwrap.wrap(_clean(text), WIDTH))


def _clean(text: str) -> str:
    """Text without what Mermaid reads as syntax: entities, ends of statements, tags."""
    text = " ".join(text.split()).replace(";", ",").replace("#", "no. ")
    return text.replace("<", "(").replace(">", ")")
