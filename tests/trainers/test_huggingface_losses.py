"""Hugging Face Trainer: losses that would not be the exact mean are noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import odb
from tests.trainers import conformance as c
from tests.trainers import extras
from tests.trainers.test_huggingface import LENGTHS, arguments
from tests.trainers.test_huggingface_settings import trainer_for


def test_a_compute_loss_that_goes_past_the_loss_scale_is_refused(tmp_path: Path) -> None:
    """The usual way to write a Trainer of one's own; behind the mixin it is right."""
    from transformers import Trainer

    from odb.integrations.huggingface import ODBOptions, ODBTrainer, ODBTrainerMixin

    class OwnLoss:
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            return model(**inputs)["loss"]

    class Past(OwnLoss, ODBTrainer):
        pass

    class Theirs(OwnLoss, Trainer):
        pass

    class Behind(ODBTrainerMixin, Theirs):
        pass

    for kind in (Past, Behind):
        trainer = kind(
            c.make_model(),
            arguments(str(tmp_path), num_train_epochs=1),
            train_dataset=c.make_dataset(),
            data_collator=odb.PadCollate(),
            odb=ODBOptions(token_budget=64),
        )
        try:
            if kind is Behind:
                assert trainer.train().metrics["samples_seen"] == len(LENGTHS)
                continue
            with pytest.raises(odb.IntegrationError, match="compute_loss of Past has gone past"):
                trainer.train()
        finally:
            trainer.close_loader()


def test_an_accelerator_that_would_divide_the_loss_is_noticed(tmp_path: Path) -> None:
    """All Accelerators of a process share their accumulation steps, the Trainer's own, too."""
    from accelerate import Accelerator

    trainer = trainer_for(tmp_path, num_train_epochs=1)
    Accelerator(cpu=True, gradient_accumulation_steps=3)
    try:
        with pytest.raises(odb.IntegrationError, match="has gradient_accumulation_steps=3"):
            trainer.train()
    finally:
        trainer.close_loader()
        Accelerator(cpu=True)


def test_what_a_model_averages_over() -> None:
    """Not every model shifts its labels, and the one of GPT-2 has no `loss_type`."""
    import transformers as t

    from odb.integrations.hf_loader import averaged_over

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = t.BertConfig(vocab_size=64, intermediate_size=32, num_labels=64, **sizes)
    models = [
        t.BertForTokenClassification(bert),
        t.BertForMaskedLM(bert),
        t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=64,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        t.GPT2LMHeadModel(t.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)),
        extras.make_llama(),
    ]
    dataset = c.make_dataset()
    batch = odb.PadCollate()([dataset[i] for i in range(6)])
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    for model in models:
        with torch.no_grad():
            out = model.eval()(**batch)
        ends = [(None, None), (-1, 1)]  # every label where it is; each but the first
        logits = [(out.logits[:, :stop], batch["labels"][:, start:]) for stop, start in ends]
        found = [
            int((kept != -100).sum())
            for made, kept in logits
            if torch.allclose(
                torch.nn.functional.cross_entropy(made.flatten(0, 1), kept.flatten()), out.loss
            )
        ]
        assert [averaged_over(model, batch)] == found, type(model).__name__
    answers = t.BertForQuestionAnswering(bert)
    assert averaged_over(answers, {"start_positions": torch.zeros(4)}) == 4
    assert averaged_over(torch.nn.Linear(1, 1), batch) is None


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForTokenClassification"])
def test_weights_that_do_not_fit_the_model_are_noticed(name: str, tmp_path: Path) -> None:
    import transformers as t

    from odb.integrations.huggingface import ODBOptions, ODBTrainer

    def collate(samples: list[Any]) -> Any:
        batch = odb.PadCollate()(samples)
        batch["labels"] = batch["input_ids"] % 5  # labels of its own
        return batch

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {
        "GPT2LMHeadModel": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
        ),
        "BertForTokenClassification": lambda: t.BertForTokenClassification(
            t.BertConfig(vocab_size=64, intermediate_size=32, num_labels=5, **sizes)
        ),
    }[name]()
    trainer = ODBTrainer(
        model,
        arguments(str(tmp_path), num_train_epochs=1),
        train_dataset=[{"input_ids": row["input_ids"]} for row in extras.rows()],
        data_collator=collate,
        odb=ODBOptions(token_budget=64),
    )
    try:
        with pytest.raises(odb.IntegrationError, match=r"ODBOptions\(loss_weight_fn=\.\.\.\)"):
            trainer.train()
    finally:
        trainer.close_loader()


def test_label_smoothing_needs_a_model_that_the_trainer_knows() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    from odb.integrations.hf_loader import check_smoothing

    llama = extras.make_llama()
    check_smoothing(llama)
    check_smoothing(c.make_model())  # of a kind that is not known
    small = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    check_smoothing(T5ForConditionalGeneration(small))  # labels stand where they are predicted
    llama.__class__ = type("FSDPLlamaForCausalLM", (type(llama),), {})
    with pytest.raises(odb.IntegrationError, match="label_smoothing_factor"):
        check_smoothing(llama)


def test_loss_weights_of_collators() -> None:
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

    from odb.integrations.hf_loader import loss_weight_of

    tokenizer = extras.make_tokenizer()
    samples = [{"input_ids": row["input_ids"]} for row in extras.rows()[:8]]
    samples[0]["input_ids"][1] = tokenizer.pad_token_id
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    weight = loss_weight_of(collator)
    assert weight is not None
    for sample in samples:
        labels = collator([sample])["labels"]
        assert weight(sample) == int((labels[:, 1:] != -100).sum())
    flat = loss_weight_of(DataCollatorWithFlattening())
    assert flat is not None
    labels = DataCollatorWithFlattening()([dict(sample) for sample in samples])["labels"]
    assert sum(map(flat, samples)) == int((torch.as_tensor(labels)[:, 1:] != -100).sum())
    tokenizer.mask_token = "t3"
    with pytest.raises(odb.IntegrationError, match="mask in the dataset"):
        loss_weight_of(DataCollatorForLanguageModeling(tokenizer, mlm=True))
