"""Real text that every machine has: the functions of the Python standard library's source."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from odb.errors import ConfigError, MissingDependencyError

VOCABULARY = 2048
END = "<end>"
PAD = "<pad>"
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class CorpusFacts:
    """The training samples in numbers: lengths in tokens, `cut` of them were longer."""

    functions: int
    train: int
    held_out: int
    mean: float
    median: int
    longest: int
    cut: int

    def __str__(self) -> str:
        return (
            f"{self.train:,} functions to train on and {self.held_out:,} held out, of "
            f"{self.functions:,}; {self.mean:.0f} tokens in the mean, median {self.median}, "
            f"longest {self.longest:,} ({self.cut} cut off there)"
        )


class Split(NamedTuple):
    """Functions to train on and functions that are held out; no text is in both."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def standard_library() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def extract_functions(root: Path) -> tuple[str, ...]:
    """The source of every function and method below `root`, each text once, in a fixed order.

    A function inside another one is left to the outer one: it would appear twice. Tests,
    site-packages and files that this Python cannot parse are left out.
    """
    texts: dict[str, None] = {}
    for path in _source_files(root):
        texts.update(dict.fromkeys(_functions_of(path)))
    return tuple(texts)


def choose_split(functions: Sequence[str], train: int, held_out: int, seed: int) -> Split:
    """A random choice of functions, so that the long tail is in it as often as in the whole.

    Raises ConfigError if there are not enough.
    """
    if train + held_out > len(functions):
        raise ConfigError(
            f"--samples {train + held_out}: this Python's standard library has only "
            f"{len(functions)} different functions"
        )
    chosen = random.Random(seed).sample(list(functions), train + held_out)
    return Split(tuple(chosen[:train]), tuple(chosen[train:]))


def train_tokenizer(texts: Iterable[str]) -> str:
    """Train a byte-level BPE on the texts; returns it in the JSON form of `tokenizers`.

    Raises MissingDependencyError if `tokenizers` is not installed.
    """
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def import_tokenizers() -> Any:
    """The `tokenizers` package. Raises MissingDependencyError."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError(
            'the demo tokenizes with `tokenizers`: pip install "verified-odb[demo]"'
        ) from error
    return tokenizers


class FunctionDataset(Dataset[dict[str, torch.Tensor]]):
    """Functions, tokenized when they are asked for: nobody knows their lengths before.

    A sample is {"input_ids", "labels"} (the model shifts the labels), cut off after `max_length`
    tokens.
    """

    def __init__(self, texts: Sequence[str], tokenizer: str, max_length: int) -> None:
        self.texts = tuple(texts)
        self.max_length = max_length
        self._tokenizer = import_tokenizers().Tokenizer.from_str(tokenizer)
        self._end = self._tokenizer.token_to_id(END)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(self.token_ids(index), dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    def token_ids(self, index: int) -> list[int]:
        """The tokens of one function, as many as are trained on."""
        ids = self._tokenizer.encode(self.texts[index]).ids[: self.max_length - 1]
        return [*ids, self._end]

    def length(self, index: int) -> int:
        """Tokens of one sample. Costs as much as reading the sample: it is tokenized."""
        return len(self.token_ids(index))


def _source_files(root: Path) -> list[Path]:
    """Python files below `root`, in an order that does not depend on the file system."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    )


def _functions_of(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library are not our concern
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    # Slicing by line numbers: ast.get_source_segment splits the whole file for every function.
    lines = source.split("\n")
    for node in _outermost_functions(tree):
        assert node.end_lineno is not None
        yield "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _outermost_functions(node)
