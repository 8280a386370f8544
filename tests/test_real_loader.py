"""The loader in real jobs: several loaders, pauses, leaks, collate functions, DDP, errors."""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import odb
from odb.testing import RankError, run_ranks
from tests.checks import check_case, check_epoch
from tests.jobs import (
    Case,
    EpochOfRank,
    Shard,
    ShardDataset,
    join_queue_feeders,
    lengths,
    loader_for,
    observe,
    run_case,
    run_epoch,
)
from tests.test_loader import ByWorker

UNEVEN = (Shard(lengths(64, 10, 500)), Shard(lengths(40, 10, 500)))
SMALL = (Shard(lengths(20, 10, 100)), Shard(lengths(9, 10, 100)))


class Lines(Dataset[dict[str, torch.Tensor]]):
    """A dataset that all ranks share: sample i is made of the number i."""

    def __init__(self, count: int, longest: int = 100) -> None:
        self.lengths = lengths(count, 2, longest)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((self.lengths[index],), index)
        return {"input_ids": tokens, "labels": tokens.clone()}


# ---------------------------------------------------------------- default sharding


def shared_dataset(rank: int, world_size: int, shuffle: bool) -> list[list[int]]:
    loader = odb.ODBDataLoader(
        Lines(101), token_budget=300, window=16, num_workers=1, shuffle=shuffle, seed=3
    )
    epochs = []
    for _ in range(2):
        ids: list[int] = []
        for batch, info in loader.steps():
            if not info.idle:
                assert batch["input_ids"][:, 0].tolist() == list(info.sample_ids)
                assert batch["attention_mask"].sum() == info.local_tokens
            ids.extend(info.sample_ids)
        epochs.append(ids)
    return epochs


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_shared_dataset_is_seen_exactly_once(world_size: int, shuffle: bool) -> None:
    """101 samples on 2 or 3 ranks: DistributedSampler would repeat one."""
    ranks = run_ranks(shared_dataset, world_size, shuffle, start_method="fork", timeout=60)
    for epoch in (0, 1):
        assert sorted(i for rank in ranks for i in rank[epoch]) == list(range(101))
    assert (sorted(ranks[0][0]) == sorted(ranks[0][1])) == (not shuffle or world_size == 1)


