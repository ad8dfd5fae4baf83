"""Data and runs that take a second, for tests of what goes from text to a trained model and on from there."""

import json
import pydoc_data.topics
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maglev import checkpoint
from maglev.data.prepare import prepare
from maglev.objectives import build_objective
from maglev.runs import read_config, read_metrics
from maglev.train import launch
from tests.helpers import random_weights

# 4 rows of 32 tokens per step, one step is a few milliseconds
SMALL: dict[str, Any] = {
    "model.context": 32,
    "model.window": 8,
    "train.tokens_per_step": 128,
    "train.steps": 6,
    "train.checkpoint_every": 2,
    "train.validate_every": 0,
    "train.validation_rows": 3,
    "train.tensorboard": "false",
}
# rates are scaled down with the tokens per step, so that a few steps of SMALL would change next to nothing
FAST = {f"optimizer.{name}_lr": 0.3 for name in ("matrix", "readout", "gate")} | {"optimizer.embedding_lr": 3}
# a step that leaves the weights as they were
FROZEN: dict[str, Any] = {"train.steps": 1, "train.checkpoint_every": 1, "optimizer.weight_decay": 0}
FROZEN |= {
    f"optimizer.{name}_lr": 0 for name in ("matrix", "embedding", "readout", "gate", "residual_scale", "input_scale")
}

Train = Callable[..., Path]


class Unwatched:
    """What a run says is kept in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, done: int, total: int, note: str) -> None:
        pass


def train_arguments(
    recipe: str, data: Path, out: Path, settings: dict[str, Any] | None = None, *more: str, depth: int = 1
) -> list[str]:
    chosen = SMALL | (settings or {})
    assignments = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    return ["train", recipe, "--data", str(data), "--out", str(out), "--depth", str(depth), *assignments, *more]


def losses_of(run: Path) -> list[tuple[int, float, float]]:
    """(step, next_token_loss, consistency_loss) as they stand in metrics.jsonl."""
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    return [(row["step"], row["next_token_loss"], row["consistency_loss"]) for row in rows]


def tensors_of(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, weights and optimizer."""
    found = checkpoint.newest(run, pytest.fail)
    assert found is not None
    return {f"{stem}/{name}": tensor for stem in found.stems for name, tensor in found.tensors(stem).items()}


def assert_same_tensors(run: Path, other: Path) -> None:
    """Bit-equal in weights and optimizer state."""
    ours, theirs = tensors_of(run), tensors_of(other)
    assert set(ours) == set(theirs)
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not different


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr; stdout must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maglev: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


def texts() -> list[str]:
    topics = sorted(pydoc_data.topics.topics.items())
    return [text[:3000] for _, text in topics[:30]]


def write_texts(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of 300 tokens; the last five documents are for validation."""
    folder = tmp_path_factory.mktemp("small")
    documents = texts()
    source, held_out = write_texts(folder / "a.jsonl", documents[:-5]), write_texts(folder / "b.jsonl", documents[-5:])
    prepare([str(source)], folder / "data", vocab_size=300, validation=str(held_out))
    return folder / "data"


@pytest.fixture(scope="session")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many tokens as `data` has, but another tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    source = write_texts(folder / "a.jsonl", [text.upper() for text in texts()])
    prepare([str(source)], folder / "data", vocab_size=300)
    return folder / "data"


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`trained(recipe)`: a run folder, trained once per session. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def train(recipe: str, depth: int = 1) -> Path:
        run = folder / f"{recipe}-{depth}"
        launch.train(recipe, data, run, Unwatched(), depth=depth, settings=SMALL | FAST)
        return run

    return train


@pytest.fixture(scope="session")
def lively(trained: Train, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`lively(recipe)`: a run whose weights are random, so that memory counts; its loop contracts."""
    folder = tmp_path_factory.mktemp("lively")

    @cache
    def make(recipe: str) -> Path:
        source, run = trained(recipe, 2), folder / recipe
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("checkpoints"))
        found = checkpoint.newest(source, pytest.fail)
        assert found is not None
        objective = build_objective(read_config(run))
        random_weights(objective, scale=0.5)
        with torch.no_grad():
            # log-probabilities of ordinary size
            objective.decoder.readout.weight.mul_(0.1)
        tensors = {stem: found.tensors(stem) for stem in found.stems}
        tensors |= {stem: module.state_dict() for stem, module in objective.named_children() if stem in tensors}
        checkpoint.save(run, found.step, tensors, found.state, keep=1)
        return run

    return make


@pytest.fixture(scope="session")
def exported(lively: Train, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`exported(recipe)`: a Hugging Face folder of `lively(recipe)`. Tests leave both as they are."""
    pytest.importorskip("transformers", reason="needs transformers, the extra 'hf' of maglev")
    from maglev.hf.convert import to_hugging_face

    folder = tmp_path_factory.mktemp("exports")

    @cache
    def export(recipe: str) -> Path:
        to_hugging_face(lively(recipe), folder / recipe, pytest.fail)
        return folder / recipe

    return export


@pytest.fixture
def without_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what measures the machine at every start."""
    monkeypatch.setattr("maglev.train.loop.matrix_rate", lambda device, dtype: 1e12)
