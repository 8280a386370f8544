"""Gradient accumulation: steps wait until the weight of their block is known."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import odb
from odb.testing import run_ranks
from spec.blocks import complete, gather
from spec.config import Budget, Config, Idle
from spec.errors import ConfigError
from spec.exchange import Tally
from spec.messages import (
    AbortedBy,
    Block,
    Closed,
    ClosedBy,
    Command,
    Emit,
    Emitted,
    End,
    Event,
    Failed,
    Finished,
    InputEnded,
    PostCounts,
    PostReport,
    Pull,
    Step,
    Tallied,
    Totalled,
)
from spec.rank import Phase, Setup, held
from spec.samples import NOTHING, Counts
from tests.test_spec_rank import Rank

PAIRS = Config(Budget(8), window=2, slow_start=2, accumulation_steps=2)
"""Blocks of two steps."""


class Alone(Rank):
    """A rank by itself: its reports and counts are those of all. `tally`: of its last report."""

    tally: Tally

    def __init__(self, config: Config = PAIRS) -> None:
        super().__init__(config, world_size=1)

    def on(self, event: Event) -> tuple[Command, ...]:
        super().on(event)
        for command in self.commands:
            if isinstance(command, PostReport):
                self.tally = command.tally
        return self.commands

    def exchange(self, **changes: Any) -> tuple[Command, ...]:
        """Complete the exchange of reports (with something else in it), and that of counts, if
        there are steps."""
        self.on(Tallied(self.tally._replace(**changes)))
        if self.state.phase is Phase.TOTALLING:
            counts = self.commands[-1]
            assert isinstance(counts, PostCounts)
            self.on(Totalled(counts.counts))
        return self.commands


def the_step(commands: tuple[Command, ...]) -> Step:
    (emit,) = commands
    assert isinstance(emit, Emit)
    return emit.step


# ---------------------------------------------------------------- one rank, told as traces


def test_a_step_waits_for_its_block_across_a_round() -> None:
    """Promise: exact-gradient. A window of one sample makes rounds of one step."""
    rank = Alone(Config(Budget(8), window=1, slow_start=1, accumulation_steps=2))
    rank.arrive(5)
    assert isinstance(rank.exchange()[-1], Pull), "nothing to emit yet: the rank reads on"
    assert [step.number for step in rank.state.waiting] == [0]
    rank.arrive(7)
    assert rank.tally.any_waiting == 1
    first = the_step(rank.exchange())
    assert (first.number, first.round, first.block) == (0, 0, Block(0, 2, Counts(2, 12, 12)))
    second = the_step(rank.on(Emitted()))
    assert (second.number, second.round, second.block) == (1, 1, Block(1, 2, Counts(2, 12, 12)))
    assert not rank.state.waiting


def test_the_last_block_is_shorter_and_comes_before_the_end() -> None:
    """Promise: identity-coverage. One round more emits what waits; the next one ends the epoch."""
    rank = Alone()
    rank.arrive(5)
    rank.on(InputEnded())
    rank.exchange()
    assert rank.tally.any_waiting == 1
    assert the_step(rank.exchange()).block == Block(0, 1, Counts(1, 5, 5))
    rank.on(Emitted())
    assert rank.tally.any_waiting == 0
    assert rank.exchange() == (End(Finished()),)


def test_a_failure_leaves_out_the_block_that_is_not_complete() -> None:
    """Promise: uniform-abort. The epoch ends behind the last whole block; the rest is held."""
    rank = Alone()
    rank.arrive(5)
    rank.on(InputEnded())
    rank.exchange()
    assert rank.state.place.step == 1
    assert rank.exchange(failed_rank=0)[-1] == End(AbortedBy(0))
    assert rank.state.place.step == 0
    assert [s.cost for s in held(rank.state)] == [5]


def test_a_rank_that_fails_in_the_last_block_can_still_say_so() -> None:
    """Promise: uniform-abort. The reason why a round follows the last, shorter block."""
    rank = Alone()
    rank.setup = Setup(PAIRS, 0, world_size=2)
    rank.arrive(5)
    rank.on(InputEnded())
    rank.exchange()
    rank.exchange()
    assert the_step(rank.on(Failed())).idle, "no other rank is left alone in its gradient"
    rank.on(Emitted())
    assert rank.tally.failed_rank == 0


def test_a_trainer_that_stops_leaves_what_waits_behind() -> None:
    rank = Alone()
    rank.arrive(5)
    rank.on(InputEnded())
    rank.exchange()
    assert rank.on(Closed()) == ()
    assert rank.exchange(closed_rank=0) == (End(ClosedBy(0)),)
    assert [s.cost for s in held(rank.state)] == [5]


def test_idle_stop_goes_without_accumulation() -> None:
    with pytest.raises(ConfigError, match='idle="stop"'):
        Config(Budget(8), idle=Idle.STOP, accumulation_steps=2)
    with pytest.raises(ConfigError, match="accumulation_steps"):
        odb.ODBDataLoader([1], token_budget=8, accumulation_steps=0)


# ---------------------------------------------------------------- any steps


def steps_of(weights: list[int], first: int = 0) -> tuple[Step, ...]:
    return tuple(Step(first + i, 0, (), NOTHING, Counts(1, w, w)) for i, w in enumerate(weights))


@given(st.integers(1, 6), st.lists(st.lists(st.integers(1, 9), max_size=9), max_size=6))
def test_blocks_are_so_many_steps_in_a_row_however_rounds_cut_them(
    size: int, rounds: list[list[int]]
) -> None:
    config = Config(Budget(8), accumulation_steps=size)
    ready: list[Step] = []
    waiting: tuple[Step, ...] = ()
    for weights in rounds:
        decided = steps_of(weights, first=len(ready) + len(waiting))
        more, waiting = gather(config, waiting, decided)
        ready += more
        assert len(waiting) < size
    ready += complete(waiting)
    flat = [w for weights in rounds for w in weights]
    assert [step.number for step in ready] == list(range(len(flat)))
    for step in ready:
        assert step.block is not None
        first = step.number - step.number % size
        weights = flat[first : first + size]
        assert step.block.place == step.number - first
        assert (step.block.steps, step.block.total.weight) == (len(weights), sum(weights))


# ---------------------------------------------------------------- real ranks


def texts(rank: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [rank] * (2 + (5 * i + rank) % 11)} for i in range((40, 9)[rank])]


def loader_of(rank: int, **options: Any) -> odb.ODBDataLoader:
    data = texts(rank)
    settings: dict[str, Any] = {"token_budget": 30, "window": 4, "timeout": 30.0, **options}
    return odb.ODBDataLoader(data, sampler=range(len(data)), **settings)


def two_epochs(rank: int, world_size: int, steps: int) -> list[odb.ODBStepInfo]:
    loader = loader_of(rank, accumulation_steps=steps)
    infos = [odb.pop_step_info(batch) for _ in range(2) for batch in loader]
    loader.close()
    return infos


@pytest.mark.parametrize("steps", [3, 100])
def test_the_scales_of_a_block_add_up_to_one_mean(steps: int) -> None:
    """Promise: exact-gradient, also across rounds; 100 steps are more than an epoch has."""
    both_ranks = run_ranks(two_epochs, 2, steps, start_method="fork", timeout=60)
    blocks: dict[tuple[int, int], list[odb.ODBStepInfo]] = {}
    for infos in both_ranks:
        for info in infos:
            blocks.setdefault((info.epoch, info.block), []).append(info)
        for _, epoch in groupby(infos, key=lambda info: info.epoch):
            ends = [info.step for info in epoch if info.last_in_block]
            gaps = [b - a for a, b in zip([-1, *ends], ends, strict=False)]
            assert set(gaps[:-1]) <= {steps}
            assert 1 <= gaps[-1] <= steps
    for (epoch, _), infos in blocks.items():
        assert {info.block_weight for info in infos} == {sum(i.local_weight for i in infos)}
        assert {info.block_samples for info in infos} == {sum(i.local_samples for i in infos)}
        assert sum(info.loss_scale for info in infos) == pytest.approx(2)
        assert epoch in (0, 1)
    assert any(len({info.round for info in infos}) > 1 for infos in blocks.values())
    assert any(info.idle for info in both_ranks[1])
    for rank, infos in enumerate(both_ranks):
        seen = sorted(name for info in infos for name in info.sample_ids)
        assert seen == sorted([*range(len(texts(rank)))] * 2)


class Broken(list[Any]):
    """A dataset whose sample 30 cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 30:
            raise RuntimeError("a broken file")
        return super().__getitem__(index)


