"""One conformance suite for every trainer adapter: the same data, model, reference and verdict.

How an adapter uses it, in a function that runs on each rank (see `tests/trainers/test_ddp.py`):

    def train(rank, world_size, case) -> RankResult:
        loader = make_loader(case, rank)          # records the infos of what it yields
        model = make_model(case.dtype)
        optimizer = make_optimizer(model.parameters())
        counter = StepCounter(optimizer)
        ...                                       # case.epochs epochs, in the framework's own way
        return RankResult(parameters_of(model), counter.steps, loader.infos)

and in the test process:

    results = run_ranks(train_all, 2, ..., timeout=120)
    judge(Subject("ddp", torch.__version__), case, results, naive=results_without_the_scale)

`judge` raises NonconformingError naming everything that is wrong, and returns a Verdict.
`verdicts.write_verdicts(framework, verdicts)` keeps them for the table of all frameworks. What the
tests of several adapters check in the same way is in `tests/trainers/checks.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import odb
from odb.info import ODBStepInfo
from tests.trainers.verdicts import NonconformingError, Verdict

WORLD_SIZE = 2
VOCABULARY = 64
WIDTH = 16
SHARDS = (range(29), range(29, 38))
"""The samples of each rank: rank 1 is drained long before rank 0."""

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-9}
CLEARLY_WRONG = 1e-4
"""A training without the loss scale must be off by more than this, or the case shows nothing."""


@dataclass(frozen=True)
class Case:
    """accumulation: steps of a block, for one step of the optimizer. clip_norm: what gradients are
    clipped to before it, if they are."""

    accumulation: int = 1
    dtype: torch.dtype = torch.float32
    epochs: int = 2
    clip_norm: float | None = None

    def __str__(self) -> str:
        return f"A={self.accumulation}, {str(self.dtype).removeprefix('torch.')}"


CASES = tuple(Case(a, dtype) for dtype in (torch.float32, torch.float64) for a in (1, 3))
FLOAT32_CASES = tuple(case for case in CASES if case.dtype is torch.float32)


# ---------------------------------------------------------------- data


class LabelledTokens(Dataset[dict[str, Tensor]]):
    """Sample i is made of the number i. Most labels are masked, on rank 0 far more than on rank 1,
    so that a mean over rows, batches or ranks is not the mean over label tokens."""

    def __len__(self) -> int:
        return SHARDS[-1].stop

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = random.Random(index)
        length = draw.randint(4, 30)
        tokens = [draw.randrange(1, VOCABULARY) for _ in range(length)]
        often = 0.1 if index in SHARDS[0] else 0.5
        kept = {draw.randrange(1, length), *(i for i in range(length) if draw.random() < often)}
        labels = [token if i in kept else -100 for i, token in enumerate(tokens)]
        return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)}


def make_dataset() -> LabelledTokens:
    """What all ranks train on; SHARDS says which of it is whose."""
    return LabelledTokens()


class EpochOrder:
    """A rank's own samples, in a new order each epoch."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(self.indices, len(self.indices)))

    def __len__(self) -> int:
        return len(self.indices)


class RecordingLoader(odb.ODBDataLoader):
    """Remembers the info of every step that it yields, over all epochs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.infos: list[ODBStepInfo] = []
        super().__init__(*args, **options)

    def steps(self) -> Iterator[tuple[Any, ODBStepInfo]]:  # type: ignore[override]
        return self._recorded(super().steps())

    def _recorded(
        self, source: Iterator[tuple[Any, ODBStepInfo]]
    ) -> Iterator[tuple[Any, ODBStepInfo]]:
        for batch, info in source:
            self.infos.append(info)
            yield batch, info


def make_loader(case: Case, rank: int, **options: Any) -> RecordingLoader:
    """The loader of a case on a rank (of the data-parallel ranks, if there are others)."""
    settings: dict[str, Any] = {
        "sampler": EpochOrder(SHARDS[rank]),
        "token_budget": 64,
        "window": 8,
        "slow_start": 4,
        "timeout": 60.0,
        "accumulation_steps": case.accumulation,
    }
    return RecordingLoader(make_dataset(), **{**settings, **options})


def make_info(**fields: Any) -> ODBStepInfo:
    """An info for tests that need one without a loader; what is not given is 0."""
    empty = dict.fromkeys(ODBStepInfo.__dataclass_fields__, 0)
    return ODBStepInfo(**{**empty, "idle": False, "sample_ids": (), "block_steps": 1, **fields})  # type: ignore[arg-type]


def said(attempt: Callable[[], object]) -> str:
    """What an IntegrationError says that this raises, or "no error"."""
    try:
        attempt()
    except odb.IntegrationError as error:
        return str(error)
    return "no error"


# ---------------------------------------------------------------- model


class CausalModel(nn.Module):
    """A language model that looks at one token: small, but every framework can wrap it.

    It takes and gives what Hugging Face models do. The result is a plain dict, as FSDP2 finds
    tensors only in containers that it knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        logits = self.head(hidden + self.down(torch.tanh(self.up(hidden))))
        # In the logits' own precision: a lower one is the framework's doing, not the model's.
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        return {"loss": loss, "logits": logits}


