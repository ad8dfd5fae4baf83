"""Labels in training give the objective's loss; in evaluation that of the decoder on its own memories."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.objectives.losses import next_token_loss
from tests.helpers import batch_of, gradients, random_tokens, step_through
from tests.hf.models import KINDS, small_model

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")


def training_loss(model: Any, row: Tensor, **given: Any) -> Tensor:
    return model.train()(row, labels=given.pop("labels", row), **given).loss


@pytest.mark.parametrize("recipe", KINDS)
def test_the_loss_is_the_objectives(recipe: str) -> None:
    """On the tokens of a row and those that follow them; the last token is read and predicts nothing."""
    model = small_model(recipe)
    tokens, targets = batch_of(2, 20)
    targets[:, -1] = -2
    expected = model.objective(tokens, targets)
    assert torch.equal(training_loss(model, tokens), expected.total)


@pytest.mark.parametrize("recipe", KINDS)
def test_padding_and_unlabelled_tokens_do_not_count(recipe: str) -> None:
    """A prompt is read and not learned; padding is neither, on whichever side."""
    model, row = small_model(recipe), random_tokens(1, 16)
    labels = row.clone()
    labels[:, :5] = -100
    expected = training_loss(model, row, labels=labels)
    padding, mask = random_tokens(1, 4, seed=9), torch.tensor([[0] * 4 + [1] * 16])
    nothing = torch.full_like(padding, -100)
    left = training_loss(
        model, torch.cat((padding, row), 1), labels=torch.cat((nothing, labels), 1), attention_mask=mask
    )
    right = training_loss(
        model, torch.cat((row, padding), 1), labels=torch.cat((labels, nothing), 1), attention_mask=mask.flip(1)
    )
    # interleaved passes go by the parity of columns, which an even number of them keeps
    torch.testing.assert_close(left, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(right, expected, rtol=1e-10, atol=1e-10)
    assert expected != training_loss(model, row)


@pytest.mark.parametrize("recipe", [*KINDS, "transformer-slsl"])
def test_gradient_checkpointing_changes_no_gradient(recipe: str) -> None:
    model, row = small_model(recipe), random_tokens(2, 16)
    plain = gradients(training_loss(model, row), model)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    loss = training_loss(model, row)
    found = gradients(loss, model)
    assert set(found) == set(plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    model.gradient_checkpointing_disable()
    assert torch.equal(training_loss(model, row), loss)


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "lrt-slsl"])
def test_checkpointing_keeps_less(recipe: str) -> None:
    model, row = small_model(recipe), random_tokens(2, 24)

    def kept() -> int:
        sizes = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            training_loss(model, row)
        return sum(sizes)

    plain = kept()
    model.gradient_checkpointing_enable()
    assert kept() < 0.8 * plain


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "swa-ssss"])
def test_the_loss_of_evaluation_is_recurrent(recipe: str) -> None:
    model, row = small_model(recipe), random_tokens(2, 20)
    targets = torch.cat((row[:, 1:], torch.full((2, 1), -1)), dim=1)
    expected = next_token_loss(model.decoder, step_through(model.decoder, row), targets)
    output = model(row, labels=row)
    torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-8, atol=1e-8)
    assert output.logits.shape == (2, 20, 61)


def test_autocast_is_the_decoders_own_mixed_precision() -> None:
    model, row = small_model(dtype=torch.float32), random_tokens(2, 20)
    model.decoder.embedding.compute_dtype = torch.bfloat16
    expected = training_loss(model, row)
    model.decoder.embedding.compute_dtype = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = training_loss(model, row)
        logits = model.eval()(row).logits
    assert torch.equal(found, expected) and logits.dtype == torch.float32
    assert model.decoder.embedding.compute_dtype is None
    found.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_cannot_be_trained_says_so() -> None:
    from maglev.hf import MaglevConfig, MaglevForCausalLM

    row = random_tokens(1, 8)
    model = small_model()
    with pytest.raises(RequestError, match="padding between tokens"):
        training_loss(model, row, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]))
    bare = MaglevForCausalLM(MaglevConfig(run=model.config.run, prefiller=False))
    with pytest.raises(RequestError, match="no prefiller"):
        training_loss(bare, row)
    assert bare.eval()(row, labels=row).loss > 0


@pytest.mark.parametrize("recipe", KINDS)
def test_trainer_trains_saves_and_comes_back(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, for Trainer")
    model, tokens = small_model(recipe, dtype=torch.float32), random_tokens(16, 16)
    first = training_loss(model, tokens).item()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        # all rows in every step, so that the first loss is known
        per_device_train_batch_size=16,
        max_steps=8,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=8,
        save_steps=8,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and losses[0] == pytest.approx(first, rel=1e-5) and losses[-1] < first
    assert trainer.evaluate()["eval_loss"] < before
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-8")
    ours, theirs = model.state_dict(), again.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.config.run == model.config.run
    assert dataclasses.asdict(again.config.run_config) == model.config.run
