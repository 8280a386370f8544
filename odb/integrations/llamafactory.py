"""LLaMA-Factory: supervised fine-tuning as its configuration says, with odb's batches.

    run_exp({"stage": "sft", "do_train": True, ...}, odb=ODBOptions(token_budget=16384))

in a script that `torchrun` starts; see docs/trainers/llamafactory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from odb.errors import IntegrationError
from odb.integrations.base import require
from odb.integrations.huggingface import ODBOptions, ODBTrainerMixin
from odb.loader import ODBDataLoader

require("llamafactory", "llamafactory")

from llamafactory.train.sft import workflow  # noqa: E402
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer  # noqa: E402
from llamafactory.train.tuner import run_exp as run_their_exp  # noqa: E402

__all__ = ["ODBOptions", "ODBSeq2SeqTrainer", "run_exp"]


class ODBSeq2SeqTrainer(ODBTrainerMixin, CustomSeq2SeqTrainer):  # type: ignore[misc]  # not typed
    """LLaMA-Factory's SFT trainer with odb's batches: see `ODBTrainerMixin`.

    Raises IntegrationError for `neat_packing`, whose attention masks belong to packed samples, and
    for `use_asft_loss`, which computes the loss past the Trainer.
    """

    def __init__(self, *args: Any, odb: ODBOptions, **kwargs: Any) -> None:
        super().__init__(*args, odb=odb, **kwargs)
        if getattr(self.data_collator, "neat_packing", False):
            raise IntegrationError(
                "set neat_packing and packing to false: odb fills each batch up to the token "
                "budget, and samples stay apart"
            )
        if self.finetuning_args.use_asft_loss:
            raise IntegrationError("use_asft_loss has not been made to work with odb: leave it out")

    def make_train_loader(self, dataset: Any, settings: dict[str, Any]) -> ODBDataLoader:
        """Build the loader; `disable_shuffling` keeps the dataset's order."""
        if self.finetuning_args.disable_shuffling and settings.get("shuffle"):
            settings = {**settings, "shuffle": False}
        return super().make_train_loader(dataset, settings)


def run_exp(
    args: Mapping[str, Any],
    *,
    odb: ODBOptions,
    callbacks: Sequence[Any] | None = None,
    trainer: type[ODBSeq2SeqTrainer] = ODBSeq2SeqTrainer,
) -> None:
    """`llamafactory.train.tuner.run_exp`, with `trainer` in place of its own one.

    args: LLaMA-Factory's configuration; `gradient_accumulation_steps` is the loader's
        accumulation too, `per_device_train_batch_size` has no meaning any more. callbacks: more
        callbacks of the Trainer.

    Raises IntegrationError for another stage than "sft", and as ODBTrainerMixin does.
    """
    stage = args.get("stage", "sft")
    if stage != "sft":
        raise IntegrationError(f'stage {stage!r}: odb works with stage "sft" only')
    with _in_workflow(partial(trainer, odb=odb)):
        run_their_exp(dict(args), None if callbacks is None else list(callbacks))


@contextmanager
def _in_workflow(trainer: Any) -> Iterator[None]:
    """Let the workflow build this trainer while the context lasts. It has no hook for it: it
    builds the one that its module names. The class itself stays as it is."""
    theirs = workflow.CustomSeq2SeqTrainer
    workflow.CustomSeq2SeqTrainer = trainer
    try:
        yield
    finally:
        workflow.CustomSeq2SeqTrainer = theirs
