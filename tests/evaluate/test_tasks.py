"""The eight tasks as lm-evaluation-harness defines them, on local files: counts, prompts, an oracle, three steps."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.cli.tasks import write_down
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError, WorkError
from maglev.evaluate.paper_tasks import BY_NAME, TASKS, read_rows
from maglev.evaluate.requests import Request, Score, load_requests, load_scores, save_scores
from tests.evaluate.task_files import ITEMS, Oracle, row_of
from tests.small_runs import Train, one_line

pytest.importorskip("lm_eval", reason="needs lm_eval, the extra 'tasks' of maglev")

from maglev.evaluate import harness
from maglev.evaluate.harness import HarnessLM, TaskSetting, build_requests, evaluate, task_names
from maglev.evaluate.results import load_results, task_result

SPLITS = ("train", "validation", "test")
# as the issue and the data's README state them, in the order of the paper's columns
COUNTS = (5153, 1838, 10042, 1267, 2376, 1172, 1954, 3270)


@pytest.fixture(scope="session")
def tokenizer(data: Path) -> Tokenizer:
    return Tokenizer.load(data / "tokenizer.json")


def results(model: HarnessLM, folder: Path, items: int, work: Path, names: str = "paper") -> dict[str, Any]:
    found = evaluate(model, TaskSetting(task_names(names), str(folder), limit=items), work, bootstraps=10)
    return task_result(found, {"memory": "recurrent"}, {})


def test_item_counts_are_those_of_the_official_splits(eval_folder: Path) -> None:
    assert tuple(task.items for task in TASKS) == COUNTS
    assert tuple(len(read_rows(eval_folder, task)) for task in TASKS) == COUNTS
    # the harness takes the last word off again
    lines = (eval_folder / "lambada.jsonl").read_text(encoding="utf-8").splitlines()
    for line, row in zip(lines, read_rows(eval_folder, BY_NAME["lambada_openai"]), strict=True):
        assert row["text"].split(" ")[-1] == json.loads(line)["continuation"]


@pytest.mark.parametrize("place", ["a handful", "../shared"])
def test_an_oracle_gets_everything_right_and_a_shuffled_one_chance(
    place: str, tasks_folder: Path, request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tasks_folder if place == "a handful" else request.getfixturevalue("eval_folder")
    items = ITEMS if place == "a handful" else 200
    right = results(HarnessLM(tokenizer, Oracle(folder, tokenizer, items), None), folder, items, tmp_path / "a")
    assert right["average_recurrent"] == 1.0
    for task in TASKS:
        assert right["tasks"][task.name][f"{task.metric}_recurrent"] == 1.0, task.name
        assert right["tasks"][task.name]["items"] == items
    assert right["tasks"]["lambada_openai"]["perplexity_recurrent"] == 1.0
    if place == "a handful":
        return
    shuffled = Oracle(folder, tokenizer, items, shuffled=True)
    guessed = results(HarnessLM(tokenizer, shuffled, None), folder, items, tmp_path / "b")["tasks"]
    for task in TASKS:
        spread = math.sqrt(task.chance * (1 - task.chance) / items)
        # any word of another item may be the right one, though few are
        bound = 3 * spread if task.chance else 0.02
        assert abs(guessed[task.name][f"{task.metric}_recurrent"] - task.chance) <= bound, task.name
        if task.metric == "acc" and task.chance:
            assert guessed[task.name]["acc_recurrent_stderr"] == pytest.approx(spread, abs=0.01)


def test_prompts_begin_with_bos_once_and_split_where_the_harness_splits(
    tasks_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    setting = TaskSetting(task_names("paper"), str(tasks_folder), limit=1)
    requests, cut = build_requests(tokenizer, setting, tmp_path)
    assert not cut
    texts = []
    for asked in requests:
        assert asked.context[0] == tokenizer.bos_id and tokenizer.bos_id not in asked.context[1:] + asked.continuation
        texts.append((tokenizer.decode(asked.context[1:]), tokenizer.decode(asked.continuation)))
        assert list(asked.context[1:] + asked.continuation) == tokenizer.encode("".join(texts[-1]))
    assert texts[0] == ('"Look at the river," she said, and he turned to the', " river")
    assert texts[1] == ("Question: How to clean a river?\nAnswer:", " Use the engine.")
    assert texts[4] == ("Sitting: A man sits on a planet. He", "  opens the engine slowly.")
    assert texts[7][0].endswith("because the river") and texts[8][1] == " was too large."
    assert texts[-3] == ("Q: Ada saw a teacher. What comes next?\nA:", " sleep")
    assert texts[-1] == ("A river is not a engine.\nQuestion: is a river a engine?\nAnswer:", " yes")


def test_the_hubs_data_sets_make_the_same_requests(
    tasks_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and splits as the harness asks the Hub for them, all eight; rows in the Hub's columns stand in for its
    answer."""
    import datasets

    local, _ = build_requests(
        tokenizer, TaskSetting(tuple(BY_NAME), str(tasks_folder), limit=ITEMS), tmp_path / "local"
    )
    hub = {
        ("EleutherAI/lambada_openai", "default"): "lambada_openai",
        ("baber/piqa", None): "piqa",
        ("Rowan/hellaswag", None): "hellaswag",
        ("allenai/winogrande", "winogrande_xl"): "winogrande",
        ("allenai/ai2_arc", "ARC-Easy"): "arc_easy",
        ("allenai/ai2_arc", "ARC-Challenge"): "arc_challenge",
        ("lighteval/siqa", None): "social_iqa",
        ("aps/super_glue", "boolq"): "boolq",
    }
    asked = {}

    def from_hub(path: str, name: str | None = None, **_: Any) -> datasets.DatasetDict:
        asked[path, name] = hub[path, name]
        task = BY_NAME[hub[path, name]]
        rows = datasets.Dataset.from_list(read_rows(tasks_folder, task, ITEMS))
        # the others' rows are of no use: only what is scored has the right split
        wrong = rows.select([])
        return datasets.DatasetDict({split: rows if split == task.split else wrong for split in SPLITS})

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    found, _ = build_requests(tokenizer, TaskSetting(tuple(BY_NAME), None), tmp_path / "hub")
    assert found == local and asked == hub

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(WorkError, match=r"'boolq' did not come from the Hub .*give files with --data"):
        build_requests(tokenizer, TaskSetting(("boolq",), None), tmp_path)
    # there are thousands of others to look through, which takes its time
    without = harness.TaskManager(include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", lambda: without)
    with pytest.raises(RequestError, match=r"lm_eval 0\.4\.\d+ has no task 'booolq'"):
        build_requests(tokenizer, TaskSetting(("booolq",), None), tmp_path)


def test_bos_stands_for_an_empty_context_and_is_cut_with_the_beginning(tokenizer: Tokenizer) -> None:
    seen: list[Request] = []

    def answer(requests: Any) -> list[Score]:
        seen.extend(requests)
        return [Score(-1.0, False)] * len(requests)

    model = HarnessLM(tokenizer, answer, 8)
    pair = SimpleNamespace(args=("", "abc"))
    assert model.loglikelihood([pair]) == [(-1.0, False)]
    assert seen.pop() == Request((tokenizer.bos_id,), tuple(tokenizer.encode("abc")))
    # a space at the end of the context goes to the continuation
    model.loglikelihood([SimpleNamespace(args=("one ", "two"))])
    assert tokenizer.decode(seen.pop().continuation) == " two"
    long, end = "zq" * 20, " jx"
    model.loglikelihood([SimpleNamespace(args=(long, end))])
    whole = [tokenizer.bos_id, *tokenizer.encode(long + end)]
    cut = seen.pop()
    assert list(cut.context + cut.continuation) == whole[-9:] and model.cut == 1
    with pytest.raises(RequestError, match="leave no context within 8"):
        model.loglikelihood([SimpleNamespace(args=("a", long))])
    # rolling: every token once, the first after BOS
    assert model.loglikelihood_rolling([SimpleNamespace(args=(long,))]) == [-float(len(seen))]
    assert [token for asked in seen for token in asked.continuation] == tokenizer.encode(long)
    assert seen[0].context == (tokenizer.bos_id,)
    with pytest.raises(RequestError, match="writes text"):
        model.generate_until([])


def test_text_is_written_up_to_a_stop(trained: Train) -> None:
    import maglev

    lm = maglev.load(trained("maglev-shared-0.1"), device="cpu")
    model = HarnessLM(lm.tokenizer, lambda requests: [], None, lm)
    whole = "".join(lm.generate("The", max_tokens=12, temperature=0))
    options = {"until": [whole[3:5]], "max_gen_toks": 12, "do_sample": False}
    assert model.generate_until([SimpleNamespace(args=("The", options))]) == [whole[: whole.index(whole[3:5])]]


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_three_steps_are_one_step_to_the_bit(
    trained: Train, data: Path, tasks_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked, scores = str(trained("maglev-shared-0.1")), str(tmp_path / "r.safetensors"), str(tmp_path / "s.json")
    common = ["--data", str(tasks_folder), "--limit", str(ITEMS)]
    once = said(["eval", "tasks", run, "--tasks", "paper", *common], capsys)
    built = said(["eval", "tasks", run, *common, "--requests", asked], capsys)
    requests = load_requests(Path(asked)).requests
    assert built["count"] == len(requests) and built["contexts"] < len(requests)
    # the run was trained on 32 tokens, so long prompts lose their beginning
    assert built["cut"] == once["setting"]["cut"] > 0
    assert max(len(r.context) + len(r.continuation) - 1 for r in requests) == 32
    said(["eval", "score", run, "--requests", asked, "--out", scores], capsys)
    later = said(["eval", "tasks", "--scores", scores], capsys)
    assert later == once
    # where the run is not at hand any more, its tokenizer does; the numbers are still the run's
    assert said(["eval", "tasks", str(data), "--scores", scores], capsys) == once
    assert set(once["tasks"]) == set(BY_NAME) and 0 <= once["average_recurrent"] <= 1
    errors = [once["tasks"][task.name][f"{task.metric}_recurrent_stderr"] for task in TASKS]
    assert once["average_recurrent_stderr"] == pytest.approx(sum(error**2 for error in errors) ** 0.5 / 8)
    assert {
        "items",
        "acc_recurrent",
        "acc_recurrent_stderr",
        "perplexity_recurrent",
        "perplexity_recurrent_stderr",
    } == set(once["tasks"]["lambada_openai"])
    # a part of the items is no result to keep
    assert not load_results(Path(run), "tasks")
    value = json.loads(Path(scores).read_text())
    for part in ("setting", "model"):
        Path(scores).write_text(json.dumps(value | {part: {}}))
        assert main(["eval", "tasks", "--scores", scores]) == 2
        assert "does not say what was asked of whom" in one_line(capsys)
    Path(scores).write_text(json.dumps(value | {"tokenizer": "another"}))
    assert main(["eval", "tasks", "--scores", scores]) == 2
    assert "answers requests of another tokenizer than that of" in one_line(capsys)
    # fewer of them, whole by themselves
    fewer = load_scores(Path(scores)).scores[:-1]
    save_scores(Path(scores), load_requests(Path(asked)), fewer, value["model"])
    assert main(["eval", "tasks", "--scores", scores]) == 2
    assert "these tasks and data make other ones" in capsys.readouterr().err


def test_scores_go_to_the_run_that_was_scored_and_to_no_other(
    trained: Train,
    data: Path,
    tasks_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Several runs may answer requests that were built for one of them."""
    monkeypatch.setattr(
        "maglev.evaluate.paper_tasks.read_rows", lambda folder, task, limit: read_rows(folder, task, ITEMS)
    )
    first, second, same = (tmp_path / name for name in ("first", "second", "same"))
    for run, recipe in ((first, "swa-ssss"), (second, "maglev-shared-0.1"), (same, "swa-ssss")):
        shutil.copytree(trained(recipe), run)
    asked, scores = str(tmp_path / "r.safetensors"), tmp_path / "s.json"
    words = ["--tasks", "boolq", "--data", str(tasks_folder), "--requests", asked]
    said(["eval", "tasks", str(first), *words], capsys)
    said(["eval", "score", str(second), "--requests", asked, "--out", str(scores)], capsys)
    found = said(["eval", "tasks", "--scores", str(scores)], capsys)
    assert (found["run"], found["recipe"]) == (str(second), "maglev-shared-0.1")
    assert not {"settings", "weights_sha256"} & found.keys()
    assert load_results(second, "tasks") == [found] and not load_results(first, "tasks")
    assert main(["eval", "tasks", str(first), "--scores", str(scores)]) == 2
    line = one_line(capsys)
    assert f"scores of {second} (maglev-shared-0.1, seed" in line and f"{first} is another run (swa-ssss" in line
    # the scored run lies elsewhere, and what the requests were built for is none
    value = json.loads(scores.read_text())
    scores.write_text(json.dumps(value | {"model": value["model"] | {"run": str(tmp_path / "gone")}}))
    assert main(["eval", "tasks", "--scores", str(scores)]) == 2
    assert "name the one that was scored" in one_line(capsys) and not load_results(first, "tasks")
    assert said(["eval", "tasks", str(data), "--scores", str(scores)], capsys)["run"] == str(tmp_path / "gone")
    # one recipe and seed with other settings is another run
    said(["eval", "score", str(first), "--requests", asked, "--out", str(scores)], capsys)
    config = json.loads((same / "config.json").read_text())
    config["optimizer"]["matrix_lr"] *= 2
    (same / "config.json").write_text(json.dumps(config))
    assert main(["eval", "tasks", str(same), "--scores", str(scores)]) == 2
    assert f"{same} is another run" in one_line(capsys)
    # and so is one whose weights differ in one bit, though it is called the same; a copy is not
    shutil.copy(first / "config.json", same / "config.json")
    assert said(["eval", "tasks", str(same), "--scores", str(scores)], capsys)["run"] == str(same)
    value = json.loads(scores.read_text())
    step, digest = value["model"]["weights_sha256"]
    for identity, status in (([step, "0" + digest[1:-1] + "x"], 2), ([step + 1, "another"], 0), (None, 0)):
        scores.write_text(json.dumps(value | {"model": value["model"] | {"weights_sha256": identity}}))
        assert main(["eval", "tasks", str(same), "--scores", str(scores)]) == status
        capsys.readouterr()
    for settings in (None, [], "none"):
        scores.write_text(json.dumps(value | {"model": value["model"] | {"settings": settings}}))
        assert main(["eval", "tasks", str(same), "--scores", str(scores)]) == 0
    # neither is here: the one that was scored is asked for
    gone = {"model": value["model"] | {"run": "gone"}, "setting": value["setting"] | {"run": "elsewhere"}}
    scores.write_text(json.dumps(value | gone))
    capsys.readouterr()
    assert main(["eval", "tasks", "--scores", str(scores)]) == 2
    assert one_line(capsys).startswith("maglev: gone is not a run folder")


def test_memories_that_a_run_has_not_are_told_before_prompts_are_built(
    trained: Train, tasks_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "evaluate", lambda *_: pytest.fail("began"))
    for memory, line in (("lifted", "no prefiller Q"), ("refined", "nothing to refine")):
        words = ["eval", "tasks", str(trained("swa-ssss")), "--data", str(tasks_folder), "--memory", memory]
        assert main(words) == 2
        assert line in one_line(capsys)


def test_whole_files_are_kept_in_the_run_by_memory_source(
    trained: Train,
    tasks_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained("maglev-shared-0.1"), run)
    monkeypatch.setattr(
        "maglev.evaluate.paper_tasks.read_rows", lambda folder, task, limit: read_rows(folder, task, ITEMS)
    )
    words = ["eval", "tasks", str(run), "--tasks", "piqa,boolq", "--data", str(tasks_folder), "--memory", "lifted"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "scoring, lifted memories: 12 of 12 requests" in err
    shown = " ".join(out.split())
    assert "lifted memories" in shown and "standard error" in shown and "acc_norm" in shown
    (found,) = load_results(run, "tasks")
    assert found["memory"] == "lifted" and "acc_lifted_stderr" in found["tasks"]["boolq"]
    # cut shorter it is another question, and takes no other's place
    assert main([*words, "--max-length", "24"]) == 0
    assert load_results(run, "tasks-piqa") == [found]
    assert [path.name for path in sorted((run / "eval").iterdir())] == [
        "tasks-length-24-piqa-boolq-lifted.json",
        "tasks-piqa-boolq-lifted.json",
    ]


@pytest.mark.parametrize(("fewshot", "table"), [(None, ["tasks-paper-recurrent.json"]), (25, [])])
def test_the_table_takes_what_was_asked_without_examples(
    fewshot: int | None, table: list[str], trained: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained("swa-ssss"), run)
    metrics = {task.name: {f"{task.metric},none": 0.5} for task in TASKS}
    facts = {"memory": "recurrent", "passes": None, "weights": "plain", "recipe": "swa-ssss"}
    setting = {"tasks": ["all"], "limit": None, "fewshot": fewshot, "max_length": 32}
    write_down(run, {"results": metrics, "n-samples": {}}, facts, setting)
    names = [path.name for path in (run / "eval").iterdir()]
    assert names == (table or ["tasks-fewshot-25-paper-recurrent.json"])
    assert len(load_results(run, "tasks-paper")) == len(table)


def test_weights_that_come_along_are_to_be_exported_first(
    tasks_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", str(tasks_folder), "--limit", "1", "--max-length", "8"]
    for words in ([], ["--requests", str(tmp_path / "r.safetensors")]):
        assert main(["eval", "tasks", "maglev-tiny", *common, *words]) == 2
        assert "'maglev export maglev-tiny OUT' makes a folder to name here" in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--data", "nowhere"], "--data is nowhere, which is no folder"),
        (["--tasks", "mmlu", "--data", "TASKS"], "no local file for task 'mmlu'"),
        (["--tasks", ",", "--data", "TASKS"], "--tasks is ','"),
        (["--data", "TASKS"], "lambada.jsonl has 3 items and lambada_openai has 5,153; bring the whole file"),
        (["--data", "TASKS", "--limit", "0"], "--limit is 0; it must be at least 1"),
        (
            ["--data", "TASKS", "--limit", "1", "--fewshot", "2"],
            "--fewshot is 2, and the files of --data hold the asked",
        ),
        (["--data", "TASKS", "--limit", "1", "--memory", "own"], "--memory is 'own'"),
        (["--data", "TASKS", "--limit", "1", "--passes", "2"], "--passes goes with --memory refined"),
        (["--data", "TASKS", "--limit", "1", "--batch-rows", "0"], "--batch-rows is 0"),
        (["--data", "TASKS", "--limit", "1", "--reading", "fast"], "--reading is 'fast'"),
        (["--data", "TASKS", "--limit", "1", "--requests", "TASKS"], "which is a folder; name a file in it"),
        (["--scores", "nowhere.json"], "nowhere.json does not exist"),
        (["--scores", "x", "--limit", "1"], "--limit was settled"),
        (["--scores", "x", "--requests", "y"], "give one of them"),
    ],
)
def test_bad_requests_end_in_one_line(
    words: list[str], line: str, trained: Train, tasks_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("maglev-shared-0.1")
    capsys.readouterr()
    chosen = [str(tasks_folder) if word == "TASKS" else word for word in words]
    assert main(["eval", "tasks", str(run), *chosen]) == 2
    assert line in [*capsys.readouterr().err.splitlines()][-1]


@pytest.mark.parametrize("missing", ["lm_eval.models.utils.normalize_gen_kwargs", "lm_eval.tasks.TaskManager.load"])
def test_a_harness_that_lacks_what_is_used_is_named(
    missing: str,
    trained: Train,
    tasks_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in older releases."""
    run = trained("maglev-shared-0.1")
    capsys.readouterr()
    monkeypatch.delattr(missing)
    monkeypatch.delitem(sys.modules, "maglev.evaluate.harness")
    assert main(["eval", "tasks", str(run), "--data", str(tasks_folder), "--limit", "1"]) == 2
    told = one_line(capsys)
    assert "does not fit" in told and missing.rsplit(".", 1)[1] in told and "install the version" in told


def test_bad_files_are_named(
    tasks_folder: Path, data: Path, trained: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    piqa = BY_NAME["piqa"]
    for content, line in {
        '{"goal": "x"': "line 1: this is no JSON",
        '{"goal": "x", "sol1": "a", "label": 0}': "line 1: no field 'sol2'",
    }.items():
        (tmp_path / piqa.file).write_text(content)
        with pytest.raises(RequestError, match=line):
            read_rows(tmp_path, piqa, 1)
    line = '{"goal": "x", "sol1": "a", "sol2": "b", "label": 0}\n'
    (tmp_path / piqa.file).write_text(line * (piqa.items + 1))
    assert len(read_rows(tmp_path, piqa, 1)) > 1
    with pytest.raises(RequestError, match=r"piqa.jsonl has 1,839 items and piqa has 1,838; bring the file again"):
        read_rows(tmp_path, piqa)
    with pytest.raises(RequestError, match=r"boolq.jsonl does not exist; boolq needs it"):
        read_rows(tmp_path, BY_NAME["boolq"])
    (tmp_path / "arc_easy.jsonl").write_text('{"query": "What?", "choices": ["a"], "gold": 0}')
    with pytest.raises(RequestError, match="this is not an item of arc_easy"):
        read_rows(tmp_path, BY_NAME["arc_easy"], 1)
    (tmp_path / piqa.file).write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match=r"piqa.jsonl is no UTF-8 text"):
        read_rows(tmp_path, piqa, 1)
    run = tmp_path / "run"
    shutil.copytree(trained("maglev-shared-0.1"), run)
    (run / "tokenizer.json").unlink()
    capsys.readouterr()
    assert main(["eval", "tasks", str(run), "--data", str(tasks_folder), "--limit", "1"]) == 2
    assert "has no tokenizer.json" in one_line(capsys)
    # prepared data has the tokenizer and no length
    assert main(["eval", "tasks", str(data), "--data", str(tasks_folder), "--requests", str(tmp_path / "r")]) == 2
    assert "has no context of its own; add --max-length" in one_line(capsys)


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("lambada_openai", {"continuation": "two words"}, "continuation is 'two words', not one word"),
        ("lambada_openai", {"context": 3}, "a text is missing"),
        ("piqa", {"label": "x"}, "invalid literal"),
        ("piqa", {"label": 2}, "the right answer is number 3 of 2"),
        ("piqa", {"sol1": None}, "a text is missing"),
        ("hellaswag", {"endings": "abc"}, "endings is no list"),
        ("hellaswag", {"label": "9"}, "the right answer is number 10 of 4"),
        ("winogrande", {"sentence": "nothing"}, "sentence has no _"),
        ("winogrande", {"answer": "0"}, "the right answer is number 0 of 2"),
        ("arc_easy", {"gold": -1}, "the right answer is number 0 of 4"),
        ("arc_challenge", {"choices": ["a", ""]}, "a text is missing"),
        ("social_iqa", {"label": "7"}, "the right answer is number 7 of 3"),
        ("boolq", {"answer": 7}, "the right answer is number 8 of 2"),
    ],
)
def test_an_item_that_could_only_be_scored_wrong_is_refused(
    name: str, change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    task = BY_NAME[name]
    rows = [row_of(name, 0), row_of(name, 1) | change]
    (tmp_path / task.file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RequestError, match=rf"line 2: {line}.*; this is not an item of {name}"):
        read_rows(tmp_path, task, 2)


def test_a_harness_without_a_task_is_named(
    tasks_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.tasks.__file__", str(tmp_path / "__init__.py"))
    setting = TaskSetting(("piqa",), str(tasks_folder), limit=1)
    with pytest.raises(RequestError, match=r"this lm_eval has no piqa/piqa.yaml and so no piqa"):
        build_requests(tokenizer, setting, tmp_path)
