"""torchtitan's dataloader component from odb, on two CPU processes:

    torchrun --nproc-per-node 2 examples/train_torchtitan.py

With torchtitan's trainer, `TitanDataLoader.Config(build_loader=build)` goes into
`Trainer.Config(dataloader=...)`, and that is all. The trainer needs Triton; to run on a CPU, `main`
below does with the batches what the trainer does: it adds up losses, and divides by the label
tokens of all ranks and steps.
"""

from __future__ import annotations

from itertools import chain, islice

import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss

import odb
from odb.demo.corpus import extract_functions, standard_library
from odb.integrations.torchtitan import Place, TitanDataLoader

LONGEST = 256
EPOCHS = 2
ACCUMULATION = 2


def samples() -> list[dict[str, torch.Tensor]]:
    """One sample for each function of `json` and `email`, one byte a token."""
    folders = (standard_library() / name for name in ("email", "json"))
    texts = chain.from_iterable(map(extract_functions, folders))
    tokens = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def build(place: Place) -> odb.ODBDataLoader:
    """What torchtitan's configuration names; its trainer passes a tokenizer and more in `place`."""
    return odb.ODBDataLoader(
        samples(), token_budget=2048, window=256, shuffle=True, accumulation_steps=ACCUMULATION
    )


class Model(torch.nn.Module):
    """Logits for each position, as torchtitan's models give them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 32)
        self.rnn = torch.nn.GRU(32, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def main() -> None:
    """Train for two epochs and report what every rank did."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of = CrossEntropyLoss.Config().build()
    config = TitanDataLoader.Config(build_loader=build, epochs=EPOCHS)
    dataloader = config.build(
        dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), seq_len=LONGEST
    )
    batches = iter(dataloader)
    while steps := list(islice(batches, ACCUMULATION)):
        valid = sum((labels != IGNORE_INDEX).sum() for _, labels in steps)
        dist.all_reduce(valid)
        loss_sum = torch.zeros(())
        for inputs, labels in steps:
            loss, _ = loss_of(model(inputs["input"]), labels, valid)
            loss.backward()
            loss_sum += loss.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        progress = dataloader.progress
        if progress.optimizer_steps % 10 == 1:
            print(
                f"epoch {progress.epoch} rank {dist.get_rank()}: "
                f"{progress.optimizer_steps} optimizer steps, {progress.samples} samples, "
                f"loss {loss_sum:.3f}",
                flush=True,
            )
    assert progress.samples == EPOCHS * len(samples()), "every function once in each epoch"
    dataloader.loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
