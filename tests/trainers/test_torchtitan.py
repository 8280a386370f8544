"""torchtitan: the adapter against its base class, its config, its loss, and its trainer's way.

Its trainer needs Triton, so that `train_step` below takes its place: it does with batches and
gradients what torchtitan 0.3.0 does, with torchtitan's own loss. torchtitan is in an environment of
its own: `make test-trainers`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import odb
from odb.integrations.base import version_of
from odb.testing import run_ranks
from tests.test_examples import torchrun
from tests.trainers import checks
from tests.trainers import conformance as suite
from tests.trainers.conformance import FLOAT32_CASES, Case, RankResult, Subject, said

CONTRACT = (
    "its trainer needs Triton: base class, config and loss are its own, the loop is the test's"
)

needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan is not installed here: make test-trainers"
)


# ---------------------------------------------------------------- what the ranks do


def build(rank: int, loader: Any, **options: Any) -> Any:
    """As torchtitan's trainer builds its dataloader."""
    from odb.integrations.torchtitan import TitanDataLoader

    seq_len = options.pop("seq_len", 64)
    dp_rank = options.pop("dp_rank", rank)
    config = TitanDataLoader.Config(build_loader=lambda place: loader, **options)
    return config.build(
        dp_world_size=2,
        dp_rank=dp_rank,
        tokenizer=None,
        seq_len=seq_len,
        local_batch_size=1,
        snapshot_every_n_steps=None,
    )


