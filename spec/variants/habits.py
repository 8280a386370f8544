"""Changed habits: what a loader does with its queue and between epochs."""

from __future__ import annotations

from spec.messages import AbortedBy, End
from spec.world import Node, bits, finish_queue


def walk_away(node: Node) -> Node:
    """The trainer leaves its queue as it is, and tells nobody."""
    return node


def drop_queue_on_error(node: Node) -> Node:
    """An error overtakes the steps that were aligned before it."""
    command = node.commands[0] if node.commands else None
    if isinstance(command, End) and isinstance(command.outcome, AbortedBy):
        node = node._replace(queue=(), dropped=node.dropped | bits(node.queue))
    return finish_queue(node)


def keep_queue(node: Node) -> Node:
    """Steps stay in the queue of a rank that has lost a peer."""
    return node


def lose_the_end(node: Node) -> Node:
    """The end of the epoch needs a slot of the queue, like a step, and is lost if there is none."""
    return node if node.queue else finish_queue(node)


def room_for_one_more(node: Node, capacity: int) -> bool:
    return len(node.queue) <= capacity


def begin_at_once(node: Node) -> bool:
    """The next epoch begins when the trainer asks for it, whatever the batcher is doing."""
    return True
