"""The loader in one process: settings, stats, streams, epochs, early stops, the default collate."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import odb
from odb.batches import Spare
from odb.chunks import NumbersColumn, ObjectColumn, TensorColumn, pack
from odb.costs import CostModel, Measured, default_cost, default_loss_weight
from odb.outbox import Outbox
from odb.pinning import pinned

Tokens = dict[str, torch.Tensor]


def tokens(*values: int) -> torch.Tensor:
    return torch.tensor(values)


class Sized(Dataset[Tokens]):
    """Sample i has lengths[i] tokens, all i."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tokens:
        return {"input_ids": torch.full((self.lengths[index],), index)}


def ids_of(loader: odb.ODBDataLoader) -> list[Any]:
    return [i for _, info in loader.steps() for i in info.sample_ids]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"token_budget": 0}, "token budget"),
        ({"token_budget": -5}, "token budget"),
        ({"token_budget": 12.5}, "token budget"),
        ({"window": 0}, "window"),
        ({"max_samples": 0}, "max_samples"),
        ({"batch_size": 8}, "max_samples="),
        ({"drop_last": True}, "every sample"),
        ({"batch_sampler": [[0]]}, "sampler="),
        ({"idle": "wait"}, "'pad', 'stop'"),
        ({"loss_scaling": "mean"}, "'exact', 'none'"),
        ({"on_error": "ignore"}, "'raise', 'skip'"),
        ({"quota": 10}, "join=False"),
        ({"join": False, "idle": "stop"}, 'idle="pad"'),
        ({"timeout": 0}, "timeout"),
        ({"prefetch": 0}, "prefetch"),
        ({"shuffle": True, "sampler": [0]}, "exclude"),
        ({"tokens": 5}, "no argument 'tokens'"),
        ({"seed": -1}, "seed"),
        ({"chunk": 0}, "chunk"),
        ({"sharded": "rank"}, '"workers"'),
        ({"prefetch_factor": 4}, "needs workers"),
        ({"persistent_workers": True}, "needs workers"),
        ({"sampler": iter([0])}, "one epoch only"),
        ({"resources": {"patches": odb.Resource(len, 0)}}, "resource"),
    ],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(odb.ConfigError, match=says):
        odb.ODBDataLoader(Sized(1), **{"token_budget": 8, **settings})


def test_what_dataloader_users_write_by_habit_is_fine() -> None:
    loader = odb.ODBDataLoader(Sized(1, 1), token_budget=8, batch_size=1, drop_last=False)
    assert ids_of(loader) == [0, 1]


@pytest.mark.parametrize("dataset", [DataLoader([1]), 5, iter([1])])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(odb.ConfigError):
        ids_of(odb.ODBDataLoader(dataset, token_budget=8))


# ---------------------------------------------------------------- epochs


def test_epochs_advance_shuffle_and_repeat() -> None:
    loader = odb.ODBDataLoader(Sized(*[2] * 30), token_budget=8, shuffle=True, seed=1)
    first, second = ids_of(loader), ids_of(loader)
    assert loader.epoch == 2
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    loader.set_epoch(0)
    assert ids_of(loader) == first
    with pytest.raises(odb.ConfigError, match="epoch"):
        loader.set_epoch(-1)


def test_a_new_epoch_ends_one_that_still_runs() -> None:
    loader = odb.ODBDataLoader(Sized(*[2] * 30), token_budget=4, window=4)
    old = loader.steps()
    next(old)
    assert sorted(ids_of(loader)) == list(range(30))
    assert list(old) == []
    assert loader.stats.closed_by is None


