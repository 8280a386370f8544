"""A trace as plain text: numbered steps in plain English, readable without knowing the code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from model_check.render import words
from model_check.render.story import Told, in_short, standing, told, what_is_wrong
from model_check.render.trace import Trace

WIDTH = 90

READING = (
    "Each rank has a batcher and a trainer. The batcher reads samples into its window, forms groups"
    " within the budget and agrees with the other ranks, round by round, on how many steps to take;"
    " its trainer takes these steps from a queue. An idle step holds no sample: it keeps a rank in"
    " step with the others. Samples are numbered on each rank as they arrive, so every rank has a"
    " sample 0; {0, 1} is a group of two."
)
"""What a newcomer has to know."""


def as_text(trace: Trace) -> str:
    """The whole story of a trace."""
    story = told(trace)
    title = textwrap.wrap(trace.title, WIDTH)
    lines = [*title, "=" * max(map(len, title), default=0), ""]
    lines += _table(header(trace))
    lines += ["", *textwrap.wrap(READING, WIDTH), "", "What happens", "------------"]
    for step in story:
        lines += _step(step)
    lines += ["", "How it stands then", "------------------"]
    for rank, *facts in standing(trace):
        lines += _wrapped(rank, "  ", "  ")
        for fact in facts:
            lines += _wrapped(fact, "  - ", "    ")
    if trace.promise:
        lines += ["", "What is wrong", "-------------"]
    for line in what_is_wrong(trace) if trace.promise else ():
        lines += _wrapped(line, "  ", "    " if line.startswith("- ") else "  ")
    return "\n".join(lines) + "\n"


def header(trace: Trace) -> tuple[tuple[str, str], ...]:
    """What fell (if anything did), and where."""
    says = words.PROMISES.get(trace.promise)
    promise = f"{trace.promise}: {says}" if says else trace.promise
    fell = (("broken promise", promise), ("what broke", in_short(trace)))
    return (
        *(fell if trace.promise else ()),
        *words.setting(trace.world, trace.states[0]),
        ("length", words.many(len(trace.actions), "action")),
    )


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, value in rows:
        yield from _wrapped(value, f"{label:<16}", " " * 16)


def _step(step: Told) -> Iterator[str]:
    yield from _wrapped(f"{step.sentence}.", f"{step.number:4}. ", " " * 6)
    for effect in step.effects:
        yield from _wrapped(f"rank {effect.rank} {effect.text}", " " * 6 + "- ", " " * 8)
    if step.error is not None:
        yield from _wrapped(f"this raises {step.error}", " " * 6 + "- ", " " * 8)
    if step.last:
        yield "      ^ here the promise breaks"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest)
