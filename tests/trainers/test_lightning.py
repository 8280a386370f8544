"""Lightning: the conformance suite, and what its users do besides."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import odb
from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.launch import run_as_torchrun, run_example

pytest.importorskip("lightning.pytorch", reason="the extra 'lightning' is not installed")


class Outcome(NamedTuple):
    result: c.RankResult
    global_step: int
    scheduler_steps: int
    samples: int
    logged: dict[str, float]
    step_losses: list[float]
    validated: int


def module_for(case: c.Case, kind: str, schedule: Any) -> Any:
    """kind: "exact", "naive" (no loss scale), "manual" optimization, or "every step": manual, with
    a step of the optimizer each time. Others are as "exact"."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = kind not in ("manual", "every step")
            self.model = c.make_model(case.dtype)
            self.validated = 0

        def configure_model(self) -> None:
            if self.device_mesh is not None and not isinstance(self.model, FSDPModule):
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            if kind == "naive":
                batch.pop(odb.info.STEP_INFO_KEY)
                return self.model(**batch)["loss"]
            info = odb.pop_step_info(batch)
            loss = self.model(**batch)["loss"] * info.loss_scale
            if not self.automatic_optimization:
                self.manual_backward(loss)
                if info.last_in_block or kind == "every step":
                    self.optimizers().step()  # type: ignore[union-attr]
                    self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
                    self.optimizers().zero_grad()  # type: ignore[union-attr]
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            info = odb.pop_step_info(batch) if odb.info.STEP_INFO_KEY in batch else None
            self.model(**batch)
            self.validated += len(batch["input_ids"]) if info is None else info.local_samples

        def configure_optimizers(self) -> Any:
            self.optimizer = c.make_optimizer(self.parameters())
            self.counter = c.StepCounter(self.optimizer)
            self.scheduler = LambdaLR(self.optimizer, schedule)
            scheduler = {"scheduler": self.scheduler, "interval": "step"}
            return {"optimizer": self.optimizer, "lr_scheduler": scheduler}

    return Module()