def test_a_break_leaves_no_thread_and_lists_what_was_read() -> None:
    loader = odb.ODBDataLoader(Sized(*[2] * 30), token_budget=4, window=4, prefetch=1)
    taken: list[int] = []
    for batch in loader:
        taken += odb.pop_step_info(batch).sample_ids
        break
    deadline = time.monotonic() + 10
    while any(t.name == "odb-driver" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stats = loader.stats
    assert stats.closed_by == 0
    assert not stats.complete
    assert not set(stats.undelivered) & set(taken)
    assert 0 < len(stats.undelivered) <= 4


def test_an_exception_in_the_training_loop_leaves_the_loader_usable() -> None:
    loader = odb.ODBDataLoader(Sized(*[2] * 30), token_budget=4, window=4)

    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert sorted(ids_of(loader)) == list(range(30))
    loader.close()
    assert sorted(ids_of(loader)) == list(range(30))  # opens everything anew


def test_the_driver_keeps_to_the_prefetch() -> None:
    made: list[int] = []

    def collate(samples: list[Tokens]) -> dict[str, int]:
        made.append(1)
        return {"n": len(samples)}

    loader = odb.ODBDataLoader(
        Sized(*[2] * 30), token_budget=2, window=4, prefetch=2, collate_fn=collate
    )
    steps = loader.steps()
    next(steps)
    time.sleep(0.3)
    assert len(made) <= 1 + 2 + 1  # taken, queued, and one waiting for room
    steps.close()


# ---------------------------------------------------------------- what is delivered


def test_none_and_empty_samples_and_such_without_loss_are_listed() -> None:
    masked = {"input_ids": tokens(1, 2, 3), "labels": tokens(1, -100, -100)}
    good = {"input_ids": tokens(1, 2, 3), "labels": tokens(-100, -100, 3)}
    dataset = [None, {"input_ids": tokens()}, masked, good]
    loader = odb.ODBDataLoader(dataset, token_budget=8)
    (batch,) = loader
    assert odb.pop_step_info(batch).sample_ids == (3,)
    assert loader.stats.filtered == [
        (0, "the dataset returned None"),
        (1, "cost 0"),
        (2, "loss weight 0"),
    ]
    assert loader.stats.complete


def test_without_loss_scaling_no_loss_weight_is_taken() -> None:
    masked = {"input_ids": tokens(1, 2, 3), "labels": tokens(-100, -100, -100)}
    loader = odb.ODBDataLoader([masked], token_budget=8, loss_scaling="none")
    ((_, info),) = loader.steps()
    assert (info.loss_scale, info.local_weight) == (1.0, 1)


def test_stats_count_tokens_and_padding() -> None:
    loader = odb.ODBDataLoader(Sized(4, 2, 9), token_budget=8)
    list(loader.steps())
    stats = loader.stats
    assert (stats.steps, stats.samples, stats.tokens, stats.padded_tokens) == (2, 3, 15, 17)
    assert stats.oversize == [2]
    assert stats.padding == pytest.approx(2 / 17)


def test_further_resources_bound_a_batch() -> None:
    dataset = [{"input_ids": tokens(1), "patches": n} for n in (3, 3, 2, 9)]
    patches = odb.Resource(lambda sample: sample["patches"], 5)
    loader = odb.ODBDataLoader(dataset, token_budget=100, resources={"patches": patches})
    assert sorted(sorted(info.sample_ids) for _, info in loader.steps()) == [[0], [1, 2], [3]]
    assert loader.stats.oversize == [3]


def test_packed_batches_are_budgeted_by_their_sum() -> None:
    loader = odb.ODBDataLoader(Sized(5, 1, 1, 1), token_budget=8, packed=True)
    assert [info.local_samples for _, info in loader.steps()] == [4]
    padded = odb.ODBDataLoader(Sized(5, 1, 1, 1), token_budget=8)
    assert sorted(info.local_samples for _, info in padded.steps()) == [1, 3]


def test_the_collate_function_s_rounding_counts_against_the_budget() -> None:
    collate = odb.PadCollate(pad_to_multiple_of=8)
    loader = odb.ODBDataLoader(Sized(5, 5, 5), token_budget=16, collate_fn=collate)
    shapes = sorted(tuple(b["input_ids"].shape) for b, _ in loader.steps())
    assert shapes == [(1, 8), (2, 8)]


def test_a_cost_function_of_the_user_s() -> None:
    dataset = ["a", "bb", "cccc"]
    loader = odb.ODBDataLoader(dataset, token_budget=4, cost_fn=len, collate_fn=list)
    assert sorted(sorted(batch) for batch, _ in loader.steps()) == [["a", "bb"], ["cccc"]]


@pytest.mark.parametrize("cost", [1.5, -1, float("nan"), True, "3", None])
def test_a_cost_that_is_no_whole_number_names_the_sample(cost: Any) -> None:
    loader = odb.ODBDataLoader(["x"], token_budget=4, cost_fn=lambda s: cost, collate_fn=list)
    with pytest.raises(odb.PipelineError, match=r"sample 0.*cost_fn returned") as caught:
        ids_of(loader)
    assert isinstance(caught.value.__cause__, odb.SampleError)


def test_samples_whose_cost_cannot_be_found_say_what_to_pass() -> None:
    for sample in ("text", {"text": "x"}, (tokens(1), 3)):
        with pytest.raises(odb.PipelineError, match="pass cost_fn="):
            ids_of(odb.ODBDataLoader([sample], token_budget=4))


def test_a_collate_function_that_fails_names_the_samples_lost_with_it() -> None:
    def collate(samples: list[Tokens]) -> Any:
        if any(int(s["input_ids"][0]) == 2 for s in samples):
            raise KeyError("broken")
        return {"n": len(samples)}

    loader = odb.ODBDataLoader(Sized(2, 2, 2, 2), token_budget=2, collate_fn=collate)
    with pytest.raises(odb.PipelineError, match="broken") as caught:
        ids_of(loader)
    assert 2 in caught.value.lost


# ---------------------------------------------------------------- streams


class Counting(IterableDataset[Tokens]):
    """Yields the same samples everywhere; remembers the epoch it is told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tokens]:
        for i in range(self.count):
            yield {"input_ids": tokens(i, self.epoch)}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_stream_is_read_once_and_told_the_epoch(num_workers: int) -> None:
    loader = odb.ODBDataLoader(
        Counting(25),
        token_budget=8,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=lambda samples: [s["input_ids"].tolist() for s in samples],
    )
    for epoch in range(3):
        seen = [row for batch, _ in loader.steps() for row in batch]
        assert sorted(seen) == [[i, epoch] for i in range(25)]
    loader.close()


class Ranged(IterableDataset[Tokens]):
    """The pattern of PyTorch's docs: `worker_init_fn` gives each worker its range."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[Tokens]:
        return iter({"input_ids": tokens(i)} for i in range(self.start, self.end))


def give_range(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    each = (dataset.end - dataset.start) // info.num_workers
    dataset.start += worker * each
    dataset.end = dataset.start + each


def test_a_worker_init_fn_reaches_the_dataset() -> None:
    loader = odb.ODBDataLoader(
        Ranged(0, 20), token_budget=8, num_workers=2, sharded=True, worker_init_fn=give_range
    )
    seen = [t for batch, _ in loader.steps() for t in batch["input_ids"].flatten().tolist()]
    assert sorted(seen) == list(range(20))


class Failing(Counting):
    def __iter__(self) -> Iterator[Tokens]:
        yield from list(super().__iter__())[:3]
        raise OSError("the disk is gone")


def test_a_stream_that_fails_delivers_what_came_before_and_says_where() -> None:
    loader = odb.ODBDataLoader(Failing(9), token_budget=2, window=2, slow_start=1)
    steps = loader.steps()
    seen = sorted(i for _ in range(3) for i in next(steps)[1].sample_ids)
    assert seen == [0, 1, 2]
    with pytest.raises(odb.PipelineError, match=r"sample 3: OSError: the disk is gone"):
        next(steps)
    assert list(steps) == []


def test_a_stream_has_its_own_order() -> None:
    with pytest.raises(odb.ConfigError, match="own order"):
        odb.ODBDataLoader(Counting(3), token_budget=8, shuffle=True)


class ReadsMany(Sized):
    calls = 0

    def __getitems__(self, indices: list[int]) -> list[Tokens]:
        ReadsMany.calls += 1
        if 5 in indices:
            raise ValueError("a bad index in the chunk")
        return [self[i] for i in indices]


def test_datasets_that_read_many_at_once_do() -> None:
    loader = odb.ODBDataLoader(ReadsMany(*[2] * 9), token_budget=8)
    assert sorted(ids_of(loader)) == list(range(9))  # read one by one, 5 is fine
    assert ReadsMany.calls == 1


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("sample", "cost", "weight"),
    [
        ({"input_ids": tokens(1, 2, 3)}, 3, 3),
        ({"input_ids": [1, 2, 3], "labels": [7, -100, 7]}, 3, 1),
        ({"input_ids": np.array([1, 2, 3]), "labels": np.array([7, 7, 7])}, 3, 2),
        ({"input_ids": tokens(1, 2, 3), "labels": tokens(-100, 7, 7)}, 3, 2),
        ({"input_ids": tokens(1, 2, 3), "labels": torch.tensor(1)}, 3, 1),
        ({"input_ids": tokens(1, 2, 3), "labels": 1}, 3, 1),
        (tokens(1, 2), 2, 2),
        ([1, 2, 3], 3, 3),
        ([], 0, 0),
    ],
)
def test_default_cost_and_weight(sample: Any, cost: int, weight: int) -> None:
    assert (default_cost(sample), default_loss_weight(sample)) == (cost, weight)


def test_a_cost_function_stands_in_for_missing_labels() -> None:
    loader = odb.ODBDataLoader(["abc"], token_budget=9, cost_fn=len, collate_fn=list)
    ((_, info),) = loader.steps()
    assert info.local_weight == 3


def test_a_sample_of_cost_0_is_not_weighed() -> None:
    model = CostModel(lambda s: 0, lambda s: 1 // 0)
    assert model.measure("x") == Measured(0, 0, ())


# ---------------------------------------------------------------- chunks


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


numbers = st.integers(-(2**63), 2**63 - 1)
fields = st.one_of(
    st.lists(numbers, max_size=4),
    st.lists(st.floats(allow_nan=False), max_size=4),
    st.lists(st.integers(-(2**70), 2**70), max_size=3),
    st.lists(st.booleans() | st.integers(0, 3), max_size=3),
    st.text(max_size=3),
    st.none(),
    st.lists(numbers, max_size=4).map(lambda v: torch.tensor(v, dtype=torch.int64)),
    st.lists(st.integers(0, 9), min_size=4, max_size=4).map(
        lambda v: torch.tensor(v, dtype=torch.int32).reshape(2, 2)
    ),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(
        lambda v: np.array(v, dtype=np.float32)
    ),
    st.lists(st.text(max_size=2), min_size=1, max_size=2).map(np.array),
)
samples_ = st.one_of(
    st.fixed_dictionaries({"a": fields, "b": fields}),
    st.tuples(fields, fields),
    fields,
    st.dictionaries(st.text(max_size=1), fields, max_size=2),
    st.just(()),
)


@given(st.lists(samples_, min_size=1, max_size=5))
def test_a_chunk_gives_back_what_was_packed(samples: list[Any]) -> None:
    sent = pickle.loads(pickle.dumps(pack(samples)))
    assert equal(list(sent.own().unpack()), samples)


def test_what_is_made_of_numbers_travels_flat() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    packed = pack([{"ids": [1, 2], "x": tokens(1), "s": "a"}, {"ids": [3], "x": empty, "s": ""}])
    assert [type(c) for c in packed.columns] == [NumbersColumn, TensorColumn, ObjectColumn]


def test_special_tensors_travel_as_they_are() -> None:
    for special in (torch.ones(2, requires_grad=True), torch.ones(2).to_sparse()):
        packed = pack([{"x": special}])
        assert isinstance(packed.columns[0], ObjectColumn)


def test_a_spare_survives_what_collate_does_to_it() -> None:
    original = {"input_ids": tokens(1, 2), "labels": [1, 2]}
    spare = Spare.of(original)
    taken = spare.sample()
    taken["input_ids"].zero_()
    taken["labels"].clear()
    del taken["labels"]
    assert equal(spare.sample(), original)
    assert spare.packed.buffers[0].flat.untyped_storage().nbytes() == 4 * 8


# ---------------------------------------------------------------- collate


def test_pads_the_usual_fields() -> None:
    batch = odb.PadCollate()(
        [
            {"input_ids": tokens(1, 2, 3), "labels": tokens(1, 2, 3), "id": 7, "text": "x"},
            {"input_ids": tokens(4), "labels": tokens(4), "id": 8, "text": "y"},
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["id"].tolist() == [7, 8]
    assert batch["text"] == ["x", "y"]


def test_pads_to_the_left_and_to_a_multiple_with_other_values() -> None:
    collate = odb.PadCollate({"input_ids": 9}, padding_side="left", pad_to_multiple_of=4)
    batch = collate([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert batch["input_ids"].tolist() == [[9, 9, 1, 2], [9, 9, 9, 3]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_keeps_dtypes_and_further_dimensions() -> None:
    pad = odb.PadCollate({"x": 0.5, "b": 0})
    rows = [{"x": torch.ones(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)},
            {"x": torch.ones(1, 3), "b": torch.ones(2, dtype=torch.bfloat16)}]  # fmt: skip
    batch = pad(rows)
    assert batch["x"].shape == (2, 2, 3)
    assert batch["x"][1, 1].tolist() == [0.5] * 3
    assert batch["b"].dtype is torch.bfloat16


def test_bare_sequences_become_input_ids() -> None:
    batch = odb.PadCollate()([[1, 2], [3]])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]


def test_what_it_cannot_pad_says_what_to_pass() -> None:
    with pytest.raises(odb.CostError, match="pad_values"):
        odb.PadCollate()([{"x": tokens(1, 2)}, {"x": tokens(1)}])
    with pytest.raises(odb.CostError, match="collate_fn="):
        odb.PadCollate()([object()])
    with pytest.raises(odb.ConfigError, match="padding_side"):
        odb.PadCollate(padding_side="top")  # type: ignore[arg-type]
    with pytest.raises(odb.ConfigError, match="pad_to_multiple_of"):
        odb.PadCollate(pad_to_multiple_of=0)


# ---------------------------------------------------------------- small parts


def test_step_info_is_popped_once() -> None:
    (batch,) = odb.ODBDataLoader(Sized(2), token_budget=4)
    info = odb.pop_step_info(batch)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert info.all_samples_this_step == info.global_samples == 1
    assert (info.step, info.round, info.epoch, info.idle) == (0, 0, 0, False)
    with pytest.raises(odb.BatchTypeError, match="popped before"):
        odb.pop_step_info(batch)


def test_apply_refuses_what_it_cannot_equip() -> None:
    class Wrapped(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(odb.ConfigError, match="before a framework wraps it"):
        odb.apply(Wrapped([1]), token_budget=4)
    own = DataLoader(Sized(1, 1), batch_sampler=[[0, 1]])
    with pytest.raises(odb.ConfigError, match="batch_sampler"):
        odb.apply(own, token_budget=4)


def test_an_equipped_loader_has_no_length() -> None:
    loader = odb.apply(DataLoader(Sized(1, 1)), token_budget=4)
    with pytest.raises(TypeError, match="not known before"):
        len(loader)
    assert [odb.pop_step_info(b).sample_ids for b in loader] == [(0, 1)]
    assert isinstance(loader, DataLoader)
    assert type(DataLoader(Sized(1))) is DataLoader  # no class was changed


def test_an_outbox_hands_over_its_error_behind_the_last_item() -> None:
    outbox: Outbox[int] = Outbox(2)
    assert outbox.put(1)
    outbox.finish(ValueError("x"))
    assert outbox.take() == 1
    with pytest.raises(ValueError, match="x"):
        outbox.take()
    assert outbox.take() is None


def test_a_closed_outbox_wakes_its_producer() -> None:
    outbox: Outbox[int] = Outbox(1)
    outbox.put(1)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(outbox.put(2)))
    thread.start()
    outbox.close()
    thread.join(5)
    assert results == [False]
    assert outbox.take() is None


ERRORS = [
    odb.PipelineError(rank=1, step=2, reason="x", lost=(3,)),
    odb.PeerFailedError(rank=1, step=2, reason="x"),
    odb.PeerLostError(rank=None, step=2, reason="x"),
    odb.PeerLostError(rank=3, step=2, reason="x"),
    odb.ExchangeTimeoutError(step=2, timeout=3.0),
    odb.ExchangeTimeoutError(step=2, timeout=3.0, missing=(1, 4), report="rank 1: late"),
    odb.TooManySkippedError(skipped=3, sample=7),
    odb.WorkerLostError(worker=1, pid=17, signal="SIGKILL", exit_code=-9),
    odb.MismatchError(term="window", low=1, high=2),
    odb.SampleError(5, 1, "summary", "details"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_cross_processes(error: odb.ODBError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert {k: v for k, v in vars(other).items() if k[0] != "_"} == {
            k: v for k, v in vars(error).items() if k[0] != "_"
        }


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def test_pinning_reaches_every_tensor_of_a_batch() -> None:
    point = namedtuple("point", "x y")
    batch = {"a": [Pinnable(), 1], "b": (Pinnable(),), "c": point(Pinnable(), "text")}
    expected = {"a": ["pinned", 1], "b": ("pinned",), "c": point("pinned", "text")}
    assert pinned(batch) == expected
    assert pinned(UserDict(batch)) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinning_without_a_device_warns_and_goes_on() -> None:
    loader = odb.ODBDataLoader(Sized(2), token_budget=4, pin_memory=True)
    with pytest.warns(UserWarning, match="no CUDA device"):
        assert ids_of(loader) == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_batches_are_pinned() -> None:
    for batch, _ in odb.ODBDataLoader(Sized(2), token_budget=4, pin_memory=True).steps():
        assert batch["input_ids"].is_pinned()


# ---------------------------------------------------------------- found by a reviewer


def test_dtypes_and_pad_values_are_not_narrowed_to_the_first_row() -> None:
    pad = odb.PadCollate({"e": 0})
    assert pad([{"e": []}, {"e": [0.5, 0.75]}])["e"].tolist() == [[0, 0], [0.5, 0.75]]
    assert pad([{"e": [1]}, {"e": [0.5, 0.75]}])["e"].tolist() == [[1, 0], [0.5, 0.75]]
    wide = [{"e": torch.tensor([1], dtype=torch.int32)}, {"e": torch.tensor([2**40, 2])}]
    assert pad(wide)["e"].tolist() == [[1, 0], [2**40, 2]]
    assert odb.PadCollate({"e": 0.5})([{"e": [1]}, {"e": [5, 7]}])["e"].tolist() == [
        [1, 0.5],
        [5, 7],
    ]


def test_samples_of_different_fields_are_refused() -> None:
    for rows in (
        [{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}],
        [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
    ):
        with pytest.raises(odb.CostError, match="'labels'"):
            odb.PadCollate()(rows)


def test_numpy_numbers_and_nested_lists_become_tensors() -> None:
    labels = [{"labels": np.int64(1)}, {"labels": np.int64(0)}]
    assert odb.PadCollate()(labels)["labels"].tolist() == [1, 0]
    boxes = [{"bbox": [[1, 2, 3, 4]] * 2}, {"bbox": [[5, 6, 7, 8]]}]
    assert odb.PadCollate({"bbox": 0})(boxes)["bbox"].shape == (2, 2, 4)
    assert default_cost([np.int64(3), np.int64(4)]) == 2


def test_sequences_of_the_wrong_shape_say_so() -> None:
    with pytest.raises(odb.CostError, match="return_tensors"):
        odb.PadCollate()([{"input_ids": torch.ones(1, 8)}])
    pixels = [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}]
    with pytest.raises(odb.CostError, match="more than its first size"):
        odb.PadCollate({"x": 0})(pixels)


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
def test_a_class_label_weighs_one_whatever_its_name(name: str) -> None:
    assert default_loss_weight({"input_ids": tokens(1, 2, 3), name: 1}) == 1


class ByWorker(IterableDataset[Tokens]):
    """The pattern of PyTorch's docs: the dataset divides itself among workers, not among ranks."""

    def __iter__(self) -> Iterator[Tokens]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        return iter({"input_ids": tokens(i)} for i in range(first, 50, stride))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_divides_itself_by_worker(num_workers: int) -> None:
    loader = odb.ODBDataLoader(
        ByWorker(), token_budget=8, num_workers=num_workers, sharded="workers"
    )
    seen = [t for batch, _ in loader.steps() for t in batch["input_ids"].flatten().tolist()]
    assert sorted(seen) == list(range(50))


def test_a_failing_batch_names_its_samples_and_leaves_no_dummies_behind() -> None:
    def collate(samples: list[Tokens]) -> Any:
        if any(int(s["input_ids"][0]) == 5 for s in samples):
            raise ValueError("bad")
        return {"n": len(samples)}

    loader = odb.ODBDataLoader(Sized(*[2] * 9), token_budget=2, collate_fn=collate)
    idle: list[bool] = []
    with pytest.raises(odb.PipelineError, match=r"batch of the samples 5 failed: ValueError: bad"):
        idle.extend(info.idle for _, info in loader.steps())
    assert not any(idle)


def test_a_thread_s_exit_is_a_failure_too() -> None:
    def collate(samples: list[Tokens]) -> Any:
        raise SystemExit(3)

    with pytest.raises(odb.PipelineError, match="SystemExit"):
        ids_of(odb.ODBDataLoader(Sized(2), token_budget=2, collate_fn=collate))


def test_tensors_as_indices_name_samples_by_their_number() -> None:
    loader = odb.ODBDataLoader(Sized(*[2] * 5), token_budget=4, sampler=torch.randperm(5))
    assert sorted(ids_of(loader)) == list(range(5))


def test_apply_takes_a_loader_without_batches_and_lets_options_override() -> None:
    unbatched = odb.apply(DataLoader(Sized(1, 1), batch_size=None), token_budget=4)
    assert [odb.pop_step_info(b).sample_ids for b in unbatched] == [(0, 1)]
    own_order = odb.apply(DataLoader(Sized(1, 1), shuffle=True), token_budget=4, sampler=[1])
    assert [odb.pop_step_info(b).sample_ids for b in own_order] == [(1,)]
    with pytest.raises(odb.ConfigError, match="equipped already"):
        odb.apply(own_order, token_budget=4)


def test_a_used_loader_can_be_copied() -> None:
    loader = odb.ODBDataLoader(Sized(1, 1), token_budget=4)
    assert ids_of(loader) == [0, 1]
    assert ids_of(copy.deepcopy(loader)) == [0, 1]


def test_plans_take_tensors_and_numpy_numbers() -> None:
    plan = odb.plan_microbatches(torch.tensor([3, 4]), 8, None)  # type: ignore[arg-type]
    assert [m.indices for m in plan] == [(1, 0)]
    loader = odb.ODBDataLoader(Sized(1), token_budget=np.int64(4))  # type: ignore[arg-type]
    assert ids_of(loader) == [0]


def test_an_error_that_the_trainer_got_does_not_come_again_in_the_next_epoch() -> None:
    broken = [True]

    def collate(samples: list[Tokens]) -> Any:
        if broken[0]:
            raise ValueError("this time")
        return {"n": len(samples)}

    loader = odb.ODBDataLoader(Sized(*[2] * 9), token_budget=2, collate_fn=collate)
    with pytest.raises(odb.PipelineError, match="this time"):
        ids_of(loader)
    broken[0] = False
    assert sorted(ids_of(loader)) == list(range(9))


def test_an_error_behind_steps_that_the_trainer_left_is_heard_before_the_next_epoch() -> None:
    """The explorer's `HearOfFailure`: the epoch failed, and the trainer stopped before it saw."""
    broken = [True]

    class Late(Sized):
        def __getitem__(self, index: int) -> Tokens:
            if broken[0] and index == 6:
                raise OSError("gone")
            return super().__getitem__(index)

    loader = odb.ODBDataLoader(Late(*[2] * 9), token_budget=2, window=2, prefetch=50)
    steps = loader.steps()
    next(steps)
    for thread in threading.enumerate():
        if thread.name == "odb-driver":
            thread.join(10)  # the failure is in the queue now, behind the steps
    del steps
    broken[0] = False
    with pytest.raises(odb.PipelineError, match="gone"):
        loader.steps()
    assert len(ids_of(loader)) == 9  # told once
