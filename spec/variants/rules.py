"""Changed rules: grouping, target, decision and alignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from spec import alignment, blocks, exchange, grouping
from spec import config as settings
from spec.alignment import Alignment
from spec.blocks import Gathered
from spec.config import Budget, Config, Mode
from spec.exchange import Decision, Finish, Steps, Tally
from spec.messages import Block, Step
from spec.samples import NOTHING, Counts, Group, Sample, add_counts, in_arrival_order

# ---------------------------------------------------------------- the target


def ignore_smallest(tally: Tally) -> int:
    return tally.want


def one_fewer(tally: Tally) -> int:
    return min(tally.want, tally.limit) - 1


# ---------------------------------------------------------------- the decision


def finish_with_the_first_drained(
    config: Config, world_size: int, tally: Tally, target: int
) -> Decision:
    return Finish() if tally.any_drained else exchange.decide(config, world_size, tally, target)


def ignore_failure(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(failed_rank=world_size), target)


def ignore_close(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(closed_rank=world_size), target)


def never_lend(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    decision = exchange.decide(config, world_size, tally, target)
    return Steps(decision.target, None) if isinstance(decision, Steps) else decision


def idle_without_a_quota(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    if config.mode is Mode.QUOTA and config.quota is None:
        tally = tally._replace(any_drained=0)
    return exchange.decide(config, world_size, tally, target)


def never_flush(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(any_waiting=0), target)


def any_terms(config: Config, world_size: int, tally: Tally, target: int) -> Decision:
    return exchange.decide(config, world_size, tally._replace(low=tally.high), target)


# ---------------------------------------------------------------- alignment


def drop_carry(groups: tuple[Group, ...], target: int) -> Alignment:
    return Alignment(alignment.align(groups, target).groups, ())


def _keep(groups: tuple[Group, ...], target: int, order: list[Group]) -> Alignment:
    if len(groups) <= target:
        return alignment.align(groups, target)
    kept = {id(group) for group in order[:target]}
    return Alignment(
        tuple(group for group in groups if id(group) in kept),
        in_arrival_order(group for group in groups if id(group) not in kept),
    )


def carry_smallest(groups: tuple[Group, ...], target: int) -> Alignment:
    return _keep(groups, target, sorted(groups, key=lambda g: -sum(s.cost for s in g)))


def carry_oldest(groups: tuple[Group, ...], target: int) -> Alignment:
    youngest_first = sorted(groups, key=lambda g: min(s.seq for s in g), reverse=True)
    return _keep(groups, target, youngest_first)


def deliver_twice(groups: tuple[Group, ...], target: int) -> Alignment:
    first, *rest = alignment.align(groups, target).groups
    return Alignment((first + first[:1], *rest), alignment.align(groups, target).carried)


def carry_and_deliver(groups: tuple[Group, ...], target: int) -> Alignment:
    aligned = alignment.align(groups, target)
    return Alignment(aligned.groups, aligned.groups[-1][-1:] + aligned.carried)


def split_drops_one(groups: tuple[Group, ...], target: int) -> Alignment:
    aligned = alignment.align(groups, target)
    if len(groups) >= target:
        return aligned
    longest = max(aligned.groups, key=len)
    shortened = tuple(g[:-1] if g is longest and len(g) > 1 else g for g in aligned.groups)
    if shortened == aligned.groups:
        shortened = tuple(g if g is not longest else () for g in aligned.groups)
    return Alignment(shortened, aligned.carried)


def do_not_split(groups: tuple[Group, ...], target: int) -> Alignment:
    if len(groups) < target:
        return Alignment(groups, ())
    return alignment.align(groups, target)


# ---------------------------------------------------------------- grouping


def oversize_in_company(budget: Budget, samples: tuple[Sample, ...]) -> tuple[Group, ...]:
    groups = list(grouping.group(budget, samples))
    for i, group in enumerate(groups[:-1]):
        if grouping.oversize(budget, group[0]):
            groups[i : i + 2] = [group + groups[i + 1]]
            break
    return tuple(groups)


def one_token_more(budget: Budget, samples: tuple[Sample, ...]) -> tuple[Group, ...]:
    return grouping.group(replace(budget, tokens=budget.tokens + 1), samples)


def drop_last_group(budget: Budget, samples: tuple[Sample, ...]) -> tuple[Group, ...]:
    groups = grouping.group(budget, samples)
    return groups[:-1] if len(groups) > 1 else groups


def longer_window(config: Config, round_: int) -> int:
    return settings.fill_target(config, round_) + 1


# ---------------------------------------------------------------- blocks


def _weighed(steps: tuple[Step, ...], totals: tuple[Counts, ...]) -> tuple[Step, ...]:
    """These steps as a block, whose total each of them takes to be another one."""
    return tuple(
        step._replace(block=Block(place, len(steps), total))
        for place, (step, total) in enumerate(zip(steps, totals, strict=True))
    )


def _gather_by(
    complete: Callable[[tuple[Step, ...]], tuple[Step, ...]],
) -> Callable[[Config, tuple[Step, ...], tuple[Step, ...]], Gathered]:
    def gather(config: Config, waiting: tuple[Step, ...], decided: tuple[Step, ...]) -> Gathered:
        size = config.accumulation_steps
        steps = (*waiting, *decided)
        whole = len(steps) - len(steps) % size
        blocks = (steps[i : i + size] for i in range(0, whole, size))
        return Gathered(tuple(s for b in blocks for s in complete(b)), steps[whole:])

    return gather


def each_step_by_itself(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return _weighed(steps, tuple(step.total for step in steps))


def own_part_of_the_block(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    own = reduce(add_counts, (step.local for step in steps), NOTHING)
    return _weighed(steps, (own,) * len(steps))


mean_of_means = _gather_by(each_step_by_itself)
own_weight = _gather_by(own_part_of_the_block)


def block_ends_with_the_round(
    config: Config, waiting: tuple[Step, ...], decided: tuple[Step, ...]
) -> Gathered:
    ready, left = blocks.gather(config, waiting, decided)
    return Gathered((*ready, *blocks.complete(left)), ())


# ---------------------------------------------------------------- samples without tokens


def keep_everything(sample: Sample) -> bool:
    return True


def filter_after_counting(groups: tuple[Group, ...], target: int) -> Alignment:
    """The slots are counted with samples of length zero in them; then these are taken out."""
    aligned = alignment.align(groups, target)
    left = tuple(tuple(s for s in group if s.cost > 0) for group in aligned.groups)
    return Alignment(left, tuple(s for s in aligned.carried if s.cost > 0))


# ---------------------------------------------------------------- the published package


def slots_by_inputs_read(tally: Tally) -> int:
    """Output slots are budgeted by the number of inputs that the best-off rank has read: here, its
    groups and one more, whatever the other ranks can fill."""
    return tally.want + 1
