"""The live display: one bar for each way, fed by rank 0 through a pipe."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from odb.demo.records import Way
from odb.demo.training import ORDER, News

POLL_S = 0.2


class Feed:
    """A context in which the news of rank 0 move the bars; `samples` is the length of each bar."""

    def __init__(self, news: Connection, samples: int, console: Console) -> None:
        self._news = news
        self._progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} samples"),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._tasks: dict[Way, TaskID] = {
            way: self._progress.add_task(way.title, total=samples, figures="") for way in ORDER
        }
        self._ended = threading.Event()
        # A daemon, because a rank that was ended while it wrote leaves half a message behind.
        self._thread = threading.Thread(target=self._read, name="demo-news", daemon=True)

    def __enter__(self) -> Feed:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(5)
        self._progress.stop()

    def _read(self) -> None:
        while self._news.poll(POLL_S) or not self._ended.is_set():
            if self._news.poll(0):
                self._show(self._news.recv())

    def _show(self, news: News) -> None:
        self._progress.update(
            self._tasks[news.way],
            completed=news.samples,
            figures=(
                f"{news.samples / news.seconds:4.0f}/s  padding {news.padding:3.0%}  "
                f"loss {news.loss:.2f}"
            ),
        )
