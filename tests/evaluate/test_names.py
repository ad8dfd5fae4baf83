"""Names that come again: which are found, what is changed, and that nothing is gained where nothing can be kept."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from maglev.__main__ import main
from maglev.data.prepare import prepare
from maglev.data.shards import open_data
from maglev.evaluate import names
from tests.helpers import small, step_through
from tests.small_runs import one_line

PIECES = [b"<bos>", b" Ann", b" Bar", b"tolo", b" the", b" Then", b" then", b".", b" Cid", b" Dor", b"ian", b" Evelyn"]
BOS, ANN, BAR, TOLO, THE, THEN_, THEN, DOT, CID, DOR, IAN, EVELYN = range(12)


def texts(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(each, dtype=np.uint16) for each in lists]


def test_names_are_capitals_that_are_never_written_small() -> None:
    one = [BOS, BAR, TOLO, THE, THEN_, BAR, TOLO, DOT, THEN, DOR, IAN, THEN_, BAR, TOLO]
    two = [BOS, CID, TOLO, DOT, THE, DOT]
    (found,) = names.find_documents(texts(one, two), PIECES, most=9)
    # Bartolo comes again, Dorian does not; "Then" is a word; Cidtolo of the other document has as many tokens
    assert found.probes == (names.Probe(1, 5, (CID, TOLO)),)
    assert found.probes[0].distance == 2 and found.tokens.tolist() == one


def test_without_a_name_of_the_same_size_elsewhere_nothing_is_asked() -> None:
    one, two = [BOS, BAR, TOLO, THE, BAR, TOLO], [BOS, EVELYN, DOT]
    assert names.find_documents(texts(one, two), PIECES, most=9) == []


def test_short_names_are_left_out_and_the_farthest_kept() -> None:
    one = [BOS, ANN, DOR, IAN, BAR, TOLO, DOT, BAR, TOLO, THE, DOR, IAN, ANN]
    two = [BOS, CID, TOLO, CID, DOT]
    (found,) = names.find_documents(texts(one, two), PIECES, most=1)
    assert [(probe.first, probe.again) for probe in found.probes] == [(2, 10)]


def test_a_name_that_came_in_between_in_other_tokens_was_read_more_than_once() -> None:
    pieces = [*PIECES, b'"Bar']
    one, two = [BOS, BAR, TOLO, THE, DOT, BAR, TOLO], [BOS, CID, TOLO, DOT]
    assert len(names.find_documents(texts(one, two), pieces, most=9)) == 1
    one[3:5] = [12, TOLO]
    assert names.find_documents(texts(one, two), pieces, most=9) == []


def test_documents_read_together_answer_as_they_do_alone() -> None:
    objective, draw = small("maglev-shared-0.1"), np.random.default_rng(1)
    documents = [
        names.Document(draw.integers(5, 30, size), (names.Probe(1, size - 4, (4, 4)), names.Probe(3, 9, (2,))))
        for size in (30, 17, 24)
    ]
    assert [len(some) for some in names.taken_together(documents, 6)] == [2, 1]
    assert [len(some) for some in names.taken_together(documents, 0)] == [1, 1, 1]
    alone, together = (names.ask(objective, documents, "recurrent", 3, rows=rows) for rows in (0, 9))
    assert [answer["distance"] for answer in together] == [23, 5, 10, 5, 17, 5]
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9) and mine["gain"] != 0


@pytest.mark.parametrize(("distance", "bucket"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 2), (40, 2), (41, 3)])
def test_buckets_double(distance: int, bucket: int) -> None:
    assert names.bucket_of(distance, 10) == bucket


def test_means_by_distance() -> None:
    answers = [{"distance": d, "nats": n, "gain": g} for d, n, g in ((3, 2.0, 1.0), (4, 4.0, -0.5), (25, 1.0, 0.0))]
    near, far = names.by_distance(answers, 10)
    assert (near["distance"], near["names"], near["nats"], near["gain"], near["helped"]) == ("0-1", 2, 3.0, 0.25, 0.5)
    assert near["error"] == pytest.approx(0.75)
    assert (far["distance"], far["gain"], far["helped"], far["error"]) == ("2-4", 0.0, 0.0, None)


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_the_gain_is_that_of_steps_and_exactly_nothing_beyond_a_plain_stack(recipe: str) -> None:
    objective = small(recipe, dtype=torch.float64)
    decoder = objective.decoder
    reach = decoder.config.depth * (decoder.config.window - 1)
    draw = np.random.default_rng(0)
    tokens = draw.integers(12, 30, 3 * reach).astype(np.int64)
    # tokens 1 to 4 are nowhere else
    tokens[[2, 2 + reach, 3, 4 + reach, 5, 7 + 2 * reach]] = [1, 1, 2, 2, 3, 3]
    places = ((2, 2 + reach), (3, 4 + reach), (5, 7 + 2 * reach))
    probes = tuple(names.Probe(first, again, (4,)) for first, again in places)
    answers = names.ask(objective, [names.Document(tokens, probes)], "recurrent", 3)
    assert [answer["distance"] for answer in answers] == [reach - 1, reach, 2 * reach + 1]
    gains = [answer["gain"] for answer in answers]
    for probe, answer in zip(probes, answers, strict=True):
        nats = []
        for name in (int(tokens[probe.first]), 4):
            row = torch.from_numpy(tokens[: probe.again + 1]).clone()
            row[probe.first] = name
            with torch.no_grad():
                logits = decoder.readout(step_through(decoder, row[None])[0, probe.again - 1])
            nats.append(float(torch.nn.functional.cross_entropy(logits, row[probe.again])))
        assert answer["nats"] == pytest.approx(nats[0], abs=1e-9)
        assert answer["gain"] == pytest.approx(nats[1] - nats[0], abs=1e-9)
    assert gains[0] != 0 and gains[1] != 0
    assert (gains[2] == 0) == (recipe == "swa-ssss")


def write_data(folder: Path) -> Path:
    people = ["Bartholomew", "Wilhelmina", "Ferdinand", "Clementine", "Montgomery", "Persephone"]
    lines = []
    for name in people:
        told = f"it began with {name} and with nobody else. " + "so it went on and on for a while. " * 9
        lines.append(json.dumps({"text": told + f"at last came {name} again."}))
    files = [folder / "train.jsonl", folder / "held-out.jsonl"]
    for file in files:
        file.write_text("\n".join(lines * 3))
    prepare([str(files[0])], folder / "data", vocab_size=400, validation=str(files[1]))
    return folder / "data"


def test_documents_are_read_longest_first(tmp_path: Path) -> None:
    split = open_data(write_data(tmp_path)).splits["train"]
    whole = names.read_documents(split, 10**6, 10**6)
    sizes = [len(document) for document in whole]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == split.tokens and len(sizes) == split.documents
    assert [len(document) for document in names.read_documents(split, 2, 7)] == [7, 7]


def test_the_verb_on_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = write_data(tmp_path), tmp_path / "run"
    settings = {"model.context": 64, "model.window": 4, "train.steps": 1, "train.tokens_per_step": 128}
    settings |= {"train.tensorboard": "false", "train.validate_every": 0}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "swa-ssss", "--data", str(data), "--out", str(run), "--depth", "1", *words]) == 0
    capsys.readouterr()
    command = ["eval", "names", str(run), "--data", str(data), "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == "recurrent" and found["plain_reach"] == 3 and found["documents"] > 0
    # a plain window of 4 has kept nothing of what it read a hundred tokens ago
    assert found["rows"] and all(row["gain"] == 0.0 for row in found["rows"])
    kept = run / "eval" / "names-data-recurrent.json"
    assert json.loads(kept.read_text())["rows"] == found["rows"]
    # other questions take no other's place
    assert main([*command, "--split", "train", "--documents", "3", "--names", "16"]) == 0
    assert (run / "eval" / "names-data-recurrent-split-train-documents-3-names-16.json").is_file()
    assert json.loads(kept.read_text())["rows"] == found["rows"]
    assert main(command) == 0
    assert "gain" in capsys.readouterr().out
    assert main([*command, "--split", "test"]) == 2
    assert "no split 'test'" in one_line(capsys)


@pytest.mark.parametrize("wrong", [("--documents", "0"), ("--tokens", "-1"), ("--names", "0"), ("--memory", "guessed")])
def test_wrong_requests_end_in_one_line(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "names", "nowhere", "--data", "nowhere", *wrong]) == 2
    assert wrong[0] in one_line(capsys)
