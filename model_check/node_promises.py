"""The promises about one rank with its environment, in every state of the closed system.

Each is a function of a `spec.world.Node` that returns what is wrong, or None. What they add up to
over a whole epoch is judged in `model_check.end_promises`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

from model_check.explorer import Broken
from spec.config import Idle, Mode
from spec.grouping import load_of_group, within
from spec.messages import AbortedBy, Finished, Lost, Mismatched, Step
from spec.rank import Input, Phase, RankState, Trainer, has_spare, held
from spec.samples import add_counts
from spec.world import Node, Outbox, World, bits, decided

NodePromise = Callable[[World, Node], str | None]


def identity_coverage(world: World, node: Node) -> str | None:
    """Every sample that has arrived is in exactly one place: held by the batcher, in the queue,
    with the trainer, filtered, or left behind in the queue by a trainer that stopped."""
    if not node.alive:
        return None
    holding = held(node.machine)
    waiting = [s for step in node.queue for s in step.group]
    seqs = [s.seq for s in (*holding, *waiting)]
    if len(seqs) != len(set(seqs)):
        return f"a sample is in two places: held {holding}, queued {waiting}"
    places = [sum(1 << s.seq for s in holding), bits(node.queue)]
    places += [node.taken, node.filtered, node.dropped]
    everything = 0
    for place in places:
        if everything & place:
            return f"samples {_names(everything & place)} are in two places"
        everything |= place
    missing = ((1 << node.machine.arrived) - 1) & ~everything
    return f"samples {_names(missing)} are lost" if missing else None


def step_alignment(world: World, node: Node) -> str | None:
    """Steps reach the trainer in order, without a gap, up to the last one that was decided on."""
    numbers = [step.number for step in node.queue]
    if node.outbox is Outbox.OPEN or numbers:
        expected = list(range(node.steps, node.steps + len(numbers)))
        if numbers != expected:
            return f"the queue holds steps {numbers} where {expected} come next"
    return None


def budget(world: World, node: Node) -> str | None:
    """A group of two or more samples is within the budget."""
    for step in decided(node):
        if step.group and not within(world.config.budget, load_of_group(step.group)):
            return f"step {step.number} holds {[s.cost for s in step.group]}"
    return None


def have_waited(machine: RankState) -> list[Step]:
    """The steps that wait for their block, or have waited for it, since before this round."""
    decided = (*machine.pending, *machine.waiting)
    this_round = machine.place.round - 1 if machine.phase is Phase.EMITTING else None
    return [step for step in decided if step.round != this_round]


def bounded_memory(world: World, node: Node) -> str | None:
    """A batcher holds at most a window of samples, and beside it those of steps that have waited
    for their block: fewer steps than a block has, none with more samples than a window. (A rank
    that reads no more may take them back.) Its queue holds at most its capacity of steps."""
    machine, window, block = node.machine, world.config.window, world.config.accumulation_steps
    sizes = [len(step.group) for step in have_waited(machine)]
    if len(sizes) >= block or any(size > window for size in sizes):
        return f"{len(sizes)} steps wait for their block, with {sum(sizes)} samples"
    beside = len(held(machine)) - sum(sizes)
    reads = machine.trainer is Trainer.SERVED and machine.input is not Input.FAILED
    if beside > (window if reads and machine.phase is not Phase.ENDED else window * block):
        return f"{beside} samples are held"
    if len(node.queue) > world.queue:
        return f"{len(node.queue)} steps are queued"
    return None


def bounded_delay(world: World, node: Node) -> str | None:
    """A sample leaves the window within as many rounds as this has places, that of its arrival
    included: the oldest always goes, so that in each round it has one fewer before it. A step waits
    for its block for one round less than the block has steps, at most."""
    machine = node.machine
    for step in machine.waiting:
        rounds = machine.place.round - step.round
        if rounds >= world.config.accumulation_steps:
            return f"step {step.number} has waited for {rounds} rounds"
    for step in decided(node):
        for s in step.group:
            waited = step.round - node.entered[s.seq] + 1
            if waited > world.config.window:
                return f"a sample leaves after {waited} rounds"
    return None


def bounded_termination(world: World, node: Node) -> str | None:
    """An epoch has at most as many steps as the largest shard has samples, and one round more; two
    with blocks of several steps, of which the first emits the last, shorter one."""
    place = node.machine.place
    if place.step > world.samples:
        return f"step {place.step} is due, with at most {world.samples} samples on a rank"
    if place.round > world.samples + (world.config.accumulation_steps > 1):
        return f"round {place.round} has begun, with at most {world.samples} samples on a rank"
    return None


def uniform_abort(world: World, node: Node) -> str | None:
    """A rank that ends with an error has first handed over every step that was decided on (unless
    its trainer had left or was told to stop, or it could make no batch at all). A rank that has
    lost a peer hands over none: the gradient of that step could not complete."""
    if isinstance(node.outcome, Lost) and node.queue:
        return f"a peer is lost, and step {node.queue[0].number} is handed over"
    ended = node.machine.phase is Phase.ENDED and isinstance(node.outcome, AbortedBy)
    served = node.machine.trainer is Trainer.SERVED and not node.surrendered
    served = served and node.outbox is Outbox.FINISHED
    if ended and served and node.steps + len(node.queue) != node.machine.place.step:
        due, there = node.machine.place.step, node.steps + len(node.queue)
        return f"{due} steps were decided on, {there} handed over"
    return None


def epochs_apart(world: World, node: Node) -> str | None:
    """Ranks with the same configuration never find that they disagree: no report of one epoch is
    merged with one of another, even if trainers have stopped early."""
    if isinstance(node.outcome, Mismatched):
        return f"ranks disagree on {node.outcome}"
    return None


def quota_closure(world: World, node: Node) -> str | None:
    """In quota mode no step follows the one at which the global quota is met; without a quota no
    rank idles."""
    if world.config.mode is not Mode.QUOTA:
        return None
    quota, got = world.config.quota, node.got
    for step in decided(node):
        if quota is None and step.idle and node.machine.input is not Input.FAILED:
            return f"step {step.number} is idle"
        if quota is not None and got >= quota:
            return f"step {step.number} comes behind the quota of {quota}: {got} were delivered"
        got += step.total.samples
    return None


def exact_gradient(world: World, node: Node) -> str | None:
    """A step that is emitted knows its block: as many steps in a row as gradients are added up
    over, or fewer at the end of the epoch; and what all of them add up to."""
    machine, size = node.machine, world.config.accumulation_steps
    emitted = (*node.queue, *machine.pending)
    for step in emitted:
        if step.block is None:
            return f"step {step.number} is emitted before its block is known"
        first, end = (
            step.number - step.block.place,
            step.number - step.block.place + step.block.steps,
        )
        if not 0 <= step.block.place < step.block.steps:
            return f"step {step.number} is at place {step.block.place} of {step.block.steps}"
        if first % size or step.block.steps > size:
            return f"steps {first} to {end - 1} are a block where {size} steps are"
        if step.block.steps < size and end != machine.place.step:
            return f"steps {first} to {end - 1} are a block, and not the last of the epoch"
        members = [other for other in emitted if first <= other.number < end]
        if len(members) == step.block.steps:
            total = reduce(add_counts, (other.total for other in members))
            if total != step.block.total:
                return f"steps {first} to {end - 1} come to {total}, not to {step.block.total}"
    return None


def nothing_held(world: World, node: Node) -> str | None:
    """In join mode an epoch that finishes leaves nothing in any window."""
    finished = world.config.mode is Mode.JOIN and isinstance(node.outcome, Finished)
    if finished and held(node.machine):
        return f"the epoch has finished, and {held(node.machine)} are still held"
    return None


def spare_at_hand(world: World, node: Node) -> str | None:
    """A rank that has to idle has a sample to idle with: nobody waits for a step that cannot be
    made."""
    idle = any(step.idle for step in node.machine.pending)
    if idle and world.config.idle is Idle.PAD and not has_spare(node.machine):
        return "an idle step is due and there is no sample to make it of"
    return None


NODE_PROMISES: tuple[tuple[str, NodePromise], ...] = (
    ("identity-coverage", identity_coverage),
    ("identity-coverage", nothing_held),
    ("deadlock-freedom", spare_at_hand),
    ("step-alignment", step_alignment),
    ("quota-closure", quota_closure),
    ("exact-gradient", exact_gradient),
    ("budget", budget),
    ("bounded-memory", bounded_memory),
    ("bounded-delay", bounded_delay),
    ("bounded-termination", bounded_termination),
    ("uniform-abort", uniform_abort),
    ("epochs-apart", epochs_apart),
)
"""Each with the name of the promise that it guards."""


def broken_by(world: World, node: Node) -> Broken | None:
    """The first promise that a node breaks, and how."""
    for name, promise in NODE_PROMISES:
        text = promise(world, node)
        if text is not None:
            return Broken(name, text)
    return None


def _names(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


NODE_STATEMENTS: Mapping[str, str] = {
    name: (promise.__doc__ or "").strip() for name, promise in reversed(NODE_PROMISES)
}
"""What each promise says of a rank."""
