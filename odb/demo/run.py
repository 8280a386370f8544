"""One run of the demo: corpus, ranks, the three ways, and what was verified about them."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from odb.demo.corpus import (
    CorpusFacts,
    FunctionDataset,
    Split,
    choose_split,
    extract_functions,
    import_tokenizers,
    standard_library,
    train_tokenizer,
)
from odb.demo.options import DemoOptions
from odb.demo.plot import import_figure, save_plot
from odb.demo.progress import Feed
from odb.demo.records import Way
from odb.demo.results import WayResult, merge
from odb.demo.training import Job, train_ways
from odb.demo.verification import Verification, verify
from odb.demo.ways import largest_safe_batch_size
from odb.testing import run_ranks


@dataclass(frozen=True)
class DemoReport:
    """All that a run measured; `size` is the fixed batch size, `files` were written."""

    options: DemoOptions
    corpus: CorpusFacts
    size: int
    results: dict[Way, WayResult]
    verification: Verification
    files: tuple[Path, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "options": {**asdict(self.options), "out": str(self.options.out)},
            "corpus": asdict(self.corpus),
            "fixed_batch_size": self.size,
            "ways": {way.value: result.as_json() for way, result in self.results.items()},
            "verification": self.verification.as_json(),
            "files": [str(path) for path in self.files],
        }


def run_demo(options: DemoOptions, console: Console) -> DemoReport:
    """Train in all three ways, check ODB's promises, save the plot and the numbers.

    Progress goes to `console`. Raises MissingDependencyError, ConfigError, and RankError if a rank
    failed or the time limit was reached.
    """
    import_tokenizers()
    import_figure()
    options.out.mkdir(parents=True, exist_ok=True)
    console.print(f"Reading the functions in {standard_library()} ...", highlight=False)
    functions = extract_functions(standard_library())
    split = choose_split(functions, options.train_samples, options.held_out, options.seed)
    tokenizer = train_tokenizer(split.train)
    lengths = _lengths(split, tokenizer, options)
    facts = _facts(len(functions), split, lengths, options)
    console.print(f"{facts}.", highlight=False)
    size = largest_safe_batch_size(options.budget, max(lengths))
    results = _train(options, split, tokenizer, size, console)
    report = DemoReport(
        options, facts, size, results, verify(results[Way.ODB], options.budget, console)
    )
    return _saved(report)


def _train(
    options: DemoOptions, split: Split, tokenizer: str, size: int, console: Console
) -> dict[Way, WayResult]:
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    job = Job(options, split, tokenizer, size, writer)
    with Feed(reader, len(split.train) * options.epochs, console):
        ranks = run_ranks(train_ways, options.ranks, job, timeout=options.time_limit)
    merged = [
        merge(records, len(split.train), options.epochs) for records in zip(*ranks, strict=True)
    ]
    return {way: result for way in Way for result in merged if result.way is way}


def _lengths(split: Split, tokenizer: str, options: DemoOptions) -> list[int]:
    """For the batch size of the fixed ways and the reader of the report; no way may use them."""
    dataset = FunctionDataset(split.train, tokenizer, options.max_length)
    return [dataset.length(index) for index in range(len(dataset))]


def _facts(functions: int, split: Split, lengths: list[int], options: DemoOptions) -> CorpusFacts:
    return CorpusFacts(
        functions=functions,
        train=len(split.train),
        held_out=len(split.held_out),
        mean=statistics.mean(lengths),
        median=int(statistics.median(lengths)),
        longest=max(lengths),
        cut=sum(length == options.max_length for length in lengths),
    )


def _saved(report: DemoReport) -> DemoReport:
    out = report.options.out
    files = (out / "demo.png", out / "demo.json")
    report = replace(report, files=files)
    save_plot(report.results, files[0])
    files[1].write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return report
