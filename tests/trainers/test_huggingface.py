"""Hugging Face Trainer: the conformance suite, counts, schedules, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import odb
from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.cpu_shim import accelerate_on_cpus
from tests.trainers.launch import run_as_torchrun, run_example

pytest.importorskip("transformers", reason="the extra 'huggingface' is not installed")
pytest.importorskip("accelerate", reason="the extra 'huggingface' is not installed")

LENGTHS = [len(row["input_ids"]) for row in extras.rows()]


class Outcome(NamedTuple):
    result: c.RankResult
    log: list[dict[str, Any]]
    epoch: float
    metrics: dict[str, float]
    tokens: int
    saved: list[str]


@dataclass(frozen=True)
class Engine:
    """What trains below the Trainer. options: of TrainingArguments. parameters: the whole ones of
    a trainer that has trained. steps: how many its optimizer took, if it counts that itself."""

    options: Mapping[str, Any] = field(default_factory=lambda: {"use_cpu": True})
    parameters: Callable[[Any], Mapping[str, torch.Tensor]] = lambda t: extras.full_names(t.model)
    steps: Callable[[Any], int] | None = None


DDP = Engine()


def arguments(folder: str, engine: Engine = DDP, **options: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": folder,
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        "report_to": [],
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(**{**settings, **engine.options, **options})


def train(
    rank: int,
    folder: str,
    case: c.Case,
    *,
    engine: Engine = DDP,
    naive: int | None = None,
    make_model: Any = c.make_model,
    schedule: Any = None,
    evaluate: bool = False,
    **options: Any,
) -> Outcome:
    """naive: with a Trainer that knows nothing of odb but a loader, for so many steps. schedule: of
    an optimizer that is made before, which DeepSpeed does not allow."""
    from transformers import Trainer

    from odb.integrations.huggingface import ODBOptions, ODBTrainer

    loaders: list[c.RecordingLoader] = []

    class Ours(ODBTrainer):
        def make_train_loader(self, dataset: Any, settings: Any) -> c.RecordingLoader:
            loaders.append(extras.conformance_loader(case, rank, dataset, settings))
            return loaders[0]

    class Naive(Trainer):
        def get_train_dataloader(self) -> Any:
            loaders.append(c.make_loader(case, rank))
            return Bare(loaders[0])

    counters: list[c.StepCounter] = []

    class CountedSGD(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, **c.SGD)
            counters.append(c.StepCounter(self))

    model = make_model(case.dtype)
    args = arguments(
        folder,
        engine,
        num_train_epochs=options.pop("num_train_epochs", case.epochs),
        gradient_accumulation_steps=case.accumulation,
        **({"max_steps": naive} if naive else {}),
        **options,
    )
    shared: dict[str, Any] = {
        "train_dataset": c.make_dataset(),
        "eval_dataset": c.make_dataset() if evaluate else None,
        "data_collator": odb.PadCollate(),
    }
    if schedule is None:
        shared["optimizer_cls_and_kwargs"] = (CountedSGD, {})
    else:
        optimizer = CountedSGD(model.parameters())
        shared["optimizers"] = (optimizer, LambdaLR(optimizer, schedule))
    trainer: Any
    if naive:
        trainer = Naive(model, args, **shared)
    else:
        sampler = c.EpochOrder(c.SHARDS[rank])
        odb_options = ODBOptions(token_budget=64, loader={"sampler": sampler})
        trainer = Ours(model, args, odb=odb_options, **shared)
    metrics = trainer.train().metrics
    loaders[0].close()
    steps = counters[0].steps if engine.steps is None else engine.steps(trainer)
    return Outcome(
        c.RankResult(engine.parameters(trainer), steps, loaders[0].infos),
        trainer.state.log_history,
        trainer.state.epoch,
        metrics,
        int(trainer.state.num_input_tokens_seen),
        sorted(path.name for path in Path(folder).glob("checkpoint-*")),
    )


class Bare:
    """A loader's batches without their infos, which the Trainer would not know what to do with."""

    def __init__(self, loader: odb.ODBDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return (batch for batch, _ in self.loader.steps())


NAIVE_STEPS = {1: 24, 3: 8}
"""About as many as there are blocks."""


def train_all(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    def run(name: str, case: c.Case, **options: Any) -> Outcome:
        return train(rank, str(Path(folder, name)), case, **options)

    found: dict[Any, Any] = {}
    for case in c.CASES:
        found[case] = run("", case), run("", case, naive=NAIVE_STEPS[case.accumulation])
    case = c.Case(3)
    llama = extras.make_llama
    found["naive llama"] = run("", case, make_model=llama, naive=8)
    found["llama"] = run(
        "llama",
        case,
        make_model=llama,
        schedule=extras.falling,
        max_grad_norm=extras.MAX_NORM,
        evaluate=True,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=2,
        include_num_input_tokens_seen="non_padding",
    )
    found["by samples"] = run("", case, lr_scheduler_type="linear", warmup_steps=0.25)
    found["by steps"] = run("", case, max_steps=7, lr_scheduler_type="linear", logging_steps=3)
    found["one and a half"] = run("", case, num_train_epochs=1.5)
    found["bf16"] = run("", case, bf16=True)
    found["wrong weights"] = wrong_weights(folder)
    found["tensor parallel"] = tensor_parallel(rank, folder)
    return found


def tensor_parallel(rank: int, folder: str) -> str:
    """A model that both ranks hold parts of, which the TrainingArguments do not know."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from odb.integrations.huggingface import ODBOptions, ODBTrainer

    saved = Path(folder, "saved")
    if rank == 0:
        extras.make_llama().save_pretrained(saved)
    dist.barrier()
    with accelerate_on_cpus():
        model = AutoModelForCausalLM.from_pretrained(
            saved, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2)
        )
        return c.said(
            lambda: ODBTrainer(
                model,
                arguments(folder, Engine({})),
                train_dataset=c.make_dataset(),
                odb=ODBOptions(token_budget=64),
            )
        )


def wrong_weights(folder: str) -> str:
    """A collator that makes labels of its own, and says nothing about it."""
    from odb.integrations.huggingface import ODBOptions, ODBTrainer

    def collate(samples: list[Any]) -> Any:
        batch = odb.PadCollate()(samples)
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)}

    trainer = ODBTrainer(
        extras.make_llama(),
        arguments(folder, num_train_epochs=1),
        train_dataset=c.make_dataset(),
        data_collator=collate,
        odb=ODBOptions(token_budget=64),
    )
    try:
        trainer.train()
    except odb.IntegrationError as error:
        return str(error)
    finally:
        trainer.close_loader()
    return "no error"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_as_torchrun(train_all, str(tmp_path_factory.mktemp("trainer")), timeout=150)


def results_of(ranks: Any, name: str) -> list[c.RankResult]:
    return [rank[name].result for rank in ranks]


def test_conformance(ranks: Any) -> None:
    import transformers

    subject = c.Subject("HF Trainer", transformers.__version__, extra_lines=3)
    checks.conform(
        subject,
        c.CASES,
        exact=lambda case: [rank[case][0].result for rank in ranks],
        naive=lambda case: [rank[case][1].result for rank in ranks],
    )


def test_the_logged_loss_is_the_mean_over_the_label_tokens_of_the_block(ranks: Any) -> None:
    case = c.Case(3)
    outcome = ranks[0][case][0]
    model = c.make_model()
    dataset = c.make_dataset()
    blocks = c.blocks_of([rank[case][0].result.infos for rank in ranks])
    first = next(iter(blocks.values()))
    expected = model(**odb.PadCollate()([dataset[i] for i in first]))["loss"].item()
    assert outcome.log[0]["loss"] == pytest.approx(expected, rel=1e-6)
    logged = [entry["loss"] for entry in outcome.log if "loss" in entry]
    for rank in ranks:
        assert rank[case][0].metrics["train_loss"] == pytest.approx(sum(logged) / len(logged))


def test_a_model_that_takes_num_items_clipping_a_schedule_and_evaluation(ranks: Any) -> None:
    """Llama would divide by `num_items_in_batch`; there is none."""
    results = results_of(ranks, "llama")
    case = c.Case(3)
    expected = extras.reference(
        case, results, extras.make_llama, max_norm=extras.MAX_NORM, schedule=extras.falling
    )
    assert extras.difference(results, expected) <= 1e-6
    naive = results_of(ranks, "naive llama")
    off = extras.difference(naive, extras.reference(case, naive, extras.make_llama))
    assert off > 1e-3, "average_tokens_across_devices counts idle rows and splits blocks wrongly"


def test_counts(ranks: Any) -> None:
    for rank in ranks:
        outcome = rank["llama"]
        steps = outcome.result.optimizer_steps
        assert outcome.tokens == 2 * sum(LENGTHS), "idle rows are no input"
        assert outcome.epoch == 2.0
        assert outcome.metrics["samples_seen"] == 2 * len(LENGTHS)
        rate = 2 * len(LENGTHS) / outcome.metrics["train_runtime"]
        assert outcome.metrics["train_samples_per_second"] == pytest.approx(rate, rel=1e-3)
        assert [e["epoch"] for e in outcome.log if "eval_loss" in e] == [1.0, 2.0]
        assert f"checkpoint-{steps}" in outcome.saved, "the last step is saved, as ever"
        trained = [entry for entry in outcome.log if "loss" in entry]
        assert [entry["step"] for entry in trained] == list(range(1, steps + 1))
        assert trained[-1]["samples_seen"] == 2 * len(LENGTHS)
        infos = outcome.result.infos
        seen = [i.block_samples for i in infos if i.last_in_block]
        assert [e["samples_seen"] for e in trained] == [
            sum(seen[: n + 1]) for n in range(len(seen))
        ]


def test_without_max_steps_the_schedule_follows_the_samples(ranks: Any) -> None:
    total = 2 * len(LENGTHS)
    warm = math.ceil(0.25 * total)
    for rank in ranks:
        trained = [entry for entry in rank["by samples"].log if "loss" in entry]
        before = 0
        for entry in trained:
            factor = before / warm if before < warm else (total - before) / (total - warm)
            assert entry["learning_rate"] == pytest.approx(0.1 * factor)
            before = entry["samples_seen"]
        assert before == total


def test_max_steps_are_steps_of_the_optimizer(ranks: Any) -> None:
    for rank in ranks:
        outcome = rank["by steps"]
        assert outcome.result.optimizer_steps == 7
        trained = [entry for entry in outcome.log if "loss" in entry]
        assert [entry["step"] for entry in trained] == [3, 6, 7], "the rest of the loss, too"
        assert trained[0]["learning_rate"] == pytest.approx(0.1 * 5 / 7)
        blocks = [i.block_samples for i in outcome.result.infos if i.last_in_block][:7]
        assert outcome.metrics["samples_seen"] == sum(blocks)


def test_a_fraction_of_an_epoch(ranks: Any) -> None:
    for rank in ranks:
        outcome = rank["one and a half"]
        blocks = [i.block_samples for i in outcome.result.infos if i.last_in_block]
        taken = blocks[: outcome.result.optimizer_steps]
        assert sum(taken) == outcome.metrics["samples_seen"]
        assert sum(taken) - taken[-1] < 1.5 * len(LENGTHS) <= sum(taken)
        assert 1.5 <= outcome.epoch < 2
    first, second = results_of(ranks, "one and a half")
    assert first.optimizer_steps == second.optimizer_steps


def test_bf16(ranks: Any) -> None:
    results = results_of(ranks, "bf16")
    off = extras.difference(results, extras.reference(c.Case(3), results))
    assert 0 < off < 5e-3, "bfloat16 has eight bits"


def test_labels_that_the_loss_weights_do_not_know_are_noticed(ranks: Any) -> None:
    for rank in ranks:
        assert "ODBOptions(loss_weight_fn=...)" in rank["wrong weights"]


def test_ranks_that_share_a_model_are_noticed(ranks: Any) -> None:
    for rank in ranks:
        assert "see odb.integrations.mesh" in rank["tensor parallel"]


def test_the_example() -> None:
    printed = run_example("train_huggingface.py")
    assert printed.count("samples in 2.0 epochs") == 2