def make_model(dtype: torch.dtype = torch.float32) -> CausalModel:
    """The same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return CausalModel().to(dtype)


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.5}


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """Momentum carries every earlier error on; Adam would hide a wrong scale."""
    return torch.optim.SGD(parameters, **SGD)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, by their names in a bare CausalModel (collective if sharded)."""
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.detach()
        if hasattr(full, "full_tensor"):
            full = full.full_tensor()
        found[_bare(name)] = full.cpu().clone()
    return found


def _bare(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:])


class StepCounter:
    """Counts the steps that an optimizer really takes, whatever a framework wraps around it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.steps += 1


# ---------------------------------------------------------------- results and reference


@dataclass(frozen=True)
class RankResult:
    """What a rank brings home."""

    parameters: Mapping[str, Tensor]
    optimizer_steps: int
    infos: Sequence[ODBStepInfo]


def blocks_of(ranks: Sequence[Sequence[ODBStepInfo]]) -> dict[tuple[int, int], list[int]]:
    """The samples of all ranks and steps of each (epoch, block), in the order of blocks."""
    found: dict[tuple[int, int], list[int]] = {}
    for infos in ranks:
        for info in infos:
            found.setdefault((info.epoch, info.block), []).extend(info.sample_ids)  # type: ignore[arg-type]
    return {key: sorted(found[key]) for key in sorted(found)}


def label_tokens(samples: Iterable[int]) -> int:
    """What the loss is averaged over."""
    dataset = make_dataset()
    return sum(int((dataset[i]["labels"][1:] != -100).sum()) for i in samples)


def trained(
    case: Case,
    ranks: Sequence[Sequence[ODBStepInfo]],
    make_model: Callable[[torch.dtype], Any],
    schedule: Callable[[int], float] = lambda _: 1.0,
) -> Any:
    """The model of one process that takes, for each block, one step on the mean loss over all label
    tokens of the block. It uses nothing of the infos but which samples are in which block.

    schedule: the factor of the learning rate at each step.
    """
    model = make_model(case.dtype).train()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    collate, dataset = odb.PadCollate(), make_dataset()
    for samples in blocks_of(ranks).values():
        optimizer.zero_grad()
        model(**collate([dataset[i] for i in samples]))["loss"].backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        scheduler.step()
    return model


def reference(case: Case, ranks: Sequence[Sequence[ODBStepInfo]]) -> dict[str, Tensor]:
    """The parameters of such a process, with the suite's own model."""
    return parameters_of(trained(case, ranks, make_model))


