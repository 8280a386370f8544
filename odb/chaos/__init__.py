"""The chaos campaign: random real runs with faults, each checked against what is promised.

`draw` makes scenarios from a seed, `job` is what a rank does, `run` performs them, `judge` compares
with the promises, `report` shows the result. `odb chaos` is the command.
"""
