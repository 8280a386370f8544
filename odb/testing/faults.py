"""Faults that a test makes happen in a rank, as plain data: what, where, and when.

A plan is used in one of three ways: `run_ranks(train, 2, faults=plan)`, `with plan: train()` in a
rank's own process, or the pytest fixture `odb_faults`. docs/TESTING.md has examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from odb.errors import ConfigError, ODBError
from odb.info import SampleId

if TYPE_CHECKING:
    from odb.testing.injection import ActiveFaults

FOREVER_S = 3600.0
"""Longer than any test."""


class InjectedError(ODBError):
    """What a fault raises."""


class UnfiredFaultsError(ODBError, AssertionError):
    """Some faults of a plan never happened, so a test that passed has tested nothing. `faults`:
    which."""

    def __init__(self, faults: tuple[Fault, ...], context: str = "") -> None:
        names = "".join(f"\n  {fault}" for fault in faults)
        super().__init__(
            f"{len(faults)} of the faults never happened:{names}\nThe run ended before, or does "
            "not come there at all (another rank's sample, too few steps or rounds, no workers). "
            "FaultPlan(..., must_fire=False) allows that" + (f"\n{context}" if context else "")
        )
        self.faults = faults
        self._context = context

    def __reduce__(self) -> tuple[Any, ...]:
        return UnfiredFaultsError, (self.faults, self._context)


@dataclass(frozen=True)
class Fault:
    """Something that happens to one rank, once: the first time that it comes to the place.

    rank: the rank in the whole job, as `torch.distributed.get_rank()` counts. Steps, rounds and
    epochs count from 0, as in `ODBStepInfo`. Where a fault has an `epoch`, None is the first epoch
    that comes to the place. `sample`: what the dataset calls it, as in `info.sample_ids`.
    """

    rank: int

    def __post_init__(self) -> None:
        if type(self) is Fault:
            raise ConfigError("Fault is the base of faults, and none itself")
        for name in ("rank", "step", "round", "epoch", "worker"):
            value = getattr(self, name, None)
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(f"{type(self).__name__}: {name} must be 0 or more, not {value!r}")
        for name in ("seconds", "seconds_per_step", "seconds_per_sample"):
            seconds: Any = getattr(self, name, 1.0)
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not number or not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{type(self).__name__}: {name} cannot be {seconds!r}")
            if name == "seconds" and not seconds:
                raise ConfigError(f"{type(self).__name__}: seconds must be positive")


@dataclass(frozen=True)
class RaiseInSample(Fault):
    """Reading a sample raises InjectedError, as a broken dataset would."""

    sample: SampleId


@dataclass(frozen=True)
class BlockInSample(Fault):
    """Reading a sample takes very long, as on a file system that hangs. It is over when the process
    that reads is ended."""

    sample: SampleId
    seconds: float = FOREVER_S


@dataclass(frozen=True)
class RaiseInBatch(Fault):
    """Collating the batch of a step raises InjectedError."""

    step: int
    epoch: int | None = None


@dataclass(frozen=True)
class KillWorker(Fault):
    """The DataLoader worker that reads this sample gets SIGKILL, as from the out-of-memory killer;
    or the worker of this number, at the first sample that it reads (with both: if it is the one).
    Never happens with `num_workers=0`."""

    worker: int | None = None
    sample: SampleId | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker is None and self.sample is None:
            raise ConfigError("KillWorker: pass worker=, the number of one, or sample=")


@dataclass(frozen=True)
class KillRank(Fault):
    """The rank's process gets SIGKILL: when its trainer asks for a step, or (`round`) when its
    driver is about to post the report of a round, whatever the trainer is doing then."""

    step: int | None = None
    round: int | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.step is None) == (self.round is None):
            raise ConfigError("KillRank: pass step= or round=, and not both")


@dataclass(frozen=True)
class StopRank(Fault):
    """The rank's process gets SIGSTOP when its trainer asks for a step, and SIGCONT some seconds
    later, as in a virtual machine that is moved. All of its threads stand still; its worker
    processes do not."""

    step: int
    seconds: float
    epoch: int | None = None


@dataclass(frozen=True)
class SlowRank(Fault):
    """The rank is slow all the time: its trainer in each step, or its reading of each sample."""

    seconds_per_step: float = 0.0
    seconds_per_sample: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.seconds_per_step or self.seconds_per_sample):
            raise ConfigError("SlowRank: pass seconds_per_step= or seconds_per_sample=")


@dataclass(frozen=True)
class DelayExchange(Fault):
    """The rank posts the report of a round late."""

    round: int
    seconds: float
    epoch: int | None = None


@dataclass(frozen=True)
class DropConnection(Fault):
    """Every TCP connection that the rank's process has is shut down in both directions, when it is
    about to post the report of a round: as if a router had reset them. (Linux only.)

    These are the connections of odb's exchange and of its peer watch, those of the trainer's own
    process groups (Gloo, NCCL's bootstrap, a TCP store), and any others, such as to a database. The
    process lives on, and can open new ones. Both sides see the end of the stream at once. A link
    that goes silent, where nobody hears anything until a timeout, is another fault: that takes real
    network interfaces (see tests/test_network_faults.py).
    """

    round: int
    epoch: int | None = None


@dataclass(frozen=True, init=False)
class FaultPlan:
    """Faults that happen while the plan is active, in every loader that begins an epoch then.

    Each happens once, to its own rank (SlowRank: all the time); it reaches worker processes under
    every start method. Plans are plain data: they can be compared, printed and pickled, and hold
    nothing that is drawn or timed.

    must_fire: an UnfiredFaultsError is raised at the end if some fault never happened.
    """

    faults: tuple[Fault, ...]
    must_fire: bool

    def __init__(self, *faults: Fault, must_fire: bool = True) -> None:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ConfigError(f"a FaultPlan is made of faults, not of {fault!r}")
        if len(set(faults)) < len(faults):
            raise ConfigError("a FaultPlan holds the same fault twice")
        object.__setattr__(self, "faults", tuple(faults))
        object.__setattr__(self, "must_fire", must_fire)

    def __enter__(self) -> ActiveFaults:
        """Activate the plan in this process, which is one rank; its faults for others are idle."""
        from odb.testing.injection import activate

        return activate(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        from odb.testing.injection import deactivate

        active = deactivate(self)
        if error is None:
            active.require_fired()
