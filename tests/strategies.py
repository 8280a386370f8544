"""Hypothesis strategies for samples, shards and configurations."""

from __future__ import annotations

from hypothesis import strategies as st

from spec.config import Budget, Config, CostRule, Idle, Mode
from spec.samples import Sample


def costs(largest: int = 40) -> st.SearchStrategy[int]:
    """Costs with a long tail, some of them 0."""
    return st.one_of(st.integers(0, 5), st.integers(1, largest))


@st.composite
def shards(draw: st.DrawFn, most: int = 30, extras: int = 0) -> tuple[Sample, ...]:
    """One rank's samples; weights are between 0 and the cost."""
    result = []
    for seq, cost in enumerate(draw(st.lists(costs(), max_size=most))):
        weight = draw(st.integers(0, cost)) if draw(st.integers(0, 4)) == 0 else cost
        more = tuple(draw(st.integers(0, 12)) for _ in range(extras))
        result.append(Sample(seq, cost, weight, more))
    return tuple(result)


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    return Budget(
        tokens=draw(st.integers(1, 120)),
        rule=draw(st.sampled_from(CostRule)),
        max_samples=draw(st.none() | st.integers(1, 6)),
        extras=tuple(draw(st.lists(st.integers(1, 20), max_size=2))),
        multiple=draw(st.sampled_from([1, 1, 4, 8])),
    )


@st.composite
def configs(draw: st.DrawFn, budget: Budget | None = None) -> Config:
    mode = draw(st.sampled_from(Mode))
    idle = draw(st.sampled_from(Idle)) if mode is Mode.JOIN else Idle.PAD
    return Config(
        budget=draw(budgets()) if budget is None else budget,
        window=draw(st.integers(1, 20)),
        slow_start=draw(st.integers(1, 20)),
        mode=mode,
        idle=idle,
        quota=draw(st.none() | st.integers(1, 60)) if mode is Mode.QUOTA else None,
        seed=draw(st.integers(0, 2**40)),
        accumulation_steps=1 if idle is Idle.STOP else draw(st.sampled_from([1, 1, 2, 3, 7])),
    )
