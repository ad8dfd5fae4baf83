"""Wrong requests end with exit status 2 and one line that says what to mend; they leave nothing behind."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maglev.__main__ import main
from tests.processes import ROOT
from tests.small_runs import Train, flip_byte, one_line, train_arguments

SWA, MAGLEV = "swa-ssss", "maglev-shared-0.1"


def refuse(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    return one_line(capsys)


@pytest.mark.parametrize(
    ("recipe", "settings", "says"),
    [
        ("maglev-shard-0.1", {}, "unknown recipe 'maglev-shard-0.1'; did you mean 'maglev-shared-0.1'?"),
        (SWA, {"model.windw": 4}, "unknown setting 'model.windw' for swa-ssss; did you mean 'model.window'?"),
        (SWA, {"objective.consistency_weight": 1}, "unknown setting 'objective.consistency_weight'"),
        (SWA, {"model.window": 33}, "model.window is 33, larger than model.context = 32"),
        (SWA, {"model.window_pattern": "SXS"}, "'SXS'"),
        (SWA, {"model.window_pattern": ""}, "pattern"),
        (MAGLEV, {"objective.prefiller_pattern": "slsl"}, "'slsl'"),
        (SWA, {"model.context": 0}, "at least 1"),
        (SWA, {"model.kv_heads": 3}, "model.kv_heads is 3; it must divide the number of heads"),
        (SWA, {"train.tokens_per_step": 100}, "train.tokens_per_step is 100, not a multiple of the context 32"),
        (SWA, {"train.tokens_per_step": 16}, "set it to 32"),
        (SWA, {"train.steps": -1}, "train.steps is -1; it must not be negative"),
        (SWA, {"train.steps": "many"}, "train.steps is 'many'; it must be a number"),
        (SWA, {"train.checkpoint_every": 0}, "train.checkpoint_every is 0; it must be at least 1"),
        (SWA, {"train.seed": 1.5}, "train.seed is '1.5'; it must be a whole number"),
        (SWA, {"train.precision": "float8"}, "train.precision is 'float8'; it must be one of"),
        (SWA, {"train.device": "tpu"}, "train.device is 'tpu'; it must be auto, cpu, cuda or cuda:N"),
        (SWA, {"optimizer.matrix_lr": "nan"}, "it must be a finite number"),
        (MAGLEV, {"objective.consistency_weight": -1}, "it must not be negative"),
        (SWA, {"model.vocab_size": 999}, "model.vocab_size is 999 and the tokenizer of"),
        (SWA, {"train.init_from": "nowhere"}, "nowhere is not a run folder"),
    ],
)
def test_train_refuses(
    recipe: str, settings: dict[str, object], says: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert says in refuse(train_arguments(recipe, data, run, settings), capsys)
    assert not (run / "config.json").exists()


def test_train_refuses_other_things(
    data: Path, tmp_path: Path, trained: Train, other_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert "depth is 0; it must be at least 1" in refuse(train_arguments(SWA, data, run, depth=0), capsys)
    assert "depth is -3" in refuse(train_arguments(SWA, data, run, depth=-3), capsys)
    missing = train_arguments(SWA, tmp_path / "none", run)
    assert "not a data folder" in refuse(missing, capsys) and "maglev data prepare" in refuse(missing, capsys)
    assert "'--data'" in refuse(["train", SWA, "--out", run], capsys)
    assert "not of the form KEY=VALUE" in refuse(train_arguments(SWA, data, run, {}, "--set", "steps"), capsys)
    swa = trained(SWA)
    other = train_arguments(MAGLEV, other_data, run, {}, "--init-from", str(swa))
    assert "does not match the data" in refuse(other, capsys)
    assert "holds a run already; add --resume" in refuse(train_arguments(SWA, data, swa), capsys)


@pytest.mark.parametrize("verb", ["train", "eval", "generate"])
def test_a_gpu_that_is_not_there(
    verb: str,
    data: Path,
    tmp_path: Path,
    trained: Train,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = trained(MAGLEV)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        arguments = {
            "train": train_arguments(SWA, data, tmp_path / "run", {"train.device": device}),
            "eval": ["eval", "bpb", str(run), "--data", str(data), "--device", device],
            "generate": ["generate", str(run), "--device", device],
        }[verb]
        line = refuse(arguments, capsys)
        setting = "train.device" if verb == "train" else "--device"
        assert f"{setting} is '{device}' and PyTorch sees no CUDA GPU; set {setting} to cpu or auto" in line


def test_eval_refuses(
    trained: Train, data: Path, other_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swa, run = trained(SWA), trained(MAGLEV)

    def says(*arguments: object, status: int = 2) -> str:
        return refuse(["eval", "bpb", *map(str, arguments)], capsys, status)

    assert "--memory is 'foo'; it must be one of recurrent, lifted, refined" in says(
        run, "--data", data, "--memory", "foo"
    )
    assert "has no prefiller Q, so it has no lifted memories" in says(swa, "--data", data, "--memory", "lifted")
    assert "does not match the data" in says(run, "--data", other_data)
    assert "not a data folder" in says(run, "--data", tmp_path)
    assert "--passes is 0; it must be at least 1" in says(run, "--data", data, "--passes", "0")
    assert "--rows is -1" in says(run, "--data", data, "--rows", "-1")
    assert "--rows-per-pass is 0" in says(run, "--data", data, "--rows-per-pass", "0")
    assert "no split 'test' in it, only 'train', 'validation'" in says(run, "--data", data, "--split", "test")
    assert "--device is 'tpu'" in says(run, "--data", data, "--device", "tpu")
    damaged = tmp_path / "data"
    shutil.copytree(data, damaged)
    flip_byte(next(damaged.glob("validation-*.tokens.npy")))
    assert "validation-00000.tokens.npy: damaged, its checksum is wrong" in says(run, "--data", damaged, status=1)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--top-k", "-1"), "top_k is -1"),
        (("--top-p", "0"), "top_p is 0.0"),
        (("--top-p", "1.5"), "top_p is 1.5"),
        (("--max-tokens", "-1"), "max_tokens is -1"),
        (("--seed", "-1"), "seed is -1"),
        (("--seed", str(1 << 64)), "seed is 18446744073709551616"),
        (("--device", "abacus"), "--device is 'abacus'"),
        (("--prompt-file", "none.txt"), "--prompt-file none.txt: No such file"),
        (("--prompt-file", "."), "--prompt-file .: Is a directory"),
        (("--prompt", "a", "--prompt-file", "-"), "exclude each other"),
        (("--temperature", "inf"), "temperature is inf"),
        (("--temperature", "101"), "temperature is 101.0"),
        (("--top-p", "nan"), "top_p is nan"),
        (("--min-p", "-0.5"), "min_p is -0.5"),
        (("--min-p", "nan"), "min_p is nan"),
        (("--repetition-penalty", "0"), "repetition_penalty is 0.0"),
        (("--repetition-penalty", "nan"), "repetition_penalty is nan"),
        (("--repetition-penalty", "inf"), "repetition_penalty is inf"),
        (("--stop", ""), "a stop string is empty"),
        (("--read", "foo"), "--read is 'foo'; it must be one of recurrent, lifted"),
        (("--read", "lifted", "--prompt", "word " * 99), "tokens and lifted reading takes 1 to 32"),
        (("--read", "lifted", "--repetition-penalty", "2"), "--repetition-penalty goes with --read recurrent"),
        (("--read", "lifted", "--top-k", "-1"), "top_k is -1"),
    ],
)
def test_generate_refuses(
    value: tuple[str, ...], says: str, trained: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written to stdout."""
    prompt = () if {"--prompt", "--prompt-file"} & {*value} else ("--prompt", "The")
    assert says in refuse(["generate", str(trained(MAGLEV)), *prompt, *value], capsys)


