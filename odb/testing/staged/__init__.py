"""Runs all ranks of a job in one process, in an order that a test chooses.

Each rank is the real loader with its driver thread and a trainer thread of its own; only the
surroundings are staged: the dataset, the collate function, and an exchange in memory. Between two
commands a driver waits until it is told to go on, so that the job does what the actions of
`spec.world` say, one after the other, and nothing else. There are no sleeps.
"""

from odb.testing.staged.job import StagedJob
from odb.testing.staged.stage import NotReachedError
from odb.testing.staged.standstill import Standstill, Waiting

__all__ = ["NotReachedError", "StagedJob", "Standstill", "Waiting"]
