"""The loop over an epoch's steps that adapters of training engines share, and what it checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

from odb.errors import IntegrationError
from odb.info import ODBStepInfo
from odb.integrations.base import check_exact, check_idles, check_loader
from odb.integrations.progress import Progress
from odb.integrations.sharing import SharedLoader


class Phase(Enum):
    """How far the trainer is with the step it has."""

    READY = "no step is under way"
    FORWARD = "has no backward yet"
    BACKWARD = "had its backward, but step() was not called"


class StepLoop(ABC):
    """Iterate it for an epoch's (batch, info); call `backward(loss)` and `step()` once for each.

    `backward` takes the mean loss of the batch as it is, and applies the loss scale. `step` is to
    be called after every backward: it lets the optimizer take its step at the end of a block, and
    says whether it did.

    The loop raises IntegrationError where training would go wrong in silence, or hang: a step
    without backward (idle steps need theirs, too), an epoch that was left within a block, a loader
    for other ranks than those over which the engine averages gradients.
    """

    def __init__(
        self, loader: object, ranks: Sequence[int], who: str, progress: Progress | None
    ) -> None:
        facts = check_exact(loader, ranks, who)
        check_idles(facts, who)
        self.loader = loader if isinstance(loader, SharedLoader) else check_loader(loader)
        self.accumulation_steps = facts.accumulation_steps
        self.progress = Progress() if progress is None else progress
        """What has been trained on. The loop ends the epoch where it says that it is `done`."""
        self.skipped_steps = 0
        """Blocks after which the optimizer took no step, such as for an overflow in float16."""
        self._phase = Phase.READY
        self._info: ODBStepInfo | None = None

    def __iter__(self) -> Iterator[tuple[Any, ODBStepInfo]]:
        """An epoch, or what is left to do of it until `progress.done`: nothing if it is already.

        Raises IntegrationError if the last one was left within a block.
        """
        if self._left_within_block():
            raise IntegrationError(
                "the last epoch was left within a block, whose gradients are in the model: leave "
                "an epoch only after a step with info.last_in_block"
            )
        if self.progress.done:
            return
        for batch, info in self.loader.steps():
            self._info = info
            self._phase = Phase.FORWARD
            with self._around(info):
                yield batch, info
            if self._phase is not Phase.READY:
                raise IntegrationError(
                    f"step {info.step} of epoch {info.epoch} {self._phase.value}: every step needs "
                    "backward(loss) and then step(), idle ones too, as the other ranks wait in "
                    "their collectives"
                )
            if self.progress.done:
                return

    def backward(self, loss: Any) -> None:
        """Backward of the step's mean loss, times its loss scale.

        Raises IntegrationError unless it is the step's first backward.
        """
        info = self._expect(Phase.FORWARD, "backward(loss)")
        self._backward(loss * info.loss_scale)
        self._phase = Phase.BACKWARD

    def step(self) -> bool:
        """End the step; returns whether the optimizer took its own, at the end of a block.

        Raises IntegrationError unless the step has had its backward.
        """
        info = self._expect(Phase.BACKWARD, "step()")
        self._phase = Phase.READY
        stepped = self._step(info)
        self.progress.update(info)
        self.skipped_steps += info.last_in_block and not stepped
        return stepped

    def _left_within_block(self) -> bool:
        if self._info is None:
            return False
        if self._phase is Phase.FORWARD:  # as by a `break` in the first line of the loop
            return self._info.block_step > 0
        return self._phase is Phase.BACKWARD or not self._info.last_in_block

    def _expect(self, phase: Phase, call: str) -> ODBStepInfo:
        if self._info is None or self._phase is not phase:
            raise IntegrationError(
                f"{call} is out of turn: call backward(loss) and then step(), once each, for every "
                "step that this loop yields"
            )
        return self._info

    @abstractmethod
    def _around(self, info: ODBStepInfo) -> AbstractContextManager[Any]:
        """Prepare the engine for a step; the step runs within the context that this returns."""

    @abstractmethod
    def _backward(self, scaled: Any) -> None:
        """Backward of the loss, which the loss scale has been applied to."""

    @abstractmethod
    def _step(self, info: ODBStepInfo) -> bool:
        """The engine's part of ending a step; whether the optimizer took one."""
