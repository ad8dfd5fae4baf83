"""Log-probabilities of continuations: right, whatever stands beside them, and with every context read once."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maglev.__main__ import main
from maglev.errors import RequestError, WorkError
from maglev.evaluate import scoring
from maglev.evaluate.memories import Source, memories
from maglev.evaluate.requests import Request, RequestFile, Score, load_requests, load_scores, save_requests, save_scores
from maglev.evaluate.scoring import READINGS, Limits, PassScorer, Reading, RecurrentScorer, open_scorer
from maglev.inference.engine import LanguageModel
from maglev.objectives import Objective
from tests.helpers import random_tokens, small, step_through
from tests.small_runs import Train, flip_byte, one_line

RECIPES = ("swa-ssss", "transformer-slsl", "lrt-ssss", "maglev-separate-1")


class NoTokenizer:
    """Token ids are all that a scorer sees."""

    vocab_size = 61


def model(recipe: str, dtype: torch.dtype = torch.float64) -> tuple[Objective, LanguageModel]:
    objective = small(recipe, scale=0.3, dtype=dtype, context=64)
    return objective, LanguageModel(objective.decoder, NoTokenizer())  # type: ignore[arg-type]


def some_requests() -> list[Request]:
    """Contexts of many lengths with one to four continuations, one of them twice, in no order."""
    row = random_tokens(1, 4000)[0].tolist()
    found = []
    for index, length in enumerate((1, 40, 7, 19, 40, 2, 33)):
        context = tuple(row[index * 100 : index * 100 + length])
        for choice in range(1 + index % 4):
            start = 1000 + index * 100 + choice * 20
            found.append(Request(context, tuple(row[start : start + (1, 12, 3, 1)[(choice + index) % 4]])))
    return [*found[::2], *found[1::2], found[3]]


def read_off(memory: Tensor, objective: Objective, request: Request) -> Score:
    """From the memories (1, T, D) of all tokens but the last."""
    logits = objective.decoder.readout(memory)[0, len(request.context) - 1 :]
    picked = logits.log_softmax(-1)[torch.arange(len(request.continuation)), torch.tensor(request.continuation)]
    return Score(float(picked.sum()), logits.argmax(-1).tolist() == list(request.continuation))


def one_by_one(objective: Objective, requests: list[Request]) -> list[Score]:
    rows = [torch.tensor([request.context + request.continuation[:-1]]) for request in requests]
    with torch.no_grad():
        return [
            read_off(step_through(objective.decoder, row), objective, request)
            for row, request in zip(rows, requests, strict=True)
        ]


def assert_close(ours: list[Score], theirs: list[Score], tolerance: float) -> None:
    assert [score.greedy for score in ours] == [score.greedy for score in theirs]
    worst = max(abs(a.logprob - b.logprob) for a, b in zip(ours, theirs, strict=True))
    assert worst <= tolerance


@pytest.mark.parametrize("recipe", RECIPES)
def test_scores_are_those_of_single_steps(recipe: str) -> None:
    objective, lm = model(recipe)
    requests = some_requests()
    expected = one_by_one(objective, requests)
    assert_close(RecurrentScorer(lm).score(requests), expected, 1e-9)
    assert_close(RecurrentScorer(lm, Limits(3, 120), "step").score(requests), expected, 1e-9)


def test_the_most_likely_continuation_is_greedy() -> None:
    objective, lm = model("maglev-shared-0.1")
    row = random_tokens(1, 9)
    with torch.no_grad():
        for _ in range(3):
            best = objective.decoder.readout(step_through(objective.decoder, row)[:, -1]).argmax(-1)
            row = torch.cat((row, best[:, None]), dim=1)
    tokens = tuple(row[0].tolist())
    likely, other = Request(tokens[:9], tokens[9:]), Request(tokens[:9], (*tokens[9:11], (tokens[11] + 1) % 61))
    assert [score.greedy for score in RecurrentScorer(lm).score([likely, other])] == [True, False]


@pytest.mark.parametrize("source", ["recurrent", "refined", "lifted"])
def test_neither_batches_nor_order_change_scores(source: Source) -> None:
    """float32. Another order is the same to the bit; another batch adds up otherwise and agrees to 1e-5."""
    objective, lm = model("maglev-separate-1", torch.float32)
    requests = some_requests()

    def found(limits: Limits, asked: list[Request]) -> list[Score]:
        if source == "recurrent":
            return RecurrentScorer(lm, limits).score(asked)
        return PassScorer(objective, source, 2, limits).score(asked)

    whole = found(Limits(), requests)
    assert found(Limits(), requests[::-1])[::-1] == whole
    for limits in (Limits(1, 1), Limits(2, 100), Limits(5, 1000)):
        assert_close(found(limits, requests), whole, 1e-5)
    assert_close([found(Limits(), [request])[0] for request in requests], whole, 1e-5)


@pytest.mark.parametrize("source", ["refined", "lifted"])
def test_other_memories_are_those_of_whole_rows(source: Source) -> None:
    objective, _ = model("maglev-shared-0.1")
    requests = some_requests()
    expected = [
        read_off(memories(objective, torch.tensor([r.context + r.continuation[:-1]]), source, 2), objective, r)
        for r in requests
    ]
    assert_close(PassScorer(objective, source, 2).score(requests), expected, 1e-9)
    with pytest.raises(RequestError, match=r"76 tokens and lifted memories reach 64.*--max-length 64"):
        PassScorer(objective, "lifted", 1).score([Request((1,) * 75, (2, 3))])


def test_a_context_is_read_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lm = model("maglev-shared-0.1")
    read: list[tuple[int, int]] = []
    inner = scoring.read_rows_

    def counted(reader: Any, tokens: Tensor, lengths: Tensor, state: Any, **more: Any) -> Tensor:
        read.append((len(lengths), int(lengths.sum())))
        return inner(reader, tokens, lengths, state, **more)

    monkeypatch.setattr(scoring, "read_rows_", counted)
    context = tuple(range(1, 30))
    asked = [Request(context, (1, 2, 3)), Request(context, (4,)), Request(context, (5, 6)), Request(context, (1, 2, 3))]
    RecurrentScorer(lm).score(asked)
    # the context, then all but the last tokens of the two continuations that have more than one
    assert read == [(1, 29), (2, 3)]
    read.clear()
    RecurrentScorer(lm).score([Request(context, (1,)), Request(context, (2,))])
    assert read == [(1, 29)]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_kernels_score_as_the_cpu_does(recipe: str) -> None:
    """float32 close; bfloat16 coarser, by passes as by steps."""
    shape: dict[str, Any] = {"depth": 2, "width": 128, "heads": 2, "window": 24, "context": 96}
    requests = some_requests()

    def found(device: str, dtype: torch.dtype, reading: Reading = "parallel") -> list[float]:
        decoder = small(recipe, scale=0.3, dtype=dtype, **shape).decoder.to(device)
        lm = LanguageModel(decoder, NoTokenizer())  # type: ignore[arg-type]
        return [score.logprob for score in RecurrentScorer(lm, Limits(8, 400), reading).score(requests)]

    exact = found("cpu", torch.float64)
    for reading in READINGS:
        assert found("cuda", torch.float32, reading) == pytest.approx(exact, abs=1e-3)
        assert found("cuda", torch.bfloat16, reading) == pytest.approx(exact, rel=0.05, abs=0.3)


def test_requests_and_scores_come_back_from_their_files(tmp_path: Path) -> None:
    requests = some_requests()
    asked = RequestFile(requests, "a tokenizer", {"tasks": ["x"], "limit": None})
    save_requests(tmp_path / "r.safetensors", asked)
    assert load_requests(tmp_path / "r.safetensors") == asked
    scores = [Score(-math.pi * index, index % 2 == 0) for index in range(len(requests))]
    save_scores(tmp_path / "s.json", asked, scores, {"memory": "recurrent"})
    found = load_scores(tmp_path / "s.json")
    assert (found.scores, found.requests, found.model) == (scores, asked.digest(), {"memory": "recurrent"})
    flip_byte(tmp_path / "r.safetensors")
    with pytest.raises(RequestError, match="damaged"):
        load_requests(tmp_path / "r.safetensors")
    for path, loader in (("none", load_requests), ("none", load_scores), ("s.json", load_requests)):
        with pytest.raises(RequestError):
            loader(tmp_path / path)


def test_scores_that_were_changed_are_refused(tmp_path: Path) -> None:
    path, requests = tmp_path / "s.json", some_requests()[:3]
    scores = [Score(-1.5, True), Score(-0.25, False), Score(0.0, False)]
    save_scores(path, RequestFile(requests, "a tokenizer", {}), scores, {})
    value = json.loads(path.read_text())
    assert load_scores(path).tokenizer == "a tokenizer"
    for changed, reason in (
        ({"logprob": value["logprob"][::-1]}, "do not match their checksum"),
        ({"greedy": [False, True, False]}, "do not match their checksum"),
        ({"logprob": [-1.5, 5.0, 0.0]}, "not a number of at most 0"),
        ({"logprob": [-1.5, math.nan, 0.0]}, "not a number of at most 0"),
        ({"logprob": [-1.5, -math.inf, 0.0]}, "not a number of at most 0"),
        ({"greedy": [True, False]}, "shorter"),
        ({"format": "maglev-scores-1"}, "its format is 'maglev-scores-1'"),
    ):
        path.write_text(json.dumps(value | changed))
        with pytest.raises(RequestError, match=reason):
            load_scores(path)


@pytest.mark.parametrize("source", ["recurrent", "refined"])
def test_a_model_that_diverged_has_no_scores(source: Source) -> None:
    objective, lm = model("maglev-shared-0.1")
    scorer = RecurrentScorer(lm) if source == "recurrent" else PassScorer(objective, source, 2)
    scorer.score(some_requests())
    torch.nn.init.constant_(objective.decoder.readout.weight, math.nan)
    with pytest.raises(WorkError, match="a log-probability of nan: its weights or memories have diverged"):
        scorer.score(some_requests())


def test_the_verb_says_so_in_one_line_and_writes_nothing(
    trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("maglev-shared-0.1")
    tokenizer = open_scorer(run, torch.device("cpu"), pytest.fail).tokenizer.fingerprint
    asked, out = tmp_path / "r.safetensors", tmp_path / "s.json"
    save_requests(asked, RequestFile([Request((0, 5), (7, 8))], tokenizer, {}))
    monkeypatch.setattr(RecurrentScorer, "score_batch", lambda *_: [Score(math.nan, False)])
    capsys.readouterr()
    assert main(["eval", "score", str(run), "--requests", str(asked), "--out", str(out), "--device", "cpu"]) == 1
    assert "have diverged" in one_line(capsys) and not out.exists()
    # where scores cannot be written none are made
    (tmp_path / "file").touch()
    monkeypatch.setattr(RecurrentScorer, "score_batch", lambda *_: pytest.fail("scored for nothing"))
    for place, says in ((tmp_path, "which is a folder"), (tmp_path / "file" / "s.json", "cannot be written")):
        assert main(["eval", "score", str(run), "--requests", str(asked), "--out", str(place)]) == 2
        assert says in one_line(capsys)


def test_requests_need_something_to_read_and_to_ask_for() -> None:
    for context, continuation in (((), (1,)), ((1,), ())):
        with pytest.raises(RequestError, match="at least one"):
            Request(context, continuation)
    with pytest.raises(RequestError, match="0 rows"):
        Limits(rows=0)


def test_scoring_needs_nothing_but_the_core(trained: Train, tmp_path: Path) -> None:
    """A process in which the harness and all that comes with it cannot be imported gives the same numbers."""
    run = trained("maglev-shared-0.1")
    opened = open_scorer(run, torch.device("cpu"), pytest.fail)
    requests = [Request((0, 5, 9), (7, 8)), Request((0, 5, 9), (3,)), Request((0, *range(40)), (1, 2, 3))]
    asked = RequestFile(requests, opened.tokenizer.fingerprint, {"run": str(run)})
    save_requests(tmp_path / "r.safetensors", asked)
    code = (
        "import sys\n"
        "for name in ('lm_eval', 'datasets', 'transformers', 'pandas', 'matplotlib', 'tensorboard', 'yaml'):\n"
        "    sys.modules[name] = None\n"
        "import torch; torch.set_num_threads(1)\n"
        "from maglev.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["eval", "score", run, "--requests", tmp_path / "r.safetensors", "--out", tmp_path / "s.json", "--json"]
    words += ["--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert (said["count"], said["memory"], said["dtype"], said["step"]) == (3, "recurrent", "float32", 6)
    assert said["passes_per_token"] > 1 and said["stepped_tokens"] == 0
    assert load_scores(tmp_path / "s.json").scores == opened.scorer.score(requests)
