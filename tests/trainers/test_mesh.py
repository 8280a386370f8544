"""Two data-parallel coordinates of two tensor-parallel ranks each, on four CPU processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import odb
from odb.integrations import fsdp2
from odb.integrations.agreement import Header, digest_of, judge
from odb.integrations.mesh import Layout
from odb.integrations.sharing import SharedLoader
from odb.testing import run_ranks
from tests.test_examples import torchrun
from tests.trainers import conformance as suite
from tests.trainers.conformance import Case, RankResult, Subject
from tests.trainers.verdicts import write_verdicts

SUBJECT = Subject("mesh (FSDP2 x tensor parallel)", torch.__version__, extra_lines=5)
MEMBERS = 2


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, MEMBERS), mesh_dim_names=("dp", "tp"))


def shared_loader(case: Case, layout: Layout, how: str, **options: Any) -> SharedLoader:
    """how: "loader" or "checked", the two ways that a layout offers."""
    seat = dist.get_rank(layout.group)
    timeout = {"timeout": options["timeout"]} if "timeout" in options else {}
    if how == "loader":
        return layout.loader(
            lambda group: suite.make_loader(case, seat, group=group, **options), **timeout
        )
    return layout.checked(suite.make_loader(case, seat, group=layout.group, **options), **timeout)


# ---------------------------------------------------------------- training


def train(case: Case, mesh: DeviceMesh, how: str) -> RankResult:
    """how: "loader", or "naive": the same batches without the loss scale."""
    layout = Layout.of_mesh(mesh)
    loader = shared_loader(case, layout, "loader")
    model = suite.make_model(case.dtype)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = suite.make_optimizer(model.parameters())
    counter = suite.StepCounter(optimizer)
    fsdp2.check(model, loader, mesh["dp"])
    infos = []
    for _ in range(case.epochs):
        for batch in loader:
            info = odb.pop_step_info(batch)
            infos.append(info)
            scale = 1 / case.accumulation if how == "naive" else info.loss_scale
            with fsdp2.accumulate(model, info):
                (model(**batch)["loss"] * scale).backward()
            if info.last_in_block:
                optimizer.step()
                optimizer.zero_grad()
    loader.close()
    return RankResult(suite.parameters_of(model), counter.steps, infos)


def train_all(rank: int, world_size: int) -> dict[str, list[RankResult]]:
    mesh = two_by_two()
    return {
        "loader": [train(case, mesh, "loader") for case in suite.CASES],
        "naive": [train(Case(3), mesh, "naive")],
    }


def test_a_tensor_parallel_model_conforms() -> None:
    """Promise: exact-gradient. Members see the same batches, coordinates different ones."""
    ranks = run_ranks(train_all, 4, start_method="fork", timeout=150)
    verdicts = []
    for number, case in enumerate(suite.CASES):
        results = [rank["loader"][number] for rank in ranks]
        naive = [rank["naive"][0] for rank in ranks] if case == Case(3) else None
        verdicts.append(suite.judge(SUBJECT, case, results, naive=naive, members=MEMBERS))
    write_verdicts("mesh", verdicts)


# ---------------------------------------------------------------- batches


def iterate(rank: int, world_size: int) -> dict[str, Any]:
    mesh = two_by_two()
    layout = Layout.of_mesh(mesh)
    found: dict[str, Any] = {}
    for how in ("loader", "checked"):
        loader = shared_loader(Case(2), layout, how)
        found[how, "reads"] = loader.loader is not None
        loader.set_epoch(5)
        found[how] = [(digest_of(b, i), i) for _ in range(2) for b, i in loader.steps()]
        found[how, "epoch"] = loader.epoch
        found[how, "facts"] = loader.facts
        for batch in loader:
            if odb.pop_step_info(batch).step == 2:
                break  # all members at the same step
        found[how, "after a break"] = [info.epoch for _, info in loader.steps()]
        held = [loader.steps(), loader.steps()]  # the second ends the first
        next(held[1])
        loader.close()
        found[how, "after the end"] = [list(steps) for steps in held]
    return found


def test_members_get_the_same_and_coordinates_different_batches() -> None:
    ranks = run_ranks(iterate, 4, start_method="fork", timeout=60)
    for how in ("loader", "checked"):
        assert [rank[how, "reads"] for rank in ranks] == [
            how == "checked" or r % 2 == 0 for r in range(4)
        ]
        assert ranks[0][how] == ranks[1][how] != ranks[2][how] == ranks[3][how]
        assert ranks[0][how] == ranks[0]["loader"]
        for epoch in (5, 6):
            seen = [
                i
                for r in (0, 2)
                for _, x in ranks[r][how]
                if x.epoch == epoch
                for i in x.sample_ids
            ]
            assert sorted(seen) == list(range(len(suite.make_dataset())))
        assert {rank[how, "epoch"] for rank in ranks} == {7}
        for r, rank in enumerate(ranks):
            assert set(rank[how, "after a break"]) == {8}
            assert rank[how, "after the end"] == [[], []]
            assert rank[how, "facts"] == ((r % 2, r % 2 + 2), 2, True, True)


def test_the_example() -> None:
    printed = torchrun("train_mesh.py", ranks=4)
    row = r"epoch (\d) rank (\d) \(reads: (\w+)\): (\d+) steps, (\d+) samples, loss ([\d.]+)"
    rows = re.findall(row, printed)
    assert {(epoch, rank, reads) for epoch, rank, reads, *_ in rows} == {
        (str(epoch), str(rank), str(rank % 2 == 0)) for epoch in range(2) for rank in range(4)
    }
    for epoch in "01":
        of_epoch = {rank: rest for e, rank, _, *rest in rows if e == epoch}
        assert len({(steps, samples) for steps, samples, _ in of_epoch.values()}) == 1
        losses = [of_epoch[rank][2] for rank in "0123"]
        assert losses[0] == losses[1] != losses[2] == losses[3]


# ---------------------------------------------------------------- layouts


def layouts(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, layout: Layout) -> None:
        found[name] = (dist.get_process_group_ranks(layout.group), layout.members)

    grid = two_by_two()
    note("dp first", Layout.of_mesh(grid, dp="dp"))
    note("dp second", Layout.of_mesh(grid, dp="tp"))
    note("all dp", Layout.of_mesh(grid, dp=("dp", "tp")))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "tp", "shard"))
    note("hybrid", Layout.of_mesh(cube, dp=("replicate", "shard")))
    note("two model dimensions", Layout.of_mesh(cube, dp="replicate"))
    note("groups", Layout.of_groups(data=grid.get_group("dp"), model=grid.get_group("tp")))
    note("data only", Layout.of_groups(data=dist.group.WORLD))
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    attempts: dict[str, Callable[[], Any]] = {
        "unknown": lambda: Layout.of_mesh(grid, dp="data"),
        "none": lambda: Layout.of_mesh(grid, dp=()),
        "unnamed": lambda: Layout.of_mesh(init_device_mesh("cpu", (2, 2)), dp="dp"),
        "too small": lambda: Layout.of_mesh(half, dp=("b",)),
        "no crossing": lambda: Layout.of_groups(dist.group.WORLD, grid.get_group("tp")),
    }
    return found | {name: suite.said(attempt) for name, attempt in attempts.items()}


def test_layouts_of_meshes_and_groups() -> None:
    for rank, found in enumerate(run_ranks(layouts, 4, start_method="fork", timeout=60)):
        row, column = rank // 2, rank % 2
        along, across = [column, column + 2], [2 * row, 2 * row + 1]
        assert found["dp first"] == found["groups"] == (along, tuple(across))
        assert found["dp second"] == (across, tuple(along))
        assert found["all dp"] == found["hybrid"] == found["data only"] or rank == -1
        assert found["all dp"][0] == [0, 1, 2, 3]
        assert found["two model dimensions"] == (along, tuple(across))
        assert "dp='data' names no dimension" in found["unknown"]
        assert "names no dimension" in found["none"]
        assert "whose dimensions are None" in found["unnamed"]
        assert found["too small"] == "no error", "one dimension needs no group to be made"
        assert f"rank {rank} shares a data-parallel group" in found["no crossing"]


def not_a_grid(rank: int, world_size: int) -> str:
    """Rank 0 would read, and wait for rank 3, which does not."""
    data = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    model = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    layout = Layout.of_groups(data, model)
    return suite.said(lambda: shared_loader(Case(), layout, "loader"))


def test_groups_that_form_no_grid_are_refused() -> None:
    for text in run_ranks(not_a_grid, 4, start_method="fork", timeout=60):
        assert "do not form a grid" in text


# ---------------------------------------------------------------- failures


class Broken(suite.LabelledTokens):
    """Sample 30, of the second coordinate, cannot be read on some ranks of the job."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 30 and dist.get_rank() in self.ranks:
            raise RuntimeError("a broken file")
        return super().__getitem__(index)


