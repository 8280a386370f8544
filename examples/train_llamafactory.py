"""LLaMA-Factory with odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_llamafactory.py

A small Llama learns to complete the functions of Python's own `email` and `json` packages: the
first line is the instruction, and the loss is over the rest. A token is a byte. Everything goes
through LLaMA-Factory's own configuration, data files and workflow.
"""

from __future__ import annotations

import json
import os
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from odb.demo.corpus import extract_functions, standard_library
from odb.integrations.llamafactory import ODBOptions, run_exp

LONGEST = 256


def write_data(folder: Path) -> int:
    """Each function as an instruction and its output; how many there are."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    halves = [text.split("\n", 1) for text in texts if "\n" in text]
    rows = [{"instruction": first, "input": "", "output": rest} for first, rest in halves]
    (folder / "functions.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(
        json.dumps({"functions": {"file_name": "functions.json"}})
    )
    return len(rows)


def write_model(folder: Path) -> None:
    """A small Llama with random weights, and a tokenizer with one token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<end>"
    )
    words.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Report(TrainerCallback):
    """Prints what was trained on, at the end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logged = [entry for entry in state.log_history if "loss" in entry]
        samples = logged[-1]["samples_seen"]
        assert samples == 2 * self.size, "every function was seen once in each epoch"
        print(
            f"rank {args.process_index}: {state.global_step} steps of the optimizer, {samples} "
            f"samples in {state.epoch} epochs, loss {logged[0]['loss']:.3f} to "
            f"{logged[-1]['loss']:.3f}",
            flush=True,
        )


def main() -> None:
    """Train for two epochs and report what every rank did."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_data(folder)
        write_model(folder / "model")
        config = {
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": str(folder / "model"),
            "dataset_dir": name,
            "dataset": "functions",
            "template": "empty",
            "cutoff_len": LONGEST,
            "finetuning_type": "full",
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1,
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        # Downloads nothing: model and data are local files.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        run_exp(config, odb=ODBOptions(token_budget=2048, window=256), callbacks=[Report(size)])


if __name__ == "__main__":
    main()
