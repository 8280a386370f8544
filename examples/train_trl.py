"""TRL's SFTTrainer with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_trl.py

A small Llama learns to complete the functions of Python's own `email` and `json` packages: the
first line is the prompt, and the loss is over the rest. A token is a byte.
"""

from __future__ import annotations

import tempfile
from itertools import chain

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from odb.demo.corpus import extract_functions, standard_library
from odb.integrations.trl import ODBOptions, ODBSFTTrainer

LONGEST = 256


def samples() -> Dataset:
    """Each function as a prompt and its completion."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    halves = (text.split("\n", 1) for text in texts if "\n" in text)
    return Dataset.from_list(
        [{"prompt": first + "\n", "completion": rest} for first, rest in halves]
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<end>"]
    vocabulary = {word: i for i, word in enumerate([*special, *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<end>"
    )


def main() -> None:
    """Train for two epochs and report what every rank did."""
    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LONGEST,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            max_length=LONGEST,
            learning_rate=1e-2,
            warmup_steps=0.1,
            logging_steps=10,
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
        )
        trainer = ODBSFTTrainer(
            model,
            args,
            train_dataset=samples(),
            processing_class=words,
            odb=ODBOptions(token_budget=2048, window=256),
        )
        result = trainer.train()
    size = len(trainer.train_dataset)
    assert trainer.seen.samples == 2 * size, "every function was seen once in each epoch"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(
        f"rank {args.process_index}: {result.global_step} steps of the optimizer, "
        f"{trainer.seen.samples} samples in {trainer.state.epoch} epochs, loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
