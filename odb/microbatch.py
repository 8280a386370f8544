"""Aligned micro-batches for samples that are already in memory, as in RL post-training."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odb.errors import ConfigError, CostError
from odb.farewell import at_exit
from odb.faults import FaultLog
from odb.groups import GroupChoice
from odb.interpreter import Interpreter
from odb.transport import LinkBroken, LoopBack, Transport, WatchOptions, connect
from spec.config import Budget, Config, CostRule
from spec.messages import Outcome, Step
from spec.rank import RankState, Setup, held
from spec.samples import Sample
from spec.scaling import loss_scale

EVERYTHING = 2**31 - 1
"""The window: all of a rank's samples are known at once."""


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch of this rank.

    indices: positions in the `costs` that were passed, longest first. In an idle micro-batch: the
        one cheapest sample, to run forward and backward with (none if the rank has no samples).
    idle: this rank has nothing left for this micro-batch.
    loss_scale: multiply the mean loss by this, so that the gradient averaged over ranks is that of
        the mean over all weights of the micro-batch on all ranks; 0.0 if idle.
    cost: what it costs under the budget's rule. global_samples: on all ranks together.
    """

    indices: tuple[int, ...]
    idle: bool
    loss_scale: float
    local_weight: int
    global_weight: int
    global_samples: int


@dataclass(frozen=True)
class MicrobatchPlan(Sequence[Microbatch]):
    """The micro-batches of this rank: as many as on every other rank.

    global_weight: sum of the weights of all samples on all ranks. To take one optimizer step over
    all micro-batches, scale each mean loss by `accumulated_scale(i)` instead of its `loss_scale`.
    filtered: positions of samples that cost or weigh 0 and so are in no micro-batch.
    """

    microbatches: tuple[Microbatch, ...]
    filtered: tuple[int, ...]
    world_size: int

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.microbatches[index]

    def __len__(self) -> int:
        return len(self.microbatches)

    @property
    def global_weight(self) -> int:
        """The weight of all samples of all ranks."""
        return sum(m.global_weight for m in self.microbatches)

    def accumulated_scale(self, index: int) -> float:
        """The scale of a micro-batch's mean loss when gradients of all micro-batches add up."""
        local = self.microbatches[index].local_weight
        return loss_scale(self.world_size, local, self.global_weight)


def plan_microbatches(
    costs: Sequence[int],
    token_budget: int,
    group: GroupChoice = "world",
    *,
    weights: Sequence[int] | None = None,
    packed: bool = False,
    max_samples: int | None = None,
) -> MicrobatchPlan:
    """Divide this rank's samples into micro-batches within the budget, as many on every rank.

    costs: tokens of each sample, whole numbers; ranks may have different numbers of samples, also
        none. weights: what each adds to the denominator of the mean loss (default: its cost).
    token_budget, packed, max_samples: as for `ODBDataLoader`.

    Collective: every rank of the group must call it, in the same order with other calls. Raises
    CostError on a rank whose costs or weights are not whole numbers of 0 or more, and then
    PeerFailedError on all others; MismatchError if the budgets differ; PeerLostError if the process
    of a rank is gone. Late ranks are named in a warning after a minute (logger "odb"), and in an
    ExchangeTimeoutError after half an hour.
    """
    rule = CostRule.SUMMED if packed else CostRule.PADDED
    budget = Budget(int(token_budget), rule, max_samples)
    config = Config(budget, window=EVERYTHING, slow_start=EVERYTHING)
    link = _link(group)
    shell = _PlanShell(costs, weights if weights is not None else costs, link)
    setup = Setup(config, link.seat.rank, link.seat.world_size)
    Interpreter(setup, 0, shell, link).run()
    return shell.result()


class _PlanShell:
    """Performs commands on costs in memory (see `odb.interpreter.Shell`)."""

    def __init__(self, costs: Sequence[int], weights: Sequence[int], link: Transport) -> None:
        self._costs = costs
        self._weights = weights
        self._world_size = link.seat.world_size
        self._faults = FaultLog(link, TIMEOUT_S)
        self._read = False
        self._steps: list[Step] = []
        self._filtered: list[int] = []
        self._spare: tuple[int, ...] = ()
        self._error: Exception | None = None

    def pull(self, first_seq: int, limit: int) -> tuple[Sample, ...] | None:
        if self._read:
            return ()
        self._read = True
        if len(self._weights) != len(self._costs):
            raise CostError(f"{len(self._weights)} weights for {len(self._costs)} costs")
        return tuple(
            Sample(i, _whole("cost", i, cost), _whole("weight", i, weight))
            for i, (cost, weight) in enumerate(zip(self._costs, self._weights, strict=True))
        )

    def emit(self, step: Step) -> bool:
        self._steps.append(step)
        return True

    def filter(self, sample: Sample) -> None:
        self._filtered.append(sample.seq)

    def keep_spare(self, sample: Sample) -> None:
        self._spare = (sample.seq,)

    def share_spare(self, donor: int) -> None:
        """Nothing to do, on any rank: an index means nothing to another rank."""

    def share_reason(self, rank: int) -> None:
        self._faults.share_reason(rank)

    def retire(self) -> None:
        """Never asked for: the idle mode is pad."""

    def give_up(self, state: RankState) -> None:
        """Never asked for: a micro-batch is always made."""

    def end(self, outcome: Outcome, state: RankState) -> None:
        lost = [sample.seq for sample in held(state)]
        self._error = self._faults.explain(outcome, state.place.step, lost)

    def failed(self, error: BaseException) -> None:
        self._faults.failed(error)

    def lost(self, error: LinkBroken) -> None:
        self._faults.lost(error)

    def result(self) -> MicrobatchPlan:
        if self._error is not None:
            cause = self._error.__cause__
            raise cause if isinstance(cause, CostError) else self._error
        microbatches = tuple(
            Microbatch(
                indices=tuple(sample.seq for sample in step.group) or self._spare,
                idle=step.idle,
                loss_scale=loss_scale(self._world_size, step.local.weight, step.total.weight),
                local_weight=step.local.weight,
                global_weight=step.total.weight,
                global_samples=step.total.samples,
            )
            for step in self._steps
        )
        return MicrobatchPlan(microbatches, tuple(self._filtered), self._world_size)


TIMEOUT_S = 1800.0

WARN_AFTER_S = 60.0

_LINKS: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()


def _link(choice: GroupChoice) -> Transport:
    """The exchange of earlier calls over the same group, or a new one. Calls come in the same
    order on all ranks, so that one is enough, and making one for each would take longer than
    planning."""
    if choice is None or not (dist.is_available() and dist.is_initialized()):
        return connect(choice, TIMEOUT_S) if choice is not None else LoopBack()
    over = dist.group.WORLD if choice == "world" else choice
    if over is None:
        raise ConfigError("this rank is not a member of the group that it passed")
    if over not in _LINKS:
        _LINKS[over] = connect(choice, TIMEOUT_S, WatchOptions(WARN_AFTER_S))
        weakref.finalize(over, _LINKS[over].say_bye)
        at_exit(_say_bye)
    return _LINKS[over]


def _say_bye() -> None:
    for link in list(_LINKS.values()):
        link.say_bye()


def _whole(what: str, index: int, value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise CostError(f"the {what} of sample {index} is {value!r}, not a whole number from 0")
    return int(value)