def train_step(
    model: suite.CausalModel,
    optimizer: torch.optim.Optimizer,
    steps: list[tuple[dict[str, torch.Tensor], torch.Tensor]],
    *,
    per_batch: bool = False,
) -> None:
    """Sums of losses over the label tokens of all ranks and steps; gradients are added up.
    per_batch: means of batches instead, averaged, as many trainers do."""
    from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss

    loss_of = CrossEntropyLoss.Config().build()
    valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in steps])
    total = valid.sum()
    dist.all_reduce(total)
    optimizer.zero_grad()
    for (inputs, labels), own in zip(steps, valid, strict=True):
        hidden = model.embed(inputs["input"])
        logits = model.head(hidden + model.down(torch.tanh(model.up(hidden))))
        count = own.clamp(min=1) * len(steps) * 2 if per_batch else total
        loss_of(logits, labels, count)[0].backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def groups_of(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """torchtitan takes so many for each step, and drops the last ones if they are too few."""
    while True:
        held = [batch for _, batch in zip(range(size), batches, strict=False)]
        if len(held) < size:
            return
        yield held


def train(rank: int, case: Case, *, per_batch: bool = False) -> RankResult:
    loader = suite.make_loader(case, rank)
    titan = build(rank, loader, epochs=case.epochs)
    model = suite.make_model(case.dtype)
    optimizer = suite.make_optimizer(model.parameters())
    counter = suite.StepCounter(optimizer)
    for steps in groups_of(iter(titan), case.accumulation):
        train_step(model, optimizer, steps, per_batch=per_batch)
    loader.close()
    assert titan.progress.optimizer_steps == counter.steps
    assert titan.progress.samples == case.epochs * len(suite.make_dataset())
    return RankResult(suite.parameters_of(model), counter.steps, loader.infos)


def resumed(rank: int) -> bool:
    """Whether a run that stops after each number of blocks goes on as if it had not."""

    def whole(batches: Any) -> list[Any]:
        return [(inputs["input"].tolist(), labels.tolist()) for inputs, labels in batches]

    loader = suite.make_loader(Case(3), rank)
    titan = build(rank, loader, epochs=2)
    states, expected = [titan.state_dict()], []
    for steps in groups_of(iter(titan), 3):
        expected.extend(whole(steps))
        states.append(titan.state_dict())
    final = titan.state_dict()
    loader.close()
    for blocks, state in enumerate(states):
        loader = suite.make_loader(Case(3), rank)
        titan = build(rank, loader, epochs=2)
        titan.load_state_dict(state)
        if whole(titan) != expected[3 * blocks :] or titan.state_dict() != final:
            return False
        loader.close()
    return len(states) > 5


def misuse(rank: int) -> list[tuple[str, str]]:
    """What was said, and what should be in it."""
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    rows = [{"input_ids": torch.arange(1, n), "labels": torch.arange(1, n)} for n in (5, 5, 9, 9)]
    bare = [{"input_ids": row["input_ids"]} for row in rows]
    loader = partial(odb.ODBDataLoader, rows, token_budget=16, timeout=30.0)
    left = odb.PadCollate(padding_side="left")

    def iterate(made: Any, **options: Any) -> None:
        try:
            list(build(rank, made, epochs=1, **options))
        finally:
            made.close()

    other = build(rank, loader()).state_dict() | {"dp_world_size": 4}
    return [
        (said(lambda: build(rank, loader())), "no error"),
        (said(lambda: build(rank, loader(), dp_rank=1 - rank)), f"at {1 - rank} of 2"),
        (said(lambda: build(rank, loader(group=own))), "batch ranks"),
        (said(lambda: build(rank, loader(idle="stop"))), 'idle="pad"'),
        (said(lambda: build(rank, [])), "no odb.ODBDataLoader"),
        (said(lambda: iterate(loader(), seq_len=2)), "training.seq_len=2"),
        (said(lambda: iterate(loader(collate_fn=left))), "padded on the left"),
        (
            said(lambda: iterate(odb.ODBDataLoader(bare, token_budget=16, timeout=30.0))),
            "input_ids and labels",
        ),
        (said(lambda: build(rank, loader()).load_state_dict(other)), "4 data-parallel ranks"),
        (said(lambda: next(iter(build(rank, odb.ODBDataLoader([], token_budget=16))))), "no step"),
    ]


def positions(rank: int) -> bool:
    loader = suite.make_loader(Case(), rank)
    inputs, labels = next(iter(build(rank, loader, positions=True)))
    loader.close()
    shapes = {inputs["input"].shape, inputs["positions"].shape, labels.shape}
    return len(shapes) == 1 and inputs["positions"][0].tolist() == list(range(labels.shape[1]))


def work(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "exact": {case: train(rank, case) for case in FLOAT32_CASES},
        "naive": {case: train(rank, case, per_batch=True) for case in FLOAT32_CASES},
        "resumed": resumed(rank),
        "positions": positions(rank),
        "misuse": misuse(rank),
    }


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found = run_ranks(work, 2, start_method="fork", timeout=200)
    assert isinstance(found, list)
    return found


@needs_torchtitan
def test_it_conforms(ranks: list[dict[str, Any]]) -> None:
    """Promise: exact-gradient, by torchtitan's own normalization. Its loss computes in float32."""
    subject = Subject("torchtitan", version_of("torchtitan"), CONTRACT, extra_lines=3)
    checks.conform(
        subject,
        FLOAT32_CASES,
        exact=lambda case: [rank["exact"][case] for rank in ranks],
        naive=lambda case: [rank["naive"][case] for rank in ranks],
    )


@needs_torchtitan
def test_a_checkpoint_goes_on_where_it_was(ranks: list[dict[str, Any]]) -> None:
    """At the start, after each block, and at the end of both epochs."""
    assert all(rank["resumed"] for rank in ranks)


@needs_torchtitan
def test_positions_count_from_the_start_of_each_row(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["positions"] for rank in ranks)


@needs_torchtitan
def test_misuse_is_told_apart(ranks: list[dict[str, Any]]) -> None:
    checks.is_said(ranks)


@needs_torchtitan
def test_it_is_a_component_of_torchtitan() -> None:
    """What torchtitan demands of a dataloader, and hands to it."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    from odb.integrations.torchtitan import TitanDataLoader

    assert issubclass(TitanDataLoader, BaseDataLoader)
    assert not inspect.isabstract(TitanDataLoader)
    assert issubclass(TitanDataLoader.Config, BaseDataLoader.Config)
    config = TitanDataLoader.Config(build_loader=lambda place: None, epochs=2)
    assert config.to_dict()["epochs"] == 2  # torchtitan logs its configuration
    theirs = inspect.signature(HuggingFaceTextDataLoader.__init__)
    inspect.signature(TitanDataLoader.__init__).bind(
        *dict.fromkeys(("self", "config")),
        **{
            name: None
            for name, parameter in theirs.parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        },
    )


@needs_torchtitan
def test_the_example_runs() -> None:
    assert "epoch 1 rank 0" in torchrun("train_torchtitan.py")


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_without_torchtitan_the_extra_is_named() -> None:
    with pytest.raises(odb.MissingDependencyError, match=r"verified-odb\[torchtitan\]"):
        importlib.import_module("odb.integrations.torchtitan")
