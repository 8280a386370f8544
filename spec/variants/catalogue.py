"""All variants, by name."""

from __future__ import annotations

from collections.abc import Mapping

from spec.rank import Rules
from spec.variants import habits, machines, rules
from spec.variants.variant import Variant
from spec.world import Habits

ALIGNMENT = ("step-alignment", "deadlock-freedom")
COVERAGE = ("identity-coverage",)

OURS_CHANGED: Mapping[str, Variant] = {
    # ------------------------------------------------------------ rules
    "target-ignores-smallest": Variant(
        "the target ignores the smallest sample count",
        ALIGNMENT,
        Rules(target=rules.ignore_smallest),
    ),
    "target-one-fewer": Variant(
        "the target is one below the rule, so that it may be 0",
        ALIGNMENT,
        Rules(target=rules.one_fewer),
    ),
    "finish-with-first-drained": Variant(
        "join mode ends when the first rank has drained",
        COVERAGE,
        Rules(decide=rules.finish_with_the_first_drained),
    ),
    "failure-ignored": Variant(
        "a failed rank counts as drained",
        ("uniform-abort", "identity-coverage"),
        Rules(decide=rules.ignore_failure),
    ),
    "close-ignored": Variant(
        "a rank whose trainer has stopped counts as drained",
        COVERAGE,
        Rules(decide=rules.ignore_close),
    ),
    "never-lends": Variant(
        "a rank that never saw a sample gets none to idle with",
        ("deadlock-freedom",),
        Rules(decide=rules.never_lend),
    ),
    "idles-without-quota": Variant(
        "without a quota, quota mode goes on while any rank has samples",
        ("quota-closure",),
        Rules(decide=rules.idle_without_a_quota),
    ),
    "carry-dropped": Variant(
        "samples that are carried are dropped", COVERAGE, Rules(align=rules.drop_carry)
    ),
    "carry-keeps-largest": Variant(
        "a carry keeps the largest groups, so that small ones starve",
        ("bounded-delay",),
        Rules(align=rules.carry_smallest, target=lambda tally: 1),
    ),
    "carry-keeps-youngest": Variant(
        "a carry keeps the groups with the youngest samples",
        ("bounded-delay",),
        Rules(align=rules.carry_oldest, target=lambda tally: 1),
    ),
    "delivers-twice": Variant(
        "a sample is in a group twice", COVERAGE, Rules(align=rules.deliver_twice)
    ),
    "delivers-and-carries": Variant(
        "a sample is delivered and carried as well",
        COVERAGE,
        Rules(align=rules.carry_and_deliver),
    ),
    "split-drops-one": Variant(
        "a split drops a sample", COVERAGE, Rules(align=rules.split_drops_one)
    ),
    "no-split": Variant(
        "a rank with too few groups takes fewer steps",
        ALIGNMENT,
        Rules(align=rules.do_not_split),
    ),
    "oversize-in-company": Variant(
        "a sample above the budget joins a group",
        ("budget",),
        Rules(group=rules.oversize_in_company),
    ),
    "one-token-more": Variant(
        "the budget is compared off by one", ("budget",), Rules(group=rules.one_token_more)
    ),
    "last-group-dropped": Variant(
        "the last, incomplete group of a window is dropped",
        COVERAGE,
        Rules(group=rules.drop_last_group),
    ),
    "longer-window": Variant(
        "the window is one sample longer than it should be",
        ("bounded-memory",),
        Rules(fill_target=rules.longer_window),
    ),
    "mean-of-means": Variant(
        "each step of a block is scaled by its own weight, as if means could be added up",
        ("exact-gradient",),
        Rules(gather=rules.mean_of_means, complete=rules.each_step_by_itself),
    ),
    "own-weight": Variant(
        "a block is weighed by what this rank has in it",
        ("exact-gradient",),
        Rules(gather=rules.own_weight, complete=rules.own_part_of_the_block),
    ),
    "blocks-end-with-rounds": Variant(
        "a block ends with its round, whether it is full or not",
        ("exact-gradient",),
        Rules(gather=rules.block_ends_with_the_round),
    ),
    "last-block-dropped": Variant(
        "steps that still wait for their block at the end of an epoch are left out",
        COVERAGE,
        Rules(decide=rules.never_flush),
    ),
    # ------------------------------------------------------------ machines
    "drained-ranks-leave": Variant(
        "a drained rank stops posting",
        ("deadlock-freedom", "epochs-apart"),
        machine=machines.drained_ranks_leave,
    ),
    "target-from-own-report": Variant(
        "each rank computes the target from its own number of groups",
        ALIGNMENT,
        machine=machines.target_from_own_report,
    ),
    "carry-dropped-on-drain": Variant(
        "the carry is dropped once the input has ended",
        COVERAGE,
        Rules(target=lambda tally: 1),
        machine=machines.carry_dropped_at_the_end_of_input,
    ),
    "finish-asked-again": Variant(
        "at the end a rank asks once more whether all is done, and so for ever",
        ("bounded-termination",),
        machine=machines.finish_is_asked_again,
    ),
    "failed-ranks-leave": Variant(
        "a rank that fails stops at once, without a report",
        ("deadlock-freedom", "uniform-abort"),
        machine=machines.failed_ranks_leave,
    ),
    "failed-batch-leaves-gap": Variant(
        "a batch that cannot be made is left out, and no idle step takes its place",
        ("uniform-abort", "deadlock-freedom"),
        machine=machines.failed_batches_leave_a_gap,
    ),
    "failed-batch-forgotten": Variant(
        "the samples of a batch that cannot be made are forgotten",
        COVERAGE,
        machine=machines.forget_the_group_of_a_failed_batch,
    ),
    "quota-by-own-count": Variant(
        "each rank compares its own samples with the quota",
        ("quota-closure", "exact-gradient", "epochs-apart", *ALIGNMENT),
        machine=machines.quota_by_own_count,
    ),
    "quota-counts-double": Variant(
        "samples count twice towards the quota",
        ("quota-closure", "exact-gradient"),
        machine=machines.quota_counts_double,
    ),
    "quota-behind-lost": Variant(
        "the samples of steps behind the quota are lost",
        COVERAGE,
        machine=machines.steps_behind_the_quota_lost,
    ),
    "quota-ignored": Variant(
        "the quota is never met", ("quota-closure",), machine=machines.quota_ignored
    ),
    "retired-ranks-leave": Variant(
        "with idle stop a retired rank takes no part in the exchange",
        ("deadlock-freedom",),
        machine=machines.retired_ranks_leave,
    ),
    "idle-skips-counts": Variant(
        "a rank without samples skips the exchange of counts",
        ("deadlock-freedom",),
        machine=machines.idle_ranks_skip_the_counts,
    ),
    "steps-reversed": Variant(
        "the steps of a round are emitted in reverse",
        ALIGNMENT,
        machine=machines.emit_in_reverse,
    ),
    "window-discarded": Variant(
        "the end of the input discards a sample of the window",
        COVERAGE,
        machine=machines.end_of_input_discards_the_window,
    ),
    # ------------------------------------------------------------ habits
    "slot-not-released": Variant(
        "a trainer that stops does not release the slots of its queue",
        ("deadlock-freedom",),
        habits=Habits(leave_queue=habits.walk_away),
    ),
    "abort-overtakes-steps": Variant(
        "an error is raised before the steps that were aligned earlier",
        ("uniform-abort", "deadlock-freedom"),
        habits=Habits(finish_queue=habits.drop_queue_on_error),
    ),
    "end-needs-a-slot": Variant(
        "the end of the epoch is lost if the queue is full",
        ("deadlock-freedom",),
        habits=Habits(finish_queue=habits.lose_the_end),
    ),
    "steps-after-loss": Variant(
        "a trainer is handed the steps that were queued when a peer was lost",
        ("uniform-abort",),
        habits=Habits(cut_queue=habits.keep_queue),
    ),
    "queue-unbounded": Variant(
        "the queue takes one step more than it has room for",
        ("bounded-memory",),
        habits=Habits(has_room=habits.room_for_one_more),
    ),
    "epochs-overlap": Variant(
        "the next epoch begins before the batcher has ended the one before",
        ("epochs-apart", "deadlock-freedom"),
        habits=Habits(may_begin=habits.begin_at_once),
    ),
    "epochs-overlap-unnoticed": Variant(
        "the same, and the epoch in the report is not compared",
        ("identity-coverage", *ALIGNMENT),
        Rules(decide=rules.any_terms),
        habits=Habits(may_begin=habits.begin_at_once),
    ),
}
"""Our protocol with one thing changed."""

