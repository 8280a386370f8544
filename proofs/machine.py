"""One rank's state machine with anything in its hands: states of every shape and size, the events
that may come, and what the rest of the protocol may answer.

There is one arbitrary sample, `x`, that is followed. Everything else that a rank holds is so many
other samples (see `model_check.abstract`). The functions that look into samples (grouping,
aligning, the draw, the quota, the target) are stood in for by any function that keeps what is
proved of them elsewhere; `transition` and all that it calls in `spec.rank` are the loader's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from model_check.abstract import (
    Row,
    SeveralGroups,
    Size,
    Steps,
    any_samples,
    length,
    size_of,
    some_groups,
    some_samples,
    totals_of,
)
from model_check.prover import Source, both, either, implies, negation
from model_check.symbolic import SymInt
from proofs.reports import some_tally
from spec import rank
from spec.alignment import Alignment
from spec.blocks import Gathered
from spec.config import CostRule, Idle, Mode, Place
from spec.messages import (
    Arrived,
    Closed,
    Emitted,
    Event,
    Failed,
    InputEnded,
    PeerLost,
    Step,
    Tallied,
    Totalled,
)
from spec.quota import Progress
from spec.rank import Input, Phase, RankState, Rules, Setup, Trainer, Transition
from spec.samples import NOTHING, Sample

NOWHERE, IN_WINDOW, IN_GROUPS, WAITING, NEXT, LATER = range(6)
"""Where `x` is: not in this rank's hands, or in the window, in a group of the round, in a step that
waits for its block, in the step at hand, in a later one."""


MODES = ("join, idle pad", "join, idle stop", "quota mode", "quota mode with a quota")
"""What the number of the mode stands for."""

ANY_INPUT, ANY_TRAINER = tuple(Input), tuple(Trainer)
POSSIBLE: dict[Phase, tuple[tuple[Input, ...], tuple[Trainer, ...], tuple[int, ...]]] = {
    Phase.FILLING: ((Input.OPEN,), (Trainer.SERVED,), (NOWHERE, IN_WINDOW, WAITING)),
    Phase.REPORTING: (ANY_INPUT, ANY_TRAINER, (NOWHERE, IN_WINDOW, IN_GROUPS, WAITING)),
    Phase.TOTALLING: (ANY_INPUT, ANY_TRAINER, (NOWHERE, IN_WINDOW, IN_GROUPS, WAITING)),
    Phase.EMITTING: (ANY_INPUT, (Trainer.SERVED,), (NOWHERE, IN_WINDOW, WAITING, NEXT, LATER)),
}
"""Input, trainer and place of `x` in each phase: all that the invariant leaves open. (A test tries
the others.)"""

Transitions = Callable[[Setup, RankState, Event], Transition]
"""The signature of `spec.rank.transition`."""


@dataclass(frozen=True)
class Machine:
    """The function that these theorems are about, in one phase, for one event."""

    phase: Phase
    event: type[Event]
    transition: Transitions = rank.transition


class Numbers:
    """All numbers of a situation, by name; taken from the source before anything runs."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def any(self, name: str, low: int = 0, high: int | None = None) -> Any:
        """A whole number of at least `low` (and at most `high`)."""
        value = self._source.int(name)
        self._source.assume(value >= low if high is None else both(value >= low, value <= high))
        return value


def between(low: Any, value: Any, high: Any) -> Any:
    """Any number from low to high, if `value` is any."""
    return max(low, min(value, high))


def choose(number: Any, options: tuple[Any, ...]) -> Any:
    """One of some options, by a number from 0."""
    for i, option in enumerate(options[:-1]):
        if number == i:
            return option
    return options[-1]