class Numbers(IterableDataset[dict[str, torch.Tensor]]):
    """The same stream on every rank and worker."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"input_ids": torch.tensor([i, i])} for i in range(101))


def shared_stream(rank: int, world_size: int) -> list[int]:
    loader = odb.ODBDataLoader(Numbers(), token_budget=16, window=16, num_workers=rank)
    seen = []
    for batch, info in loader.steps():
        if not info.idle:
            assert batch["input_ids"][:, 0].tolist() == list(info.sample_ids)
            seen.extend(info.sample_ids)
    return seen


def test_a_shared_stream_is_seen_exactly_once_whatever_the_workers() -> None:
    ranks = run_ranks(shared_stream, 3, start_method="fork", timeout=60)
    assert sorted(i for rank in ranks for i in rank) == list(range(101))


# ---------------------------------------------------------------- several loaders in a job


def two_loaders(rank: int, world_size: int) -> list[EpochOfRank]:
    train = loader_for(Case(UNEVEN), rank)
    evaluate = loader_for(Case(SMALL), rank)
    epochs = [run_epoch(train), run_epoch(evaluate), run_epoch(train)]  # one after the other
    interleaved, inner = EpochOfRank(), []
    for batch in train:
        info = odb.pop_step_info(batch)
        interleaved.steps.append(observe(batch, info))
        if info.step in (3, 11):
            inner.append(run_epoch(evaluate))  # in the middle of a training epoch
    interleaved.filtered = list(train.stats.filtered)
    interleaved.complete = train.stats.complete
    train.close()
    evaluate.close()
    return [*epochs, interleaved, *inner]


def test_two_loaders_in_one_job() -> None:
    """The reference hangs here: the names of its groups collide."""
    ranks = run_ranks(two_loaders, 2, start_method="fork", timeout=90)
    train, small = Case(UNEVEN), Case(SMALL)
    for number, case in enumerate((train, small, train, train, small, small)):
        check_epoch(case, [rank[number] for rank in ranks])


# ---------------------------------------------------------------- pauses


def paused(rank: int, world_size: int, seconds: float) -> list[EpochOfRank]:
    loader = loader_for(Case(UNEVEN, {"timeout": 1800.0}), rank)
    record = EpochOfRank()
    for batch in loader:
        info = odb.pop_step_info(batch)
        record.steps.append(observe(batch, info))
        if rank == 0 and info.step == 4:
            time.sleep(seconds)  # a checkpoint is being written
    record.filtered = list(loader.stats.filtered)
    record.complete = loader.stats.complete
    loader.close()
    return [record]


def test_a_trainer_that_pauses_75_seconds_loses_nothing() -> None:
    """The reference dies at 60 s."""
    check_case(Case(UNEVEN), run_ranks(paused, 2, 75.0, start_method="fork", timeout=180))


# ---------------------------------------------------------------- leaks


@dataclass(frozen=True)
class Footprint:
    threads: int
    children: int
    descriptors: int
    shared_memory: int


def footprint() -> Footprint:
    gc.collect()
    process = psutil.Process()
    deadline = time.monotonic() + 5
    while process.children() and time.monotonic() < deadline:
        multiprocessing.active_children()  # reaps
        time.sleep(0.02)
    join_queue_feeders()
    mapped = sum("/dev/shm" in m.path or "torch_" in m.path for m in process.memory_maps())
    return Footprint(threading.active_count(), len(process.children()), process.num_fds(), mapped)


def many_epochs(rank: int, world_size: int, break_at: int | None) -> list[Footprint]:
    loader = loader_for(Case(SMALL), rank)
    prints = []
    for _ in range(12 if break_at is None else 5):
        for number, _ in enumerate(loader):
            if number + 1 == break_at:
                break
        dist.barrier()
        for thread in threading.enumerate():
            if thread.name == "odb-driver":
                thread.join(20)  # all ranks agree on the end of the epoch
        prints.append(footprint())
        dist.barrier()  # a rank that goes on to close drops sockets of the other, too
    loader.close()
    return prints


@pytest.mark.parametrize("break_at", [None, 2])
def test_nothing_is_left_of_an_epoch(break_at: int | None) -> None:
    """Threads, processes, descriptors, shared memory: the same after the second epoch as after the
    last. The reference leaks two processes with each epoch and crashes in the end."""
    for prints in run_ranks(many_epochs, 2, break_at, start_method="fork", timeout=120):
        assert prints[1].children == 0
        assert prints[1] == prints[-1]


def closing(rank: int, world_size: int) -> tuple[set[str], int, int]:
    before = psutil.Process().num_fds()
    for _ in range(3):
        loader = loader_for(Case(SMALL, {"persistent_workers": True}), rank)
        run_epoch(loader)
        loader.close()
    dist.barrier()
    join_queue_feeders()
    return {t.name for t in threading.enumerate()}, before, psutil.Process().num_fds()


def test_close_gives_everything_back() -> None:
    for names, before, after in run_ranks(closing, 2, start_method="fork", timeout=60):
        assert not {name for name in names if name.startswith("odb")}
        assert after <= before


def dropped_loader(rank: int, world_size: int) -> int:
    """Nothing but the iterator is held: the loader must live as long as it does."""
    count = sum(info.local_samples for _, info in loader_for(Case(SMALL), rank).steps())
    gc.collect()
    return count


def test_a_loader_that_only_its_iterator_holds_is_not_cut_short() -> None:
    assert run_ranks(dropped_loader, 2, start_method="fork", timeout=60) == [20, 9]


# ---------------------------------------------------------------- collate functions


@dataclass
class Bag:
    rows: int
    tokens: torch.Tensor


COLLATES: dict[str, Any] = {
    "tensor": lambda samples: torch.cat([s["input_ids"] for s in samples]),
    "tuple": lambda samples: (len(samples), samples[0]["input_ids"]),
    "dataclass": lambda samples: Bag(len(samples), samples[0]["input_ids"]),
    "dict without input_ids": lambda samples: {"x": [s["input_ids"] for s in samples]},
}


def collated(rank: int, world_size: int, name: str) -> tuple[set[str], int, int]:
    loader = loader_for(Case(SMALL, {"collate_fn": COLLATES[name]}), rank)
    steps = list(loader.steps())
    loader.close()
    kinds = {type(batch).__name__ for batch, _ in steps}
    return kinds, len(steps), sum(info.local_samples for _, info in steps)


@pytest.mark.parametrize("name", COLLATES)
def test_any_batch_type_goes_through_steps(name: str) -> None:
    """The reference drops such batches, or crashes."""
    first, second = run_ranks(collated, 2, name, start_method="fork", timeout=60)
    assert first[1] == second[1]
    assert (first[2], second[2]) == (20, 9)
    assert first[0] == {type(COLLATES[name]([{"input_ids": torch.ones(1)}])).__name__}


def test_a_batch_without_room_for_the_info_is_refused_by_iter() -> None:
    loader = odb.ODBDataLoader(Lines(5), token_budget=300, collate_fn=COLLATES["tuple"])
    with pytest.raises(odb.BatchTypeError, match=r"loader\.steps\(\)"):
        next(iter(loader))


# ---------------------------------------------------------------- training


class Scorer(torch.nn.Module):
    """A model in float64 whose loss is a mean over label positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(128, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, 128, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(tokens[:, :-1]))
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )


