"""`maglev export`: an export is the engine's model, with transformers and with maglev, and comes back to the bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import maglev
from maglev.__main__ import main
from maglev.data.tokenizer import Tokenizer, bos_template
from maglev.inference.batch import generate_batch
from maglev.inference.engine import LanguageModel
from maglev.inference.sampling import Sampling
from tests.helpers import step_through
from tests.hf import answers as answers_script
from tests.hf.answers import NEW, TEXTS, answers, trained_loss
from tests.hf.models import KINDS
from tests.small_runs import Train, assert_same_tensors, losses_of, one_line, tensors_of, train_arguments

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

TEXT = TEXTS[0]


def opened(folder: Path) -> tuple[Any, Any]:
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


def assert_engines(found: dict[str, Tensor], lm: LanguageModel) -> None:
    """Logits of all positions as the engine steps through them, text token for token."""
    written = generate_batch(lm, TEXTS, max_tokens=NEW, sampling=Sampling(temperature=0))
    for row, text in enumerate(TEXTS):
        ids = torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode(text)]])
        logits = lm.decoder.readout(step_through(lm.decoder, ids))[0].detach()
        torch.testing.assert_close(logits[-1], lm.next_logits(lm.read(text)), rtol=1e-5, atol=1e-5)
        for kind in ("", " padded left", " padded right", " continued"):
            torch.testing.assert_close(found[f"logits{kind}, {row}"], logits, rtol=1e-5, atol=1e-5)
        for kind in ("", " padded", " continued"):
            tokens = found[f"tokens{kind}, {row}"].tolist()
            # the engine leaves BOS away, which ends a document
            end = tokens.index(lm.tokenizer.bos_id) if lm.tokenizer.bos_id in tokens else NEW
            assert tokens[:end] == written[row].tokens, kind
    assert max(len(own.tokens) for own in written) == NEW


@pytest.mark.parametrize("recipe", KINDS)
def test_logits_and_text_are_the_engines(recipe: str, lively: Train, exported: Train) -> None:
    lm = maglev.load(lively(recipe))
    model, tokenizer = opened(exported(recipe))
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == [lm.tokenizer.bos_id, *lm.tokenizer.encode(TEXT)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert_engines(answers(model, tokenizer), lm)


def test_exports_run_where_maglev_is_not(lively: Train, exported: Train, tmp_path: Path) -> None:
    kinds = ("maglev-shared-0.1", "swa-ssss")
    folders = [exported(recipe) for recipe in kinds]
    command = [sys.executable, answers_script.__file__, str(tmp_path), *map(str, folders)]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for recipe, folder in zip(kinds, folders, strict=True):
        found = load_file(tmp_path / f"{recipe}.safetensors")
        torch.testing.assert_close(found.pop("loss"), trained_loss(*opened(folder)), rtol=1e-6, atol=1e-6)
        assert_engines(found, maglev.load(lively(recipe)))
    assert (tmp_path / "saved" / "modeling_maglev.py").read_bytes() == (folder / "modeling_maglev.py").read_bytes()


@pytest.mark.parametrize("recipe", KINDS)
def test_back_to_the_bit(recipe: str, lively: Train, exported: Train, tmp_path: Path) -> None:
    run, back = lively(recipe), tmp_path / "back"
    assert main(["export", str(exported(recipe)), str(back), "--format", "run"]) == 0
    for name in ("config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (run / name).read_bytes()
    ours, theirs = tensors_of(run), tensors_of(back)
    assert {name for name in ours if not name.startswith("optimizer/")} == set(theirs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_saved_by_transformers_it_comes_back_too(lively: Train, exported: Train, tmp_path: Path) -> None:
    model, tokenizer = opened(exported("maglev-shared-0.1"))
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "back"), "--format", "run"]) == 0
    assert main(["export", str(exported("maglev-shared-0.1")), str(tmp_path / "direct"), "--format", "run"]) == 0
    assert_same_tensors(tmp_path / "back", tmp_path / "direct")
    lm, again = maglev.load(lively("maglev-shared-0.1")), maglev.load(tmp_path / "back")
    assert again.fingerprint == lm.fingerprint
    assert again.tokenizer.encode(TEXT) == lm.tokenizer.encode(TEXT)


def test_an_export_is_a_run_to_maglev(
    lively: Train, exported: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = lively("maglev-shared-0.1"), exported("maglev-shared-0.1")
    assert maglev.load(folder).fingerprint == maglev.load(run).fingerprint
    results = []
    for each in (run, folder):
        arguments = ["--data", str(data), "--memory", "lifted", "--json"]
        assert main(["eval", "bpb", str(each), *arguments]) == 0
        results.append(json.loads(capsys.readouterr().out)["bpb_lifted"])
    assert results[0] == results[1]


def test_training_begins_from_an_export_as_from_its_run(
    lively: Train, exported: Train, data: Path, tmp_path: Path
) -> None:
    for name, source in (("run", lively), ("export", exported)):
        begun = {"train.init_from": str(source("swa-ssss"))}
        assert main(train_arguments("maglev-shared-0.1", data, tmp_path / name, begun, depth=2)) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "export")
    assert_same_tensors(tmp_path / "run", tmp_path / "export")


def test_without_the_prefiller(lively: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = lively("maglev-separate-1"), tmp_path / "out"
    assert main(["export", str(run), str(out), "--without-prefiller", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["parameters"]) == {"decoder"}
    assert not any("prefiller" in name for name in load_file(out / "model.safetensors"))
    model, tokenizer = opened(out)
    ids = tokenizer("Once", return_tensors="pt")
    torch.testing.assert_close(
        model(**ids).logits[0, -1], maglev.load(run).next_logits(maglev.load(run).read("Once")), rtol=1e-5, atol=1e-5
    )


def test_the_pipeline_writes(lively: Train, exported: Train) -> None:
    expected = "".join(maglev.load(lively("maglev-shared-0.1")).generate("Once", max_tokens=8, temperature=0))
    write = transformers.pipeline("text-generation", model=str(exported("maglev-shared-0.1")))
    (found,) = write("Once", max_new_tokens=8, do_sample=False)
    assert found["generated_text"] == "Once" + expected


def test_a_tokenizer_with_a_processor_of_its_own_comes_back(lively: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lively("swa-ssss"), run)
    description = json.loads((run / "tokenizer.json").read_text())
    own = bos_template("<|bos|>", 0) | {"single": [{"Sequence": {"id": "A", "type_id": 0}}]}
    (run / "tokenizer.json").write_text(json.dumps(description | {"post_processor": own}))
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert opened(tmp_path / "out")[1]("a")["input_ids"][0] == 0
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "back"), "--format", "run"]) == 0
    assert json.loads((tmp_path / "back" / "tokenizer.json").read_text()) == description | {"post_processor": own}
    # no text is encoded with it: the same tokenizer to data prepared with either
    files = [folder / "tokenizer.json" for folder in (run, tmp_path / "out", tmp_path / "back")]
    assert {Tokenizer.load(file).fingerprint for file in files} == {Tokenizer(json.dumps(description)).fingerprint}


def test_wrong_requests_end_in_one_line(
    lively: Train, exported: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder, out = lively("swa-ssss"), exported("swa-ssss"), tmp_path / "out"

    def line(*words: str | Path) -> str:
        assert main(["export", *map(str, words)]) == 2
        assert not out.exists()
        return one_line(capsys)

    assert "it must be one of hf, run" in line(run, out, "--format", "onnx")
    assert "leave it away" in line(folder, out, "--format", "run", "--without-prefiller")
    assert "is not a run folder" in line(tmp_path, out)
    assert "is there already" in line(run, folder)

    def altered(name: str) -> Path:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        return copy

    other = altered("other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert "a model of type 'llama'" in line(other, out, "--format", "run")
    unknown = altered("unknown")
    config["run"]["model"]["colour"] = 3
    (unknown / "config.json").write_text(json.dumps(config))
    assert "unknown key model.colour" in line(unknown, out, "--format", "run")
    pickled = altered("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "pickles are not read" in line(pickled, out, "--format", "run")
    shaped = altered("shaped")
    tensors = load_file(shaped / "model.safetensors")
    name = "objective.decoder.readout.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, shaped / "model.safetensors", {"format": "pt"})
    assert "decoder.readout.weight is (299, 128)" in line(shaped, out, "--format", "run")
    cut = altered("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
    assert main(["export", str(cut), str(out), "--format", "run"]) == 1
    assert "model.safetensors is cut short or damaged" in one_line(capsys)
    bare = altered("bare")
    (bare / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in line(bare, out, "--format", "run")


def test_weights_that_do_not_fit_are_refused_wherever_they_are_loaded(
    exported: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(exported("maglev-shared-0.1"), folder)
    weights = folder / "model.safetensors"
    whole, tensors, name = weights.read_bytes(), load_file(weights), "objective.decoder.readout.weight"
    verbs = [["generate", str(folder)], ["eval", "bpb", str(folder), "--data", str(data), "--memory", "lifted"]]
    told = "decoder.readout.weight is (299, 128) and the model has (300, 128)"
    altered = {
        told: {name: tensors[name][:-1].clone()},
        "decoder.more is (1,)": {"objective.decoder.more": torch.ones(1)},
    }
    for words, changed in altered.items():
        save_file(tensors | changed, weights, {"format": "pt"})
        for verb in verbs:
            assert main(verb) == 2
            assert words in one_line(capsys)
    weights.write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    for verb in verbs:
        assert main(verb) == 1
        assert "header too large" in one_line(capsys)
    with pytest.raises(Exception, match="header too large"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_transformers_takes_no_pickle_either(exported: Train, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(exported("swa-ssss"), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_without_transformers_it_says_what_to_install(
    lively: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import maglev.hf

    monkeypatch.delattr(maglev.hf, "convert", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "maglev.hf.convert", None)
    assert main(["export", str(lively("swa-ssss")), str(tmp_path / "out")]) == 2
    assert "pip install 'maglev[hf]'" in one_line(capsys)
