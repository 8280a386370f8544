"""LLaMA-Factory: its own `run_exp` with odb's trainer; runs in an environment of its own."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import odb
from odb.info import STEP_INFO_KEY
from tests.trainers import checks, extras
from tests.trainers import conformance as c
from tests.trainers.launch import ROOT, run_as_torchrun, run_example

pytest.importorskip(
    "llamafactory", reason="LLaMA-Factory has an environment of its own: make test-trainers"
)


class Outcome(NamedTuple):
    result: c.RankResult
    log: list[dict[str, Any]]
    saved: bool


def without_torchaudio() -> None:
    """LLaMA-Factory imports it for samples with sound; no build of it fits the CPU torch here."""
    if importlib.util.find_spec("torchaudio") is None:
        empty = types.ModuleType("torchaudio")
        empty.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = empty


def configuration(folder: str, **options: Any) -> dict[str, Any]:
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": f"{folder}/model",
        "tokenized_path": f"{folder}/data",
        "dataset": "tokens",
        "template": "empty",
        "finetuning_type": "full",
        "output_dir": f"{folder}/out",
        "overwrite_output_dir": True,
        "per_device_train_batch_size": 1,
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "flash_attn": "disabled",
        "disable_gradient_checkpointing": True,
        **options,
    }


def train(rank: int, folder: str, case: c.Case, *, naive: bool = False) -> Outcome:
    from odb.integrations.llamafactory import ODBOptions, ODBSeq2SeqTrainer, run_exp

    made: dict[str, Any] = {}

    class Recorded(ODBSeq2SeqTrainer):
        def make_train_loader(self, dataset: Any, settings: Any) -> c.RecordingLoader:
            made["loader"] = extras.conformance_loader(case, rank, dataset, settings)
            made["trainer"] = self
            return made["loader"]

        def create_optimizer(self, *_: Any, **__: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = c.make_optimizer(self.model.parameters())
                made["counter"] = c.StepCounter(self.optimizer)
            return self.optimizer

    class Naive(Recorded):
        """The same blocks, with the mean loss of each batch, divided by the accumulation steps."""

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            info = inputs.get(STEP_INFO_KEY)
            if info is not None:
                inputs[STEP_INFO_KEY] = replace(info, loss_scale=1 / info.block_steps)
            return super().training_step(model, inputs, *args, **kwargs)

    run_exp(
        configuration(
            folder, num_train_epochs=case.epochs, gradient_accumulation_steps=case.accumulation
        ),
        odb=ODBOptions(token_budget=64, loader={"sampler": c.EpochOrder(c.SHARDS[rank])}),
        trainer=Naive if naive else Recorded,
    )
    trainer = made["trainer"]
    result = c.RankResult(
        extras.full_names(trainer.model), made["counter"].steps, made["loader"].infos
    )
    saved = Path(folder, "out", "model.safetensors").exists()
    return Outcome(result, trainer.state.log_history, saved)


def one_run(
    rank: int, world_size: int, folder: str, case: c.Case, naive: bool
) -> tuple[Outcome, dict[str, str]]:
    """LLaMA-Factory ends the process group behind a run, so that there is one for each process."""
    without_torchaudio()
    said = {stage: refused(folder, stage) for stage in ("dpo", "sft")}
    return train(rank, folder, case, naive=naive), said


def refused(folder: str, stage: str) -> str:
    """What a stage says that is not supported; or one that is, with steps that cannot be known."""
    from odb.integrations.llamafactory import ODBOptions, run_exp

    try:
        run_exp(
            configuration(folder, stage=stage, logging_steps=0.5),
            odb=ODBOptions(token_budget=64),
        )
    except odb.IntegrationError as error:
        return str(error)
    return "no error"


def prepare(folder: Path) -> None:
    """The suite's samples as LLaMA-Factory's preprocessing saves them, and a model."""
    from datasets import Dataset, DatasetDict

    samples = [
        {**row, "attention_mask": [1] * len(row["input_ids"]), "images": None, "videos": None}
        for row in extras.rows()
    ]
    DatasetDict({"train": Dataset.from_list(samples)}).save_to_disk(str(folder / "data"))
    extras.make_tokenizer().save_pretrained(folder / "model")
    extras.make_llama().save_pretrained(folder / "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llamafactory")
    prepare(folder)
    return {
        (case, naive): run_as_torchrun(one_run, str(folder), case, naive, timeout=120)
        for case in c.FLOAT32_CASES
        for naive in (False, True)
    }


def test_conformance(runs: Any) -> None:
    """In float32: the model computes its norms and its loss in no other precision."""
    from odb.integrations.base import version_of

    subject = c.Subject(
        "LLaMA-Factory", version_of("llamafactory"), extra_lines=2, reference=extras.of_llama
    )
    checks.conform(
        subject,
        c.FLOAT32_CASES,
        exact=lambda case: [outcome.result for outcome, _ in runs[case, False]],
        naive=lambda case: [outcome.result for outcome, _ in runs[case, True]],
    )


def test_counts_and_saving(runs: Any) -> None:
    for case in c.FLOAT32_CASES:
        for outcome, _ in runs[case, False]:
            trained = [entry for entry in outcome.log if "loss" in entry]
            assert trained[-1]["samples_seen"] == 2 * len(extras.rows())
            assert trained[-1]["epoch"] == 2.0
            assert trained[-1]["step"] == outcome.result.optimizer_steps
        assert runs[case, False][0][0].saved, "by rank 0"


def test_what_is_refused(runs: Any) -> None:
    for _, said in runs[c.FLOAT32_CASES[0], False]:
        assert "stage 'dpo'" in said["dpo"]
        assert "logging_steps=0.5" in said["sft"]


def test_the_example(tmp_path: Path) -> None:
    (tmp_path / "torchaudio.py").touch()  # as in `without_torchaudio`
    printed = run_example("train_llamafactory.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert printed.count("samples in 2.0 epochs") == 2