class Situation:
    """A rank's state before an event, the event, and the rules that it will ask."""

    def __init__(self, source: Source, about: Machine) -> None:
        self.about = about
        n = Numbers(source)
        inputs, trainers, self.places = POSSIBLE[about.phase]
        self.inputs, self.trainers = inputs, trainers
        reports = about.event in (Arrived, Tallied)  # where it matters whether there is a spare
        sliced = about.phase is Phase.TOTALLING
        self.x = Sample(n.any("x.seq"), n.any("x.cost"), n.any("x.weight"))
        self._where = n.any("place of x", 0, len(self.places) - 1)
        self.is_nowhere = self._where == self.places.index(NOWHERE)
        self.numbers = {
            "mode": n.any("mode", 0, 3),
            "input": n.any("input", 0, len(inputs) - 1),
            "trainer": n.any("trainer", 0, len(trainers) - 1),
            "spare": n.any("spare", 0, 1 if reports else 0),
            "rank": n.any("rank"),
            "W": n.any("W", 1),
            "window": n.any("window", 1),
            "quota": n.any("quota", 1),
            "delivered": n.any("delivered"),
            "round": n.any("round"),
            "step": n.any("step"),
            "waiting": n.any("others waiting"),
            "beside": n.any("others in the group of x"),
            "before": n.any("groups before"),
            "in before": n.any("samples in the groups before"),
            "after": n.any("groups after", 0, None if sliced else 0),
            "in after": n.any("samples in the groups after"),
            "idle": n.any("idle round", 0, 1),
            "held back": n.any("other steps that wait"),
            "in held back": n.any("samples in other steps that wait"),
            "block": n.any("accumulation steps", 1),
        }
        self.rules = AnyRules(self, n)
        self.extra = {"seq": n.any("arrived so far"), "new": n.any("arrives first", 0, 2)}
        self.other = Sample(0, n.any("other.cost"), n.any("other.weight"))
        self.tally = some_tally(source, "tally")
        self._number_samples(source)
        for low, high in zip(self.tally.low[1:], self.tally.high[1:], strict=True):
            source.assume(low == high)  # which term ranks differ in is all the same here
        source.assume(self.numbers["rank"] < self.numbers["W"])
        source.assume(self.numbers["in before"] >= self.numbers["before"])
        source.assume(self.numbers["in after"] >= self.numbers["after"])
        self._rule_out(source)

    def _rule_out(self, source: Source) -> None:
        """What the invariant excludes anyway, said before anything runs: it leaves fewer paths."""
        n, phase = self.numbers, self.about.phase
        grouped, alone = n["idle"] == 0, n["block"] == 1
        source.assume(implies(n["mode"] == 1, alone))  # `Config` refuses anything else
        source.assume(n["held back"] < n["block"])
        source.assume(implies(alone, negation(self._is_at(WAITING))))
        source.assume(implies(self._is_at(WAITING), n["held back"] + 1 < n["block"]))
        source.assume(implies(n["held back"] == 0, n["in held back"] == 0))
        source.assume(implies(alone, self.rules.gathered == 1))
        for place in (IN_GROUPS, NEXT, LATER):
            source.assume(implies(self._is_at(place), grouped))
        if Trainer.RETIRED in self.trainers:
            retired = n["trainer"] == self.trainers.index(Trainer.RETIRED)
            drained = n["input"] != self.inputs.index(Input.OPEN)
            source.assume(implies(retired, both(n["mode"] == 1, drained)))
        if phase is Phase.REPORTING:
            sound = n["input"] != self.inputs.index(Input.FAILED)
            window_empty = both(n["waiting"] == 0, negation(self._is_at(IN_WINDOW)))
            some = either(n["before"] >= 1, self._is_at(IN_GROUPS))
            source.assume(implies(grouped, both(some, sound, window_empty)))
        if self.about.event is Tallied:  # the tally bounds what this rank's report has said
            failed = n["input"] == self.inputs.index(Input.FAILED)
            waits = either(n["held back"] >= 1, self._is_at(WAITING))
            source.assume(implies(failed, self.tally.failed_rank <= n["rank"]))
            source.assume(both(self.tally.any_waiting >= 0, self.tally.any_waiting <= 1))
            # And all ranks hold back as many steps (step-alignment).
            source.assume(waits == (self.tally.any_waiting == 1))
        if phase is Phase.EMITTING:
            source.assume(implies(grouped, either(n["beside"] >= 1, self._is_at(NEXT))))
        if phase is Phase.TOTALLING:
            source.assume(implies(n["after"] == 0, self.rules.taken != 1))

    def _is_at(self, place: int) -> Any:
        """Whether that is the place of `x`."""
        return self._where == self.places.index(place) if place in self.places else False

    def _number_samples(self, source: Source) -> None:
        """Samples are numbered as they arrive: what is here has a lower number than what comes."""
        seq, new, x = self.extra["seq"], self.extra["new"], self.x.seq
        source.assume(implies(both(self.is_nowhere, new <= 1), x == seq))
        source.assume(implies(both(self.is_nowhere, new == 2), x == seq + 1))
        source.assume(either(self.is_nowhere, x < seq))

    @property
    def place(self) -> int:
        """Where `x` is."""
        return int(choose(self._where, self.places))

    # ------------------------------------------------------------ what runs

    def setup(self) -> Setup:
        """Any configuration, any seat."""
        config: Any = AnyConfig(self.numbers)
        rules = Rules(
            fill_target=self.rules.fill_target,
            group=self.rules.group,
            target=self.rules.target,
            align=self.rules.align,
            arrange=lambda groups, key: groups,
            take_steps=self.rules.take_steps,
            gather=self.rules.gather,
            complete=self.rules.complete,
        )
        return Setup(config, self.numbers["rank"], self.numbers["W"], rules)

    def state(self) -> RankState:
        """The rank's state. In which shape, the numbers say."""
        n, phase = self.numbers, self.about.phase
        window: tuple[Any, ...] = ()
        groups: tuple[Any, ...] = ()
        pending: tuple[Step, ...] = ()
        if phase in (Phase.FILLING, Phase.REPORTING, Phase.TOTALLING, Phase.EMITTING):
            window = self._window()
        if phase in (Phase.REPORTING, Phase.TOTALLING):
            groups = self._groups()
        if phase is Phase.EMITTING:
            pending = self._pending()
        waiting = self._waiting(n["step"] + length(pending))
        return RankState(
            phase,
            Place(0, n["round"], n["step"] + length(pending) + length(waiting)),
            input=choose(n["input"], self.inputs),
            trainer=choose(n["trainer"], self.trainers),
            window=window,
            groups=groups,
            waiting=waiting,
            pending=pending,
            arrived=self.extra["seq"],
            spare=choose(n["spare"], (None, Sample(0, 1, 1))),  # (a borrowed one counts alike)
            delivered=n["delivered"],
        )

    def _window(self) -> tuple[Any, ...]:
        here = (self.x,) if self.place == IN_WINDOW else ()
        return Row((*here, *any_samples(self.numbers["waiting"])))

    def _group_of_x(self) -> tuple[Any, ...]:
        return Row((self.x, *any_samples(self.numbers["beside"])))

    def _groups(self) -> Row:
        n = self.numbers
        if n["idle"] == 1:
            if self.about.phase is Phase.REPORTING:
                return Row()
            return Row(some_groups(n["before"], 0) + some_groups(n["after"], 0))
        here = (self._group_of_x(),) if self.place == IN_GROUPS else ()
        before = some_groups(n["before"], n["in before"])
        return Row((*before, *here, *some_groups(n["after"], n["in after"])))

    def _waiting(self, number: Any) -> tuple[Step, ...]:
        n = self.numbers
        here = (self._group_of_x(),) if self.place == WAITING else ()
        return self._steps(number, (*here, *some_groups(n["held back"], n["in held back"])))

    def _pending(self) -> tuple[Step, ...]:
        n = self.numbers
        later = some_groups(n["before"], n["in before"])
        first: tuple[Any, ...] = some_samples(n["beside"])
        if self.place == NEXT:
            first = self._group_of_x()
        elif self.place == LATER:
            later = (self._group_of_x(), *later)
        if n["idle"] == 1:
            first, later = (), some_groups(n["before"], 0)
        return self._steps(n["step"], (first, *later))

    def _steps(self, number: Any, groups: tuple[Any, ...]) -> Row:
        n = self.numbers
        steps: list[Step] = []
        for group in groups:
            kind = Steps if isinstance(group, SeveralGroups) else Step
            steps.append(kind(number, n["round"], group, NOTHING, NOTHING))
            number = number + size_of(steps[-1])
        return Row(steps)

    def event_for(self, state: RankState) -> Event:
        """The event, of any content that `check` accepts."""
        kind = self.about.event
        if kind is Arrived:
            return Arrived(self.arriving())
        if kind is Totalled:
            return Totalled(totals_of(state.groups))
        if kind is Tallied:
            return Tallied(self.tally)
        if kind is PeerLost:
            return PeerLost(None)
        assert kind in (InputEnded, Failed, Closed, Emitted)
        return kind()

    def arriving(self) -> tuple[Sample, ...]:
        """`x` by itself, before or behind another sample; or only another one."""
        seq = self.extra["seq"]
        if self.place != NOWHERE:
            return (self.other._replace(seq=seq),)
        if self.extra["new"] == 0:
            return (self.x,)
        if self.extra["new"] == 1:
            return (self.x, self.other._replace(seq=seq + 1))
        return (self.other._replace(seq=seq), self.x)


