"""The alignment protocol of odb, as pure functions.

Nothing here does input or output, reads a clock, draws at random, or imports anything outside the
standard library. The loader (`odb`), the checkers (`model_check`) and the theorems (`proofs`) all
run these very functions. Read in this order:

    samples, config     what there is, and what all ranks agree on
    grouping            samples -> groups within the budget
    exchange            report -> tally -> decision, the same on every rank
    alignment           groups -> exactly T groups
    draw, quota         the order of a round's steps, and how many of them are taken
    messages, rank      the state machine of one rank
    lockstep            several ranks in one loop
    world, enabled, system   the closed system: ranks with inputs, queues, trainers and faults
    variants            protocols with something changed, which the checks must notice
"""

ODB_PROTOCOL = "odb"
"""Tells this package from any other that is called `spec`."""