def until_the_error(rank: int, world_size: int) -> tuple[int, odb.ODBError]:
    data = Broken(texts(rank))
    loader = odb.ODBDataLoader(
        data,
        sampler=range(len(data)),
        token_budget=30,
        window=4,
        timeout=30.0,
        accumulation_steps=4,
    )
    infos: list[odb.ODBStepInfo] = []
    with pytest.raises(odb.ODBError) as caught:
        infos.extend(map(odb.pop_step_info, loader))
    loader.close()
    return len(infos), caught.value


def test_a_failure_ends_all_ranks_behind_a_whole_block() -> None:
    """Promise: uniform-abort. No trainer is left with a part of a block."""
    (taken, error), (other, told) = run_ranks(until_the_error, 2, start_method="fork", timeout=60)
    assert isinstance(error, odb.PipelineError)
    assert isinstance(told, odb.PeerFailedError)
    assert taken == other == error.step == told.step
    assert taken > 0
    assert taken % 4 == 0


def different(rank: int, world_size: int) -> str:
    loader = loader_of(rank, accumulation_steps=1 + rank)
    with pytest.raises(odb.MismatchError) as caught:
        list(loader)
    return str(caught.value)


def test_ranks_that_accumulate_differently_say_so() -> None:
    for text in run_ranks(different, 2, start_method="fork", timeout=60):
        assert "accumulation_steps" in text


# ---------------------------------------------------------------- groups of some of the ranks


def in_uneven_groups(rank: int, world_size: int) -> int:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.new_group([0, 2])
    dist.new_group([0, 3])
    delivered = 0
    for _ in range(2):
        loader = odb.ODBDataLoader(texts(0), token_budget=30, group=pairs[rank // 2], timeout=30.0)
        delivered += sum(odb.pop_step_info(batch).local_samples for batch in loader)
        loader.close()
    return delivered


def test_members_may_be_in_different_numbers_of_groups() -> None:
    """As first and later stages of a pipeline are: PyTorch names a group by that number."""
    delivered = run_ranks(in_uneven_groups, 4, start_method="fork", timeout=60)
    assert delivered == [40, 40, 40, 40]
