"""Makes blocks of steps: gradients are added up over a block, then the optimizer takes its step.

The loss scale of a step needs the weight of its whole block. So a step waits until the last one of
its block has been decided on, which may be some rounds later. What waits at the end of an epoch is
a block of fewer steps.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

from spec.config import Config
from spec.messages import Block, Step
from spec.samples import NOTHING, add_counts


class Gathered(NamedTuple):
    """`ready`: steps of complete blocks. `waiting`: the first steps of the next block, fewer than
    it takes."""

    ready: tuple[Step, ...]
    waiting: tuple[Step, ...]


def gather(config: Config, waiting: tuple[Step, ...], decided: tuple[Step, ...]) -> Gathered:
    """The blocks that are complete with the steps that were decided on now (promise:
    exact-gradient)."""
    return reduce(partial(add, config), decided, Gathered((), waiting))


def add(config: Config, gathered: Gathered, step: Step) -> Gathered:
    """After one more step: it waits, or it completes its block."""
    block = (*gathered.waiting, step)
    if len(block) < config.accumulation_steps:
        return gathered._replace(waiting=block)
    return Gathered((*gathered.ready, *complete(block)), ())


def complete(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """These steps as a block of their own."""
    total = reduce(add_counts, (step.total for step in steps), NOTHING)
    return tuple(
        step._replace(block=Block(place, len(steps), total)) for place, step in enumerate(steps)
    )
