"""The invariant that the proof of identity-coverage rests on is the one that the explorer sees, and
its stand-ins are what the real functions do."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from model_check.abstract import (
    Row,
    Several,
    SeveralGroups,
    Size,
    length,
    some_groups,
    some_samples,
    totals_of,
)
from model_check.closed import ClosedSystem, Key
from model_check.explorer import Broken, Property, Question, Verdict, explore
from model_check.paths import Engine
from model_check.profiles import Case, for_mutants
from model_check.prover import OUTSIDE, Obligation, Parts, Proof, Prover, Source, both
from model_check.symbolic import NeedsConcrete, SymInt
from proofs import ledger
from proofs.invariant import sound
from proofs.machine import ANY_INPUT, ANY_TRAINER, POSSIBLE, Machine, Situation
from proofs.theorem import prover
from spec.messages import Closed, Step
from spec.rank import Phase
from spec.samples import NOTHING, Sample

THIS = (__import__("sys").modules[__name__],)
PLAIN = Prover(Engine(THIS, timeout_ms=5000), 5000)


@pytest.mark.parametrize("case", for_mutants(), ids=lambda case: case.name)
def test_every_state_that_is_reached_satisfies_the_invariant(case: Case) -> None:
    system = ClosedSystem(case.world)

    def holds(key: Key) -> Broken | None:
        for rank, node in enumerate(system.state(key).nodes):
            if not sound(case.world.setup(rank), node.machine):
                return Broken("invariant", f"rank {rank}: {node.machine}")
        return None

    found = explore(system, Question(properties=(Property(holds),)))
    assert found.verdict is Verdict.HOLDS, found.violation


@pytest.mark.parametrize("phase", POSSIBLE, ids=lambda phase: phase.name)
def test_what_the_proof_leaves_out_cannot_be(phase: Phase) -> None:
    """The states of a phase are built with some inputs and trainers only: no other is sound."""
    inputs, trainers, _ = POSSIBLE[phase]
    for input_, trainer in product(ANY_INPUT, ANY_TRAINER):
        if input_ in inputs and trainer in trainers:
            continue
        values: dict[str, Any] = {"W": 2, "window": 9, "fill target": 5, "T": 1, "mode": 1}
        values |= {"accumulation steps": 1}
        values |= {"others in the group of x": 1, "groups before": 1}
        situation = Situation(Source(values), Machine(phase, Closed))
        state = situation.state()._replace(input=input_, trainer=trainer)
        assert sound(situation.setup(), situation.state())
        assert not sound(situation.setup(), state), (input_, trainer)


# ---------------------------------------------------------------- tuples of any length


def prove(body: Any) -> Any:
    return PLAIN.prove(Obligation("test", "", body, None))


def test_lengths_and_slices_of_tuples_of_any_length() -> None:
    def body(source: Source, _: Any) -> Any:
        before, after = source.int("before"), source.int("after")
        source.assume(both(before >= 0, after >= 0))

        def claim() -> Any:
            x = Sample(7, 1, 1)
            row = Row((*some_groups(before, before), (x,), *some_groups(after, after)))
            first, rest = row[:before], row[before:]
            return both(
                len(row) == before + 1 + after,
                len(first) == before,
                len(rest) == 1 + after,
                sum(1 for group in rest for s in group if s is x) == 1,
                sum(len(group) for group in row) == before + 1 + after,
            )

        return claim

    found = prove(body)
    assert found.proof is Proof.PROVED, found.why
    assert found.paths == 4


def test_a_slice_inside_of_what_stands_for_many_is_refused() -> None:
    def body(source: Source, _: Any) -> Any:
        size = source.int("size")
        source.assume(size >= 2)
        return lambda: len(Row(some_groups(size, size))[: size - 1]) == size - 1

    found = prove(body)
    assert found.proof is Proof.UNKNOWN
    assert "cuts through" in found.why


def test_what_many_stand_for_cannot_be_cut_or_counted_by_mistake() -> None:
    """`(...)[:4]` of a window must not be taken for the window."""
    import z3

    many = Several(Size(z3.Int("n")))
    x = Sample(7, 1, 1)

    def body(source: Source, _: Any) -> Any:
        size = source.int("size")
        source.assume(size >= 1)
        return lambda: len((Row((x,)) + some_samples(size))[:4]) == size + 1

    assert prove(body).proof is not Proof.PROVED
    assert Row((x, many))[0] is x
    with pytest.raises(NeedsConcrete, match="depends on how many"):
        Row((many, x))[1]
    with pytest.raises(NeedsConcrete, match="one place to another"):
        Row((many, x))[::-1]
    assert Row((1, 2, 3))[::-1] == (3, 2, 1)


def test_a_proof_whose_witness_is_false_on_plain_values_is_none() -> None:
    def body(source: Source, _: Any) -> Any:
        x = source.int("x")
        return lambda: type(x).__name__ != "int"  # true of a symbol, false of a number

    found = prove(body)
    assert found.proof is Proof.UNKNOWN
    assert "false of the witness" in found.why


def test_plain_numbers_give_plain_tuples() -> None:
    assert length(some_samples(3)) == len(some_samples(3)) == 3
    assert [len(group) for group in some_groups(3, 5)] == [1, 1, 3]
    assert some_groups(2, 0) == ((), ())
    assert some_groups(0, 0) == ()
    assert Row((1, 2, 3))[1:] == (2, 3)
    assert Row((1, 2, 3))[1] == 2
    assert len(totals_of(some_groups(2, 2))) == 2
    several = Step(0, 0, SeveralGroups(4, 4), NOTHING, NOTHING)  # type: ignore[arg-type]
    assert length((several, several)) == 8
    assert length((Several(3), Sample(0, 1, 1))) == 4


def test_a_size_multiplies_the_empty_group_and_nothing_else() -> None:
    import z3

    size = Size(z3.Int("n"))
    assert isinstance(((),) * size, Row)  # type: ignore[operator]
    assert isinstance(2 * size, SymInt)
    with pytest.raises(NeedsConcrete):
        _ = (1,) * size  # type: ignore[operator]


# ---------------------------------------------------------------- claims of several parts


def test_a_counterexample_names_the_part_that_broke() -> None:
    def body(source: Source, _: Any) -> Any:
        x = source.int("x")
        return lambda: Parts(first=x == x, second_part=x < 5)

    found = prove(body)
    assert (found.proof, found.broken) == (Proof.REFUTED, ("second-part",))


def test_a_claim_about_nothing_proves_nothing() -> None:
    def body(source: Source, _: Any) -> Any:
        x = source.int("x")
        return lambda: OUTSIDE if x == x else True

    found = prove(body)
    assert found.proof is Proof.UNKNOWN
    assert "no values at all" in found.why


def test_the_witness_is_of_what_the_claim_is_about() -> None:
    def body(source: Source, _: Any) -> Any:
        x = source.int("x")
        return lambda: x > 40 if x > 41 else OUTSIDE

    found = prove(body)
    assert found.proof is Proof.PROVED
    assert found.witness["x"] > 41


@pytest.mark.parametrize(
    ("mutant", "part"),
    [
        ("a sample is lost", "identity-coverage"),
        ("nothing is asked for", "deadlock-freedom"),
        ("a step is skipped", "uniform-abort"),
    ],
)
def test_a_mutant_breaks_the_part_of_the_invariant_that_it_should(mutant: str, part: str) -> None:
    (about,) = (o for o in ledger.THEOREM.obligations if "Totalled" in o.name)
    found = prover(ledger).refute(about, about.mutants[mutant])
    assert found.proof is Proof.REFUTED
    assert part in found.broken
