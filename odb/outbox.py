"""The bounded queue between the driver thread and the trainer."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Holds up to `capacity` items. The producer ends it, with an error or without; the consumer
    may close it at any time, and then nothing that is put into it is kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._closed = False
        self._error: BaseException | None = None

    @property
    def closed(self) -> bool:
        """Whether the consumer wants no more."""
        return self._closed

    def put(self, item: T) -> bool:
        """Add an item; wait while the queue is full. False if the consumer has closed it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> bool:
        """No more items will come. The consumer gets the error behind the last of them. False if
        the queue was finished before, or closed: then nobody will see the error here."""
        with self._changed:
            if self._finished or self._closed:
                return False
            self._finished = True
            self._error = error
            self._changed.notify_all()
            return True

    def take(self) -> T | None:
        """The next item, or None behind the last one; raises the producer's error there, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._items:
                item = self._items.popleft()
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
