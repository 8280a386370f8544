"""What stands behind each promise: how far it was explored, what is proved, which real processes it
was tried on, and what nothing covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from model_check.profiles import full
from proofs.catalogue import THEOREMS


class Coverage(NamedTuple):
    """proved_by: names of theorems. tested_by: tests with real processes. not_covered: by none."""

    proved_by: tuple[str, ...]
    tested_by: tuple[str, ...]
    not_covered: str


LOADER, SHARDS = "tests/test_real_loader.py", "tests/test_real_shards.py"
EVERY_SHARD = f"{SHARDS}::test_shards"

COVERAGE: Mapping[str, Coverage] = {
    "step-alignment": Coverage(
        ("exchange", "step-alignment", "target-envelope", "alignment-succeeds", "partition"),
        (EVERY_SHARD, f"{SHARDS}::test_every_start_method_aligns"),
        "that all_reduce delivers the maximum and the sum to every rank",
    ),
    "deadlock-freedom": Coverage(
        ("deadlock-freedom", "identity-coverage"),
        (EVERY_SHARD, f"{LOADER}::test_nothing_is_left_of_an_epoch"),
        "proved without faults and stops; more ranks with them than were explored; locks",
    ),
    "bounded-termination": Coverage(
        ("bounded-termination",),
        (EVERY_SHARD,),
        "proved for join mode without faults; an input that neither delivers nor ends",
    ),
    "identity-coverage": Coverage(
        ("identity-coverage", "partition", "target-envelope"),
        (EVERY_SHARD, f"{LOADER}::test_a_shared_dataset_is_seen_exactly_once"),
        "grouping of more than 3 samples, by the solver; what a dataset leaves out itself",
    ),
    "quota-closure": Coverage(
        ("quota-closure", "target-envelope"),
        (EVERY_SHARD,),
        "trimming the last step to the exact quota, which the loader does not offer",
    ),
    "budget": Coverage(
        ("budget", "partition"),
        (EVERY_SHARD, f"{SHARDS}::test_an_oversize_sample_is_delivered_alone_and_listed"),
        "what a collate function of the user's adds to a batch",
    ),
    "bounded-memory": Coverage(
        ("bounded-memory", "identity-coverage"),
        (f"{LOADER}::test_close_gives_everything_back",),
        "what is held outside of the window: the queue, a chunk, what workers have ready, a spare",
    ),
    "bounded-delay": Coverage(
        ("bounded-delay", "partition"),
        (EVERY_SHARD,),
        "carries of more than three groups, by the solver",
    ),
    "uniform-abort": Coverage(
        ("uniform-abort", "identity-coverage"),
        (
            f"{LOADER}::test_a_sample_that_fails_stops_all_ranks_at_the_same_step",
            f"{LOADER}::test_a_rank_that_can_make_no_batch_at_all_fails_at_once_and_tells_the_others",
        ),
        "a rank that neither answers nor dies before the timeout",
    ),
    "epochs-apart": Coverage(
        ("step-alignment",),
        (f"{LOADER}::test_ranks_in_different_epochs_say_so",),
        "proved only as far as that terms are compared; the rest is explored",
    ),
    "exact-gradient": Coverage(
        ("exact-gradient",),
        (
            f"{LOADER}::test_ddp_training_equals_one_process_with_the_global_token_mean",
            "tests/test_blocks.py::test_the_scales_of_a_block_add_up_to_one_mean",
        ),
        "rounding, and trainers that average otherwise than over all ranks",
    ),
    "determinism": Coverage(
        ("exchange",),
        (f"{SHARDS}::test_batches_do_not_depend_on_timing",),
        "proved only for the exchange; datasets that are not deterministic themselves",
    ),
}
"""By promise. (A test checks that each theorem and test exists.)"""


def explored() -> str:
    """How far the full profile explores, as its worlds say."""
    worlds = [case.world for case in full()]
    ranks, samples = max(w.world_size for w in worlds), max(w.samples for w in worlds)
    most = max(w.faults.most for w in worlds)
    faulty = max(w.world_size for w in worlds if w.faults.most == most)
    return f"{ranks} ranks, {samples} samples each, and {most} faults with {faulty} ranks"


def coverage_table() -> list[str]:
    """The table of docs/PROOFS.md, in Markdown."""
    sizes = {theorem.promise: len(theorem.obligations) for theorem, _ in THEOREMS}
    lines = [
        "## What stands behind each promise",
        "",
        f"Explored completely (`odb verify --profile full`): up to {explored()}, in every mode. "
        "The theorems hold for every number of ranks and samples, within what each says of itself "
        "below.",
        "",
        "| promise | proved by (obligations) | tested on real processes by | not covered |",
        "| --- | --- | --- | --- |",
    ]
    for promise, row in COVERAGE.items():
        proved = ", ".join(f"{name} ({sizes[name]})" for name in row.proved_by)
        tested = ", ".join(f"`{test.partition('::')[2]}`" for test in row.tested_by)
        lines.append(f"| {promise} | {proved} | {tested} | {row.not_covered} |")
    return [*lines, ""]