class Noisy(suite.LabelledTokens):
    """Augments at random, on every rank in its own way."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        sample["input_ids"][0] = dist.get_rank()
        return sample


def with_dataset(dataset: Any, seat: int, **options: Any) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(
        dataset, sampler=suite.EpochOrder(suite.SHARDS[seat]), token_budget=64, window=8, **options
    )


def unpicklable(samples: list[Any]) -> Any:
    return {"input_ids": torch.ones(1), "why": lambda: samples}


Outcome = tuple[int, str, str, Any]


def outcome(iterate: Callable[[], Any]) -> Outcome:
    """Steps taken, and the error: its type, its text, and the rank that it names."""
    steps = 0
    try:
        for _ in iterate():
            steps += 1
    except odb.ODBError as error:
        return steps, type(error).__name__, str(error), getattr(error, "rank", None)
    return steps, "", "", None


def failures(rank: int, world_size: int) -> dict[str, Any]:
    layout = Layout.of_mesh(two_by_two())
    seat = dist.get_rank(layout.group)
    found: dict[str, Any] = {}
    makers: dict[str, Callable[[], SharedLoader]] = {
        "reader": lambda: layout.loader(lambda g: with_dataset(Broken(2), seat, group=g)),
        "member": lambda: layout.checked(with_dataset(Broken(3), seat, group=layout.group)),
        "noisy": lambda: layout.checked(with_dataset(Noisy(), seat, group=layout.group)),
        "unpicklable": lambda: layout.loader(
            lambda g: with_dataset(
                suite.make_dataset(), seat, group=g, collate_fn=unpicklable, loss_scaling="none"
            )
        ),
    }
    for name, make in makers.items():
        loader = make()
        found[name] = outcome(loader.steps)
        found[name, "again"] = outcome(loader.steps)[1] == found[name][1]
        loader.close()

    def fails(group: Any) -> Any:
        if rank == 0:
            raise FileNotFoundError("corpus.bin")
        return with_dataset(suite.make_dataset(), seat, group=group)

    builds: dict[str, Callable[[], SharedLoader]] = {
        "build": lambda: layout.loader(fails),
        "bad option": lambda: layout.loader(lambda g: with_dataset([], seat, group=g, chunk=0)),
        "world": lambda: layout.loader(lambda g: with_dataset([], seat)),
        "no loader": lambda: layout.loader(lambda g: [1, 2]),  # type: ignore[arg-type, return-value]
    }
    for name, build in builds.items():
        try:
            build().close()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_an_error_of_one_is_raised_on_all() -> None:
    """Promise: uniform-abort, for members too."""
    ranks = run_ranks(failures, 4, start_method="fork", timeout=90)
    for name, raiser in (("reader", 2), ("member", 3)):
        outcomes = [rank[name] for rank in ranks]
        assert outcomes[raiser][1] == "PipelineError"
        assert "a broken file" in outcomes[raiser][2]
        mates = {raiser, raiser ^ 1} if name == "reader" else set(range(4))
        for rank in mates - {raiser}:
            assert outcomes[rank][1] == "PeerFailedError", (name, rank, outcomes)
            assert "a broken file" in outcomes[rank][2]
        assert len({steps for steps, *_ in outcomes}) == 1, outcomes
        assert all(rank[name, "again"] for rank in ranks), "nobody hangs in the next epoch either"
    for rank in ranks:
        steps, kind, text, _ = rank["noisy"]
        assert (steps, kind) == (0, "IntegrationError")
        assert "their batches differ" in text
        steps, kind, text, _ = rank["unpicklable"]
        assert (steps, kind) == (0, "BatchTypeError")
    assert ranks[0]["build"].startswith("FileNotFoundError: corpus.bin")
    assert ranks[1]["build"].startswith("PeerFailedError: rank 0 failed")
    assert "FileNotFoundError: corpus.bin" in ranks[1]["build"]
    assert [ranks[2]["build"], ranks[3]["build"]] == ["", ""]
    for rank in ranks:
        assert rank["bad option"].startswith("ConfigError: chunk")
        assert "build the loader with group=layout.group" in rank["world"]
        assert "list is no odb.ODBDataLoader" in rank["no loader"]


def out_of_step(rank: int, world_size: int) -> Outcome:
    """Rank 1 leaves an epoch one step before its mate, and goes on to the next one."""
    layout = Layout.of_mesh(two_by_two())
    loader = shared_loader(Case(), layout, "loader")

    def steps() -> Any:
        for batch, info in loader.steps():
            if rank == 1 and info.step == 2:
                break
            yield batch
        if rank == 1:
            yield from loader.steps()

    found = outcome(steps)
    loader.close()
    return found


def test_members_out_of_step_are_told() -> None:
    ranks = run_ranks(out_of_step, 4, start_method="fork", timeout=60)
    for (steps, kind, text, _), taken in zip(ranks[:2], (3, 2), strict=True):
        assert (steps, kind) == (taken, "MismatchError")
        assert "ranks disagree on epoch: one has 0, another 1" in text


def dies(rank: int, world_size: int) -> tuple[Outcome, float]:
    layout = Layout.of_mesh(two_by_two())
    loader = shared_loader(Case(), layout, "loader")
    started = time.monotonic()

    def steps() -> Any:
        for batch, info in loader.steps():
            if rank == 1 and info.step == 3:
                os._exit(9)
            yield batch

    found = outcome(steps)
    return found, time.monotonic() - started


def test_a_member_that_dies_is_named_at_once() -> None:
    results = run_ranks(dies, 4, start_method="fork", timeout=60, check=False)
    assert 1 in [failure.rank for failure in results.failures]
    (steps, kind, _, rank), seconds = results.values[0]
    assert (steps, kind, rank) == (4, "PeerLostError", 1)
    assert seconds < 20


def late(rank: int, world_size: int) -> tuple[Outcome, Any]:
    layout = Layout.of_mesh(two_by_two())
    loader = shared_loader(Case(), layout, "loader", timeout=3.0)

    def steps() -> Any:
        for batch, info in loader.steps():
            if rank == 3 and info.step == 2:
                time.sleep(6)
            yield batch

    return outcome(steps), rank


def test_a_member_that_is_stuck_is_named_in_time() -> None:
    results = run_ranks(late, 4, start_method="fork", timeout=60, check=False)
    (steps, kind, text, _), _ = results.values[2]
    assert (steps, kind) == (3, "ExchangeTimeoutError")
    assert "rank 3" in text


# ---------------------------------------------------------------- what members compare


def maximum(*headers: Header) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*(h.encode() for h in headers), strict=True))


def test_what_members_compare() -> None:
    silent, read = Header(1, 7), Header(1, 7, ended=0, digest=5)
    assert judge(maximum(silent, silent)) is None
    assert judge(maximum(silent, read)) is None
    assert judge(maximum(read, read)) is None
    assert judge(maximum(silent, read._replace(failed=2))) == 1
    assert judge(maximum(read, read._replace(failed=1, digest=6))) == 0
    with pytest.raises(odb.IntegrationError, match="their batches differ"):
        judge(maximum(read, read._replace(digest=6)))
    with pytest.raises(odb.IntegrationError, match="ended for some only"):
        judge(maximum(read, Header(1, 7, ended=1)))
    with pytest.raises(odb.MismatchError, match="step: one has 6, another 7"):
        judge(maximum(silent, Header(1, 6, failed=1)))
    with pytest.raises(odb.MismatchError, match="epoch: one has 1, another 2"):
        judge(maximum(silent, Header(2, 7)))


def test_the_digest_sees_contents() -> None:
    info = suite.make_info()
    digest = partial(digest_of, info=info)
    batch = {"x": torch.tensor([1, 2]), "y": [np.ones(2), 1.5, "text", None], "z": (True,)}
    same = {"x": torch.tensor([[1, 9], [2, 9]])[:, 0], "y": [np.ones(2), 1.5, "text", None]}
    same["z"] = (True,)
    assert digest(batch) == digest(same)
    different: tuple[Any, ...] = (
        {**batch, "x": torch.tensor([1, 3])},
        {**batch, "x": torch.tensor([[1], [2]])},
        {**batch, "x": torch.tensor([1, 2], dtype=torch.int32)},
        {**batch, "y": [np.ones(3), 1.5, "text", None]},
        {**batch, "y": [np.ones(2), 1.25, "text", None]},
        {**batch, "z": (False,)},
        {**batch, "w": batch["x"]},
    )
    assert len({digest(batch), *map(digest, different)}) == len(different) + 1
    assert digest(batch) != digest_of(batch, suite.make_info(step=1))
    assert 0 <= digest(torch.ones(3, dtype=torch.bfloat16)) < 2**61
    assert digest({"f": object()}) == digest({"f": object()})
