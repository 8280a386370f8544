"""TRL's SFTTrainer: the conformance suite on a tiny Llama, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import odb
from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.launch import run_as_torchrun, run_example

pytest.importorskip("trl", reason="the extra 'trl' is not installed")

NAIVE_STEPS = {1: 24, 3: 8}
"""About as many as there are blocks."""


class Outcome(NamedTuple):
    result: c.RankResult
    log: list[dict[str, Any]]


def arguments(folder: str, **options: Any) -> Any:
    from trl import SFTConfig

    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        "report_to": [],
        "max_grad_norm": 0.0,
        "max_length": None,
        "logging_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
    }
    return SFTConfig(**{**settings, **options})


def train(rank: int, folder: str, case: c.Case, *, naive: bool = False) -> Outcome:
    from datasets import Dataset
    from trl import SFTTrainer

    from odb.integrations.trl import ODBOptions, ODBSFTTrainer

    loaders: list[c.RecordingLoader] = []

    class Ours(ODBSFTTrainer):
        def make_train_loader(self, dataset: Any, settings: Any) -> c.RecordingLoader:
            loaders.append(extras.conformance_loader(case, rank, dataset, settings))
            return loaders[0]

    class Naive(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            loaders.append(c.make_loader(case, rank, collate_fn=self.data_collator))
            loaders[0].dataset = self.train_dataset
            return Bare(loaders[0])

    model = extras.make_llama(case.dtype)
    optimizer = c.make_optimizer(model.parameters())
    counter = c.StepCounter(optimizer)
    shared: dict[str, Any] = {
        "train_dataset": Dataset.from_list(extras.rows()),
        "processing_class": extras.make_tokenizer(),
        "optimizers": (optimizer, None),
    }
    steps = {"max_steps": NAIVE_STEPS[case.accumulation]} if naive else {}
    args = arguments(
        folder,
        num_train_epochs=case.epochs,
        gradient_accumulation_steps=case.accumulation,
        **steps,
    )
    trainer: Any
    if naive:
        trainer = Naive(model, args, **shared)
    else:
        options = ODBOptions(token_budget=64, loader={"sampler": c.EpochOrder(c.SHARDS[rank])})
        trainer = Ours(model, args, odb=options, **shared)
    trainer.train()
    loaders[0].close()
    result = c.RankResult(extras.full_names(trainer.model), counter.steps, loaders[0].infos)
    return Outcome(result, trainer.state.log_history)


class Bare:
    """A loader's batches without their infos."""

    def __init__(self, loader: odb.ODBDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return (batch for batch, _ in self.loader.steps())


def train_all(rank: int, world_size: int, folder: str) -> list[tuple[Outcome, Outcome]]:
    return [
        (train(rank, folder, case), train(rank, folder, case, naive=True))
        for case in c.FLOAT32_CASES
    ]


def test_conformance(tmp_path: Path) -> None:
    """In float32: the model and TRL's own loss compute in no other precision."""
    import trl

    ranks = run_as_torchrun(train_all, str(tmp_path), timeout=200)
    subject = c.Subject("TRL SFTTrainer", trl.__version__, extra_lines=3, reference=extras.of_llama)
    arms = checks.conform_both(subject, c.FLOAT32_CASES, ranks)
    for outcome, _ in arms[0].values():
        trained = [entry for entry in outcome.log if "loss" in entry]
        assert trained[-1]["samples_seen"] == 2 * len(extras.rows())
        assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(trained[-1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"packing": True, "max_length": 64}, r"packing=False"),
        ({"padding_free": True}, r"ODBOptions\(packed=True\)"),
        ({"remove_unused_columns": True}, "remove_unused_columns=False"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    from datasets import Dataset

    from odb.integrations.trl import ODBOptions, ODBSFTTrainer

    with pytest.raises(odb.IntegrationError, match=says):
        ODBSFTTrainer(
            extras.make_llama(),
            arguments(str(tmp_path), **options),
            train_dataset=Dataset.from_list(extras.rows()),
            processing_class=extras.make_tokenizer(),
            odb=ODBOptions(token_budget=64),
        )


@pytest.mark.parametrize(
    ("sample", "weight"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, 1),
        ({"input_ids": [1, 2, 3]}, 2),
        ({"input_ids": [1, 2, 3], "completion_mask": [1, 0, 1]}, 1),
        ({"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]}, 1),
    ],
)
def test_loss_weights(sample: dict[str, list[int]], weight: int) -> None:
    from odb.integrations.trl import sft_loss_weight

    assert sft_loss_weight(sample) == weight


def test_the_example() -> None:
    printed = run_example("train_trl.py")
    assert printed.count("samples in 2.0 epochs") == 2
