"""TRL's SFTTrainer: what `ODBTrainerMixin` needs beyond a Trainer.

    trainer = ODBSFTTrainer(model, SFTConfig(..., remove_unused_columns=False),
                            train_dataset=dataset, odb=ODBOptions(token_budget=16384))

See docs/trainers/trl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb.costs import CostFn, default_loss_weight
from odb.errors import IntegrationError
from odb.integrations.base import require
from odb.integrations.huggingface import ODBOptions, ODBTrainerMixin

require("trl", "trl")

from trl.trainer.sft_config import SFTConfig  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402

__all__ = ["ODBOptions", "ODBSFTTrainer", "sft_loss_weight"]

MASKS = ("completion_mask", "assistant_masks")
"""Columns by which TRL's collators before 1.0 left tokens out of the loss."""


def sft_loss_weight(sample: Any) -> int:
    """How many tokens of a prepared sample SFTTrainer's loss averages over.

    TRL makes the labels when it prepares the dataset, from 1.0 on, and in its collator before: then
    a token counts if every mask of the sample has it. The first token is never predicted.
    """
    if not isinstance(sample, Mapping) or sample.get("labels") is not None:
        return default_loss_weight(sample)
    masks = [sample[name] for name in MASKS if sample.get(name) is not None]
    kept = [all(bits) for bits in zip(*masks, strict=True)] if masks else sample["input_ids"]
    return sum(map(bool, kept[1:])) if masks else max(len(kept) - 1, 0)


class ODBSFTTrainer(ODBTrainerMixin, SFTTrainer):  # type: ignore[misc]  # trl is not typed
    """`trl.SFTTrainer` with odb's batches: see `ODBTrainerMixin`.

    Raises IntegrationError for `packing=True`, as odb fills the batches, and for
    `padding_free=True` without `ODBOptions(packed=True)`.
    """

    def __init__(
        self, model: Any, args: Any = None, *rest: Any, odb: ODBOptions, **kwargs: Any
    ) -> None:
        if isinstance(args, SFTConfig):
            _check(args, odb)
        super().__init__(model, args, *rest, odb=odb, **kwargs)

    def loss_weight_fn(self) -> CostFn:
        """The label tokens of a prepared sample: see `sft_loss_weight`."""
        return sft_loss_weight


def _check(args: SFTConfig, options: ODBOptions) -> None:
    if args.packing:
        raise IntegrationError(
            "set SFTConfig(packing=False): packing cuts and joins samples beforehand, and the "
            "labels at the joints are dropped in the collator, where no loss weight sees it. odb "
            "fills each batch up to the token budget instead"
        )
    if args.padding_free and not options.packed:
        raise IntegrationError(
            "padding_free=True joins the rows of a batch: pass ODBOptions(packed=True), so that "
            "the budget counts the sum of the lengths"
        )
