"""`maglev generate` as a user meets it: any prompt, whole characters, nothing but text on stdout."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.data.tokenizer import Tokenizer
from maglev.model.accounting import state_nbytes
from maglev.runs import TOKENIZER, read_config
from tests.processes import Processes
from tests.small_runs import Train, flip_byte, one_line

RECIPE = "maglev-shared-0.1"
PROMPTS = {
    "empty": "",
    "plain": "The list",
    "emoji": "🧪👩‍🚀 then",
    "control": "a\x00b\x1b[31m\x7f\r\n\t\u2028",
    "special": "<|bos|> <|endoftext|>",
    "many": "naïve Ωmega 漢字 \U0010ffff \ufeff ",
    "long": "word " * 200,
}


@pytest.fixture
def run(trained: Train, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = trained(RECIPE)
    capsys.readouterr()
    return folder


def written(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(written([*arguments, "--json"], capsys))


@pytest.mark.parametrize("name", PROMPTS)
def test_any_prompt_works(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = PROMPTS[name]
    value = as_json([str(run), "--prompt", prompt, "--max-tokens", "5"], capsys)
    assert value["prompt"] == prompt and value["memory"] == "recurrent"
    assert value["prompt_tokens"] >= 1 + len(prompt) // 16
    assert value["state_bytes"] == state_nbytes(read_config(run).model, 4)
    out = written([str(run), "--prompt", prompt, "--max-tokens", "5"], capsys)
    assert out == prompt + value["text"] + "\n"


def test_the_seed_decides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*more: str) -> str:
        return written([str(run), "--prompt", "The", "--max-tokens", "30", *more], capsys)

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--temperature", "0", "--seed", "1") == text("--temperature", "0", "--seed", "2")
    assert text("--top-k", "1", "--seed", "1") == text("--temperature", "0")


def test_a_prompt_from_a_file_and_from_stdin(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: Processes
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Zwölf\r\n🧪".encode())
    value = as_json([str(run), "--prompt-file", str(file), "--max-tokens", "4"], capsys)
    assert value["prompt"] == "Zwölf\r\n🧪"
    piped = processes.run(["generate", str(run), "--prompt-file", "-", "--max-tokens", "4", "--json"], stdin=str(file))
    assert json.loads(piped.stdout) | {"seconds": 0} == value | {"seconds": 0}


@pytest.fixture
def spells(run: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the model write these bytes, one token each."""
    tokenizer = Tokenizer.load(run / TOKENIZER)

    def spell(content: bytes) -> None:
        left = list(content)

        def next_token(*logits_and_sampling: Any) -> int:
            return tokenizer.token_bytes.index(bytes([left.pop(0)])) if left else tokenizer.bos_id

        monkeypatch.setattr("maglev.inference.writing.next_token", next_token)

    return spell


def test_streaming_never_splits_a_character(
    run: Path, spells: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces: list[str] = []
    plain = print

    def spy(*words: Any, **options: Any) -> None:
        pieces.extend(words)
        plain(*words, **options)

    monkeypatch.setattr("builtins.print", spy)
    spells("é🧪漢".encode())
    assert written([str(run), "--prompt", ">", "--temperature", "0"], capsys) == ">é🧪漢\n"
    assert pieces[:4] == [">", "é", "🧪", "漢"]


def test_bytes_that_are_no_text_become_replacement_signs(
    run: Path, spells: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    spells(b"a\xff\xf0\x9f\xa7b\xe6")
    value = as_json([str(run), "--temperature", "0"], capsys)
    assert value["text"] == "a\ufffd\ufffdb\ufffd"


def test_a_terminal_without_unicode(run: Path, processes: Processes) -> None:
    before = "import sys; sys.stdout.reconfigure(encoding='ascii')"
    done = processes.run(["generate", str(run), "--prompt", "é🧪", "--max-tokens", "0"], before=before)
    assert done.stdout == "\\xe9\\U0001f9ea\n" and done.stderr == ""


def test_stop_and_penalty_reach_the_engine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*arguments: str) -> str:
        assert main(["generate", str(run), "--prompt", "a", "--max-tokens", "30", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["text"]

    plain = text("--temperature", "0")
    stop = plain[2:4]
    assert text("--temperature", "0", "--stop", stop) == plain.split(stop)[0]
    assert text("--temperature", "0", "--repetition-penalty", "5") != plain
    assert text("--min-p", "1") == plain
    assert text("--top-p", "1e-9") == plain


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    newest = sorted((copy / "checkpoints").iterdir())[-1]
    shutil.copytree(newest, newest.with_name("step-00099999"))
    flip_byte(newest.with_name("step-00099999") / "decoder.safetensors")
    assert main(["generate", str(copy), "--prompt", "a", "--max-tokens", "3"]) == 0
    assert "step-00099999 is damaged" in capsys.readouterr().err


def test_a_prompt_read_lifted_is_said_to_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(run), "--prompt", "The list", "--max-tokens", "8", "--temperature", "0"]
    assert main([*arguments, "--read", "lifted", "--json"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert (value["prompt_memory"], value["memory"]) == ("lifted", "recurrent")
    assert err.count("\n") == 1 and "lifted memories" in err
    assert as_json(arguments[1:], capsys)["prompt_memory"] == "recurrent"
    assert main([*arguments, "--read", "lifted"]) == 0
    assert capsys.readouterr().out == "The list" + value["text"] + "\n"


def test_no_prompt_at_all_no_tokens_and_a_stop_that_never_comes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = as_json([str(run), "--max-tokens", "0"], capsys)
    assert (nothing["prompt"], nothing["text"], nothing["prompt_tokens"]) == ("", "", 1)
    assert written([str(run), "--prompt", "a", "--max-tokens", "0"], capsys) == "a\n"
    plain = written([str(run), "--prompt", "a", "--max-tokens", "9"], capsys)
    assert written([str(run), "--prompt", "a", "--max-tokens", "9", "--stop", "\x01never"], capsys) == plain
    assert written([str(run), "--prompt", "a", "--max-tokens", "9", "--top-k", "9" * 30], capsys) == plain


def test_weights_in_8_bits_are_named_and_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for weights in ("plain", "int8", "fp8"):
        value = as_json([str(run), "--prompt", "a", "--max-tokens", "5", "--weights", weights], capsys)
        assert value["weights"] == weights


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--weights", "int4"], "--weights is 'int4'; it must be one of plain, int8, fp8"),
        (["--weights", "int4", "--read", "lifted"], "--weights is 'int4'"),
        (["--weights", "int8", "--read", "lifted"], "--weights int8 goes with --read recurrent alone"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    run: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "--prompt", "a", *more]) == 2
    assert says in one_line(capsys)


def test_a_closed_stdin_is_told(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # what Python makes of `<&-`
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", str(run), "--prompt-file", "-"]) == 2
    assert "--prompt-file -: stdin is closed" in one_line(capsys)


def test_bytes_that_are_no_utf8_are_refused_as_a_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--prompt", os.fsdecode(b"a\xff")]) == 2
    assert "--prompt is not UTF-8 text" in one_line(capsys)
