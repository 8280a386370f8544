"""The promises about the ends of the closed system: states in which nothing more can happen.

An end is accepted if every rank that lives is through: its trainer has left the last epoch, or has
an error, and its batcher has ended. Any other end is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from spec.config import Idle, Mode
from spec.enabled import COLLECTIVES, waits_for_exchange
from spec.messages import AbortedBy, Emit, Finished, Lost
from spec.rank import Phase, Trainer
from spec.world import Activity, Node, Outbox, State, World

EndPromise = Callable[[World, State], str | None]


def deadlock_freedom(world: World, state: State) -> str | None:
    """Nobody waits for something that nobody will ever do."""
    stuck = [r for r, node in enumerate(state.nodes) if node.alive and not _through(world, node)]
    return explain_deadlock(world, state) if stuck else None


def step_alignment(world: World, state: State) -> str | None:
    """All ranks have taken the same number of steps. (With idle stop a drained rank may have taken
    fewer; a rank that died, or whose trainer an error or a stop of its own cut short, too.)"""
    finished = {
        r: node.steps
        for r, node in enumerate(state.nodes)
        if node.alive and node.trainer is Activity.DONE and isinstance(node.outcome, Finished)
    }
    if world.config.idle is Idle.STOP:
        return None
    if len(set(finished.values())) > 1:
        return f"the ranks took {finished} steps"
    return None


def uniform_abort(world: World, state: State) -> str | None:
    """All ranks end alike and at the same step: if one fails, every one has an error that names it.
    (Where a process died, the others lose it, or had ended before.)"""
    living = [node for node in state.nodes if node.alive]
    outcomes = {node.outcome for node in living if not isinstance(node.outcome, Lost)}
    lost = [node for node in living if isinstance(node.outcome, Lost)]
    if len(outcomes) > 1:
        return f"ranks end with {sorted(map(str, outcomes))}"
    if lost and len(living) == len(state.nodes):
        return "a rank was lost although none has died"
    places = {node.machine.place.step for node in living}
    if outcomes and not lost and len(places) > 1:
        return f"ranks end before steps {sorted(places)}"
    aborted = any(isinstance(outcome, AbortedBy) for outcome in outcomes)
    unaware = (n.trainer is Activity.DONE and not _retired(n) for n in living)
    if aborted and any(unaware):
        return "a rank failed, and another ends without an error"
    return None


def _retired(node: Node) -> bool:
    return node.machine.trainer is Trainer.RETIRED


def quota_closure(world: World, state: State) -> str | None:
    """In quota mode an epoch that finishes has met the quota, or has delivered everything; without
    a quota some rank has nothing left."""
    if world.config.mode is not Mode.QUOTA:
        return None
    if not _complete(state):
        return None
    holding = [bool(node.machine.window) for node in state.nodes]
    quota, delivered = world.config.quota, _delivered(state)
    if quota is None and all(holding):
        return "the epoch has ended, and every rank still holds samples"
    if quota is not None and delivered < quota and any(holding):
        return f"{delivered} samples were delivered of a quota of {quota}, and some are held"
    return None


def exact_gradient(world: World, state: State) -> str | None:
    """The totals by which losses are scaled are true: what every rank was told that all ranks
    together have delivered is what they have."""
    if _complete(state):
        for rank, node in enumerate(state.nodes):
            if node.got != _delivered(state) and node.machine.trainer is not Trainer.RETIRED:
                return f"rank {rank} was told of {node.got} samples, {_delivered(state)} were taken"
    return None


def _complete(state: State) -> bool:
    return all(isinstance(n.outcome, Finished) and n.trainer is Activity.DONE for n in state.nodes)


def _delivered(state: State) -> int:
    return sum(node.taken.bit_count() for node in state.nodes)


END_PROMISES: tuple[tuple[str, EndPromise], ...] = (
    ("deadlock-freedom", deadlock_freedom),
    ("step-alignment", step_alignment),
    ("uniform-abort", uniform_abort),
    ("quota-closure", quota_closure),
    ("exact-gradient", exact_gradient),
)
"""Each with the name of the promise that it guards."""


def _through(world: World, node: Node) -> bool:
    if node.machine.phase is not Phase.ENDED:
        return False
    if node.trainer is Activity.FAILED:
        return True
    last = node.machine.place.epoch + 1 == world.epochs
    return last and node.trainer in (Activity.DONE, Activity.STOPPED)


# ---------------------------------------------------------------- who waits for whom


def explain_deadlock(world: World, state: State) -> str:
    """The waits of a state, and the circle that they form, in the words of the project."""
    waits: nx.DiGraph[str] = nx.DiGraph()
    sentences = []
    for rank, node in enumerate(state.nodes):
        for who, whom, why in _waits_of(state, rank, node):
            sentences.append(f"{who} waits for {whom} {why}")
            waits.add_edge(who, whom)
    try:
        circle = [edge[0] for edge in nx.find_cycle(waits)]
        sentences.append("a circle: " + " -> ".join([*circle, circle[0]]))
    except nx.NetworkXNoCycle:
        pass
    return "; ".join(sentences)


def _waits_of(state: State, rank: int, node: Node) -> list[tuple[str, str, str]]:
    if not node.alive:
        return []
    me, mine = f"rank {rank} trainer", f"rank {rank} batcher"
    found = []
    if node.trainer is Activity.IN_GRADIENT:
        for other, peer in enumerate(state.nodes):
            same = peer.trainer is Activity.IN_GRADIENT and peer.steps == node.steps
            if other != rank and not same:
                why = f"in gradient step {node.steps - 1}"
                found.append((me, f"rank {other} trainer", why))
    elif node.trainer is Activity.READY and not node.queue and node.outbox is Outbox.OPEN:
        found.append((me, mine, f"to put step {node.steps} into the queue"))
    elif node.trainer in (Activity.DONE, Activity.STOPPED) and node.commands:
        found.append((me, mine, "to end the epoch"))
    command = node.commands[0] if node.commands else None
    if isinstance(command, Emit):
        found.append((mine, me, "to make room in the queue"))
    elif isinstance(command, COLLECTIVES) and node.inbox is None:
        for other, peer in enumerate(state.nodes):
            there = waits_for_exchange(peer) and type(peer.commands[0]) is type(command)
            if other != rank and not there:
                why = f"in the exchange of round {node.machine.place.round}"
                found.append((mine, f"rank {other} batcher", why))
    return found
