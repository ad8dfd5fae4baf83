"""`benchmarks/small_table.py` at toy size: rows of recipes and peers, their tasks, and the table that comes of them."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from maglev import config, objectives, recipes
from maglev.__main__ import main
from maglev.bench.sources import source_fingerprint
from maglev.evaluate import paper_tasks
from maglev.evaluate.paper_tasks import read_rows
from maglev.evaluate.requests import Request, RequestFile, save_requests
from maglev.evaluate.table_checks import KEYS
from maglev.model.accounting import describe
from maglev.recipes import run_config
from tests.evaluate.task_files import ITEMS
from tests.helpers import random_tokens
from tests.scripts import load_script

SMALL = ["model.context=32", "train.tokens_per_step=128", "train.steps=3"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/small_table.py")


def stub(script: ModuleType, head_dim: int = 16, state: int = 8) -> Any:
    """Mamba-2 with its scan a step at a time, which needs no kernels."""
    layer = partial(script.peers.Mamba2, head_dim=head_dim, state=state)
    return replace(script.peers.PEERS["mamba-2"], mixer=layer)


def test_rows_make_a_table(
    script: ModuleType,
    data: Path,
    tasks_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval, the extra 'tasks' of maglev")
    monkeypatch.setitem(script.peers.PEERS, "mamba-2", stub(script))
    asked, scores, out = tmp_path / "r.safetensors", tmp_path / "scores", tmp_path / "small.json"
    # before there is a run: the tokenizer is all that requests need
    words = ["--max-length", "32", "--limit", str(ITEMS), "--data", tasks_folder, "--requests", asked]
    assert main(["eval", "tasks", str(data), *map(str, words)]) == 0
    common = ["--data", data, "--text", data, "--scores", scores, "--device", "cpu"]
    common += ["--depth", 1, "--window", 8, *(word for setting in SMALL for word in ("--set", setting))]
    answers = ["--requests", asked]
    rows = [("swa-ssss", ["--set", "train.steps=6", "--name", "twice"]), ("swa-ssss", answers)]
    rows += [("swa-ssss", ["--seed", 1]), ("maglev-shared-0.1", []), ("mamba-2", answers)]
    for name, own in rows:
        capsys.readouterr()
        assert script.main(["row", name, *map(str, common), *map(str, own)]) == 0
        found = json.loads(capsys.readouterr().out)
        script.add_row(found | {"row": name, "name": name, "status": 0, "seconds": 1.0}, out, tmp_path)
    joining = ["aggregate", str(out), "--scores", str(scores), "--tokenizer", str(data), "--data", str(tasks_folder)]
    assert script.main(joining) == 2
    assert "answers the first items of each task alone" in capsys.readouterr().err
    whole(scores)
    # answers of an earlier run of that name are not this row's
    kept = json.loads((scores / "swa-ssss-0.json").read_text())
    other = kept["model"]["settings"] | {"optimizer.matrix_lr": 7.0}
    for change in ({"step": 2}, {"seed": 5}, {"recipe": "lrt-ssss"}, {"settings": other}):
        (scores / "swa-ssss-0.json").write_text(json.dumps(kept | {"model": kept["model"] | change}))
        assert script.main(joining) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert "make the row again with --requests" in told and "the row swa-ssss-0 of swa-ssss, seed 0, step 3" in told
    (scores / "swa-ssss-0.json").write_text(json.dumps(kept))
    monkeypatch.setattr(paper_tasks, "read_rows", lambda folder, task, limit: read_rows(folder, task, ITEMS))
    assert script.main(joining) == 0
    runs = {run["run"]: run for run in json.loads(out.read_text())["runs"]}
    assert list(runs)[-1] == "twice" and runs["twice"]["tokens"] == 2 * runs["swa-ssss-0"]["tokens"]
    for name, run in runs.items():
        sources = {"recurrent", "lifted", "refined"} if "maglev" in name else {"recurrent"}
        assert {result["memory"] for result in run["bpb"]} == sources, name
        assert [result["memory"] for result in run["tasks"]] == ["recurrent"] * (name in ("swa-ssss-0", "mamba-2-0"))
        assert run["parameters"] > 0 and run["training_flops"] > 0 and run["tokens_per_second"] > 0
        assert run["machine"]["torch"] == torch.__version__
        assert run["machine"]["sources"] == source_fingerprint()
    # aggregated answers stay as they are
    before = out.read_bytes()
    assert (
        script.main(["aggregate", str(out), "--scores", str(scores), "--tokenizer", str(data), "--data", "nowhere"])
        == 0
    )
    assert out.read_bytes() == before
    capsys.readouterr()
    assert main(["table", str(out), "--no-paper", "--no-figures", "--out", str(tmp_path / "table"), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [(line["model"], line["memory"], line["seeds"]) for line in lines] == [
        ("SWA (SSSS), steps 3", "recurrent", [0, 1]),
        ("SWA (SSSS), steps 6", "recurrent", [0]),
        ("Maglev (λ=0.1)", "recurrent", [0]),
        ("Maglev (λ=0.1)", "lifted", [0]),
        ("Maglev (λ=0.1)", "refined", [0]),
        ("Mamba-2", "recurrent", [0]),
    ]
    swa, _, *others = lines
    text = f"bpb {data.name}"
    assert swa["cells"][text]["spread"] is not None and swa["cells"][text]["difference"] is None
    assert all(cell["difference"] is not None for line in others for cell in line["cells"].values())
    assert 0 <= others[-1]["cells"]["average"]["value"] <= 100


def whole(scores: Path) -> None:
    """As if the files of the tasks had no more items."""
    for path in scores.glob("*.json"):
        value = json.loads(path.read_text())
        value["setting"]["limit"] = None
        path.write_text(json.dumps(value))


def toy(data: Path, *words: object) -> list[str]:
    sizes = ["--data", data, "--device", "cpu", "--depth", 1, "--window", 8, *words]
    return [*map(str, sizes), *(word for setting in SMALL for word in ("--set", setting))]


def test_rows_are_processes_and_keep_what_they_took(
    script: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, keep = tmp_path / "small.json", tmp_path / "runs"
    # what is not usual of all rows is part of each one's name
    words = toy(data, "--seeds", 3)
    name = script.job_of("swa-ssss", 3, script.parse(["rows", "swa-ssss", *words]), tmp_path).facts["name"]
    assert name.startswith("swa-ssss-depth-1-window-8-model.context-32-")
    words = toy(data, "--keep", keep, "--out", out, "--jobs", 2, "--seeds", 3)
    assert script.main(["rows", "swa-ssss", *words]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = json.loads(out.read_text())["runs"]
    assert (run["run"], run["seed"], run["rows_at_a_time"]) == (name, 3, 2)
    assert run["row_seconds"] == told["rows"][0]["seconds"] > run["train_seconds"] > 0
    # the same again goes on with what is there: nothing is trained twice
    before = (keep / name / "metrics.jsonl").read_bytes()
    assert script.main(["row", "swa-ssss", "--seed", "3", "--name", name, *toy(data, "--keep", keep)]) == 0
    assert json.loads(capsys.readouterr().out)["bpb"] == run["bpb"]
    assert (keep / name / "metrics.jsonl").read_bytes() == before
    # what earlier tries took is counted
    named = {"row": "swa-ssss, seed 3", "name": name, "status": 0}
    script.add_row(named | {"error": "stopped at the limit", "seconds": 5.0}, out, keep)
    script.add_row(named | {"error": "stopped at the limit", "seconds": 0.5}, out, keep)
    for seconds in (7.5, 2.0):
        script.add_row(named | run | {"seconds": 2.0}, out, keep)
        assert json.loads(out.read_text())["runs"][0]["row_seconds"] == seconds


def test_what_a_row_needs_is_looked_for_before_it_is_trained(
    script: ModuleType,
    data: Path,
    other_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "work_through", lambda *_, **__: pytest.fail("began"))
    asked = tmp_path / "asked.safetensors"
    save_requests(asked, RequestFile([Request((0,), (1,))], "another", {}))
    for words, line in (
        (["swa-sss", *toy(data)], "no recipe or peer 'swa-sss'; known: transformer-slsl, "),
        (["swa-ssss", *toy(tmp_path / "none")], "not a data folder"),
        (["swa-ssss", *toy(data, "--text", tmp_path / "none")], "not a data folder"),
        (["swa-ssss", *toy(data, "--text", other_data)], "another tokenizer than"),
        (["swa-ssss", *toy(data, "--requests", tmp_path / "none")], "does not exist"),
        (["mamba-2", *toy(data, "--requests", asked)], "another tokenizer than"),
        (["swa-ssss", *toy(data, "--set", "train.steps")], "--set 'train.steps' is not of the form KEY=VALUE"),
    ):
        for verb in ("row", "rows"):
            assert script.main([verb, *words]) == 2
            out, err = capsys.readouterr()
            assert not out and line in err and err.count("\n") == 1
    assert script.main(["rows", "", *toy(data)]) == 2
    assert "a row is empty" in capsys.readouterr().err


def test_a_diverged_row_is_kept_and_a_foreign_file_is_not_written_to(
    script: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small.json"
    facts = dict.fromkeys(KEYS, 0) | {"run": "mamba-2-0", "tokens": 9, "tokens_per_second": None, "seconds": 1.0}
    bpb = [{"data": "text", "memory": "recurrent", "bpb_recurrent": float("nan")}]
    script.add_row(facts | {"row": "mamba-2, seed 0", "name": "mamba-2-0", "status": 0, "bpb": bpb}, out, tmp_path)
    assert "text recurrent nan" in capsys.readouterr().out
    assert script.diverged(bpb) and not script.diverged([bpb[0] | {"bpb_recurrent": 1.5}])
    assert json.loads(out.read_text())["runs"][0]["bpb"][0]["bpb_recurrent"] is None
    out.write_text("{}")
    assert script.main(["rows", "swa-ssss", *toy(data, "--out", out)]) == 2
    assert "is no file of table facts" in capsys.readouterr().err


def test_a_row_is_started_with_its_own_options_last(script: ModuleType, tmp_path: Path) -> None:
    words = ["rows", "swa-ssss --passes=2 --set=a=b", "--data", "d", "--text", "e", "--text", "f", "--seeds", "3"]
    arguments = script.parse([*words, "--requests", "r", "--set", "c=d"])
    job = script.job_of(arguments.rows[0], 3, arguments, tmp_path)
    asked = script.parse(job.command[2:])
    assert (asked.model, asked.seed, asked.passes, asked.set) == ("swa-ssss", 3, 2, ["c=d", "a=b"])
    assert (asked.data, asked.text, asked.requests) == (Path("d"), [Path("e"), Path("f")], Path("r"))
    assert asked.name.startswith("swa-ssss-passes-2-set-a-b-c-d-3-") and job.facts["row"].endswith("seed 3")
    names = [
        ["swa-ssss"],
        ["swa-ssss --passes=2"],
        *([f"swa-ssss --set=a={value}"] for value in ("1", "-1", "1" * 300)),
    ]
    parsed = [script.parse(["rows", *own, "--data", "d"]) for own in names]
    found = [script.job_of(own.rows[0], 0, own, tmp_path).facts["name"] for own in parsed]
    # those of the stored rows stay as they were, no two are the same, and a file may be called so
    assert found[:2] == ["swa-ssss-0", "swa-ssss-passes-2-0"] and len({*found}) == 5 and max(map(len, found)) < 120


def test_levers_are_a_row_with_their_settings(
    script: ModuleType,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # gone after the test
    for registry in (config.OBJECTIVE_KINDS, recipes.RECIPES):
        monkeypatch.setitem(registry, "levers", None)
        monkeypatch.delitem(registry, "levers")
    monkeypatch.setattr(objectives, "OTHERS", {})
    words = ["--set", "objective.rollout_from=1", "--set", "objective.rollout=2"]
    assert script.main(["row", "levers", *toy(data, *words)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == "levers" and found["settings"]["objective.rollout_from"] == 1
    assert {result["memory"] for result in found["bpb"]} == {"recurrent", "lifted", "refined"}


def test_a_missing_peer_ends_in_one_line(
    script: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, package in (("gated-deltanet", "fla"), ("mamba-2", "mamba_ssm")):
        monkeypatch.setitem(sys.modules, package, None)
        capsys.readouterr()
        assert script.main(["row", name, "--data", str(data), "--depth", "1", "--device", "cpu"]) == 2
        told = capsys.readouterr()
        assert "is missing" in told.err and "PYTHONPATH" in told.err and not told.out
        assert "Traceback" not in told.err


def test_a_peer_has_as_many_parameters_as_ours_and_its_rules(script: ModuleType) -> None:
    peers = script.peers
    config = run_config("swa-ssss", 8, {"model.vocab_size": 8192})
    ours = describe(config)["parameters"]["deployed"]
    peer = stub(script, head_dim=64, state=128)
    costs = peers.costs(peers.PeerDecoder(config.model, peer), peer)
    assert costs["parameters"] == pytest.approx(ours, rel=0.02) and costs["layers"] == 15
    beside = replace(peer, has_mlp=True)
    assert peers.costs(peers.PeerDecoder(config.model, beside), beside)["layers"] == 8
    roles = {
        name: peers.peer_role(name, each) for name, each in peers.PeerDecoder(config.model, peer).named_parameters()
    }
    assert roles["blocks.0.mixer.in_proj.weight"] == "matrix" and roles["readout.weight"] == "readout"
    assert {roles[f"blocks.3.mixer.{name}"] for name in ("A_log", "conv_weight", "dt_bias", "norm_weight")} == {"gate"}


def test_a_peer_sees_nothing_ahead_and_begins_as_its_embedding(script: ModuleType) -> None:
    peers = script.peers
    config = run_config("swa-ssss", 1, {"model.vocab_size": 61, "model.context": 16}).model
    decoder = peers.PeerDecoder(config, stub(script))
    peers.initialise(decoder, 0)
    tokens = random_tokens(2, 12)
    other = torch.cat((tokens[:, :7], (tokens[:, 7:] + 1) % 61), dim=1)
    with torch.no_grad():
        start = decoder.embedding(tokens)
        torch.testing.assert_close(decoder(tokens), start / start.square().mean(-1, keepdim=True).sqrt())
        peers.draw_matrices(decoder, 0)
        memory, changed = decoder(tokens), decoder(other)
        assert torch.equal(memory[:, :7], changed[:, :7]) and not torch.equal(memory[:, 7], changed[:, 7])
        # the parallel form of the whole row is that of its beginning
        torch.testing.assert_close(decoder(tokens[:, :7]), memory[:, :7])
