"""References for what trainers do besides: clipping, schedules, models of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from odb.info import ODBStepInfo
from odb.integrations.base import version_of
from tests.trainers import conformance as c

MAX_NORM = 0.3
"""Clips most steps of the conformance suite's models."""


def falling(step: int) -> float:
    """A learning-rate schedule that differs at every step."""
    return 1.0 / (1 + step)


def reference(
    case: c.Case,
    results: Sequence[c.RankResult],
    make_model: Callable[[torch.dtype], Any] = c.make_model,
    *,
    max_norm: float | None = None,
    schedule: Callable[[int], float] = lambda _: 1.0,
) -> dict[str, Tensor]:
    """As `conformance.reference`, with other models, clipping and a schedule (see
    `conformance.trained`)."""
    infos = [result.infos for result in results]
    return full_names(c.trained(replace(case, clip_norm=max_norm), infos, make_model, schedule))


def full_names(model: Any) -> dict[str, Tensor]:
    """A model's parameters by the names that it has without a DDP around it."""
    return {
        name.removeprefix("module."): parameter.detach().cpu().clone()
        for name, parameter in model.named_parameters()
    }


def difference(results: Sequence[c.RankResult], expected: Mapping[str, Tensor]) -> float:
    """The largest of any rank."""
    return max(c.largest_difference(result.parameters, expected) for result in results)


def subject_below(trainer: str, engine: str, *versions: str) -> c.Subject:
    """One of Hugging Face's trainers, "Trainer" or "Accelerate", with what trains below it, and the
    version of that if it has one of its own."""
    names = {"Trainer": ("HF Trainer", "transformers"), "Accelerate": ("Accelerate", "accelerate")}
    name, package = names[trainer]
    return c.Subject(
        f"{name}, {engine}",
        ", ".join((version_of(package), *versions)),
        "yes, with a shim (tests/trainers/cpu_shim.py): Accelerate offers it on accelerators only",
        extra_lines=3,
    )


# ---------------------------------------------------------------- Hugging Face models


def make_llama(dtype: torch.dtype = torch.float32) -> Any:
    """A tiny one with the same weights on every call, for frameworks that take no other models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=c.VOCABULARY,
        hidden_size=c.WIDTH,
        intermediate_size=2 * c.WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return LlamaForCausalLM(config).to(dtype)


def make_tokenizer() -> Any:
    """A word for each token of the conformance suite."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"t{i}": i for i in range(c.VOCABULARY)}, unk_token="t1")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="t0", unk_token="t1", eos_token="t2"
    )


def rows() -> list[dict[str, list[int]]]:
    """The samples of the conformance suite, as lists."""
    dataset = c.make_dataset()
    return [{k: v.tolist() for k, v in dataset[i].items()} for i in range(len(dataset))]


def of_llama(case: c.Case, ranks: Sequence[Sequence[ODBStepInfo]]) -> dict[str, Tensor]:
    """The `reference` of a `conformance.Subject` whose ranks train the tiny Llama."""
    return full_names(c.trained(case, ranks, make_llama))


def conformance_loader(
    case: c.Case, rank: int, dataset: Any, settings: Mapping[str, Any]
) -> c.RecordingLoader:
    """The suite's loader, with what a trainer decides taken from the trainer's settings."""
    kept = {name: settings[name] for name in ("collate_fn", "accumulation_steps", "loss_weight_fn")}
    loader = c.make_loader(case, rank, **kept)
    loader.dataset = dataset
    return loader
