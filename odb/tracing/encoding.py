"""Events, commands and settings as JSON values, and back: total, compact, and nothing is lost.

Commands name samples by their `seq` alone: what a sample costs, and what the dataset calls it, is
written once, where it arrives. What is read from a file may be anything, so that decoding raises
ValueError for all that is not an encoding, and UnknownSample for a sample that has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from odb.info import SampleId
from spec.config import Budget, Config, CostRule, Idle, Mode, Terms
from spec.exchange import decode, encode
from spec.messages import (
    AbortedBy,
    Arrived,
    Block,
    Closed,
    ClosedBy,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Filter,
    Finished,
    GiveUp,
    InputEnded,
    KeepSpare,
    Lost,
    Mismatched,
    Outcome,
    PeerLost,
    PostCounts,
    PostReport,
    Pull,
    Retire,
    ShareReason,
    ShareSpare,
    Step,
    Tallied,
    Totalled,
)
from spec.rank import RankState, Rules
from spec.samples import Counts, Sample

TALLY_WIDTH = 2 * len(Terms._fields) + 8


class UnknownSample(ValueError):
    """A command names a sample that has not arrived."""


# ---------------------------------------------------------------- events


Names = Callable[[Sequence[int]], Sequence[SampleId]]
"""What the dataset calls the samples with these numbers."""


def event_to_json(event: Event, names: Names) -> list[Any]:
    """An event; `names` gives the dataset's names of arriving samples."""
    match event:
        case Emitted() | InputEnded() | Failed() | Closed():
            return [type(event).__name__]
        case Arrived(samples):
            return ["Arrived", *_arrived(samples, names)]
        case Tallied(tally):
            return ["Tallied", encode(tally)]
        case Totalled(totals):
            return ["Totalled", totals]
        case PeerLost(rank):
            return ["PeerLost", rank]


def _arrived(samples: Sequence[Sample], names: Names) -> list[Any]:
    """Columns: seqs (or the first, if they count up from it), ids, costs, weights (or by how much
    all are below their costs), extras if there are any."""
    seqs, costs, weights, extras = zip(*samples, strict=True) if samples else ((),) * 4
    ids: Any = names(seqs)
    if set(map(type, ids)) != {int}:  # as they nearly always are
        ids = list(map(id_to_json, ids))
    count = len(seqs)
    below = costs[0] - weights[0] if samples else 0
    by_the_same = bool(samples) and list(map(int.__sub__, costs, weights)).count(below) == count
    in_a_row = bool(samples) and seqs == tuple(range(seqs[0], seqs[0] + count))
    columns = [seqs[0] if in_a_row else seqs, ids, costs, below if by_the_same else weights]
    return [*columns, extras] if any(extras) else columns


def event_from_json(value: Any) -> Event:
    """The event. Raises ValueError for what is none."""
    kind, *rest = _list(value) or [None]
    match kind, rest:
        case "Emitted", []:
            return Emitted()
        case "InputEnded", []:
            return InputEnded()
        case "Failed", []:
            return Failed()
        case "Closed", []:
            return Closed()
        case "Arrived", [seqs, ids, costs, weights, *more] if len(more) <= 1:
            count = len(_list(ids))
            if not isinstance(seqs, list):
                seqs = range(_whole(seqs), seqs + count)
            if not isinstance(weights, list):
                weights = [_whole(cost) - _whole(weights) for cost in _list(costs)]
            extras = [_wholes(e) for e in _list(more[0])] if more else [()] * count
            columns = seqs, _list(costs), weights, extras
            if any(len(column) != count for column in columns):
                raise ValueError("the columns of samples differ in length")
            rows = zip(*columns, strict=True)
            return Arrived(tuple(_sample(*row) for row in rows))
        case "Tallied", [vector]:
            return Tallied(decode(_vector(vector)))
        case "Totalled", [totals]:
            return Totalled(tuple(map(_counts, _list(totals))))
        case "PeerLost", [rank]:
            return PeerLost(None if rank is None else _whole(rank))
    raise ValueError(f"{value!r} is no event")


