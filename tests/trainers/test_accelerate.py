"""Accelerate: the conformance suite, and what its users do besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import odb
from odb.integrations.mesh import Layout
from odb.integrations.schedule import ScaledByBlock
from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.launch import run_as_torchrun, run_example

pytest.importorskip("accelerate", reason="the extra 'accelerate' is not installed")


def fresh_accelerator(**options: Any) -> Any:
    """Accelerators share their state; a test that wants another precision starts anew."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(**{"cpu": True, **options})


class Outcome(NamedTuple):
    result: c.RankResult
    scheduler_steps: int
    evaluated: int = 0


@dataclass(frozen=True)
class Engine:
    """What trains below Accelerate. options: of a new Accelerator. parameters: the whole ones of a
    prepared model that has trained, by the accelerator and the model."""

    options: Callable[[], Mapping[str, Any]] = dict
    parameters: Callable[[Any, Any], Mapping[str, torch.Tensor]] = lambda accelerator, model: (
        c.parameters_of(accelerator.unwrap_model(model))
    )


DDP = Engine()


def train(
    rank: int,
    case: c.Case,
    *,
    engine: Engine = DDP,
    naive: bool = False,
    max_norm: float | None = None,
    schedule: Any = lambda _: 1.0,
    base: int | None = None,
    evaluate: bool = False,
    **options: Any,
) -> Outcome:
    """base: of learning rates that follow the size of each block, if they do."""
    from odb.integrations.accelerate import prepare

    accelerator = fresh_accelerator(
        gradient_accumulation_steps=case.accumulation, **engine.options(), **options
    )
    loader = c.make_loader(case, rank)
    model = c.make_model(case.dtype)
    optimizer: Any = c.make_optimizer(model.parameters())
    counter = c.StepCounter(optimizer)
    scheduler: Any = LambdaLR(optimizer, schedule)
    scaled = None if base is None else ScaledByBlock(optimizer, base=base)
    if naive:
        model, optimizer, batches, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
    else:
        model, optimizer, batches, scheduler = prepare(
            accelerator, model, optimizer, loader, scheduler
        )
    evaluated = 0
    for _ in range(case.epochs):
        for batch in batches:
            info = odb.pop_step_info(batch)
            if scaled is not None:
                scaled.update(info)
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss if naive else loss * info.loss_scale)
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if evaluate and info.step == 1:  # within a block
                evaluated = evaluate_all(accelerator, model)
    loader.close()
    result = c.RankResult(engine.parameters(accelerator, model), counter.steps, loader.infos)
    return Outcome(result, scheduler.scheduler.last_epoch, evaluated)


def evaluate_all(accelerator: Any, model: Any) -> int:
    """With a plain DataLoader that Accelerate prepares; how many samples that were."""
    plain = DataLoader(c.make_dataset(), batch_size=5, collate_fn=odb.PadCollate())
    seen = 0
    with torch.no_grad():
        for batch in accelerator.prepare(plain):
            model(**batch)
            seen += len(accelerator.gather_for_metrics(batch["input_ids"][:, 0]))
    return seen


def train_all(rank: int, world_size: int) -> tuple[list[Any], dict[str, Outcome], list[str]]:
    conformance = [(train(rank, case), train(rank, case, naive=True)) for case in c.CASES]
    besides = {
        "clipped": train(
            rank, c.Case(3), max_norm=extras.MAX_NORM, schedule=extras.falling, evaluate=True
        ),
        "bf16": train(rank, c.Case(3), mixed_precision="bf16"),
    }
    return conformance, besides, [misuse(rank, how) for how in MISUSES]


MISUSES = {
    "another number of steps": "accumulation_steps=3, but the accelerator has",
    "no loss scale": 'loss_scaling="none"',
    "ranks that stop": 'build it with idle="pad"',
    "the info left": "info left in the batch",
    "left within a block": "the last epoch was left within a block",
    "other ranks": "pass the same process group to both",
    "outside of accumulate": "with accelerator.accumulate",
    "a scheduler of theirs": "2 steps for each step of the optimizer",
    "windows of their own": "set sync_with_dataloader=True",
    "no optimizer": "prepare both in the same call",
    "a loader of a mesh": "does not prepare a loader of odb.integrations.mesh",
}


