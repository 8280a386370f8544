"""`ODBDataLoader`: batches formed after each sample's cost is known, aligned on all ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Sampler

from odb.batches import BatchMaker, CollateFn, LossScaling
from odb.collate import PadCollate
from odb.costs import CostFn, CostModel, Resource
from odb.errors import ConfigError
from odb.groups import GroupChoice, global_rank
from odb.hooks import NO_HOOKS, HookedObserver, hooks_of
from odb.info import ODBStepInfo, attach_step_info
from odb.observer import NOBODY, Observer
from odb.options import check_skipping, choice, chunk_size, digest, one_of, worker_options
from odb.outbox import Outbox
from odb.parts import parts
from odb.pinning import Pinner
from odb.session import OnPeerLost, Session, StepIterator
from odb.sharding import Sharded
from odb.shell import LoaderShell, Ports, ShellOptions
from odb.source import ReadOptions, Source
from odb.stats import LoaderStats
from odb.tracing.recorder import Recorder, TraceFolder
from odb.transport import WatchOptions
from spec.config import Budget, Config, CostRule, Idle, Mode
from spec.rank import Setup


@dataclass(frozen=True)
class _Plan:
    """What a loader was asked for, checked."""

    config: Config
    costs: CostModel
    read: ReadOptions
    shell: ShellOptions
    collate: CollateFn
    scaling: LossScaling
    group: GroupChoice
    prefetch: int
    pin: bool
    watch: WatchOptions
    on_peer_lost: OnPeerLost | None


class ODBDataLoader:
    """A drop-in for `torch.utils.data.DataLoader` that batches by cost, aligned over ranks.

    Every epoch, each rank delivers the same number of steps, every sample of the dataset is
    delivered exactly once on one of the ranks, and no batch of two or more samples costs more than
    the budget.

    dataset: map-style or iterable. A map-style one is divided among ranks as `DistributedSampler`
        does it, without repeating any sample. An iterable one is iterated on every rank and
        worker, and each keeps its own part of the samples. `sharded=True`: the dataset itself
        yields different samples on each rank and worker; `sharded="workers"`: on each worker of a
        rank, but the same on every rank.
    token_budget: most tokens of a batch: rows times the longest row (its length rounded up to the
        collate function's `pad_to_multiple_of`), or with `packed=True` the sum of the costs. A
        sample that exceeds it by itself is delivered alone and listed in `stats.oversize`.
    collate_fn: makes a batch of a list of samples; default `PadCollate()`.
    num_workers, prefetch_factor, persistent_workers, worker_init_fn, generator,
        multiprocessing_context: as in DataLoader (`prefetch_factor` counts chunks of samples).
        With `num_workers=0` samples are read in a background thread, not in the trainer's.
    shuffle, seed: order of a map-style dataset; a new one each epoch.
    sampler: this rank's own samples in their order; they are not divided any further.
    window: most samples that a rank holds while it forms batches. Larger means less padding.
    cost_fn: tokens of a sample, a whole number; default: length of `input_ids`. Samples that cost
        0 are not delivered but listed in `stats.filtered`, as are None samples.
    loss_weight_fn: what a sample adds to the denominator of its batch's mean loss; default: its
        labels that are not -100, behind the causal shift, or all tokens if it has no labels.
        Samples of weight 0 have no loss to train on; they are listed in `stats.filtered`.
    resources: further budgets by name, such as `{"patches": Resource(count_patches, 4096)}`.
    join: True: an epoch delivers every sample. False (quota mode): it ends on all ranks at the
        step at which `quota` samples have been delivered (all ranks together), or without a quota
        at the last step for which every rank has samples.
    accumulation_steps: steps whose gradients are added up for one step of the optimizer. They are a
        block: `info.loss_scale` uses the weight of the whole block, so that its gradient is that
        of one global mean, and `info.last_in_block` says when the optimizer takes its step. The
        last block of an epoch may be shorter. Steps wait until their block is known.
    idle: what a rank does that has no sample left while others have: "pad": it yields small dummy
        batches with `info.idle` and `info.loss_scale == 0.0`; "stop": its iteration ends (for
        trainers under DDP's `Join`).
    loss_scaling: "exact": `info.loss_scale` makes the averaged gradient that of the global mean;
        "none": it is 1, and no loss weights are taken.
    group: the ranks to align: "world", a process group, or None for this rank by itself.
    timeout: seconds after which an exchange fails that some rank takes no part in. A pause of the
        trainer (a checkpoint, an evaluation) counts, so be generous.
    warn_after: seconds of waiting in an exchange after which a warning says which ranks are late
        and what they do (logger "odb"; again after twice as long, and so on); None: never.
    on_peer_lost: called with a `PeerLostError` when the process of another rank is gone, once for
        each, at once and in a thread of its own: the trainer may be stuck in a collective with
        that rank. What it raises is logged.
    on_error: what to do with a sample that cannot be read or measured: "raise": all ranks stop at
        the same step, and say which sample; "skip": it is listed in `stats.filtered`.
    max_skipped: with "skip", most such samples of a rank in an epoch; the next one is raised.
    prefetch: batches made ahead of the trainer. pin_memory: put them into page-locked memory.
    trace_dir: an empty folder, the same on all ranks, into which each rank records what its state
        machine does; `odb trace check` replays it (see docs/TRACES.md).

    chunk: samples of a message from a worker; default: 64, or a quarter of a smaller window.

    Raises ConfigError (a ValueError) at once for settings that cannot work.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        token_budget: int,
        collate_fn: CollateFn | None = None,
        num_workers: int = 0,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        window: int = 1024,
        slow_start: int = 64,
        cost_fn: CostFn | None = None,
        loss_weight_fn: CostFn | None = None,
        packed: bool = False,
        max_samples: int | None = None,
        resources: Mapping[str, Resource] | None = None,
        join: bool = True,
        quota: int | None = None,
        accumulation_steps: int = 1,
        idle: Literal["pad", "stop"] = "pad",
        loss_scaling: Literal["exact", "none"] = "exact",
        group: GroupChoice = "world",
        seed: int = 0,
        timeout: float = 1800.0,
        warn_after: float | None = 60.0,
        on_peer_lost: OnPeerLost | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        sharded: Sharded = False,
        chunk: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        **dataloader_options: Any,
    ) -> None:
        workers = worker_options(dataloader_options, num_workers)
        if sharded not in (True, False, "workers"):
            raise ConfigError(f'sharded must be True, False or "workers", not {sharded!r}')
        if isinstance(token_budget, np.integer):
            token_budget = int(token_budget)
        collate: CollateFn = PadCollate() if collate_fn is None else collate_fn
        resources = dict(resources or {})
        scaling = choice("loss_scaling", loss_scaling, LossScaling)
        on_error_is_skip = one_of("on_error", on_error, ("raise", "skip")) == "skip"
        _check_order(dataset, shuffle, sampler)
        if timeout <= 0 or prefetch < 1:
            raise ConfigError(f"timeout ({timeout}) and prefetch ({prefetch}) must be positive")
        if warn_after is not None and not warn_after > 0:
            raise ConfigError(f"warn_after must be positive, or None for never, not {warn_after}")
        if on_peer_lost is not None and not callable(on_peer_lost):
            raise ConfigError(f"on_peer_lost must be a function, not {on_peer_lost!r}")
        check_skipping(on_error_is_skip, max_skipped)
        budget = Budget(
            tokens=token_budget,
            rule=CostRule.SUMMED if packed else CostRule.PADDED,
            max_samples=max_samples,
            extras=tuple(resource.budget for resource in resources.values()),
            multiple=getattr(collate, "pad_to_multiple_of", None) or 1,
        )
        config = Config(
            budget=budget,
            window=window,
            slow_start=slow_start,
            mode=Mode.JOIN if join else Mode.QUOTA,
            idle=Idle.PAD if one_of("idle", idle, ("pad", "stop")) == "pad" else Idle.STOP,
            quota=quota,
            seed=seed,
            accumulation_steps=accumulation_steps,
            settings=digest(
                shuffle, scaling, on_error, sharded, [(k, r.budget) for k, r in resources.items()]
            ),
        )
        extra_fns = tuple((name, resource.cost_fn) for name, resource in resources.items())
        costs = CostModel.of(cost_fn, loss_weight_fn, extra_fns)
        if scaling is LossScaling.NONE:
            costs = replace(costs, weight_fn=None)
        self._plan = _Plan(
            config=config,
            costs=costs,
            read=ReadOptions(
                sampler=sampler,  # type: ignore[arg-type]  # DataLoader takes any iterable
                shuffle=bool(shuffle),
                seed=seed,
                sharded=sharded,
                chunk=chunk_size(chunk, window),
                workers=workers,
            ),
            shell=ShellOptions(budget, on_error_is_skip, timeout, max_skipped),
            collate=collate,
            scaling=scaling,
            group=group,
            prefetch=prefetch,
            pin=pin_memory,
            watch=WatchOptions(warn_after),
            on_peer_lost=on_peer_lost,
        )
        self._traces = None if trace_dir is None else TraceFolder(trace_dir)
        self.dataset = dataset
        self._epoch = 0
        self._stats = LoaderStats(epoch=0)
        self._session: Session | None = None
        self._source: Source | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    # ------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """An epoch's batches, each with its `ODBStepInfo` inside (see `odb.pop_step_info`).

        Batches must be mutable mappings; for others use `steps()`. Raises BatchTypeError.
        """
        return map(_with_info, self.steps())

    def steps(self) -> StepIterator:
        """An epoch's (batch, info) pairs, for batches of any type.

        Each call starts the next epoch, and ends one that is still running. All ranks must call it
        the same number of times.
        """
        session, source = self._connect()
        session.finish_epoch()
        plan, epoch, built_of = self._plan, self._epoch, parts()
        seat = session.transport.seat
        hooks = hooks_of(global_rank())
        setup = Setup(plan.config, seat.rank, seat.world_size, built_of.rules)
        divided = plan.read.sampler is None
        trace = None if self._traces is None else self._traces.open(setup, epoch, divided)
        self._stats = LoaderStats(epoch=epoch)
        outbox: Outbox[Any] = built_of.outbox(plan.prefetch)
        pinner = Pinner.for_this_thread() if plan.pin else None
        shell = LoaderShell(
            Ports(
                stream=source.open(epoch, hooks),
                transport=session.transport,
                outbox=outbox,
                batches=BatchMaker(
                    plan.collate,
                    pinner,
                    plan.scaling,
                    seat.world_size,
                    plan.config.accumulation_steps,
                    epoch,
                    hooks,
                ),
                stats=self._stats,
            ),
            plan.shell,
        )
        observer: Observer = NOBODY if trace is None else Recorder(trace, shell.sample_ids)
        if hooks is not NO_HOOKS:
            observer = HookedObserver(observer, hooks)
        observer = built_of.watching(observer, setup, outbox)
        interpreter = built_of.interpreter(setup, epoch, shell, session.transport, observer)
        self._epoch = epoch + 1
        session.begin(interpreter, shell, outbox)
        return StepIterator(outbox, self, partial(hooks.on_step, epoch))

    def _connect(self) -> tuple[Session, Source]:
        if self._session is None or self._source is None:
            plan, built_of = self._plan, parts()
            transport = built_of.connect(plan.group, plan.shell.timeout, plan.watch)
            self._source = Source(self.dataset, self._plan.costs, self._plan.read, transport.seat)
            self._session = built_of.session(transport, plan.shell.timeout, plan.on_peer_lost)
            self._finalizer = weakref.finalize(self, Session.close, self._session)
            self._finalizer.atexit = False  # session.py sees to that
        return self._session, self._source

    def close(self, timeout: float = 10.0) -> None:
        """End a running epoch, the workers and the process group. All ranks should call it.

        Waits up to `timeout` seconds for the other ranks to agree on the end of the epoch; after
        that a background thread goes on waiting. Iterating again opens everything anew.
        """
        session, self._session, self._source = self._session, None, None
        if session is not None:
            assert self._finalizer is not None
            self._finalizer.detach()
            session.close(timeout)

    # ------------------------------------------------------------ state

    @property
    def stats(self) -> LoaderStats:
        """This rank's counts of the current epoch, or of the last one."""
        return self._stats

    @property
    def group(self) -> GroupChoice:
        """The ranks that are aligned, as passed: "world", a process group, or None."""
        return self._plan.group

    @property
    def accumulation_steps(self) -> int:
        """The steps of a block, over which gradients are added up."""
        return self._plan.config.accumulation_steps

    @property
    def idle(self) -> Literal["pad", "stop"]:
        """What a drained rank does: "pad" or "stop"."""
        return "pad" if self._plan.config.idle is Idle.PAD else "stop"

    @property
    def loss_scaling(self) -> Literal["exact", "none"]:
        """What `info.loss_scale` is: "exact" or "none"."""
        return "exact" if self._plan.scaling is LossScaling.EXACT else "none"

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration takes. Advances by itself."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration takes."""
        if epoch < 0:
            raise ConfigError(f"an epoch is a whole number of 0 or more, not {epoch}")
        self._epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens an exchange and workers of its own."""
        return {**self.__dict__, "_session": None, "_source": None, "_finalizer": None}

    def __repr__(self) -> str:
        config = self._plan.config
        return (
            f"ODBDataLoader({type(self.dataset).__name__}, "
            f"token_budget={config.budget.tokens}, window={config.window}, "
            f"{config.mode.name.lower()} mode, idle {config.idle.name.lower()})"
        )


def _with_info(step: tuple[Any, ODBStepInfo]) -> Any:
    return attach_step_info(*step)


def _check_order(dataset: Any, shuffle: bool | None, sampler: Any) -> None:
    if sampler is not None and iter(sampler) is sampler:
        raise ConfigError("sampler is an iterator, which lasts one epoch only: pass a list")
    if sampler is not None and shuffle:
        raise ConfigError("sampler and shuffle exclude each other: the sampler gives the order")
    if isinstance(dataset, IterableDataset) and (shuffle or sampler is not None):
        raise ConfigError("an IterableDataset gives its own order: leave out shuffle and sampler")
    if isinstance(dataset, DataLoader | ODBDataLoader):
        raise ConfigError("pass the dataset, not a loader; odb.apply() equips a DataLoader")