def ids_from_json(value: Any) -> tuple[SampleId, ...]:
    """The dataset's names of the samples of an event; none of most."""
    if isinstance(value, list) and len(value) > 2 and value[0] == "Arrived":
        return tuple(map(id_from_json, _list(value[2])))
    return ()


# ---------------------------------------------------------------- commands


def command_to_json(command: Command) -> list[Any]:
    """A command, its samples by their `seq`."""
    match command:
        case Emit(step):
            seqs = [s.seq for s in step.group]
            alone = step.block == Block(0, 1, step.total)  # as most are
            block = [] if alone else [step.block]
            return ["Emit", step.number, step.round, seqs, step.local, step.total, *block]
        case Pull(limit):
            return ["Pull", limit]
        case Filter(sample):
            return ["Filter", sample.seq]
        case KeepSpare(sample):
            return ["KeepSpare", sample.seq]
        case PostReport(tally):
            return ["PostReport", encode(tally)]
        case PostCounts(counts):
            return ["PostCounts", counts]
        case ShareSpare(rank) | ShareReason(rank):
            return [type(command).__name__, rank]
        case Retire() | GiveUp():
            return [type(command).__name__]
        case End(outcome):
            return ["End", outcome_to_json(outcome)]


def command_from_json(value: Any, samples: Mapping[int, Sample]) -> Command:
    """The command, of these samples. Raises ValueError for what is none."""

    def sample(seq: Any) -> Sample:
        found = samples.get(_whole(seq))
        if found is None:
            raise UnknownSample(f"sample {seq} has not arrived")
        return found

    kind, *rest = _list(value) or [None]
    match kind, rest:
        case "Emit", [number, round_, seqs, local, total, *block] if len(block) <= 1:
            group = tuple(map(sample, _list(seqs)))
            step = Step(_whole(number), _whole(round_), group, _counts(local), _counts(total))
            return Emit(step._replace(block=_block(*block or [[0, 1, total]])))
        case "Pull", [limit]:
            return Pull(_whole(limit))
        case "Filter", [seq]:
            return Filter(sample(seq))
        case "KeepSpare", [seq]:
            return KeepSpare(sample(seq))
        case "PostReport", [vector]:
            return PostReport(decode(_vector(vector)))
        case "PostCounts", [counts]:
            return PostCounts(tuple(map(_counts, _list(counts))))
        case "ShareSpare", [donor]:
            return ShareSpare(_whole(donor))
        case "ShareReason", [rank]:
            return ShareReason(_whole(rank))
        case "Retire", []:
            return Retire()
        case "GiveUp", []:
            return GiveUp()
        case "End", [outcome]:
            return End(outcome_from_json(outcome))
    raise ValueError(f"{value!r} is no command")


def outcome_to_json(outcome: Outcome) -> list[Any]:
    """How an epoch ended."""
    return [type(outcome).__name__, *(getattr(outcome, f.name) for f in fields(outcome))]


def outcome_from_json(value: Any) -> Outcome:
    """How an epoch ended. Raises ValueError for what is no outcome."""
    match value:
        case ["Finished"]:
            return Finished()
        case ["ClosedBy", rank]:
            return ClosedBy(_whole(rank))
        case ["AbortedBy", rank]:
            return AbortedBy(_whole(rank))
        case ["Mismatched", str(term), low, high]:
            return Mismatched(term, _whole(low), _whole(high))
        case ["Lost", rank]:
            return Lost(None if rank is None else _whole(rank))
    raise ValueError(f"{value!r} is no outcome")


