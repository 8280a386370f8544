"""A block knows what its steps add up to: part of exact-gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_check.abstract import Row, SeveralGroups, Steps
from model_check.prover import Obligation, Source, both
from proofs.conduct import same
from spec import blocks
from spec.blocks import Gathered
from spec.config import Config
from spec.messages import Block, Step
from spec.samples import NOTHING, Counts
from spec.variants import rules


@dataclass(frozen=True)
class Gathering:
    """The functions that these obligations are about, with so many steps in hand."""

    steps: int
    add: Callable[[Config, Gathered, Step], Gathered] = blocks.add
    complete: Callable[[tuple[Step, ...]], tuple[Step, ...]] = blocks.complete


class _Size:
    """A configuration, as far as blocks depend on it."""

    def __init__(self, accumulation_steps: Any) -> None:
        self.accumulation_steps = accumulation_steps


def _counts(source: Source, name: str) -> Counts:
    return Counts(*(source.int(f"{what} of {name}") for what in Counts._fields))


def _some_steps(source: Source, number: int) -> tuple[Step, ...]:
    """Steps of any totals, in which a place of the tuple can be told from another."""
    return tuple(Step(i, 0, (), NOTHING, _counts(source, f"step {i}")) for i in range(number))


def _sum(totals: list[Counts]) -> Counts:
    return Counts(*(sum(column) for column in zip(*totals, strict=True)))


def _is_block(made: tuple[Step, ...], of: tuple[Step, ...], size: Any) -> Any:
    """The same steps in the same order, each with its place in the block, the block's size and what
    its steps add up to."""
    if [step._replace(block=None) for step in made] != list(of):
        return False
    total = _sum([step.total for step in of])
    facts = []
    for place, step in enumerate(made):
        if step.block is None or step.block.place != place:
            return False
        facts += [step.block.steps == size, same(step.block.total, total)]
    return both(*facts)


def _adds(source: Source, f: Gathering) -> Callable[[], Any]:
    size = source.int("accumulation steps")
    source.assume(size > f.steps)  # the invariant: what waits is less than a block
    *waiting, step = _some_steps(source, f.steps + 1)
    ready = Step(-1, 0, (), NOTHING, NOTHING, Block(0, 1, NOTHING))

    def claim() -> Any:
        config: Any = _Size(size)
        after = f.add(config, Gathered((ready,), tuple(waiting)), step)
        if after.ready[:1] != (ready,):
            return False
        if size == f.steps + 1:
            whole = _is_block(after.ready[1:], (*waiting, step), size)
            return both(not after.waiting, whole)
        return both(after.ready == (ready,), after.waiting == (*waiting, step))

    return claim


def _adds_to_any(source: Source, f: Gathering) -> Callable[[], Any]:
    """`before`: any number of steps that wait, and what they add up to."""
    size, before = source.int("accumulation steps"), source.int("steps that wait")
    source.assume(both(before >= 1, size > before))
    sums, total = _counts(source, "those that wait"), _counts(source, "the next step")

    def claim() -> Any:
        config: Any = _Size(size)
        groups: Any = SeveralGroups(before, 0)
        waiting = Row((Steps(0, 0, groups, NOTHING, sums),))
        step = Step(1, 0, (), NOTHING, total)
        after = f.add(config, Gathered((), waiting), step)
        if size != before + 1:
            return not after.ready and [s.number for s in after.waiting] == [0, 1]
        if after.waiting or [s.number for s in after.ready] != [0, 1]:
            return False
        known = [s.block for s in after.ready if s.block is not None]
        expected = _sum([sums, total])
        right = (both(b.steps == size, same(b.total, expected)) for b in known)
        return both(len(known) == 2, *right)

    return claim


def _completes(source: Source, f: Gathering) -> Callable[[], Any]:
    steps = _some_steps(source, f.steps)
    return lambda: _is_block(f.complete(steps), steps, f.steps)


def _one_longer(config: Config, gathered: Gathered, step: Step) -> Gathered:
    block = (*gathered.waiting, step)
    if len(block) <= config.accumulation_steps:
        return gathered._replace(waiting=block)
    return Gathered((*gathered.ready, *blocks.complete(block)), ())


def _by_itself(config: Config, gathered: Gathered, step: Step) -> Gathered:
    after = blocks.add(config, gathered, step)
    return after if after.waiting else Gathered(rules.each_step_by_itself(after.ready), ())


def _forgets_what_waits(config: Config, gathered: Gathered, step: Step) -> Gathered:
    return blocks.add(config, gathered._replace(waiting=()), step)


def _only_the_last(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return blocks.complete(steps[-1:])


LENGTHS = range(5)

OBLIGATIONS = (
    *(
        Obligation(
            f"a step joins its block ({before} wait)",
            "it waits, or it completes a block of its steps in order, with the sum of their totals",
            _adds,
            Gathering(before),
            {
                "a block is one step longer": Gathering(before, add=_one_longer),
                "what waits is forgotten": Gathering(before + 1, add=_forgets_what_waits),
            },
        )
        for before in LENGTHS
    ),
    Obligation(
        "a step joins its block (any number wait)",
        "the same for any number of steps that wait: the block's total is theirs and its own",
        _adds_to_any,
        Gathering(0),
        {
            "each step is scaled by itself": Gathering(0, add=_by_itself),
            "a block is one step longer": Gathering(0, add=_one_longer),
        },
    ),
    *(
        Obligation(
            f"the last block ({steps} steps)",
            "what waits at the end of an epoch becomes a block, with the sum of its totals",
            _completes,
            Gathering(steps),
            {
                "only its last step is emitted": Gathering(max(steps, 2), complete=_only_the_last),
                "each step is scaled by itself": Gathering(
                    max(steps, 2), complete=rules.each_step_by_itself
                ),
            },
        )
        for steps in LENGTHS[1:]
    ),
)