def train_ddp(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    model = DistributedDataParallel(Scorer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    shards = (Shard(lengths(30, 5, 60), labels="few"), Shard(lengths(11, 5, 60)))
    loader = loader_for(Case(shards, {"token_budget": 128}), rank)
    for batch in loader:
        info = odb.pop_step_info(batch)
        loss = model(batch["input_ids"], batch["labels"]) * info.loss_scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append([] if info.idle else [batch["input_ids"], batch["labels"]])
    loader.close()
    return [p.detach() for p in model.module.parameters()], seen


def test_ddp_training_equals_one_process_with_the_global_token_mean() -> None:
    ranks = run_ranks(train_ddp, 2, start_method="fork", timeout=60)
    model = Scorer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert len(ranks[0][1]) == len(ranks[1][1]) > 5
    assert [] in ranks[1][1], "the shorter shard should have idled"
    for parts in zip(ranks[0][1], ranks[1][1], strict=True):
        present = [part for part in parts if part]
        positions = sum(int((labels[:, 1:] != -100).sum()) for _, labels in present)
        loss = sum(
            model(tokens, labels) * int((labels[:, 1:] != -100).sum()) / positions
            for tokens, labels in present
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameters, _ in ranks:
        for mine, reference in zip(parameters, model.parameters(), strict=True):
            assert (mine - reference).abs().max() <= 1e-9


# ---------------------------------------------------------------- equipping a DataLoader


def equipped(rank: int, world_size: int, sampler: bool) -> tuple[list[Any], list[int]]:
    dataset = Lines(51)
    own = DistributedSampler(dataset, shuffle=False, drop_last=True) if sampler else None
    loader = DataLoader(dataset, batch_size=4, shuffle=not sampler, sampler=own, num_workers=1)
    same = odb.apply(loader, token_budget=300, window=16)
    assert same is loader
    ids = [odb.pop_step_info(batch).sample_ids for batch in loader]
    loader.set_epoch(7)
    assert same.odb.epoch == 7
    same.close()
    return [i for step in ids for i in step], [len(step) for step in ids]


def test_apply_equips_a_loader_in_place() -> None:
    ranks = run_ranks(equipped, 2, False, start_method="fork", timeout=60)
    assert sorted(i for ids, _ in ranks for i in ids) == list(range(51))


def test_apply_respects_a_sampler_of_the_user_s() -> None:
    ranks = run_ranks(equipped, 2, True, start_method="fork", timeout=60)
    assert [sorted(ids) for ids, _ in ranks] == [list(range(0, 50, 2)), list(range(1, 50, 2))]


# ---------------------------------------------------------------- errors reach every rank


class Broken(ShardDataset):
    def __getitem__(self, index: int) -> Any:
        if self.rank == 1 and index == 20:
            raise RuntimeError("a broken file")
        return super().__getitem__(index)


def failing(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, Any, Any, int]:
    loader = odb.ODBDataLoader(
        Broken(UNEVEN[rank], rank), sampler=range(len(UNEVEN[rank].lengths)),
        token_budget=512, window=8, timeout=30.0, **options,
    )  # fmt: skip
    steps, error = 0, None
    try:
        for _ in loader.steps():
            steps += 1
    except odb.ODBError as raised:
        error = raised
    filtered = list(loader.stats.filtered)
    again = 0
    if error is None:
        again = sum(1 for _ in loader.steps())
    loader.close()
    return steps, error, filtered, again


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_fails_stops_all_ranks_at_the_same_step(num_workers: int) -> None:
    """Promise: uniform-abort."""
    options = {"num_workers": num_workers}
    first, second = run_ranks(failing, 2, options, start_method="fork", timeout=60)
    assert first[0] == second[0] > 0
    assert isinstance(first[1], odb.PeerFailedError)
    assert (first[1].rank, first[1].step) == (1, first[0])
    assert "sample 20" in first[1].reason
    assert "a broken file" in first[1].reason
    assert isinstance(second[1], odb.PipelineError)
    assert "sample 20" in str(second[1])
    assert 20 not in second[1].lost


def test_a_sample_that_fails_can_be_skipped() -> None:
    first, second = run_ranks(failing, 2, {"on_error": "skip"}, start_method="fork", timeout=60)
    assert first[1] is second[1] is None
    assert first[0] == second[0]
    assert [f.sample_id for f in second[2]] == [20]
    assert "a broken file" in second[2][0].reason


def failing_after_retirement(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Rank 0 drains at once; rank 1 fails later."""
    size = (2, 40)[rank]
    loader = odb.ODBDataLoader(
        Broken(UNEVEN[rank], rank), sampler=range(size), token_budget=512, window=4, idle="stop"
    )
    errors = []
    steps = 0
    for _ in range(2):
        try:
            for _ in loader.steps():
                steps += 1
        except odb.ODBError as error:
            errors.append(type(error).__name__)
            break
    loader.close()
    return steps, errors


def test_a_rank_that_retired_hears_of_a_failure_before_its_next_epoch() -> None:
    first, second = run_ranks(failing_after_retirement, 2, start_method="fork", timeout=60)
    assert first == (2, ["PeerFailedError"])
    assert second[1] == ["PipelineError"]


def unable(rank: int, world_size: int) -> tuple[int, str]:
    def collate(samples: list[Any]) -> Any:
        if rank == 1:
            raise KeyError("no batch on this rank")
        return {"n": len(samples)}

    loader = loader_for(Case(UNEVEN, {"collate_fn": collate}), rank)
    steps = 0
    try:
        for _ in loader.steps():
            steps += 1
    except odb.ODBError as error:
        return steps, f"{type(error).__name__}: {error}"
    finally:
        loader.close()
    return steps, "no error"


def test_a_rank_that_can_make_no_batch_at_all_fails_at_once_and_tells_the_others() -> None:
    first, second = run_ranks(unable, 2, start_method="fork", timeout=60)
    assert second[0] == 0
    assert second[1].startswith("PipelineError")
    assert "no batch on this rank" in second[1]
    assert first[1].startswith("PeerFailedError: rank 1")


def mismatched(rank: int, world_size: int, term: str) -> tuple[str, int, int]:
    options: dict[str, Any] = {"token_budget": 512, "window": 16}
    options[term] = options.get(term, 0) + rank
    loader = odb.ODBDataLoader(Lines(9), **options)
    try:
        list(loader.steps())
    except odb.MismatchError as error:
        return error.term, error.low, error.high
    finally:
        loader.close()
    raise AssertionError("no error")


@pytest.mark.parametrize(("term", "low"), [("token_budget", 512), ("window", 16), ("seed", 0)])
def test_ranks_that_are_configured_differently_say_so(term: str, low: int) -> None:
    assert (
        run_ranks(mismatched, 2, term, start_method="fork", timeout=60)
        == [(term, low, low + 1)] * 2
    )


def ahead(rank: int, world_size: int) -> str:
    loader = odb.ODBDataLoader(Lines(9), token_budget=512)
    loader.set_epoch(rank)
    try:
        list(loader.steps())
    except odb.MismatchError as error:
        return error.term
    finally:
        loader.close()
    return "no error"


def test_ranks_in_different_epochs_say_so() -> None:
    assert run_ranks(ahead, 2, start_method="fork", timeout=60) == ["epoch", "epoch"]


def alone(rank: int, world_size: int, group: Any) -> str:
    options = {} if group == "default" else {"group": group}
    loader = odb.ODBDataLoader(Lines(9), token_budget=512, **options)
    try:
        return str(sum(info.local_samples for _, info in loader.steps()))
    except odb.NotDistributedError as error:
        return type(error).__name__


def test_without_a_process_group_several_ranks_are_never_silently_alone() -> None:
    run = {"start_method": "fork", "timeout": 60, "process_group": False}
    assert run_ranks(alone, 2, "default", **run) == ["NotDistributedError"] * 2  # type: ignore[arg-type]
    assert run_ranks(alone, 2, None, **run) == ["9", "9"]  # type: ignore[arg-type]


def closed_late(rank: int, world_size: int) -> int:
    loader = odb.ODBDataLoader(Lines(9), token_budget=512)
    count = sum(info.local_samples for _, info in loader.steps())
    dist.destroy_process_group()
    loader.close()
    return count


def test_closing_after_the_default_group_is_gone_is_no_error() -> None:
    assert run_ranks(closed_late, 2, start_method="fork", timeout=60) == [5, 4]


def on_one_rank_only(rank: int, world_size: int) -> str:
    if rank == 1:
        time.sleep(6)
        return ""
    try:
        list(odb.ODBDataLoader(Lines(9), token_budget=512, timeout=3).steps())
    except odb.NotDistributedError as error:
        return str(error)
    return "no error"


def test_a_loader_on_one_rank_only_says_what_to_do() -> None:
    said, _ = run_ranks(on_one_rank_only, 2, start_method="fork", timeout=60)
    assert "group=None" in said


def stream_by_worker(rank: int, world_size: int) -> list[int]:
    loader = odb.ODBDataLoader(ByWorker(), token_budget=16, num_workers=2, sharded="workers")
    return [
        int(i)
        for batch, info in loader.steps()
        if not info.idle
        for i in batch["input_ids"].flatten()
    ]


def test_a_stream_that_divides_itself_by_worker_is_seen_once() -> None:
    ranks = run_ranks(stream_by_worker, 2, start_method="fork", timeout=60)
    assert sorted(i for rank in ranks for i in rank) == list(range(50))


# ---------------------------------------------------------------- some of the ranks


def in_subgroups(rank: int, world_size: int) -> list[list[int]]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    seen = []
    for count in (20, 11, 30):
        loader = odb.ODBDataLoader(Lines(count + rank // 2), token_budget=200, group=mine)
        seen.append([i for _, info in loader.steps() for i in info.sample_ids])
        loader.close()  # the next loader takes its group over
    return seen


def test_groups_of_ranks_are_aligned_by_themselves() -> None:
    ranks = run_ranks(in_subgroups, 4, start_method="fork", timeout=60)
    for number, count in enumerate((20, 11, 30)):
        assert sorted(ranks[0][number] + ranks[1][number]) == list(range(count))
        assert sorted(ranks[2][number] + ranks[3][number]) == list(range(count + 1))


# ---------------------------------------------------------------- the harness itself


def misbehave(rank: int, world_size: int, how: str) -> int:
    if rank == 1:
        if how == "raise":
            raise ValueError("on purpose")
        if how == "exit":
            os._exit(7)
        time.sleep(60)
    return rank


@pytest.mark.parametrize(
    ("how", "says"), [("raise", "on purpose"), ("exit", "exit code 7"), ("hang", "3 s")]
)
def test_the_harness_names_the_rank_that_failed(how: str, says: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=says) as caught:
        run_ranks(misbehave, 2, how, start_method="fork", timeout=3, process_group=False)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert time.monotonic() - started < 30
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank-")]


def test_the_environment_names_ranks() -> None:
    assert run_ranks(environment, 2, start_method="fork", timeout=30) == [
        ("0", "2", 0),
        ("1", "2", 1),
    ]


def environment(rank: int, world_size: int) -> tuple[str, str, int]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank()


def test_shards_of_a_case_are_what_they_say() -> None:
    """A guard for the guards: a case whose rank sees a sample of another fails the check."""
    case = Case(SMALL)
    ranks = run_ranks(run_case, 2, case, start_method="fork", timeout=60)
    check_case(case, ranks)
    ranks[0][0].steps.pop()
    with pytest.raises(AssertionError):
        check_case(case, ranks)


def built_before_the_group(rank: int, folder: str) -> None:
    """What `torch.multiprocessing.spawn` starts: no environment, and the loader comes first."""
    dataset = [{"input_ids": [1] * (1 + i % 7)} for i in range(40)]
    loader = odb.ODBDataLoader(dataset, token_budget=16, window=8)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    steps = list(loader.steps())
    assert all(info.global_samples > info.local_samples for _, info in steps[:2])
    ids = sorted(i for _, info in steps for i in info.sample_ids)
    Path(folder, f"rank{rank}").write_text(repr((len(steps), ids)))
    loader.close()
    dist.destroy_process_group()


def test_torch_spawn_and_a_group_that_is_made_after_the_loader(tmp_path: Path) -> None:
    mp.spawn(built_before_the_group, (str(tmp_path),), nprocs=2)
    (steps, first), (others, second) = (
        ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)
    )
    assert steps == others
    assert sorted(first + second) == list(range(40))
