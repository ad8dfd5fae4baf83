"""Which request begins a run, which goes on with one, which is refused; and runs that start from another's decoder."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from maglev import checkpoint
from maglev.errors import RequestError, WorkError
from maglev.model.init import draw
from maglev.runs import read_config, read_metrics
from maglev.train import launch
from maglev.train.setup import rows_per_pass
from tests.helpers import MAGLEV_RECIPES
from tests.small_runs import FROZEN, SMALL, Train, Unwatched, losses_of, tensors_of

pytestmark = pytest.mark.usefixtures("without_speed")

RECIPE = "maglev-shared-0.1"


def train(
    data: Path,
    run: Path,
    settings: dict[str, Any] | None = None,
    *,
    recipe: str = RECIPE,
    resume: bool = False,
    depth: int = 1,
) -> dict[str, Any]:
    chosen = SMALL | (settings or {})
    return launch.train(recipe, data, run, Unwatched(), depth=depth, settings=chosen, resume=resume)


def test_a_run_is_not_begun_twice(data: Path, trained: Train) -> None:
    run = trained(RECIPE)
    with pytest.raises(RequestError, match="holds a run already; add --resume"):
        train(data, run)


def test_a_folder_of_other_things_is_not_taken(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RequestError, match="exists and is not a run folder"):
            train(data, tmp_path, resume=resume)
        with pytest.raises(RequestError, match="exists and is not a run folder"):
            train(data, tmp_path / "thesis.txt", resume=resume)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_an_empty_folder_and_what_a_kill_left_of_a_claim_are_taken(
    data: Path, other_data: Path, tmp_path: Path
) -> None:
    train(data, tmp_path / "run", {"train.steps": 1})
    claim = tmp_path / "claim"
    claim.mkdir()
    shutil.copy(other_data / "tokenizer.json", claim)
    (claim / ".partial-abc.json").write_text("{")
    train(data, claim, {"train.steps": 1})
    assert not list(claim.glob(".partial-*"))
    assert (claim / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()


@pytest.fixture
def begun(data: Path, tmp_path: Path) -> Path:
    train(data, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("train.steps", 7, 6),
        ("train.seed", 1, 0),
        ("train.tokens_per_step", 64, 128),
        ("model.window", 4, 8),
        ("optimizer.matrix_lr", 0.5, 0.02),
        ("objective.consistency_weight", 0.2, 0.1),
        ("data.memory_reset", "true", False),
        ("train.init_from", "elsewhere", ""),
    ],
)
def test_resuming_with_other_settings_names_the_key(key: str, value: Any, was: Any, data: Path, begun: Path) -> None:
    with pytest.raises(RequestError) as refused:
        train(data, begun, {key: value}, resume=True)
    assert f"{key} = {was}, now it is {str(value).replace('true', 'True')}" in str(refused.value)


def test_resuming_another_recipe_or_depth_is_refused(data: Path, begun: Path) -> None:
    with pytest.raises(RequestError, match=r"is a run of maglev-shared-0\.1, not of lrt-ssss"):
        train(data, begun, recipe="lrt-ssss", resume=True)
    with pytest.raises(RequestError, match=r"model\.depth = 1, now it is 2"):
        train(data, begun, depth=2, resume=True)


def test_what_does_not_change_the_result_may_differ(data: Path, begun: Path) -> None:
    shutil.rmtree(begun / "checkpoints" / "step-00000006")
    before = read_config(begun)
    free = {"train.device": "cpu", "train.checkpoint_every": 1, "train.keep_checkpoints": 3, "train.log_every": 2}
    free |= {"train.validate_every": 6, "train.validation_rows": 2, "train.tensorboard": "true"}
    free |= {"train.compile": "off", "train.max_bad_steps": 1, "train.threads": 1, "train.rows_per_pass": 2}
    free |= {"train.recompute": "selective", "train.attention": "blockwise"}
    free |= {"train.sharding": "full", "train.timeout": 60, "train.graphs": "off"}
    assert set(free) == {f"train.{name}" for name in launch.FREE_ON_RESUME}
    assert train(data, begun, free, resume=True)["finished"]
    assert [step for step, _ in checkpoint.list_checkpoints(begun)] == [4, 5, 6]
    assert [row["step"] for row in read_metrics(begun)] == [1, 2, 3, 4, 6, 6]
    assert read_config(begun) == before


def test_other_data_is_refused(data: Path, other_data: Path, begun: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the tokenizer of .* does not match the data"):
        train(other_data, begun, resume=True)
    # also where there is no checkpoint yet
    shutil.rmtree(begun / "checkpoints")
    with pytest.raises(RequestError, match=r"the tokenizer of .* does not match the data"):
        train(other_data, begun, resume=True)


def test_other_text_of_the_same_tokenizer_is_refused(data: Path, begun: Path, tmp_path: Path) -> None:
    from maglev.data.prepare import prepare

    (tmp_path / "a.txt").write_text("Quite another text, long enough for a row or two of the smallest of models.\n" * 9)
    prepare([str(tmp_path / "a.txt")], tmp_path / "data", tokenizer=data / "tokenizer.json")
    with pytest.raises(RequestError, match="was trained on other data"):
        train(tmp_path / "data", begun, resume=True)


def test_a_vocabulary_that_contradicts_the_data_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.vocab_size is 512 and the tokenizer of .* has 300"):
        train(data, tmp_path / "run", {"model.vocab_size": 512})
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_version_is_refused(data: Path, begun: Path) -> None:
    folder = begun / "checkpoints" / "step-00000006"
    state = json.loads((folder / "state.json").read_text()) | {"flux": 3}
    tensors = {stem: checkpoint.newest(begun, pytest.fail).tensors(stem) for stem in ("decoder", "optimizer")}  # type: ignore[union-attr]
    shutil.rmtree(folder)
    checkpoint.save(begun, 6, tensors, state, 2)
    with pytest.raises(RequestError, match="another version of Maglev"):
        train(data, begun, resume=True)


def test_a_read_only_place_is_told(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="could not write"):
        train(data, tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("rows", "wanted", "expected"), [(12, 5, 4), (12, 12, 12), (12, 100, 12), (7, 3, 1), (1, 9, 1)]
)
def test_rows_per_pass_divide_the_rows(rows: int, wanted: int, expected: int) -> None:
    from maglev.recipes import run_config

    config = run_config("swa-ssss", 1, {"train.rows_per_pass": wanted})
    assert rows_per_pass(config, rows, torch.device("cpu")) == expected


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_init_from_an_swa_takes_its_decoder(recipe: str, data: Path, trained: Train, tmp_path: Path) -> None:
    swa = trained("swa-ssss")
    run, watch = tmp_path / "run", Unwatched()
    settings = SMALL | FROZEN | {"train.init_from": str(swa)}
    launch.train(recipe, data, run, watch, depth=1, settings=settings)
    theirs = {name: tensor for name, tensor in tensors_of(swa).items() if name.startswith("decoder/")}
    ours = tensors_of(run)
    assert theirs and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    anew = {name for name in ours if name.startswith("decoder/")} - set(theirs)
    expected = {"local_gate", "memory_gate", "memory_key_proj", "memory_value_proj"}
    expected |= {"residual_proj"} if recipe == "maglev-closed" else set()
    assert {name.rsplit(".", 2)[-2] for name in anew} == expected
    for name in anew:
        start = draw(name.replace("/", "."), ours[name], seed=0)
        assert torch.equal(ours[name], start), name
    # Q starts as the same stack: what has the decoder's names and shapes is taken there too
    for name, tensor in ours.items():
        stem, _, own = name.partition("/")
        if stem == "prefiller":
            assert torch.equal(tensor, theirs[f"decoder/{own}"]), name
    assert any(f"decoder taken from {swa}; {len(anew)} tensors start anew" in line for line in watch.lines)
    # the decoder's loss starts where the SWA's ended: its neutral gates and memory change it only so much
    assert losses_of(run)[0][1] < losses_of(swa)[0][1]


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_init_from_a_maglev_takes_its_prefiller_too(recipe: str, data: Path, trained: Train, tmp_path: Path) -> None:
    first, run = trained(recipe), tmp_path / "run"
    launch.train(recipe, data, run, Unwatched(), depth=1, settings=SMALL | FROZEN | {"train.init_from": str(first)})
    theirs, ours = tensors_of(first), tensors_of(run)
    weights = {name for name in theirs if name.startswith(("decoder/", "prefiller/"))}
    assert {name.partition("/")[0] for name in weights} == {"decoder", "prefiller"}
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)
    # and it had learned something that is not the decoder's
    shared = {
        name for name in weights if f"decoder/{name.partition('/')[2]}" in theirs and name.startswith("prefiller")
    }
    assert any(not torch.equal(theirs[name], theirs[f"decoder/{name.partition('/')[2]}"]) for name in shared)


def test_init_from_is_not_repeated_on_resume(data: Path, trained: Train, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", {"train.init_from": str(trained("swa-ssss"))}
    train(data, run, settings)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    before = losses_of(run)
    train(data, run, settings, resume=True)
    assert losses_of(run) == before


def test_init_from_refuses_what_does_not_fit(data: Path, other_data: Path, trained: Train, tmp_path: Path) -> None:
    swa = trained("swa-ssss")
    given = {"train.init_from": str(swa)}
    with pytest.raises(RequestError, match=r"--init-from .*: its model\.depth is 1, this run's is 2"):
        train(data, tmp_path / "a", given, depth=2)
    with pytest.raises(RequestError, match=r"its model\.heads is 1, this run's is 2"):
        train(data, tmp_path / "b", given | {"model.heads": 2}, depth=1)
    with pytest.raises(RequestError, match=r"the tokenizer of .* does not match the data"):
        train(other_data, tmp_path / "c", given)
    with pytest.raises(RequestError, match="is not a run folder"):
        train(data, tmp_path / "d", {"train.init_from": str(tmp_path)})
    empty = tmp_path / "empty"
    shutil.copytree(swa, empty, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(RequestError, match="has no checkpoint yet"):
        train(data, tmp_path / "e", {"train.init_from": str(empty)})
    # a refused request does not stand in the way of the one that is mended
    train(data, tmp_path / "e", given)
    with pytest.raises(RequestError, match="not a multiple of the context"):
        train(data, tmp_path / "f", {"train.tokens_per_step": 100})
    train(data, tmp_path / "f")


def test_init_from_says_which_checkpoint_is_damaged(data: Path, trained: Train, tmp_path: Path) -> None:
    swa, watch = tmp_path / "swa", Unwatched()
    shutil.copytree(trained("swa-ssss"), swa)
    (swa / "checkpoints" / "step-00000006" / "decoder.safetensors").write_bytes(b"")
    settings = SMALL | {"train.init_from": str(swa), "train.steps": 1}
    launch.train(RECIPE, data, tmp_path / "run", watch, depth=1, settings=settings)
    assert any("step-00000006 is damaged" in line for line in watch.lines)
