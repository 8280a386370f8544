"""What must happen in some run, so that the promises are not kept by doing nothing.

Each is a function of a rank with its environment. A goal that no state of the worlds explored
reaches fails the verification: the promise that it guards would be about nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from spec.grouping import group, oversize
from spec.messages import AbortedBy, ClosedBy, Finished, Lost
from spec.rank import Input, Phase, Trainer, held
from spec.world import Node, World, decided

GoalCheck = Callable[[World, Node], bool]


def carry(world: World, node: Node) -> bool:
    """Samples wait for the next round, because another rank cannot take as many steps."""
    return node.machine.phase is Phase.TOTALLING and bool(node.machine.window)


def split(world: World, node: Node) -> bool:
    """Groups are smaller than the budget allows, because another rank wants more steps."""
    machine = node.machine
    samples = tuple(s for g in machine.groups for s in g)
    aligned = machine.phase is Phase.TOTALLING and not machine.window and bool(samples)
    return aligned and len(machine.groups) > len(group(world.config.budget, samples))


def full_batch(world: World, node: Node) -> bool:
    """A step holds more than one sample."""
    return any(len(step.group) > 1 for step in decided(node))


def idle_step(world: World, node: Node) -> bool:
    """A rank takes an idle step."""
    return any(step.idle for step in decided(node))


def borrowed_spare(world: World, node: Node) -> bool:
    """A rank that never saw a sample borrows one to idle with."""
    return node.machine.donor is not None


def filtered_sample(world: World, node: Node) -> bool:
    """A sample is filtered."""
    return node.filtered != 0


def oversize_alone(world: World, node: Node) -> bool:
    """A sample above the budget travels."""
    budget = world.config.budget
    return any(oversize(budget, s) for step in decided(node) for s in step.group)


def retired(world: World, node: Node) -> bool:
    """A drained rank's trainer is told to stop while the others go on."""
    return node.machine.trainer is Trainer.RETIRED and node.machine.phase is not Phase.ENDED


def finished(world: World, node: Node) -> bool:
    """An epoch finishes behind at least one step."""
    return isinstance(node.outcome, Finished) and node.steps > 0


def second_epoch(world: World, node: Node) -> bool:
    """A second epoch takes a step."""
    return node.machine.place.epoch > 0 and node.steps > 0


def quota_withdraws(world: World, node: Node) -> bool:
    """The quota is met before the last step of a round, so that samples go back."""
    quota = world.config.quota
    met = quota is not None and node.machine.delivered >= quota
    return met and bool(node.machine.window)


def block_across_rounds(world: World, node: Node) -> bool:
    """A block has steps of more than one round."""
    return any(
        later.block is not None and later.block.place > 0 and step.round < later.round
        for step, later in pairwise(node.machine.pending)
    )


def shorter_block(world: World, node: Node) -> bool:
    """An epoch of several blocks ends with a shorter one."""
    size = world.config.accumulation_steps
    steps = node.steps
    return isinstance(node.outcome, Finished) and steps > size and steps % size > 0


def failure_while_steps_wait(world: World, node: Node) -> bool:
    """A rank fails while steps wait for their block, so that these are not emitted."""
    return bool(node.machine.waiting) and node.machine.input is Input.FAILED


def queue_full(world: World, node: Node) -> bool:
    """A batcher has to wait for room in its queue."""
    return len(node.queue) == world.queue and bool(node.machine.pending)


def abort_behind_steps(world: World, node: Node) -> bool:
    """A failure is decided on while a trainer still has steps to take."""
    return isinstance(node.outcome, AbortedBy) and bool(node.queue)


def close_elsewhere(world: World, node: Node) -> bool:
    """A trainer's early stop ends the epoch on a rank."""
    return isinstance(node.outcome, ClosedBy)


def idle_for_failure(world: World, node: Node) -> bool:
    """A rank that cannot make a batch idles, so that nobody waits for it."""
    return node.machine.input.value == "failed" and any(step.idle for step in decided(node))


def surrender(world: World, node: Node) -> bool:
    """A rank cannot make even an idle step."""
    return node.surrendered


def peer_lost(world: World, node: Node) -> bool:
    """A rank notices that another has died."""
    return isinstance(node.outcome, Lost)


def longest_delay(world: World, node: Node) -> bool:
    """A sample leaves as late as bounded-delay allows (the bound is exact)."""
    window = world.config.window
    waited = (s.round - node.entered[x.seq] + 1 for s in decided(node) for x in s.group)
    return window > 1 and any(rounds == window for rounds in waited)


def most_steps(world: World, node: Node) -> bool:
    """An epoch has as many steps as bounded-termination allows (the bound is exact)."""
    return world.samples > 0 and node.machine.place.step == world.samples


def most_rounds(world: World, node: Node) -> bool:
    """An epoch has as many rounds as bounded-termination allows (the bound is exact)."""
    ended = isinstance(node.outcome, Finished)
    bound = world.samples + (world.config.accumulation_steps > 1)
    return ended and world.samples > 0 and node.machine.place.round == bound


def window_full(world: World, node: Node) -> bool:
    """A batcher holds as many samples as bounded-memory allows (the bound is exact)."""
    return world.config.accumulation_steps == 1 and _most_held(world, node)


def window_and_block_full(world: World, node: Node) -> bool:
    """The same, with steps that wait for their block."""
    return world.config.accumulation_steps > 1 and _most_held(world, node)


def _most_held(world: World, node: Node) -> bool:
    config = world.config
    return len(held(node.machine)) == config.window * config.accumulation_steps


GOALS: Mapping[str, GoalCheck] = {
    "longest delay": longest_delay,
    "most steps": most_steps,
    "most rounds": most_rounds,
    "window full": window_full,
    "window and block full": window_and_block_full,
    "carry": carry,
    "split": split,
    "full batch": full_batch,
    "idle step": idle_step,
    "borrowed spare": borrowed_spare,
    "filtered sample": filtered_sample,
    "oversize sample": oversize_alone,
    "retired trainer": retired,
    "finished epoch": finished,
    "second epoch": second_epoch,
    "quota withdraws": quota_withdraws,
    "block across rounds": block_across_rounds,
    "shorter last block": shorter_block,
    "failure while steps wait": failure_while_steps_wait,
    "queue full": queue_full,
    "abort behind queued steps": abort_behind_steps,
    "early stop ends the epoch": close_elsewhere,
    "idle for a failure": idle_for_failure,
    "surrender": surrender,
    "peer lost": peer_lost,
}
"""All goals by name."""