def largest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Over all parameters; infinite if they are not the same ones, or one is not a number."""
    if set(first) != set(second):
        return float("inf")
    difference = 0.0
    for name, mine in first.items():
        gap = (mine.double() - second[name].double()).abs().max().item()
        difference = max(difference, gap if gap == gap else float("inf"))
    return difference


# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Subject:
    """What is judged. runs_on_cpu: "yes", or which part was tested here and why not the rest.
    extra_lines: lines that a user adds to the same training without odb, imports included.
    reference: what parameters are compared with; another one for another model."""

    framework: str
    version: str
    runs_on_cpu: str = "yes"
    extra_lines: int = 0
    reference: Callable[[Case, Sequence[Sequence[ODBStepInfo]]], Mapping[str, Tensor]] = reference


def judge(
    subject: Subject,
    case: Case,
    results: Sequence[RankResult],
    *,
    naive: Sequence[RankResult] | None = None,
    members: int = 1,
) -> Verdict:
    """Raise NonconformingError unless the ranks did what the contract says.

    members: ranks, next to each other, that share a data-parallel coordinate and so a batch.
    """
    verdict = measure(subject, case, results, naive=naive, members=members)
    if verdict.problems:
        raise NonconformingError(verdict)
    return verdict


def measure(
    subject: Subject,
    case: Case,
    results: Sequence[RankResult],
    *,
    naive: Sequence[RankResult] | None = None,
    members: int = 1,
) -> Verdict:
    """The verdict, whatever it is."""
    infos = [list(result.infos) for result in results]
    seats = infos[::members]
    blocks = blocks_of(seats)
    difference = difference_of(subject, case, results, members)
    naive_difference = None if naive is None else difference_of(subject, case, naive, members)
    of_steps = list(_problems_of_steps(case, results, blocks, members))
    of_samples = list(_problems_of_samples(case, seats))
    problems = [*of_steps, *of_samples, *_problems_of_infos(case, infos, blocks)]
    if difference > TOLERANCE[case.dtype]:
        problems.append(
            f"parameters are off by {difference:.2e} (allowed: {TOLERANCE[case.dtype]})"
        )
    if naive_difference is not None and naive_difference < CLEARLY_WRONG:
        problems.append(f"the naive arm is off by {naive_difference:.2e} only: it shows nothing")
    return Verdict(
        framework=subject.framework,
        version=subject.version,
        runs_on_cpu=subject.runs_on_cpu,
        extra_lines=subject.extra_lines,
        accumulation=case.accumulation,
        dtype=str(case.dtype).removeprefix("torch."),
        max_difference=difference,
        naive_difference=naive_difference,
        blocks=len(blocks),
        optimizer_steps=tuple(result.optimizer_steps for result in results),
        idle_steps=sum(info.idle for rank in seats for info in rank),
        steps_equal=not of_steps,
        samples_once=not of_samples,
        problems=tuple(problems),
    )


def difference_of(
    subject: Subject, case: Case, results: Sequence[RankResult], members: int = 1
) -> float:
    """How far a training is from the reference on its own batches: the largest of any rank."""
    expected = subject.reference(case, [result.infos for result in results[::members]])
    return max(largest_difference(result.parameters, expected) for result in results)


def _problems_of_steps(
    case: Case, results: Sequence[RankResult], blocks: Mapping[Any, Any], members: int
) -> Iterator[str]:
    for rank, result in enumerate(results):
        if result.optimizer_steps != len(blocks):
            taken = f"{result.optimizer_steps} optimizer steps for {len(blocks)} blocks"
            yield f"rank {rank} took {taken}"
    if len({len(result.infos) for result in results}) != 1:
        yield f"ranks took different steps: {[len(result.infos) for result in results]}"
    for rank, result in enumerate(results):
        leader = rank - rank % members
        if list(result.infos) != list(results[leader].infos):
            yield f"rank {rank} did not see the batches of rank {leader}"
        epochs = [info.epoch for info in result.infos]
        if epochs != sorted(epochs) or len(set(epochs)) != case.epochs:
            yield f"rank {rank} took epochs {sorted(set(epochs))}, not {case.epochs} of them"


def _problems_of_samples(case: Case, seats: Sequence[Sequence[ODBStepInfo]]) -> Iterator[str]:
    for epoch in range(case.epochs):
        seen = sorted(
            i for rank in seats for info in rank if info.epoch == epoch for i in info.sample_ids
        )
        missing = sorted(set(range(len(make_dataset()))) - set(seen))
        twice = sorted({i for i in seen if seen.count(i) > 1})
        if missing or twice:
            yield f"epoch {epoch}: samples missing: {missing}, more than once: {twice}"


def _problems_of_infos(
    case: Case, ranks: Sequence[Sequence[ODBStepInfo]], blocks: Mapping[tuple[int, int], list[int]]
) -> Iterator[str]:
    if not any(info.idle for rank in ranks for info in rank):
        yield "no rank was ever idle: the case shows nothing about idle steps"
    weights = {key: label_tokens(samples) for key, samples in blocks.items()}
    for rank, infos in enumerate(ranks):
        for info in infos:
            if info.block_weight != weights[info.epoch, info.block]:
                yield f"rank {rank}: {info} is wrong about the weight of its block"
            if not 1 <= info.block_steps <= case.accumulation:
                yield f"rank {rank}: {info} has a block of the wrong size"
