"""torchtitan: a dataloader component, whose batches its trainer normalizes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from odb.costs import IGNORED_LABEL
from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import check_exact, check_idles, facts_of, require
from odb.integrations.progress import Progress

_dataloader = require("torchtitan.components.dataloader", "torchtitan")

TitanBatch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What torchtitan takes: the model's inputs, and the label of each position."""


@dataclass(frozen=True)
class Place:
    """What torchtitan tells a dataloader. seq_len: the longest row that the model takes."""

    dp_rank: int
    dp_world_size: int
    tokenizer: Any
    seq_len: int


class TitanDataLoader(_dataloader.BaseDataLoader):  # type: ignore[misc, name-defined]
    """An odb loader as torchtitan's dataloader.

        def build(place: Place) -> odb.ODBDataLoader:
            return odb.ODBDataLoader(MyDataset(place.tokenizer, place.seq_len), token_budget=16384)

        config = Trainer.Config(..., dataloader=TitanDataLoader.Config(build_loader=build))

    torchtitan adds up losses and divides by the label tokens of all ranks and steps itself, so
    that no loss scale is applied: an idle step has no labels at all, which adds exactly nothing to
    a sum. Samples are as for a Hugging Face model; labels are shifted here, as torchtitan's models
    do not. A short last block is filled up with steps without labels, as torchtitan drops what
    does not fill its `gradient_accumulation_steps`.

    Raises IntegrationError when it is built if the loader is for other ranks than torchtitan's
    batch ranks, and when it is iterated for rows that the model cannot take, or none at all.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_dataloader.BaseDataLoader.Config):  # type: ignore[misc, name-defined]
        """build_loader: makes the ODBDataLoader (or, with model parallelism, what
        `odb.integrations.mesh.Layout` makes of one); its `accumulation_steps` must be torchtitan's
        gradient accumulation steps times its pipeline microbatches. epochs: after so many the data
        is exhausted; None: it begins anew until `training.steps` are done. positions: also pass
        the model each token's place in its row, as masked attention needs it."""

        build_loader: Callable[[Place], Any]
        epochs: int | None = None
        positions: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        seq_len: int,
        **_: Any,
    ) -> None:
        place = Place(dp_rank, dp_world_size, tokenizer, seq_len)
        self.loader = config.build_loader(place)
        facts = facts_of(self.loader)
        check_exact(self.loader, facts.ranks, "torchtitan")
        if len(facts.ranks) != dp_world_size or facts.ranks.index(_own(facts.ranks)) != dp_rank:
            raise IntegrationError(
                f"torchtitan puts this rank at {dp_rank} of {dp_world_size} that see different "
                f"samples, but the loader aligns the ranks {facts.ranks}: pass it group= the batch "
                "ranks, or build it with odb.integrations.mesh.Layout"
            )
        check_idles(facts, "torchtitan")
        self.progress = Progress()
        """What was handed over: torchtitan's own token counts include padding."""
        self._config = config
        self._place = place
        self._accumulation = facts.accumulation_steps
        self._epoch = 0
        self._taken = 0

    def __iter__(self) -> Iterator[TitanBatch]:
        """Batches of this epoch and the next ones, from where the last iteration stopped."""
        while self._config.epochs is None or self._epoch < self._config.epochs:
            done = self._taken
            self.loader.set_epoch(self._epoch)
            number = -1
            for number, (batch, info) in enumerate(self._filled()):
                if number < done:
                    continue
                self._taken = number + 1
                if info is not None:
                    self.progress.update(info)
                yield batch
            if number < 0:
                raise IntegrationError(
                    f"epoch {self._epoch} had no step on any rank: the dataset is empty, or all "
                    "of its samples are filtered out (see stats.filtered of the loader)"
                )
            self._epoch += 1
            self._taken = 0

    def _filled(self) -> Iterator[tuple[TitanBatch, ODBStepInfo | None]]:
        """An epoch's batches; the last block has as many steps as the others, some without info."""
        batch, info = None, None
        for batch, info in self.loader.steps():
            yield self._as_titan_takes_it(batch, info), info
        if info is not None:
            for _ in range(self._accumulation - info.block_steps):
                inputs, labels = self._as_titan_takes_it(batch, info)
                yield (inputs, torch.full_like(labels, IGNORED_LABEL)), None

    def _as_titan_takes_it(self, batch: Any, info: ODBStepInfo) -> TitanBatch:
        if not isinstance(batch, dict) or not {"input_ids", "labels"} <= batch.keys():
            raise IntegrationError(
                "torchtitan needs batches with input_ids and labels: let samples or the collate "
                "function have both, with -100 as the label of what is not trained on"
            )
        tokens, labels = batch["input_ids"], batch["labels"]
        if tokens.shape[1] - 1 > self._place.seq_len:
            raise IntegrationError(
                f"a row of {tokens.shape[1] - 1} tokens is longer than training.seq_len="
                f"{self._place.seq_len}: cut samples off, or raise it"
            )
        if "attention_mask" in batch and not bool(batch["attention_mask"][:, 0].all()):
            raise IntegrationError(
                "this batch is padded on the left, where torchtitan's models, which get no "
                'attention mask, would look at it: build PadCollate with padding_side="right"'
            )
        inputs = {"input": tokens[:, :-1].contiguous()}
        if self._config.positions:
            row = torch.arange(tokens.shape[1] - 1, device=tokens.device)
            inputs["positions"] = row.expand(tokens.shape[0], -1).contiguous()
        shifted = labels[:, 1:].contiguous()
        return inputs, torch.full_like(shifted, IGNORED_LABEL) if info.idle else shifted

    def state_dict(self) -> dict[str, Any]:
        """Where this is, for torchtitan's checkpoints; the same on all ranks."""
        return {
            "epoch": self._epoch,
            "taken": self._taken,
            "dp_world_size": self._place.dp_world_size,
            "progress": self.progress.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: batches are the same in every run, and the ones that were taken are
        made and passed over. Raises IntegrationError for a checkpoint of another number of ranks.
        """
        if not state_dict:
            return
        if state_dict["dp_world_size"] != self._place.dp_world_size:
            raise IntegrationError(
                f"this checkpoint is of {state_dict['dp_world_size']} data-parallel ranks, here "
                f"are {self._place.dp_world_size}: their batches differ"
            )
        self._epoch = state_dict["epoch"]
        self._taken = state_dict["taken"]
        self.progress.load_state_dict(state_dict["progress"])


def _own(ranks: tuple[int, ...]) -> int:
    return dist.get_rank() if dist.is_initialized() else ranks[0]
