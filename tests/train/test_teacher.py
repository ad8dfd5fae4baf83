"""A pretrained Hugging Face model as Q: frozen, of any width, through a learned projection."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from maglev.__main__ import main
from maglev.data.shards import open_data
from maglev.errors import RequestError
from maglev.evaluate.runs import has_prefiller, load_objective
from maglev.model.accounting import describe
from maglev.objectives.maglev import MaglevObjective
from maglev.recipes import run_config
from maglev.runs import TOKENIZER, read_config
from maglev.train import launch
from tests.helpers import batch_of, gradients
from tests.small_runs import FAST, SMALL, Unwatched, tensors_of
from tests.train.test_options import trained_run

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

RECIPE = "maglev-separate-0.1"


def make_teacher(folder: Path, data: Path, kind: str = "llama", **shape: Any) -> Path:
    """With random weights, and the tokenizer of the data."""
    torch.manual_seed(0)
    if kind == "llama":
        sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        sizes |= {"vocab_size": 300, "intermediate_size": 64, "max_position_embeddings": 64} | shape
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    else:
        sizes = {"n_embd": 36, "n_layer": 1, "n_head": 2, "vocab_size": 320, "n_positions": 64} | shape
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    open_data(data).tokenizer.save(folder / TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"), data)


def taught(teacher: Path) -> dict[str, Any]:
    return {"objective.prefiller_from": str(teacher)}


@pytest.mark.parametrize(("recipe", "kind"), [(RECIPE, "llama"), (RECIPE, "gpt2"), ("maglev-closed", "llama")])
def test_a_run_learns_from_a_frozen_model(recipe: str, kind: str, data: Path, tmp_path: Path) -> None:
    folder, run = make_teacher(tmp_path / "teacher", data, kind), tmp_path / "run"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "bpb_lifted" in trained_run(recipe, data, run, taught(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    width, depth = {"llama": (48, 2), "gpt2": (36, 1)}[kind]
    objective = read_config(run).objective
    assert (objective.prefiller_width, objective.prefiller_depth) == (width, depth)
    # a checkpoint holds what was learned, and that was
    stored = {name: tensor for name, tensor in tensors_of(run).items() if name.startswith("prefiller/")}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {"prefiller/exit_proj.weight": (64, width)}
    told = describe(read_config(run))
    assert told["parameters"]["prefiller"] == 64 * width
    shutil.rmtree(folder)
    # the deployed part has no need of its teacher, its lifted memories have
    load_objective(run, torch.device("cpu"), pytest.fail, with_prefiller=False)
    _, whole, _ = load_objective(run, torch.device("cpu"), pytest.fail)
    with pytest.raises(RequestError, match="cannot be loaded"):
        whole(*batch_of(1, 8, vocab=300))


def test_targets_are_the_models_states_projected(teacher: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained_run(RECIPE, data, run, taught(teacher))
    _, objective, _ = load_objective(run, torch.device("cpu"), pytest.fail)
    assert isinstance(objective, MaglevObjective)
    tokens, targets = batch_of(2, 20, vocab=300)
    found = objective.prefiller(tokens, objective.decoder)
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    states = model(tokens, output_hidden_states=True).hidden_states[-1].detach()
    norm = torch.nn.functional.rms_norm
    projected = norm(states, (48,), eps=1e-6) @ objective.prefiller.exit_proj.weight.T
    torch.testing.assert_close(found, norm(projected, (64,), eps=1e-6), rtol=1e-4, atol=1e-5)
    losses = objective(tokens, targets)
    for loss in (losses.next_token, losses.consistency):
        assert gradients(loss, objective)["prefiller.exit_proj.weight"].abs().max() > 0
    assert all(parameter.grad is None for parameter in objective.prefiller.load().parameters())
    assert len(list(objective.prefiller.parameters())) == 1


def test_what_does_not_fit_is_told(teacher: Path, data: Path, other_data: Path, tmp_path: Path) -> None:
    def refused(words: str, folder: Path, given: Path = data, **settings: Any) -> None:
        with pytest.raises(RequestError, match=words):
            trained_run(RECIPE, given, tmp_path / "run", taught(folder) | settings)

    refused("objective.prefiller_from: the tokenizer of .* does not match the data", teacher, other_data)
    refused("context is 16, and this run's is 32", make_teacher(tmp_path / "a", data, max_position_embeddings=16))
    refused("vocabulary is 299, and this run's is 300", make_teacher(tmp_path / "b", data, vocab_size=299))
    refused("prefiller_width is 50, and that of .* is 48; leave it away", teacher, **{"objective.prefiller_width": 50})
    refused("prefiller_depth is 50, and that of .* is 2; leave it away", teacher, **{"objective.prefiller_depth": 50})
    refused("no config.json tells", tmp_path / "nowhere", **{"objective.prefiller_width": 48})
    without = shutil.copytree(teacher, tmp_path / "c")
    (without / TOKENIZER).unlink()
    refused(f"has no {TOKENIZER}", without)
    (without / "model.safetensors").unlink()
    shutil.copy(teacher / TOKENIZER, without)
    refused("cannot be loaded", without)
    refused("leave one away", teacher, **{"objective.sharing": "mlp"})
    refused("leave one away", teacher, **{"objective.prefiller_pattern": "L"})
    refused("sees whole rows", teacher, **{"data.document_mask": True})
    encoder = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(encoder).save_pretrained(tmp_path / "d")
    shutil.copy(teacher / TOKENIZER, tmp_path / "d")
    refused("states depend on later tokens", tmp_path / "d")
    assert not (tmp_path / "run" / "config.json").exists()


def test_without_transformers_it_says_what_to_install(
    teacher: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(RequestError, match=r"pip install 'maglev\[hf\]'"):
        trained_run(RECIPE, data, tmp_path / "run", taught(teacher))


def test_a_run_costs_its_teachers_forward_pass(teacher: Path) -> None:
    shape = {"model.context": 32, "model.vocab_size": 300}
    own, plain = run_config(RECIPE, 2, shape | taught(teacher)), run_config("swa-ssss", 2, shape)
    more = describe(own)["flops_per_token"]["training"] - 3 * describe(own)["flops_per_token"]["decoder_forward"]
    matrices, keys = 2 * 12 * 48**2, 2 * (32 + 1) / 2
    assert more == pytest.approx(2 * matrices + 4 * 48 * keys + 6 * 48 * 128, rel=1e-6)
    assert describe(own)["steps"] == describe(plain)["steps"]
    told = run_config(RECIPE, 2, shape | taught(teacher) | {"objective.prefiller_width": 48})
    assert describe(told) == describe(own)


def test_a_resumed_run_goes_on_with_the_same_teacher(data: Path, tmp_path: Path) -> None:
    folder, run = make_teacher(tmp_path / "teacher", data), tmp_path / "run"
    trained_run(RECIPE, data, run, taught(folder))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    chosen = SMALL | FAST | {"model.width": 64, "train.validate_every": 6} | taught(folder)
    aside = folder.rename(tmp_path / "aside")
    make_teacher(folder, data, initializer_range=0.1)
    with pytest.raises(RequestError, match=r"begun with other weights in objective.prefiller_from; put those back"):
        launch.train(RECIPE, data, run, Unwatched(), depth=2, settings=chosen, resume=True)
    shutil.rmtree(folder)
    # from where it lies now, which the run remembers
    moved = chosen | taught(aside)
    assert launch.train(RECIPE, data, run, Unwatched(), depth=2, settings=moved, resume=True)["finished"]
    assert read_config(run).objective.prefiller_from == str(aside)
    # a run without a teacher does not get one on its way
    alone = tmp_path / "alone"
    trained_run(RECIPE, data, alone, {})
    with pytest.raises(RequestError, match=r"was begun with objective.prefiller_depth = 0, now"):
        launch.train(RECIPE, data, alone, Unwatched(), depth=2, settings=moved, resume=True)


def test_without_its_teacher_a_run_is_asked_on_its_own_memories(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = make_teacher(tmp_path / "teacher", data), tmp_path / "run"
    trained_run(RECIPE, data, run, taught(folder))
    shutil.rmtree(folder)
    assert not has_prefiller(run, lambda line: print(line))
    assert "is not there any more, so lifted memories are left out" in capsys.readouterr().out
    assert main(["eval", "bpb", str(run), "--data", str(data), "--memory", "lifted", "--device", "cpu"]) == 2
    assert "there is no such folder; put it back, or ask for recurrent memories" in capsys.readouterr().err