PUBLISHED: Mapping[str, Variant] = {
    "published-slots": Variant(
        "output slots are budgeted by the inputs read in the round",
        ALIGNMENT,
        Rules(target=rules.slots_by_inputs_read),
    ),
    "published-overflow": Variant(
        "overflow keeps the largest groups, and what overflows at the end is not delivered",
        COVERAGE,
        Rules(align=rules.carry_smallest),
        machine=machines.carry_dropped_at_the_end_of_input,
    ),
    "published-finished-rank": Variant(
        "a finished rank advertises that it is, and posts no slots any more",
        ("deadlock-freedom",),
        machine=machines.finished_ranks_post_no_counts,
    ),
    "published-late-filter": Variant(
        "samples of length zero are filtered after the slots were counted",
        (*COVERAGE, "deadlock-freedom", "step-alignment"),
        Rules(trainable=rules.keep_everything, align=rules.filter_after_counting),
    ),
    "published-no-exchange": Variant(
        "there is no exchange, because the side process has no process group",
        (*ALIGNMENT, "quota-closure"),
        machine=machines.no_exchange,
    ),
}
"""The rules of the published package, as its documentation describes them and its behaviour shows
them (online-dynamic-batching 0.1.2)."""

VARIANTS: Mapping[str, Variant] = {**OURS_CHANGED, **PUBLISHED}
"""Every variant by name. All must fall."""
