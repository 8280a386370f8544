"""From a Hugging Face Trainer's arguments to an odb loader: options, checks, loss weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import IterableDataset

from odb.batches import CollateFn
from odb.collate import PadCollate
from odb.costs import IGNORED_LABEL, CostFn, Resource, default_loss_weight
from odb.errors import IntegrationError
from odb.integrations.base import check_parallelism, require

require("transformers", "huggingface")
require("accelerate", "huggingface")

from accelerate import Accelerator, DistributedType  # noqa: E402
from transformers import (  # noqa: E402
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    TrainingArguments,
    default_data_collator,
)
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

SET_BY_TRAINER = {
    "accumulation_steps": "TrainingArguments(gradient_accumulation_steps=...)",
    "collate_fn": "the trainer's data_collator=",
    "dataset": "the trainer's train_dataset=",
    "idle": '"pad", as the Trainer has no Join',
    "loss_scaling": '"exact"',
    "num_workers": "TrainingArguments(dataloader_num_workers=...)",
    "persistent_workers": "TrainingArguments(dataloader_persistent_workers=...)",
    "pin_memory": "TrainingArguments(dataloader_pin_memory=...)",
    "prefetch_factor": "TrainingArguments(dataloader_prefetch_factor=...)",
}
"""Arguments of the loader that have another place, and which."""


@dataclass(frozen=True)
class ODBOptions:
    """What a trainer needs to know beyond its TrainingArguments.

    token_budget, window, packed, cost_fn, loss_weight_fn, max_samples, resources: as for
        `ODBDataLoader`. Without a `loss_weight_fn`, weights follow from the data collator if it
        makes the labels, and from the samples' labels otherwise.
    loader: further arguments of `ODBDataLoader`, such as `{"timeout": 3600.0, "on_error": "skip"}`.

    Raises IntegrationError for an argument in `loader` that has another place.
    """

    token_budget: int
    window: int = 1024
    packed: bool = False
    cost_fn: CostFn | None = None
    loss_weight_fn: CostFn | None = None
    max_samples: int | None = None
    resources: Mapping[str, Resource] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.loader:
            if name in SET_BY_TRAINER:
                raise IntegrationError(
                    f"ODBOptions(loader={{{name!r}: ...}}): {name} is {SET_BY_TRAINER[name]}"
                )
            if name in ODBOptions.__dataclass_fields__:
                raise IntegrationError(f"pass ODBOptions({name}=...) itself, not within loader=")


def loader_settings(
    options: ODBOptions, args: TrainingArguments, dataset: Any, collator: CollateFn
) -> dict[str, Any]:
    """The arguments of `ODBDataLoader` for a trainer, without the dataset and the loss weights."""
    workers = args.dataloader_num_workers
    settings: dict[str, Any] = {
        "token_budget": options.token_budget,
        "window": options.window,
        "packed": options.packed,
        "cost_fn": options.cost_fn,
        "max_samples": options.max_samples,
        "resources": options.resources,
        "collate_fn": PadCollate() if collator is default_data_collator else collator,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and args.device.type != "cpu",
        "accumulation_steps": args.gradient_accumulation_steps,
        "seed": args.seed if args.data_seed is None else args.data_seed,
    }
    if workers:
        settings["persistent_workers"] = args.dataloader_persistent_workers
        settings["prefetch_factor"] = args.dataloader_prefetch_factor
    if not isinstance(dataset, IterableDataset) and "sampler" not in options.loader:
        settings["shuffle"] = args.train_sampling_strategy == "random"
    return {**settings, **options.loader}


def check_args(args: TrainingArguments) -> None:
    """Raise IntegrationError for the first argument that would make batches, counts or gradients
    wrong, and say what to set."""
    for wrong, message in _objections(args):
        if wrong:
            raise IntegrationError(message)
    check_parallelism(args)


def _objections(args: TrainingArguments) -> list[tuple[bool, str]]:
    accelerator: Any = args.accelerator_config
    return [
        (
            args.remove_unused_columns,
            "set TrainingArguments(remove_unused_columns=False): samples go to the data collator "
            "as the dataset gives them, so that their cost can be known",
        ),
        (
            args.auto_find_batch_size,
            "set TrainingArguments(auto_find_batch_size=False): the token budget decides how much "
            "memory a batch needs",
        ),
        (
            args.dataloader_drop_last,
            "set TrainingArguments(dataloader_drop_last=False): odb delivers every sample",
        ),
        (
            args.train_sampling_strategy not in ("random", "sequential"),
            'set TrainingArguments(train_sampling_strategy="random"): odb groups by length itself',
        ),
        (
            bool(accelerator.split_batches),
            "set accelerator_config split_batches to False: batches are already this rank's own",
        ),
        (
            bool(accelerator.dispatch_batches),
            "set accelerator_config dispatch_batches to False: every rank reads its own samples",
        ),
        (
            args.n_gpu > 1,
            "torch.nn.DataParallel splits batches by rows: start one process for each GPU, with "
            "torchrun",
        ),
        (
            args.optim in ("lomo", "adalomo") and args.gradient_accumulation_steps > 1,
            "with optim lomo or adalomo every backward changes the parameters: set "
            "gradient_accumulation_steps=1",
        ),
    ]


def check_smoothing(model: Any) -> None:
    """Raise IntegrationError if the Trainer's label smoothing would take the model's labels for
    those of the tokens where they stand. It knows causal models by the names of their classes."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = type(own).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if _predicts_next(own) and not known:
        raise IntegrationError(
            f"label_smoothing_factor: the Trainer does not take a {type(own).__name__} for a "
            "causal model, and so does not shift its labels (FSDP2 changes the names of classes): "
            "set label_smoothing_factor=0, or train with FSDP1, DDP or DeepSpeed"
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise IntegrationError if its `backward` would divide the loss. The Trainer does not ask for
    that, but all Accelerators of a process share the number."""
    steps = accelerator.gradient_accumulation_steps
    if steps != 1 and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise IntegrationError(
            f"another Accelerator of this process has gradient_accumulation_steps={steps}, which "
            "all of them share, so that this trainer's losses would be divided by it: build the "
            "trainer after it, and do not go on with the other one before this one has trained"
        )


def check_epochs(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Raise IntegrationError for arguments that need the number of steps, where training is bound
    by epochs and it is not known."""
    engine = getattr(accelerator.state, "deepspeed_plugin", None)
    if engine is not None and "scheduler" in engine.deepspeed_config:
        raise IntegrationError(
            'the "scheduler" of the DeepSpeed configuration counts steps, whose number is not '
            "known when training is bound by epochs: leave it out, so that the Trainer's own "
            "lr_scheduler_type follows the samples, or set max_steps"
        )
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        if value is not None and 0 < value < 1:
            raise IntegrationError(
                f"{name}={value} is a share of the number of steps, which is not known before the "
                f"end: set {name} to a number of steps, or set max_steps"
            )
    if args.warmup_steps >= 1:
        raise IntegrationError(
            f"warmup_steps={args.warmup_steps} counts steps, but training is bound by epochs and "
            "its learning rate follows the samples seen: set warmup_steps to the share of all "
            "samples, such as 0.03, or set max_steps"
        )


# ---------------------------------------------------------------- loss weights


@dataclass(frozen=True)
class NextTokens:
    """The loss weight of a sample whose labels the collator copies from `input_ids`: every token
    but the first is predicted, except those that the collator takes for padding."""

    pad_token_id: int | None = None

    def __call__(self, sample: Any) -> int:
        """The number of predicted tokens of one sample."""
        tokens = sample["input_ids"] if isinstance(sample, Mapping) else sample
        rest = tokens[1:].tolist() if hasattr(tokens, "tolist") else list(tokens[1:])
        return len(rest) - (0 if self.pad_token_id is None else rest.count(self.pad_token_id))


def labels_or_next_tokens(sample: Any) -> int:
    """The label tokens of a sample, or if it has no labels, all tokens but the first."""
    if isinstance(sample, Mapping) and sample.get("labels") is not None:
        return default_loss_weight(sample)
    return NextTokens()(sample)


def loss_weight_of(collator: CollateFn) -> CostFn | None:
    """The loss weights that fit the labels that a Hugging Face collator makes; None if it takes
    the samples' own labels.

    Raises IntegrationError for masked language modelling, whose labels are drawn when a batch is
    made.
    """
    if isinstance(collator, DataCollatorForLanguageModeling):
        if collator.mlm:
            raise IntegrationError(
                f"{type(collator).__name__} draws the labels when a batch is made, after batches "
                "have been agreed on, so their number is not known in time: mask in the dataset"
            )
        return NextTokens(collator.tokenizer.pad_token_id)
    if isinstance(collator, DataCollatorWithFlattening):
        return labels_or_next_tokens
    return None


UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
"""Kinds of models, by transformers' `loss_type`, that predict every label where it stands."""
SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
"""Kinds that predict each label but the first of a row, unless they have an encoder."""


def averaged_over(model: Any, inputs: Mapping[str, Any]) -> int | None:
    """How many labels a model of transformers averages the loss of this batch over; None if that
    is not known."""
    kind = getattr(model, "loss_type", None)
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs.get("labels")
    if kind == "ForQuestionAnswering":
        spans = inputs.get("start_positions")
        return len(spans) if isinstance(spans, torch.Tensor) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
        return None
    if kind in UNSHIFTED or _has_encoder(model):
        kept = labels
    elif _predicts_next(model):
        kept = labels if "shift_labels" in inputs else labels[:, 1:]
    else:
        return None
    return int((kept != IGNORED_LABEL).sum())


def _has_encoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _predicts_next(model: Any) -> bool:
    kind = getattr(model, "loss_type", None)
    known = kind in SHIFTED or type(model).__name__.endswith("LMHeadModel")  # GPT-2 has no kind
    return known and not _has_encoder(model)
