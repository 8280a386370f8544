"""The bounded queue between the driver thread and the trainer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Content(NamedTuple):
    """What is in an outbox at one moment, and whether it is finished, closed, or cut short by an
    error that came before what was queued."""

    items: tuple[object, ...]
    finished: bool
    closed: bool
    cut: bool


class Outbox(Generic[T]):
    """Holds up to `capacity` items. The producer ends it, with an error or without; the consumer
    may close it at any time, and then nothing that is put into it is kept. `taken`: how many items
    the consumer has had."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._closed = False
        self._error: BaseException | None = None
        self._unheard: BaseException | None = None
        self._failed = False
        self._dropped = False
        self._cut = False
        self.taken = 0

    @property
    def closed(self) -> bool:
        """Whether the consumer wants no more."""
        return self._closed

    def put(self, item: T) -> bool:
        """Add an item; wait while the queue is full. False if the consumer has closed it, or it
        has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._dropped or len(self._items) < self._capacity
            )
            if self._closed or self._dropped:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> bool:
        """No more items will come. The consumer gets the error behind the last of them; of several,
        the first. False if the queue was finished before, or closed: then `take` does not raise
        the error, and it stays `unheard`."""
        with self._changed:
            late = self._finished or self._closed
            if late and not self._failed:
                self._unheard = error
            elif not late:
                self._finished = True
                self._error = error
                self._changed.notify_all()
            self._failed = self._failed or error is not None
            return not late

    def fail(self, error_at: Callable[[int], BaseException]) -> list[T]:
        """Give the consumer an error instead of what is queued; returns what it will not get.
        `error_at` makes it, of the number of items that the consumer has had."""
        with self._changed:
            error = error_at(self.taken)
            dropped = list(self._items)
            self._items.clear()
            self._dropped = True
            if self._closed:
                self._unheard = self._unheard or error
                self._failed = True
            elif not self._failed and (dropped or not self._finished):
                self._finished = self._cut = True
                self._error = error
                self._failed = True
            # Else the consumer has all of it: if the epoch fails, `finish` is told so.
            self._changed.notify_all()
            return dropped

    @property
    def unheard(self) -> BaseException | None:
        """The error that the consumer has not been given: it came too late, or the consumer closed
        the queue before it got there."""
        return self._unheard or self._error

    def look(self) -> Content:
        """What is in it now, for somebody who only watches."""
        with self._changed:
            return Content(tuple(self._items), self._finished, self._closed, self._cut)

    def take(self) -> T | None:
        """The next item, or None behind the last one; raises the producer's error there, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._items:
                item = self._items.popleft()
                self.taken += 1
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def close(self) -> None:
        """Take no more: wakes the producer and drops what is queued."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