def test_a_run_without_q_cannot_be_read_lifted(trained: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no prefiller Q" in refuse(["generate", str(trained(SWA)), "--read", "lifted"], capsys)


def test_a_prompt_that_is_not_text(trained: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    arguments = ["generate", str(trained(MAGLEV)), "--prompt-file", str(tmp_path / "a.bin")]
    assert "is not UTF-8 text" in refuse(arguments, capsys)


def without(name: str) -> Callable[[Path], None]:
    def remove(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def with_config(content: str) -> Callable[[Path], None]:
    return lambda run: (run / "config.json").write_text(content) and None


def changed_config(**changes: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        value = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(value | changes))

    return change


@pytest.mark.parametrize("verb", ["eval", "generate", "info"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "not a run folder"),
        (without("config.json"), "not a run folder, it has no config.json"),
        (with_config("{"), "config.json is damaged"),
        (with_config("[1]"), "config.json is damaged"),
        (with_config("\x00"), "config.json is damaged"),
        (changed_config(model=5), "config.json is damaged"),
        (changed_config(model={"depth": 1}), "config.json: "),
        (changed_config(turbo={}), "config.json: unknown section 'turbo'"),
        (without("checkpoints"), "has no checkpoint yet"),
        (without("tokenizer.json"), "has no tokenizer.json"),
    ],
)
def test_a_folder_that_is_no_run(
    verb: str,
    damage: Callable[[Path], None],
    says: str,
    trained: Train,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained(MAGLEV), run)
    damage(run)
    arguments = {
        "eval": ["eval", "bpb", str(run), "--data", str(data)],
        "generate": ["generate", str(run), "--prompt", "a"],
        "info": ["info", str(run)],
    }[verb]
    if verb == "info" and ("checkpoint" in says or "tokenizer" in says):
        assert main(arguments) == 0
        return
    assert says in refuse(arguments, capsys)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "a.txt: no text in it"),
        ("a.txt", b"text\x00", "a.txt: not a text file (NUL byte at offset 4)"),
        ("a.txt", b"\xff\xfe\xfa", "a.txt: not a text file (invalid UTF-8 at offset 0)"),
        ("a.parquet", b"PAR1 no parquet", "a.parquet: not a readable parquet file"),
        ("a.parquet", b"", "a.parquet: not a readable parquet file"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "a.jsonl, line 2: no 'text' in it, only 'txt'"),
        ("a.jsonl", b"{", "a.jsonl, line 1: not JSON"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz"),
        ("a.docx", b"text", "a.docx: unknown kind of file"),
    ],
)
def test_prepare_refuses(
    name: str, content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "data"
    line = refuse(["data", "prepare", str(tmp_path / name), "--out", str(out), "--vocab-size", "300"], capsys)
    assert says in line
    assert not out.exists()


def test_prepare_refuses_other_things(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text, some more text\n" * 20)
    source = str(tmp_path / "a.txt")

    def says(*arguments: object) -> str:
        return refuse(["data", "prepare", *map(str, arguments)], capsys)

    assert "vocabulary of 256 tokens" in says(source, "--out", tmp_path / "x", "--vocab-size", "256")
    assert "no such file or folder" in says(tmp_path / "b.txt", "--out", tmp_path / "x")
    assert "no such tokenizer file" in says(source, "--out", tmp_path / "x", "--tokenizer", tmp_path / "t.json")
    assert "cannot be used as a tokenizer" in says(source, "--out", tmp_path / "x", "--tokenizer", data / "index.json")
    assert "already holds prepared data" in says(source, "--out", data)
    assert "is a file" in says(source, "--out", source)
    assert "nothing left to train on" in says(source, "--out", tmp_path / "x", "--validation", source)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "swa", "--data", "d", "--out", "r"], "not a data folder"),
        (["generate", "nowhere"], "nowhere is not a run folder"),
    ],
)
def test_in_a_process_of_its_own(arguments: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "maglev", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("maglev: ") and done.stderr.count("\n") == 1 and says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--depth", "99999999999999999999"), "model.depth"),
        (("--set", "model.context=1e300"), "model.context"),
        (("--set", "train.steps=1e30"), "train.steps"),
        (("--set", "train.tokens_per_parameter=1e308"), "train.tokens_per_parameter"),
        (("--depth", "5", "--set", "model.depth=3"), "given twice"),
    ],
)
def test_values_beyond_any_machine_are_refused_at_once(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "swa-ssss", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_more_memory_than_there_is_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 4 EB")

    monkeypatch.setattr("maglev.model.accounting.describe", fail)
    assert main(["info", "swa-ssss"]) == 1
    assert capsys.readouterr().err.startswith("maglev: out of memory")


def test_refining_without_memory_and_passes_without_refining_are_refused(
    trained: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("swa-ssss")
    capsys.readouterr()
    for arguments, words in ((["--memory", "refined"], "nothing to refine"), (["--passes", "5"], "--passes goes with")):
        assert main(["eval", "bpb", str(run), "--data", str(data), *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_missing_path_in_a_folder_that_exists_is_not_looked_up_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    assert main(["data", "prepare", "data/books", "--out", "prepared"]) == 2
    assert "no such file or folder" in capsys.readouterr().err
