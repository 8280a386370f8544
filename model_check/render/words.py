"""How samples, groups, steps, outcomes and worlds are put into words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from spec.config import Config, CostRule, Idle, Mode
from spec.grouping import oversize
from spec.messages import AbortedBy, ClosedBy, Finished, Lost, Mismatched, Outcome, Step
from spec.samples import Group, Sample
from spec.world import State, Stop, World

PROMISES = {
    "step-alignment": "every rank takes the same steps, in the same order",
    "deadlock-freedom": "nobody ever waits for something that nobody will do",
    "bounded-termination": "an epoch ends within a stated number of rounds and steps",
    "identity-coverage": "every sample that enters a rank leaves it exactly once",
    "quota-closure": "in quota mode all ranks stop at the step that meets the quota",
    "budget": "a batch of two or more samples stays within the budget",
    "bounded-memory": "a rank holds no more samples, and queues no more steps, than it may",
    "bounded-delay": "a sample leaves within as many rounds as the window has places",
    "exact-gradient": "the totals by which losses are scaled are true",
    "uniform-abort": "if a rank fails, all ranks end with its error, at the same step",
    "epochs-apart": "no report of one epoch meets a report of another",
}
"""What each promise says, in a line."""

CONSEQUENCES = {
    "step-alignment": "Ranks whose steps differ hang in their next collective, or mix gradients"
    " of different steps.",
    "deadlock-freedom": "From here nobody can go on, ever: the training job hangs.",
    "bounded-termination": "An epoch could go on longer than anybody planned for.",
    "identity-coverage": "The model trains on other samples than it was given, and nobody is told.",
    "quota-closure": "The ranks stop too early or too late, or idle where they should not.",
    "budget": "Such a batch can exceed the memory of the accelerator.",
    "bounded-memory": "Memory grows beyond what was planned for.",
    "bounded-delay": "Samples like this one starve while others are trained on.",
    "exact-gradient": "Losses are scaled wrongly, so the gradient is not that of the global mean.",
    "uniform-abort": "Ranks disagree on where training ended, or lose steps already agreed on.",
    "epochs-apart": "Healthy ranks would end with an error, or mix two epochs.",
}
"""Why it matters that a promise falls."""


def many(count: int, thing: str) -> str:
    """A count with its thing: one step, 2 steps."""
    return f"{count} {thing}" + ("" if count == 1 else "s")


def listed(items: Iterable[str]) -> str:
    """Items as in a sentence: a, b and c."""
    *first, last = list(items) or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def names(seqs: Iterable[int]) -> str:
    """Samples by their numbers."""
    numbers = [str(seq) for seq in sorted(seqs)]
    if not numbers:
        return "no sample"
    return ("sample " if len(numbers) == 1 else "samples ") + listed(numbers)


def seqs_of(mask: int) -> tuple[int, ...]:
    """The samples that a log of `spec.world.Node` lists, a bit for each."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def sample(world: World, one: Sample) -> str:
    """A sample with what matters about it."""
    facts = [f"cost {one.cost}"]
    if one.weight != one.cost:
        facts.append(f"loss weight {one.weight}")
    if oversize(world.config.budget, one):
        facts.append("above the budget")
    return f"sample {one.seq} ({', '.join(facts)})"


def content(group: Group) -> str:
    """The samples of a group; an empty one is idle."""
    return names(s.seq for s in group) if group else "idle"


def groups(several: Sequence[Group]) -> str:
    """Groups by the numbers of their samples: {0, 1} {2}."""
    sets = ("{" + ", ".join(str(s.seq) for s in group) + "}" for group in several)
    return " ".join(sets)


def step(one: Step, of_all: bool = False) -> str:
    """A step of one rank with its samples, and (if asked for) how many it holds on all ranks."""
    total = f"; {one.total.samples} on all ranks" if of_all else ""
    return f"step {one.number} ({content(one.group)}{total})"


def outcome(how: Outcome) -> str:
    """How an epoch ended on a rank."""
    match how:
        case Finished():
            return "finished"
        case ClosedBy(rank):
            return f"closed, as the trainer of rank {rank} stopped early"
        case AbortedBy(rank):
            return f"aborted, as rank {rank} failed"
        case Mismatched(term, low, high):
            return f"an error, as ranks differ in their {term}: {low} and {high}"
        case Lost(None):
            return "an error, as a rank was lost"
        case Lost(rank):
            return f"an error, as rank {rank} was lost"


