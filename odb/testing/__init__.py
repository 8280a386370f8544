"""Tools for testing distributed training loops: real ranks on this machine, with a time limit."""

from odb.testing.ranks import RankError, RankFailure, RankResults, run_ranks

__all__ = ["RankError", "RankFailure", "RankResults", "run_ranks"]