def state_to_json(state: RankState) -> list[Any]:
    """What a state comes to: its phase, input and trainer; its place; how many samples are in the
    window, in how many groups, waiting and pending steps; samples arrived and delivered; spare and
    donor."""
    spare = None if state.spare is None else state.spare.seq
    return [
        *(state.phase.name, state.input.name, state.trainer.name),
        *(state.place.round, state.place.step),
        *(len(state.window), len(state.groups), len(state.waiting), len(state.pending)),
        *(state.arrived, state.delivered, spare, state.donor),
    ]


STATE_FIELDS = (
    *("phase", "input", "trainer", "round", "step", "samples in the window", "groups"),
    *("waiting steps", "pending steps", "samples arrived", "samples delivered", "spare", "donor"),
)
"""What the parts of a summary of a state are."""

# ---------------------------------------------------------------- names of samples


def id_to_json(name: SampleId) -> Any:
    """A sample's name in the dataset. Whole numbers, strings, None and tuples of these are kept;
    of anything else its text is."""
    kind = type(name)
    if kind is int or kind is str or name is None:
        return name
    if kind is tuple:
        return [id_to_json(part) for part in name]  # type: ignore[attr-defined]
    return {"repr": f"{kind.__name__}: {name!r}"}


class Named(str):
    """A sample's name that was kept as text only."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and str.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((Named, str(self)))


def id_from_json(value: Any) -> SampleId:
    """The name, as it was (or as its text)."""
    match value:
        case None | str():
            return value
        case list():
            return tuple(map(id_from_json, value))
        case {"repr": str(text)} if len(value) == 1:
            return Named(text)
    return _whole(value)


# ---------------------------------------------------------------- settings


def config_to_json(config: Config) -> dict[str, Any]:
    """All settings of an epoch, the budget included."""
    budget = config.budget
    return {
        "budget": {
            "tokens": budget.tokens,
            "rule": budget.rule.name,
            "max_samples": budget.max_samples,
            "extras": budget.extras,
            "multiple": budget.multiple,
        },
        "window": config.window,
        "slow_start": config.slow_start,
        "mode": config.mode.name,
        "idle": config.idle.name,
        "quota": config.quota,
        "seed": config.seed,
        "settings": config.settings,
        "accumulation_steps": config.accumulation_steps,
    }


def config_from_json(value: Any) -> Config:
    """The settings. Raises ValueError (ConfigError is one) for what are none."""
    try:
        budget = dict(value["budget"])
        return Config(
            **{
                **value,
                "budget": Budget(
                    **{
                        **budget,
                        "rule": CostRule[budget["rule"]],
                        "extras": tuple(budget["extras"]),
                    }
                ),
                "mode": Mode[value["mode"]],
                "idle": Idle[value["idle"]],
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{value!r} is no configuration: {error}") from error


def rules_to_json(rules: Rules) -> dict[str, str]:
    """The rules that are not the shipped ones, each with the name of what stands in its place."""
    shipped = Rules()
    return {
        field.name: f"{chosen.__module__}.{chosen.__qualname__}"
        for field in fields(Rules)
        if (chosen := getattr(rules, field.name)) is not getattr(shipped, field.name)
    }


# ---------------------------------------------------------------- parts


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    return tuple(map(_whole, _list(values)))


def _sample(seq: Any, cost: Any, weight: Any, extras: tuple[int, ...]) -> Sample:
    return Sample(_whole(seq), _whole(cost), _whole(weight), extras)


def _block(value: Any) -> Block | None:
    match value:
        case None:
            return None
        case [place, steps, total]:
            return Block(_whole(place), _whole(steps), _counts(total))
    raise ValueError(f"{value!r} is no block")


def _vector(values: Any) -> tuple[int, ...]:
    vector = _wholes(values)
    if len(vector) != TALLY_WIDTH:
        raise ValueError(f"a tally has {TALLY_WIDTH} numbers, not {len(vector)}")
    return vector


def _counts(values: Any) -> Counts:
    numbers = _wholes(values)
    if len(numbers) != len(Counts._fields):
        raise ValueError(f"{values!r} are no counts")
    return Counts(*numbers)
