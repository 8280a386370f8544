"""What the tests of several adapters check in the same way, of ranks that have trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tests.trainers import conformance as suite
from tests.trainers.conformance import Case, RankResult, Subject
from tests.trainers.verdicts import write_verdicts


def conform(
    subject: Subject,
    cases: Iterable[Case],
    exact: Callable[[Case], Sequence[RankResult]],
    naive: Callable[[Case], Sequence[RankResult]],
) -> None:
    """Judge each case, and keep the verdicts. exact, naive: what the ranks brought home."""
    verdicts = [suite.judge(subject, case, exact(case), naive=naive(case)) for case in cases]
    write_verdicts(subject.framework, verdicts)


def conform_both(
    subject: Subject, cases: Sequence[Case], ranks: Iterable[Sequence[tuple[Any, Any]]]
) -> list[dict[Case, tuple[Any, Any]]]:
    """The same for ranks that bring home, for each case, an outcome with odb and a naive one, each
    with its `result`. Returns them by case, for each rank."""
    arms = [dict(zip(cases, rank, strict=True)) for rank in ranks]
    conform(
        subject,
        cases,
        exact=lambda case: [arm[case][0].result for arm in arms],
        naive=lambda case: [arm[case][1].result for arm in arms],
    )
    return arms


def clips(subject: Subject, case: Case, results: Sequence[RankResult]) -> None:
    """Clipping sees the exact gradient, and changes enough to show that."""
    suite.judge(subject, case, results)
    unclipped = suite.reference(replace(case, clip_norm=None), [result.infos for result in results])
    assert suite.largest_difference(results[0].parameters, unclipped) > 1e-2


def is_close(case: Case, results: Sequence[RankResult], most: float) -> None:
    """Ranks that compute in a low precision stay together, and near the reference."""
    expected = suite.reference(case, [result.infos for result in results])
    gaps = [suite.largest_difference(result.parameters, expected) for result in results]
    assert gaps[0] == gaps[1]
    assert 1e-6 < gaps[0] < most


def is_said(ranks: Sequence[dict[str, Any]]) -> None:
    """Every misuse was told as it should be, on every rank."""
    for rank in ranks:
        for words, expected in rank["misuse"]:
            assert expected in words
