"""Hugging Face Trainer with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_huggingface.py

A small Llama reads the functions of Python's own `email` and `json` packages as bytes, with
gradients added up over two steps. Training ends after two epochs, whose number of steps nobody
knows beforehand; the learning rate follows the samples seen.
"""

from __future__ import annotations

import tempfile
from itertools import chain

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.integrations.huggingface import ODBOptions, ODBTrainer

LONGEST = 256


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def main() -> None:
    """Train, evaluate after each epoch, and report what every rank did."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LONGEST,
        )
    )
    dataset, held_out = samples()[32:], samples()[:32]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            logging_steps=10,
            eval_strategy="epoch",
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
        )
        trainer = ODBTrainer(
            model,
            args,
            train_dataset=dataset,
            eval_dataset=held_out,
            data_collator=odb.PadCollate(),
            odb=ODBOptions(token_budget=2048, window=256),
        )
        result = trainer.train()
    assert trainer.seen.samples == 2 * len(dataset), "every function was seen once in each epoch"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(
        f"rank {args.process_index}: {result.global_step} steps of the optimizer, "
        f"{trainer.seen.samples} samples in {trainer.state.epoch} epochs, loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