def misuse(rank: int, how: str) -> str:
    from accelerate.utils import GradientAccumulationPlugin

    from odb.integrations.accelerate import prepare

    plugin = GradientAccumulationPlugin(
        num_steps={"another number of steps": 2, "ranks that stop": 1}.get(how, 3),
        sync_with_dataloader=how != "windows of their own",
    )
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    options: dict[str, Any] = {}
    if how == "no loss scale":
        options["loss_scaling"] = "none"
    if how == "other ranks":
        options["group"] = None
    if how == "ranks that stop":
        options["idle"] = "stop"
    loader = c.make_loader(c.Case(1 if how == "ranks that stop" else 3), rank, **options)
    model = c.make_model()
    optimizer = c.make_optimizer(model.parameters())
    scheduler: Any = LambdaLR(optimizer, lambda _: 1.0)
    try:
        if how == "a scheduler of theirs":
            optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        if how == "a loader of a mesh":
            with closing(Layout.of_groups(dist.group.WORLD).checked(loader)) as shared:
                prepare(accelerator, model, optimizer, shared)
        if how == "no optimizer":
            prepare(accelerator, model, loader, scheduler)
        model, optimizer, batches, _ = prepare(accelerator, model, optimizer, loader, scheduler)
        if how == "the info left":
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["input_ids"], batch["labels"])["loss"])
        for left in (3, 4, 99) if how == "left within a block" else ():
            for number, batch in enumerate(batches):
                if number == left:
                    break
                info = odb.pop_step_info(batch)
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"] * info.loss_scale)
            assert left < 99, "the one before was left within a block"
        for batch in batches:
            info = odb.pop_step_info(batch)
            accelerator.backward(model(**batch)["loss"] * info.loss_scale)
    except odb.IntegrationError as error:
        return str(error)
    finally:
        loader.close()
    return "no error"


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_as_torchrun(train_all, timeout=120)


def test_conformance(ranks: Any) -> None:
    import accelerate

    subject = c.Subject("Accelerate", accelerate.__version__, extra_lines=3)
    arms = checks.conform_both(subject, c.CASES, (rank[0] for rank in ranks))
    for outcome, _ in (pair for arm in arms for pair in arm.values()):
        assert outcome.scheduler_steps == outcome.result.optimizer_steps


def test_the_naive_scheduler_steps_twice(ranks: Any) -> None:
    """Why `prepare` wraps schedulers itself."""
    naive = ranks[0][0][0][1]
    assert naive.scheduler_steps == 2 * naive.result.optimizer_steps


def test_clipping_a_schedule_and_an_evaluation_within_a_block(ranks: Any) -> None:
    outcomes = [rank[1]["clipped"] for rank in ranks]
    results = [outcome.result for outcome in outcomes]
    expected = extras.reference(
        c.Case(3), results, max_norm=extras.MAX_NORM, schedule=extras.falling
    )
    assert extras.difference(results, expected) <= 1e-6
    assert extras.difference(results, extras.reference(c.Case(3), results)) > 1e-3
    assert [outcome.evaluated for outcome in outcomes] == [38, 38]


def test_bf16(ranks: Any) -> None:
    results = [rank[1]["bf16"].result for rank in ranks]
    assert c.largest_difference(results[0].parameters, results[1].parameters) == 0
    off = extras.difference(results, extras.reference(c.Case(3), results))
    assert 0 < off < 5e-3, "bfloat16 has eight bits"


@pytest.mark.parametrize("how", MISUSES)
def test_misuse_is_said_on_every_rank(ranks: Any, how: str) -> None:
    for rank in ranks:
        assert MISUSES[how] in rank[2][list(MISUSES).index(how)]


def test_an_optimizer_that_deepspeed_puts_in_place_of_the_scheduler_s_own() -> None:
    """As offloading does: it is another one, over the same groups."""
    from odb.integrations.accelerate import _is_optimizer_of

    own, other = (c.make_optimizer(c.make_model().parameters()) for _ in range(2))
    in_its_place = torch.optim.AdamW(own.param_groups)
    assert in_its_place.param_groups[0] is own.param_groups[0]
    scheduler = LambdaLR(own, lambda _: 1.0)
    assert _is_optimizer_of(in_its_place, scheduler)
    assert not _is_optimizer_of(other, scheduler)


def test_the_example() -> None:
    printed = run_example("train_accelerate.py")
    assert printed.count("steps of the optimizer") == 4
