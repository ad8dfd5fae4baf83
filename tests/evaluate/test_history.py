"""`maglev eval history`: the same tokens after more and more of what stands before them."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import maglev
from maglev.__main__ import main
from maglev.data.shards import open_data
from maglev.evaluate import history
from maglev.evaluate.runs import load_objective
from maglev.runs import RECALL, TOKENIZER
from tests.small_runs import SMALL, Train, one_line

# of the small runs, at one layer
REACH, SPAN = 7, 5


def ask(runs: list[Path], data: Path, *more: str) -> list[str]:
    return ["eval", "history", *map(str, runs), "--data", str(data), "--tokens", str(SPAN), "--times", "3", *more]


@pytest.fixture
def own(trained: Train, lively: Train, tmp_path: Path) -> Train:
    """`own(recipe)`: a copy of a trained run, or of a lively one, that results may be kept in."""

    def copy(recipe: str, *, alive: bool = False) -> Path:
        return Path(shutil.copytree((lively if alive else trained)(recipe), tmp_path / recipe))

    return copy


@pytest.mark.parametrize(("times", "found"), [(2, [8, 15]), (3, [8, 15, 22]), (8, [8, 15, 29, 57])])
def test_histories_double_up_to_the_longest(times: int, found: list[int]) -> None:
    assert history.histories(REACH, times) == found


def test_spans_follow_each_other_in_documents_and_have_their_history_in_them(data: Path) -> None:
    split = open_data(data).splits["validation"]
    (shard,) = split.shards
    spans = history.find_spans(split, 20, SPAN, 10**9)
    expected, numbers = [], []
    for number, (begin, end) in enumerate(pairwise(shard.offsets.tolist())):
        text = shard.tokens[begin + 1 : end].tolist()
        pieces = [text[at - 20 : at + SPAN] for at in range(20, len(text) - SPAN + 1, SPAN)]
        expected += pieces
        numbers += [number] * len(pieces)
    assert spans.rows.tolist() == expected and spans.documents.tolist() == numbers
    # five documents, and as many of each
    some = history.find_spans(split, 20, SPAN, 14)
    assert np.bincount(some.documents).tolist() == [2] * 5 and some.effective_documents == pytest.approx(5)
    assert some.rows[0].tolist() == expected[0] and some.rows[-1].tolist() == expected[-1]
    assert some.digest != spans.digest == history.find_spans(split, 20, SPAN, 10**9).digest
    assert history.find_spans(split, 20, SPAN, 3).documents.tolist() == [0, 1, 2]
    own = [row for row, number in zip(expected, numbers, strict=True) if number == 0]
    assert history.find_spans(split, 20, SPAN, 5).rows[0].tolist() == own[(len(own) - 1) // 2]
    assert history.find_spans(split, 10**6, SPAN, 7).rows.shape == (0, 10**6 + SPAN)


def test_far_text_is_shuffled_or_foreign_and_all_else_stays() -> None:
    draw = np.random.default_rng(1)
    rows = draw.permutation(8 * 30).reshape(8, 30)
    spans = history.Spans(rows, np.array([0, 0, 0, 0, 0, 1, 1, 2]), SPAN)
    # 22 of history, the last 8 of which stay
    assert np.array_equal(spans.with_far(22, 8, "own"), rows[:, -27:])
    shuffled, foreign = spans.with_far(22, 8, "shuffled"), spans.with_far(22, 8, "foreign")
    for changed in (shuffled, foreign):
        assert np.array_equal(changed[:, 14:], rows[:, -13:])
    assert np.array_equal(np.sort(shuffled[:, :14]), np.sort(rows[:, 3:17]))
    assert (shuffled[:, :14] != rows[:, 3:17]).mean() > 0.7
    from_rows = [int(np.flatnonzero(rows[:, 3] == row[0])[0]) for row in foreign]
    assert np.array_equal(foreign[:, :14], rows[from_rows, 3:17])
    assert all(spans.documents[mine] != spans.documents[theirs] for mine, theirs in enumerate(from_rows))
    # one reach has nothing far
    assert np.array_equal(spans.with_far(8, 8, "foreign"), rows[:, -13:])


def test_errors_are_those_of_documents_not_of_spans() -> None:
    spans = history.Spans(np.ones((4, 3), dtype=np.int64), np.array([0, 0, 1, 1]), span=2)
    before, after = np.array([4.0, 4, 2, 2]), np.array([3.0, 3, 2, 2])
    first, second = history.gains([before, after], spans, np.array([0, 3]))
    size, bit = 4 * 2 * 3, math.log(2)
    assert first == pytest.approx({"bpb": 12 / bit / size, "gain": 0, "error": 0})
    # two documents whose spans gained 2 nats and 0: each is 1 from their mean
    assert second == pytest.approx({"bpb": 10 / bit / size, "gain": 2 / bit / size, "error": 2 / bit / size})
    alone = history.Spans(spans.rows, np.zeros(4, dtype=np.int64), 2)
    assert math.isnan(history.gains([before, after], alone, np.array([0, 3]))[1]["error"])


def test_the_numbers_are_those_of_stepping_and_plain_windows_gain_nothing(
    own: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # random weights of two layers: twice the reach
    runs, plot = [own("swa-ssss", alive=True), own("maglev-shared-0.1", alive=True)], tmp_path / "history.svg"
    assert main(ask(runs, data, "--times", "2", "--spans", "5", "--plot", str(plot), "--json")) == 0
    plain, ours = json.loads(capsys.readouterr().out)["runs"]
    assert plot.read_text().count("<svg") == 1
    assert plain["plain_reach"] == ours["plain_reach"] == 2 * REACH and plain["spans"] == ours["spans"] == 5
    tokens = open_data(data)
    spans = history.find_spans(tokens.splits["validation"], 4 * REACH + 1, SPAN, 5)
    assert plain["places"] == ours["places"] == spans.digest
    sizes = torch.tensor([len(piece) for piece in tokens.tokenizer.token_bytes])
    for run, found in zip(runs, (plain, ours), strict=True):
        decoder = maglev.load(run, device="cpu").decoder
        for row in found["rows"]:
            kept = torch.from_numpy(spans.rows[:, -(row["history"] + SPAN) :])
            state, nats = decoder.initial_state(5), []
            rows = torch.cat((torch.full((5, 1), tokens.tokenizer.bos_id), kept), 1)
            for now, target in zip(rows.T[:-1], rows.T[1:], strict=True):
                with torch.no_grad():
                    memory, state = decoder.step(now, state)
                    nats.append(F.cross_entropy(decoder.readout(memory).double(), target, reduction="none"))
            bits = torch.stack(nats[-SPAN:]).sum() / math.log(2)
            assert row["bpb_recurrent"] == pytest.approx(float(bits / sizes[kept[:, -SPAN:]].sum()), abs=1e-5)
    assert plain["sources"] == ["recurrent"] and abs(plain["rows"][1]["gain_recurrent"]) < 1e-6
    assert abs(ours["rows"][1]["gain_recurrent"]) > 1e-5


def test_lifted_numbers_are_on_the_memories_of_q_and_those_of_q_itself_beside_them(
    own: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own("maglev-shared-0.1", alive=True)
    words = ["--times", "2", "--tokens", "3", "--spans", "5", "--prefiller", "--far", "foreign", "--json"]
    assert main(ask([run], data, *words)) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["sources"] == ["recurrent", "lifted", "prefiller"] and found["far"] == "foreign"
    tokens = open_data(data)
    spans = history.find_spans(tokens.splits["validation"], 4 * REACH + 1, 3, 5)
    sizes = torch.tensor([len(piece) for piece in tokens.tokenizer.token_bytes])
    _, objective, _ = load_objective(run, torch.device("cpu"), pytest.fail)
    for row in found["rows"]:
        kept = torch.from_numpy(spans.with_far(row["history"], 2 * REACH + 1, "foreign"))
        rows = torch.cat((torch.full((5, 1), tokens.tokenizer.bos_id), kept), 1)
        with torch.no_grad():
            q = objective.prefiller(rows[:, :-1], objective.decoder)
            p = objective.decoder(rows[:, :-1], F.pad(q, (0, 0, 1, 0))[:, :-1])
            for name, memory in (("lifted", p), ("prefiller", q)):
                logits = objective.decoder.readout(memory[:, -3:]).double()
                bits = F.cross_entropy(logits.flatten(0, 1), kept[:, -3:].flatten(), reduction="sum") / math.log(2)
                assert row[f"bpb_{name}"] == pytest.approx(float(bits / sizes[kept[:, -3:]].sum()), abs=1e-5)


def test_what_people_see_is_what_was_gained_and_a_result_is_kept(
    own: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [own("transformer-slsl"), own("maglev-shared-0.1")]
    assert main(ask(runs, data, "--far", "shuffled")) == 0
    out = capsys.readouterr().out
    assert "plain reaches of 7 tokens" in out and "Beyond one reach tokens were shuffled." in out
    (kept,) = (runs[1] / "eval").glob("history-data-3-tokens-5-far-shuffled.json")
    found = json.loads(kept.read_text())
    assert found["sources"] == ["recurrent", "lifted"]
    assert [row["history"] for row in found["rows"]] == [8, 15, 22]
    for source in found["sources"]:
        gain, error = found["rows"][1][f"gain_{source}"], found["rows"][1][f"error_{source}"]
        first, second = (row[f"bpb_{source}"] for row in found["rows"][:2])
        assert gain == pytest.approx(first - second) and f"{gain:+.5f} ± {error:.5f}" in out


def test_the_picture_shows_what_was_gained() -> None:
    row = {
        "reaches": 2,
        "gain_recurrent": 0.25,
        "error_recurrent": math.nan,
        "gain_prefiller": 0.5,
        "error_prefiller": 0.1,
    }
    first = dict.fromkeys(row, 0.0) | {"reaches": 1}
    figure = Figure()
    history.draw_history(figure, [{"label": "x", "sources": ["recurrent", "prefiller"], "rows": [first, row]}])
    own, of_q = figure.axes[0].containers
    assert own[0].get_ydata().tolist() == [0, 0.25] and of_q[0].get_ydata().tolist() == [0, 0.5]


def test_runs_of_one_name_are_told_apart(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / name / "run" for name in "ab"]
    for run in runs:
        shutil.copytree(trained("swa-ssss"), run)
    assert main(ask(runs, data, "--json")) == 0
    assert [run["label"] for run in json.loads(capsys.readouterr().out)["runs"]] == [str(run) for run in runs]


def test_nothing_is_measured_where_one_of_the_runs_cannot_be(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, recall = (tmp_path / name for name in ("good", "bad", "recall"))
    for run in (good, bad, recall):
        shutil.copytree(trained("swa-ssss"), run)
    shutil.rmtree(good / "eval", ignore_errors=True)
    shutil.rmtree(bad / "checkpoints")
    (recall / TOKENIZER).rename(recall / RECALL)
    for run, told in ((bad, "no checkpoint yet"), (recall, "knows no text")):
        assert main(ask([good, run], data)) == 2
        assert told in one_line(capsys)
    assert not (good / "eval").exists()


def test_rows_that_q_was_not_trained_on_are_read_without_it(
    own: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own("maglev-shared-0.1")
    assert SMALL["model.context"] < 8 * REACH + 1 + SPAN
    assert main(ask([run], data, "--times", "8", "--spans", "4", "--json")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"][0]["sources"] == ["recurrent"] and "lifted memories are left out" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--times", "1"], "--times is 1"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--spans", "0"], "--spans is 0"),
        (["--times", "1000000"], "no document in validation"),
        (["--split", "test"], "has no split 'test'"),
        (["--far", "near"], "--far is 'near'"),
        (["--far", "foreign", "--spans", "1"], "spans of two documents"),
        (["--plot", "x.gif"], "--plot is x.gif"),
    ],
)
def test_a_wrong_request_is_one_line(
    trained: Train, data: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ask([trained("swa-ssss")], data, *words)) == 2
    assert told in one_line(capsys)


def test_runs_that_cannot_be_set_beside_each_other_are_told(
    trained: Train, data: Path, other_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ask([trained("swa-ssss"), trained("swa-ssss", 2)], data)) == 2
    assert "different plain reaches" in one_line(capsys)
    assert main(ask([trained("transformer-slsl", 2)], data)) == 2
    assert "longer rows or with shorter windows" in one_line(capsys)
    assert main(ask([trained("swa-ssss")], other_data)) == 2
    assert "tokenizer" in one_line(capsys)
