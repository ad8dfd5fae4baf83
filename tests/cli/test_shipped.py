"""Weights that come with the package: found by their name, read and never written to."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import maglev
from maglev import runs
from maglev.__main__ import main
from maglev.cli.bench import prompt_of
from maglev.errors import RequestError
from maglev.inference.engine import LanguageModel
from maglev.inference.reading import read_
from maglev.runs import read_config
from tests.documents import REPOSITORY
from tests.helpers import step_through
from tests.scripts import load_script
from tests.small_runs import Train, one_line

NAME = "tiny"


@pytest.fixture
def shipped(trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model under that name, as an export in half of the bytes, and a working folder elsewhere."""
    pytest.importorskip("transformers")
    run, folder = trained("maglev-shared-0.1"), tmp_path / "weights" / NAME
    assert main(["export", str(run), str(folder), "--without-prefiller", "--dtype", "bfloat16"]) == 0
    monkeypatch.setattr(runs, "SHIPPED", folder.parent)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_a_name_writes_what_its_folder_writes(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    texts = []
    for model in (NAME, str(shipped)):
        assert main(["generate", model, "--prompt", "The", "--max-tokens", "8", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert maglev.load(NAME, device="cpu").fingerprint == maglev.load(shipped, device="cpu").fingerprint


def test_a_folder_of_that_name_comes_first(shipped: Path) -> None:
    Path(NAME).mkdir()
    with pytest.raises(RequestError, match=f"^{NAME} is not a run folder, .* made$"):
        maglev.load(NAME)


@pytest.mark.parametrize("name", ["tin", "../weights/tiny/nothing", ""])
def test_other_names_are_folders(shipped: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.run_folder(name) == Path(name)
    capsys.readouterr()
    assert main(["generate", name, "--prompt", "a"]) == 2
    assert "is not a run folder" in one_line(capsys)


@pytest.mark.parametrize("name", [NAME, f"{NAME}/", f"./{NAME}"])
def test_every_verb_that_only_reads_takes_it(shipped: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.run_folder(name) == shipped
    capsys.readouterr()
    assert main(["info", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "maglev-shared-0.1"
    assert main(["export", name, "again", "--json"]) == 0
    capsys.readouterr()
    assert main(["bench", "read", name, "--quick", "--tokens", "20", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["weights"] == "trained"


def test_others_say_how_to_get_a_folder(shipped: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["eval", "bpb", NAME, "--data", str(data)], ["eval", "recall", NAME]):
        capsys.readouterr()
        assert main(words) == 2
        assert f"'maglev export {NAME} OUT'" in one_line(capsys)


def test_results_are_not_kept_in_the_package(shipped: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(shipped.rglob("*"))
    capsys.readouterr()
    assert main(["eval", "bpb", str(shipped), "--data", str(data), "--device", "cpu"]) == 0
    assert "is not kept there" in capsys.readouterr().err
    assert sorted(shipped.rglob("*")) == before


def test_through_an_export_of_an_export_it_is_the_same_run(shipped: Path, trained: Train) -> None:
    assert main(["export", NAME, "again"]) == 0
    assert main(["export", "again", "run", "--format", "run"]) == 0
    before, after = trained("maglev-shared-0.1"), Path("run")
    first, last = (json.loads((path / runs.TOKENIZER).read_text()) for path in (before, after))
    assert first == last and read_config(before) == read_config(after)


def test_rounding_halves_the_bytes_and_changes_no_name(shipped: Path, trained: Train) -> None:
    rounded = maglev.load(shipped, device="cpu").decoder.state_dict()
    exact = maglev.load(trained("maglev-shared-0.1"), device="cpu").decoder.state_dict()
    assert rounded.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.bfloat16().float()), name
    stored = sum(tensor.numel() * 2 for tensor in exact.values())
    assert stored < (shipped / "model.safetensors").stat().st_size < 1.2 * stored + 10_000


@pytest.mark.parametrize("more", [["--dtype", "int3"], ["--format", "run", "--dtype", "bfloat16"]])
def test_what_cannot_be_rounded_is_refused(shipped: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", NAME, "out", *more]) == 2
    assert "dtype" in one_line(capsys) and not Path("out").exists()


def test_a_server_keeps_its_sessions_outside(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maglev.cli import serve

    told: dict = {}
    monkeypatch.setattr(serve, "serve_here", lambda run, *rest, **more: told.update(more, run=run))
    for name in (NAME, str(shipped)):
        assert main(["serve", name, "--port", "0"]) == 0
        assert told["run"] == shipped and told["name"] == NAME and told["sessions"] == Path(f"{NAME}-sessions")


# what does come with the package
TINY = "maglev-tiny"
PROSE = (
    "The old man walked down to the river in the morning, and the boy went with him. They had a small boat there, and "
    "when the water was still they would sit in it and wait for the fish. It was a good life, he thought, and there "
    "was nothing else that he wanted to do in the world."
)


def test_the_weights_that_come_with_it_know_english() -> None:
    lm = maglev.load(TINY, device="cpu")
    tokens = lm.tokenizer.encode(PROSE)
    forwards, backwards = (bits_per_byte(lm, each, len(PROSE)) for each in (tokens, tokens[::-1]))
    # what a model that knows nothing would need is between the two
    assert forwards < 1.8 < len(tokens) * math.log2(lm.tokenizer.vocab_size) / len(PROSE) < backwards


def bits_per_byte(lm: LanguageModel, tokens: list[int], size: int) -> float:
    """Of a text read token by token, on the decoder's own memories."""
    state, nats = lm.read(""), 0.0
    for token in tokens:
        nats -= float(lm.next_logits(state).float().log_softmax(-1).flatten()[token])
        lm.step_through([token], state)
    return nats / math.log(2) / size


def test_their_card_says_what_was_measured() -> None:
    pytest.importorskip("transformers")
    script = load_script("benchmarks/ship.py")
    found = json.loads((REPOSITORY / "results" / f"{TINY}.json").read_text())
    folder = runs.SHIPPED / TINY
    assert (folder / "README.md").read_text() == script.card(found, runs.read_config(folder))
    lm = maglev.load(TINY, device="cpu")
    assert script.written(lm) == found["written"] and lm.read(found["prompt"]).nbytes == found["state_bytes"]
    assert found["parameters"] == sum(tensor.numel() for tensor in lm.decoder.state_dict().values())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6, "more than a few megabytes"


def test_transformers_takes_them_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    folder = runs.SHIPPED / TINY
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    written = model.generate(**tokenizer("The river", return_tensors="pt"), max_new_tokens=20, do_sample=False)
    lm = maglev.load(TINY, device="cpu")
    expected = "The river" + "".join(lm.generate("The river", max_tokens=20, temperature=0))
    assert tokenizer.decode(written[0], skip_special_tokens=True) == expected


def test_four_passes_read_what_stepping_reads() -> None:
    """Of the weights themselves, on text that they were not trained on: as near as rounding lets passes come at all."""
    lm = maglev.load("maglev-tiny", device="cpu", dtype=torch.bfloat16)
    tokens = prompt_of(lm, None, 256)
    stepped = step_through(lm.decoder, tokens).float()

    def distance(passes: int, **how: int) -> float:
        memories: list[Tensor] = []
        read_(lm.decoder, tokens, lm.decoder.initial_state(1), passes=passes, memories=memories, **how)
        return float((torch.cat(memories, dim=1).float() - stepped).norm() / stepped.norm())

    floor = distance(8, block=16, stride=8)
    assert distance(4, block=16, stride=8) < 1.1 * floor < 0.01
    assert distance(1, block=16, stride=8) > 10 * floor