def trainer_for(case: c.Case, callbacks: list[Any], **options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": c.WORLD_SIZE,
        "strategy": DDPStrategy(process_group_backend="gloo"),
        "max_epochs": case.epochs,
        "accumulate_grad_batches": case.accumulation,
        "callbacks": callbacks,
        "precision": "64-true" if case.dtype is torch.float64 else "32-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**settings, **options})


def train(
    rank: int,
    case: c.Case,
    kind: str = "exact",
    *,
    schedule: Any = lambda _: 1.0,
    validate: bool = False,
    **options: Any,
) -> Outcome:
    from lightning.pytorch import Callback

    from odb.integrations.lightning import LightningLoader, ODBCallback

    losses: list[float] = []

    class Losses(Callback):
        """Comes behind ours."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if "odb/loss_step" in trainer.callback_metrics:
                losses.append(float(trainer.callback_metrics["odb/loss_step"]))

    counts = ODBCallback()
    loader = c.make_loader(case, rank)
    module = module_for(case, kind, schedule)
    trainer = trainer_for(case, [] if kind == "naive" else [counts, Losses()], **options)
    held_out: Any = DataLoader(c.make_dataset(), batch_size=5, collate_fn=odb.PadCollate())
    if kind == "validated by odb":
        held_out = LightningLoader(c.make_loader(c.Case(1), rank))
    trainer.fit(module, LightningLoader(loader), held_out if validate else None)
    loader.close()
    if kind == "validated by odb":
        held_out.close()
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(
        c.RankResult(c.parameters_of(module.model), module.counter.steps, loader.infos),
        trainer.global_step,
        module.scheduler.last_epoch,
        counts.samples,
        logged,
        losses,
        module.validated,
    )


MISUSES = {
    "another number of steps": "accumulation_steps=3, but accumulate_grad_batches is 2",
    "ranks that stop": 'build it with idle="pad"',
    "one batch": "limit_train_batches=1, which fast_dev_run",
    "the info left": "Module.training_step has left the step's info",
    "no loss scale": 'loss_scaling="none"',
    "other ranks": "pass the same process group to both",
    "the loader itself": "LightningLoader(loader)",
    "a cut epoch": "limit_train_batches=4",
    "a batch rebuilt": "does a hook such as",
    "steps of its own": "the optimizer stepped in it",
}


def misuse(rank: int, how: str) -> str:
    from odb.integrations.lightning import LightningLoader, ODBCallback

    case = c.Case(1 if how == "ranks that stop" else 3)
    options: dict[str, Any] = {}
    if how == "one batch":
        options["fast_dev_run"] = True
    if how == "another number of steps":
        options["accumulate_grad_batches"] = 2
    if how == "a cut epoch":
        options["limit_train_batches"] = 4
    if how == "steps of its own":
        options["accumulate_grad_batches"] = 1
    loader = c.make_loader(
        case,
        rank,
        loss_scaling="none" if how == "no loss scale" else "exact",
        group=None if how == "other ranks" else "world",
        idle="stop" if how == "ranks that stop" else "pad",
    )
    kind = "every step" if how == "steps of its own" else "exact"
    module = module_for(case, kind, lambda _: 1.0)
    if how == "a batch rebuilt":
        module.on_before_batch_transfer = lambda batch, _: {"input_ids": batch["input_ids"]}
    if how == "the info left":
        model = module.model
        module.training_step = lambda batch, batch_idx: model(batch["input_ids"], batch["labels"])[
            "loss"
        ]
    trainer = trainer_for(case, [ODBCallback()], **options)
    try:
        trainer.fit(module, loader if how == "the loader itself" else LightningLoader(loader))
    except odb.IntegrationError as error:
        return str(error)
    finally:
        loader.close()
    return "no error"


def sharded() -> Any:
    """Lightning's strategy for FSDP2, which it lets run on accelerators only, if it is exactly that
    class."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    class OnCpus(ModelParallelStrategy):
        pass

    return OnCpus(
        data_parallel_size=c.WORLD_SIZE, tensor_parallel_size=1, process_group_backend="gloo"
    )


def train_sharded(rank: int, world_size: int) -> list[tuple[Outcome, Outcome]]:
    return [
        (
            train(rank, case, strategy=sharded()),
            train(rank, case, "naive", strategy=sharded()),
        )
        for case in c.FLOAT32_CASES
    ]


def train_all(rank: int, world_size: int) -> tuple[list[Any], dict[str, Outcome], list[str]]:
    conformance = [(train(rank, case), train(rank, case, "naive")) for case in c.CASES]
    case = c.Case(3)
    besides = {
        "manual": train(rank, case, "manual", accumulate_grad_batches=1),
        "clipped": train(
            rank,
            case,
            schedule=extras.falling,
            gradient_clip_val=extras.MAX_NORM,
            validate=True,
            val_check_interval=5,
        ),
        "validated by odb": train(rank, case, "validated by odb", validate=True),
        "max_steps": train(rank, case, max_epochs=-1, max_steps=7),
        "bf16": train(rank, case, precision="bf16-mixed"),
    }
    return conformance, besides, [misuse(rank, how) for how in MISUSES]


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_as_torchrun(train_all, timeout=120)


def results_of(ranks: Any, name: str) -> list[c.RankResult]:
    return [rank[1][name].result for rank in ranks]


def test_conformance(ranks: Any) -> None:
    import lightning

    subject = c.Subject("Lightning", lightning.__version__, extra_lines=4)
    checks.conform_both(subject, c.CASES, (rank[0] for rank in ranks))


def test_conformance_with_fsdp2() -> None:
    """It takes no `64-true`."""
    import lightning

    subject = c.Subject(
        "Lightning, FSDP2",
        lightning.__version__,
        "yes, through a subclass of its ModelParallelStrategy, which refuses CPUs itself",
        extra_lines=4,
    )
    ranks = run_as_torchrun(train_sharded, timeout=120)
    checks.conform_both(subject, c.FLOAT32_CASES, ranks)


def test_counts_and_the_logged_loss(ranks: Any) -> None:
    case = c.Case(3)
    number = c.CASES.index(case)
    results = [rank[0][number][0].result for rank in ranks]
    blocks = list(c.blocks_of([result.infos for result in results]).values())
    dataset, model = c.make_dataset(), c.make_model()
    first = model(**odb.PadCollate()([dataset[i] for i in blocks[0]]))["loss"].item()
    for rank in ranks:
        outcome = rank[0][number][0]
        assert outcome.global_step == outcome.scheduler_steps == len(blocks)
        assert outcome.samples == outcome.logged["odb/samples"] == 2 * len(dataset)
        assert outcome.step_losses[case.accumulation - 1] == pytest.approx(first, rel=1e-6)


def test_manual_optimization(ranks: Any) -> None:
    results = results_of(ranks, "manual")
    assert extras.difference(results, extras.reference(c.Case(3), results)) <= 1e-6


def test_clipping_a_schedule_and_a_validation_within_a_block(ranks: Any) -> None:
    results = results_of(ranks, "clipped")
    expected = extras.reference(
        c.Case(3), results, max_norm=extras.MAX_NORM, schedule=extras.falling
    )
    assert extras.difference(results, expected) <= 1e-6
    steps = len(results[0].infos)
    for rank in ranks:
        # Lightning gives the DataLoader of the validation a DistributedSampler.
        assert rank[1]["clipped"].validated == steps // 5 * 19


def test_validation_with_a_loader_of_odb(ranks: Any) -> None:
    """Promise: identity-coverage, for validation, whose steps also carry their info."""
    validated = [rank[1]["validated by odb"].validated for rank in ranks]
    assert validated == [2 * len(shard) for shard in c.SHARDS]
    results = results_of(ranks, "validated by odb")
    assert extras.difference(results, extras.reference(c.Case(3), results)) <= 1e-6


def test_max_steps_are_steps_of_the_optimizer(ranks: Any) -> None:
    for rank in ranks:
        outcome = rank[1]["max_steps"]
        blocks = [i.block_samples for i in outcome.result.infos if i.last_in_block][:7]
        assert outcome.result.optimizer_steps == outcome.global_step == 7
        assert outcome.samples == sum(blocks)


def test_bf16(ranks: Any) -> None:
    results = results_of(ranks, "bf16")
    off = extras.difference(results, extras.reference(c.Case(3), results))
    assert 0 < off < 5e-3, "bfloat16 has eight bits"


@pytest.mark.parametrize("how", MISUSES)
def test_misuse_is_said_on_every_rank(ranks: Any, how: str) -> None:
    for rank in ranks:
        assert MISUSES[how] in rank[2][list(MISUSES).index(how)]


def test_the_example() -> None:
    printed = run_example("train_lightning.py")
    assert printed.count("samples, held out") == 2