# ---------------------------------------------------------------- the world


def mode(config: Config) -> str:
    """When an epoch ends, and what a drained rank does."""
    if config.mode is Mode.JOIN:
        idle = "takes idle steps" if config.idle is Idle.PAD else "tells its trainer to stop"
        return f"join mode: ends when every sample is delivered; a drained rank {idle}"
    if config.quota is None:
        return "quota mode without a quota: ends before a rank would have nothing to deliver"
    return f"quota mode: ends at the step that meets {config.quota} samples on all ranks together"


def setting(world: World, first: State) -> tuple[tuple[str, str], ...]:
    """The world of a run, as labels with their values."""
    config = world.config
    rule = "padded" if config.budget.rule is CostRule.PADDED else "summed"
    window = many(config.window, "sample")
    if config.slow_start < config.window:
        window += f" (slow start: {config.slow_start} in the first round)"
    costs = listed(sorted({str(cost) for cost, _ in world.kinds}, key=int))
    rows = [
        ("ranks", str(world.world_size)),
        ("mode", mode(config)),
        ("window", window),
        ("budget", f"{many(config.budget.tokens, 'token')} for a batch, {rule}"),
        ("input", f"up to {many(world.samples, 'sample')} on each rank, of cost {costs}"),
        ("queue", f"room for {many(world.queue, 'step')} between batcher and trainer"),
        ("faults", _faults(world, first)),
    ]
    if world.epochs > 1:
        rows.append(("epochs", str(world.epochs)))
    if not world.coupled:
        rows.append(("gradient", "left out: trainers do not wait for each other"))
    return tuple(rows)


def _faults(world: World, first: State) -> str:
    found = []
    if first.faults:
        kinds = {
            "reading fails": world.faults.input,
            "a batch cannot be made": world.faults.batch,
            "a process dies": world.faults.crash,
        }
        what = " or ".join(kind for kind, wanted in kinds.items() if wanted)
        found.append(f"at most {first.faults} ({what})")
    if world.stop is Stop.TOGETHER and first.stop_after is not None:
        steps = many(first.stop_after, "step")
        when = f"after {steps}" if first.stop_after else "before its first step"
        found.append(f"every trainer stops early, {when}")
    if first.stops:
        found.append("one trainer may stop early")
    return "; ".join(found) or "none"


# ---------------------------------------------------------------- what the checker says

SAMPLE = r"Sample\(seq=(\d+), cost=\d+, weight=\d+, extras=\([^)]*\)\)"
SAMPLES = re.compile(rf"[(\[]{SAMPLE}(?:, {SAMPLE})*,?[)\]]")
MISMATCH = re.compile(r"Mismatched\(term='(\w+)', low=(\d+), high=(\d+)\)")
STEPS = re.compile(r"steps \[(\d+)\] where \[(\d+)\] come next")
COSTS = re.compile(r"holds \[([\d, ]+)\]")
NUMBERS = re.compile(r"samples \[([\d, ]+)\]")


def plain(text: str) -> str:
    """What a check reports, without Python's notation."""

    def by_number(match: re.Match[str]) -> str:
        return names(int(seq) for seq in re.findall(r"seq=(\d+)", match[0]))

    text = SAMPLES.sub(by_number, text)
    text = re.sub(SAMPLE, r"sample \1", text)
    text = MISMATCH.sub(r"the \1: \2 on one rank, \3 on another", text)
    text = NUMBERS.sub(lambda match: names(int(n) for n in match[1].split(", ")), text)
    text = re.sub(r"\b1 (sample|step|round|state)s\b", r"1 \1", text)
    text = re.sub(r"\b(1 (?:sample|step)) were\b", r"\1 was", text)
    text = re.sub(r"\b(sample \d+) are\b", r"\1 is", text)
    text = COSTS.sub(lambda match: f"holds samples of cost {listed(match[1].split(', '))}", text)
    text = STEPS.sub(r"step \1 where step \2 comes next", text)
    return re.sub(r"queued (?:\[\]|\(\))", "queued none", text)
