"""A small causal transformer in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odb.costs import IGNORED_LABEL

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelSize:
    """vocabulary: token ids; width: of the hidden states; heads must divide the width."""

    vocabulary: int
    width: int = 64
    heads: int = 2
    layers: int = 2


class CausalTransformer(nn.Module):
    """Pre-norm decoder with rotary positions and an output layer tied to the embedding."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """The mean loss over the labels that are not -100, behind the causal shift.

        All are (rows, length). `attention_mask` is not used: padding stands on the right, where
        no token before it looks, and its own labels are -100.
        """
        hidden = self.embedding(input_ids)
        rotation = rotary_angles(input_ids.shape[1], self.head_width)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        logits = F.linear(self.norm(hidden[:, :-1]), self.embedding.weight)
        return F.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`hidden` is (rows, length, width); `rotation` as `rotary_angles` gives it."""
        hidden = hidden + self._attend(self.attention_norm(hidden), rotation)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = hidden.shape
        projected = self.queries_keys_values(hidden).view(rows, length, 3, -1, self.head_width)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            _rotated(queries, rotation), _rotated(keys, rotation), values, is_causal=True
        )
        out: Tensor = self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        return out


def rotary_angles(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (length, head_width / 2) each."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(length), frequencies)
    return angles.cos(), angles.sin()


def _rotated(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
