"""Predicts an epoch from lengths alone: what `odb plan` shows before GPUs are paid for.

Nothing is modelled: the epoch is run by the very functions that drive the loader
(`spec.lockstep.run_epoch`), on the samples that each rank would read, in that order.
"""

from odb.planning.forecast import Forecast, Scenario, Simulation, forecast, simulate
from odb.planning.lengths import Lengths, Origin, read_lengths

__all__ = [
    "Forecast",
    "Lengths",
    "Origin",
    "Scenario",
    "Simulation",
    "forecast",
    "read_lengths",
    "simulate",
]