class AnyConfig:
    """Any configuration. What it is, is chosen where it is first looked at, which keeps the paths
    few. The budget is that of `proofs.budget`'s theorem; here nobody looks into it."""

    budget = SimpleNamespace(tokens=8, rule=CostRule.PADDED, max_samples=None, multiple=1)
    slow_start, seed, settings = 1, 0, 0

    def __init__(self, numbers: dict[str, Any]) -> None:
        self._numbers = numbers
        self.window = numbers["window"]
        self.accumulation_steps = numbers["block"]

    @property
    def mode(self) -> Mode:
        return Mode.JOIN if self._numbers["mode"] <= 1 else Mode.QUOTA

    @property
    def idle(self) -> Idle:
        return Idle.STOP if self._numbers["mode"] == 1 else Idle.PAD

    @property
    def quota(self) -> Any:
        return self._numbers["quota"] if self._numbers["mode"] == 3 else None


class AnyRules:
    """Any rules that keep their promises: what grouping, aligning and the rest may answer."""

    def __init__(self, situation: Situation, n: Numbers) -> None:
        self._situation = situation
        self._fill = n.any("fill target", 1)
        self._beside = n.any("put beside x")
        self._number = n.any("number of groups")
        self._kept = n.any("x is kept", 0, 1)
        self._samples = n.any("others kept")
        self._target = n.any("T", 1)
        self.taken = n.any("steps taken", 0, 2)
        self._more = n.any("samples of the steps taken")
        self.gathered = n.any("steps that complete a block", 0, 3)

    def fill_target(self, config: Any, round_: Any) -> Any:
        """At least one sample and at most the window (theorem: bounded-memory)."""
        return between(1, self._fill, config.window)

    def group(self, budget: Any, window: Any) -> Row:
        """A partition of the window into groups that are not empty."""
        x = self._situation.x
        others = len(window) - sum(1 for s in window if s is x)
        if any(s is x for s in window):
            beside = between(0, self._beside, others)
            left = others - beside
            return Row(((x, *any_samples(beside)), *self._some_groups(left)))
        return Row(self._some_groups(others))

    def _some_groups(self, samples: Any) -> tuple[Any, ...]:
        if samples == 0:
            return ()
        return some_groups(between(1, self._number, samples), samples)

    def target(self, tally: Any) -> Any:
        """Any number of steps (that it is in the envelope is assumed where it matters)."""
        return Size(self._target.term) if isinstance(self._target, SymInt) else self._target

    def align(self, groups: Any, target: Any) -> Alignment:
        """Exactly T groups that are not empty, and the rest (theorem: alignment-succeeds)."""
        x = self._situation.x
        here = any(s is x for group in groups for s in group)
        others = sum(len(group) for group in groups) - (1 if here else 0)
        if here and (self._kept == 1 or others < target):
            beside = between(0, self._beside, others - (target - 1))
            more = between(target - 1, self._samples, others - beside)
            more = more if target >= 2 else 0
            kept = ((x, *any_samples(beside)), *some_groups(target - 1, more))
            return Alignment(Row(kept), any_samples(others - beside - more))
        more = between(target, self._samples, others)
        carried = ((x,) if here else ()) + any_samples(others - more)
        return Alignment(Row(some_groups(target, more)), carried)

    def take_steps(self, config: Any, delivered: Any, totals: Any) -> Progress:
        """All steps, or those up to some place; without a quota all (theorem: quota-closure)."""
        n = self._situation.numbers
        after = delivered + self._more
        if config.quota is None or self.taken == 2:
            return Progress(len(totals), after)
        return Progress(n["before"] if self.taken == 0 else len(totals) - n["after"], after)

    def gather(self, config: Any, waiting: Any, decided: Any) -> Gathered:
        """Steps in their order: those of complete blocks, and the rest, which wait (theorem:
        exact-gradient)."""
        x, n = self._situation.x, self._situation.numbers
        steps, ahead = Row((*waiting, *decided)), len(waiting)
        x_is_new = any(s is x for step in decided for s in step.group)
        if self.gathered == 0:
            return Gathered((), steps)
        if self.gathered == 1:
            return Gathered(steps, ())
        cut = ahead + n["before"] + (1 if x_is_new and self.gathered == 3 else 0)
        return Gathered(steps[:cut], steps[cut:])

    def complete(self, steps: Any) -> Any:
        """The same steps, as a block."""
        return Row(steps)
