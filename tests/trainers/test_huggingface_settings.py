"""Hugging Face Trainer: settings that would be wrong, and what is left alone, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import odb
from tests.trainers import conformance as c

pytest.importorskip("transformers", reason="the extra 'huggingface' is not installed")
pytest.importorskip("accelerate", reason="the extra 'huggingface' is not installed")

from tests.trainers.test_huggingface import arguments

WRONG_ARGUMENTS = {
    "remove_unused_columns": {"remove_unused_columns": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "train_sampling_strategy": {"train_sampling_strategy": "group_by_length"},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "adalomo": {"optim": "lomo", "gradient_accumulation_steps": 2},
}


def trainer_for(
    folder: Path,
    loader: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    **options: Any,
) -> Any:
    from odb.integrations.huggingface import ODBOptions, ODBTrainer

    return ODBTrainer(
        c.make_model(),
        arguments(str(folder), **options),
        train_dataset=c.make_dataset(),
        data_collator=odb.PadCollate(),
        eval_dataset=c.make_dataset(),
        callbacks=callbacks,
        odb=ODBOptions(token_budget=64, loader=loader or {}),
    )


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_that_would_be_wrong(name: str, tmp_path: Path) -> None:
    with pytest.raises(odb.IntegrationError, match=name):
        trainer_for(tmp_path, **WRONG_ARGUMENTS[name])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"warmup_steps": 10}, "warmup_steps"),
        ({"logging_steps": 0.1}, "logging_steps=0.1"),
        ({"loader": {"join": False}}, "set max_steps"),
        ({"loader": {"loss_scaling": "none"}}, "loss_scaling"),
        ({"loader": {"window": 5}}, r"ODBOptions\(window=...\)"),
    ],
)
def test_settings_that_would_be_wrong(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(odb.IntegrationError, match=says):
        trainer_for(tmp_path, **options).train()


def test_callbacks_see_the_epochs_that_were_seen(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    found = []

    class Watcher(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found.append((state.epoch, trainer.seen.epochs))

    trainer = trainer_for(tmp_path, callbacks=[Watcher()], num_train_epochs=2)
    trainer.train()
    assert all(state == seen for state, seen in found)
    assert found[-1] == (2.0, 2.0)
    assert (1.0, 1.0) in found


def test_a_schedule_that_goes_by_a_metric_is_left_alone(tmp_path: Path) -> None:
    from transformers.optimization import GreedyLR

    trainer = trainer_for(
        tmp_path, lr_scheduler_type="greedy", eval_strategy="epoch", num_train_epochs=1
    )
    trainer.train()
    assert isinstance(trainer.lr_scheduler, GreedyLR)


def test_resuming_is_refused(tmp_path: Path) -> None:
    with pytest.raises(odb.IntegrationError, match="resume_from_checkpoint"):
        trainer_for(tmp_path).train(resume_from_checkpoint=True)
