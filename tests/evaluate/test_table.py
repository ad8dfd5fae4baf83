"""From results in run folders to the paper's table, its formats and its figures."""

import csv
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.evaluate import table_formats
from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.results import save_result
from maglev.evaluate.table import ACCURACIES, AVERAGE, FINEWEB, LABELS, OURS, PERPLEXITY, PUBLISHED, make_table
from maglev.evaluate.table_facts import collect, save_facts
from maglev.runs import CONFIG
from tests.evaluate.table_runs import five_runs, make_run, recall_rows
from tests.small_runs import Train, one_line


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return five_runs(tmp_path)


def test_the_papers_numbers_are_those_of_its_table(shared_folder: Path) -> None:
    source = shared_folder / "paper" / "maglev.tex"
    if not source.is_file():
        pytest.skip("needs ../shared/paper beside the checkout")
    found = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        if re.match(r"(Transformer|LRT|SWA|Maglev) \(", line) and line.count("&") == 11:
            name, *cells = line.removesuffix("\\\\").split("&")
            found[name.strip().replace("$\\lambda", "λ").replace("$", "")] = tuple(
                float(re.sub(r"\\best\{([\d.]+)\}", r"\1", cell).strip(" \\")) for cell in cells
            )
    assert found == {LABELS[recipe]: numbers for recipe, numbers in PUBLISHED.items()}


def test_the_average_is_the_papers_mean_of_eight_accuracies() -> None:
    """LAMBADA's included: so their own column comes out, to rounding."""
    for numbers in PUBLISHED.values():
        assert len(numbers[2:10]) == len(ACCURACIES) == 8
        assert sum(numbers[2:10]) / 8 == pytest.approx(numbers[10], abs=0.11)


def test_seeds_make_one_line_with_a_spread_and_other_settings_another(runs: list[Path]) -> None:
    table = make_table(collect(runs))
    ours = {(line.model, line.memory): line for line in table.lines if line.origin == OURS}
    assert list(ours) == [
        ("SWA (SSSS), steps 50", "recurrent"),
        ("SWA (SSSS), steps 100", "recurrent"),
        ("Maglev (λ=0.1)", "recurrent"),
        ("Maglev (λ=0.1)", "lifted"),
    ]
    swa, double, own, lifted = ours.values()
    assert swa.seeds == (0, 1) and double.seeds == (0,) and double.cells["fw"].spread is None
    assert swa.cells["fw"].value == pytest.approx(1.31) and swa.cells["fw"].spread == pytest.approx(0.014142, abs=1e-6)
    assert own.cells["fw"].difference == pytest.approx(1.27 - 1.31)
    assert own.cells["average"].value == pytest.approx(44) and own.cells["average"].difference == pytest.approx(2)
    # lifted memories are no contest: nobody is deployed with them
    assert own.cells["fw"].best and not lifted.cells["fw"].best and lifted.cells["fw"].value < own.cells["fw"].value
    # the other SWA is measured against the first one too
    assert double.cells["fw"].difference == pytest.approx(-0.02) and swa.cells["fw"].difference is None
    theirs = [line for line in table.lines if line.origin == "paper"]
    assert [line.recipe for line in theirs] == ["swa-ssss", "maglev-shared-0.1"]
    assert not theirs[1].cells["fw"].best and theirs[1].cells["hellaswag"].best
    assert theirs[1].cells["fw"].difference == pytest.approx(0.7295 - 0.7413)
    assert [column.key for column in table.columns] == [c.key for c in (FINEWEB, PERPLEXITY, *ACCURACIES, AVERAGE)]


def change_result(run: Path, name: str, **facts: object) -> None:
    path = run / "eval" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_a_run_that_was_not_finished_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_run(tmp_path, "swa-ssss", 0, recurrent=1.30, accuracy=0.40)
    part = make_run(tmp_path, "maglev-shared-0.1", 0, recurrent=1.28, lifted=1.25)
    for source in ("recurrent", "lifted"):
        change_result(part, f"bpb-fineweb-{source}.json", step=20)
    table = make_table(collect([whole, part]))
    lines = {line.model: line for line in table.lines if line.origin == OURS}
    assert list(lines) == ["SWA (SSSS)", "Maglev (λ=0.1), after 20 of 50 steps"]
    swa, own = lines.values()
    assert own.costs["tokens"] == swa.costs["tokens"] * 20 / 50
    assert own.costs["training_flops"] < swa.costs["training_flops"]
    # rollouts begin at .6 of training: what stopped before has made none, what stopped after made fewer
    closed = make_run(tmp_path, "maglev-closed", 0, recurrent=1.28)
    costs = {}
    for step in (50, 40, 20):
        change_result(closed, "bpb-fineweb-recurrent.json", step=step)
        (facts,) = collect([closed])
        costs[step] = facts["training_flops"] / facts["tokens"]
    alone = costs[20]
    assert alone < costs[40] < costs[50]
    assert (costs[40] - alone) / (costs[50] - alone) == pytest.approx((40 - 30) / 40 / 0.4)
    # bold is among equal tokens
    assert not own.cells["fw"].best
    # seeds that stopped elsewhere are another line
    other = make_run(tmp_path, "maglev-shared-0.1", 1, recurrent=1.28)
    models = {line.model for line in make_table(collect([whole, part, other])).lines if line.origin == OURS}
    assert models == {*lines, "Maglev (λ=0.1)"}
    change_result(part, "bpb-fineweb-lifted.json", step=30)
    change_result(whole, "tasks-paper-recurrent.json", recipe="lrt-ssss")
    for run, line in ((part, "results of steps 20, 30"), (whole, "is a run of swa-ssss, and")):
        assert main(["table", str(run), "--out", str(tmp_path / "out")]) == 2
        assert line in one_line(capsys)


def test_two_texts_of_one_name_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path, recipe, recurrent=1.3) for recipe in ("swa-ssss", "lrt-ssss")]
    change_result(runs[1], "bpb-fineweb-recurrent.json", bytes=8)
    assert main(["table", *map(str, runs), "--out", str(tmp_path / "out")]) == 2
    line = one_line(capsys)
    assert "swa-ssss-0-50 and lrt-ssss-0-50 were measured on 9 and 8 bytes of a text that both call 'fineweb'" in line


def test_places_that_cannot_be_written_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "swa-ssss", recurrent=1.3)
    (tmp_path / "file").write_text("mine")
    for words, line in (
        (["--out", str(tmp_path / "file")], "which is a file; name a folder"),
        (["--out", str(tmp_path / "out"), "--save", str(tmp_path)], "which is a folder; name a file in it"),
    ):
        assert main(["table", str(run), *words]) == 2
        assert line in one_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_numbers_of_fewer_seeds_are_marked(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "swa-ssss", 0, recurrent=1.30, accuracy=0.40),
        make_run(tmp_path, "swa-ssss", 1, recurrent=1.32),
        make_run(tmp_path, "lrt-ssss", 3, recurrent=1.31, accuracy=0.41),
    ]
    table = make_table(collect(runs), paper=False)
    swa = table.lines[0]
    assert swa.seeds == swa.cells["fw"].seeds == (0, 1) and swa.cells["piqa"].seeds == (0,)
    text = table_formats.as_text(table)
    rows = {line.split("  ")[0]: line for line in text.splitlines()[:3]}
    assert "40.0†" in rows["SWA (SSSS)"] and "1.3100 ± 0.0141†" not in text and "†" not in rows["LRT (SSSS)"]
    assert "† of seed 0 alone." in text and "$^\\dagger$" in table_formats.as_latex(table)
    told = {row["column"]: row["seeds"] for row in csv.DictReader(io.StringIO(table_formats.as_csv(table)))}
    assert told["FW BPB"] == "3"
    first = next(row for row in csv.DictReader(io.StringIO(table_formats.as_csv(table))) if row["column"] == "PIQA Acc")
    assert (first["model"], first["seeds"]) == ("SWA (SSSS)", "0")
    assert "†" not in table_formats.as_text(make_table(collect([runs[0], runs[2]]), paper=False))


def test_standard_errors_are_told_below_and_stand_in_the_csv(tmp_path: Path) -> None:
    """More seeds answer the same items, so that their mean is no surer; results may lack them."""
    runs = [
        make_run(tmp_path, "swa-ssss", 0, accuracy=0.40, error=0.010),
        make_run(tmp_path, "swa-ssss", 1, accuracy=0.42, error=0.014),
        make_run(tmp_path, "lrt-ssss", accuracy=0.41, error=0.004),
        make_run(tmp_path, "maglev-closed", accuracy=0.43),
    ]
    table = make_table(collect(runs))
    rows = {
        (row["model"], row["column"]): row["standard_error"]
        for row in csv.DictReader(io.StringIO(table_formats.as_csv(table)))
        if row["numbers"] == "ours"
    }
    assert float(rows["SWA (SSSS)", "PIQA Acc"]) == pytest.approx(1.2)
    assert float(rows["LRT (SSSS)", "Hella Acc_n"]) == pytest.approx(0.4)
    # eight of them, independent
    assert float(rows["LRT (SSSS)", "Avg Acc"]) == pytest.approx(0.4 / 8**0.5)
    assert float(rows["LRT (SSSS)", "LMD PPL"]) == 3 and rows["Maglev (closed)", "Avg Acc"] == ""
    assert rows["LRT (SSSS)", "tokens"] == ""
    told = "Standard errors of our accuracies, by their items: 0.4 to 1.2, of their average 0.1 to 0.4;"
    for form in (table_formats.as_text, table_formats.as_markdown, table_formats.as_latex):
        assert form(table).count(told) == 1
    assert "Standard errors" not in table_formats.as_text(make_table(collect(runs[3:])))


def test_a_task_without_a_standard_error_leaves_the_average_without_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, "swa-ssss", accuracy=0.40, error=0.01)
    path = run / "eval" / "tasks-paper-recurrent.json"
    value = json.loads(path.read_text())
    del value["tasks"]["piqa"]["acc_recurrent_stderr"]
    path.write_text(json.dumps(value))
    (line,) = make_table(collect([run]), paper=False).lines
    assert (line.cells["piqa"].error, line.cells["average"].error) == (None, None)
    assert line.cells["boolq"].error == pytest.approx(1)


def test_more_tokens_are_no_contest_and_speed_is_told_of_runs_that_were_alone(runs: list[Path]) -> None:
    facts = collect([*runs, make_run(runs[0].parent / "more", "swa-ssss", 1, 100, recurrent=1.0)])
    lines = {line.model: line for line in make_table(facts, paper=False).lines if line.memory == "recurrent"}
    assert lines["SWA (SSSS), steps 100"].cells["fw"].value < lines["Maglev (λ=0.1)"].cells["fw"].value
    assert lines["Maglev (λ=0.1)"].cells["fw"].best and not lines["SWA (SSSS), steps 100"].cells["fw"].best
    for at_a_time in (1, 2):
        timed = [run | {"tokens_per_second": 9.0, "rows_at_a_time": at_a_time} for run in facts]
        costs = [line.costs for line in make_table(timed, paper=False).lines]
        assert all(("tokens_per_second" in own) == (at_a_time == 1) for own in costs)


@pytest.mark.parametrize("paper", [True, False])
def test_the_papers_lines_do_not_decide_which_of_ours_compete(tmp_path: Path, paper: bool) -> None:
    """The paper has an SWA of the same name, without tokens, and no closed Maglev."""
    runs = [make_run(tmp_path, "swa-ssss", recurrent=1.30), make_run(tmp_path, "maglev-closed", recurrent=1.25)]
    table = make_table(collect(runs), paper=paper)
    ours = {line.recipe: line.cells["fw"].best for line in table.lines if line.origin == OURS}
    assert ours == {"swa-ssss": False, "maglev-closed": True}


def test_another_text_has_a_column_that_the_paper_does_not_fill(tmp_path: Path) -> None:
    run = make_run(tmp_path, "swa-ssss", recurrent=1.3)
    value = json.loads((run / "eval" / "bpb-fineweb-recurrent.json").read_text()) | {"data": "books"}
    save_result(run, "bpb-books-recurrent", value)
    table = make_table(collect([run]))
    assert [column.title for column in table.columns][:2] == ["FW", "books"]
    assert ["bpb books" in line.cells for line in table.lines] == [True, False]


def test_two_texts_of_the_papers_name_have_a_column_each(tmp_path: Path) -> None:
    """Neither stands for the other, in whatever order they were measured."""
    run = make_run(tmp_path, "swa-ssss", recurrent=1.3)
    value = json.loads((run / "eval" / "bpb-fineweb-recurrent.json").read_text())
    save_result(run, "bpb-fineweb-2-recurrent", value | {"data": "fineweb-2", "bpb_recurrent": 1.1})
    table = make_table(collect([run]))
    ours, theirs = table.lines
    assert (ours.cells["bpb fineweb"].value, ours.cells["bpb fineweb-2"].value) == (1.3, 1.1)
    assert "fw" not in ours.cells and "fw" in theirs.cells
    assert "FW is the paper's alone" in table_formats.as_text(table)
    alone = make_table(collect([run]), paper=False)
    assert FINEWEB not in alone.columns and "the paper's alone" not in table_formats.as_text(alone)


def test_a_run_named_twice_comes_once_and_two_of_one_seed_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path / "a", "swa-ssss", recurrent=1.3)
    other = make_run(tmp_path / "b", "swa-ssss", recurrent=1.2)
    kept = tmp_path / "kept.json"
    save_facts(kept, collect([first]))
    assert collect([first, kept, first]) == collect([first])
    for places, named in (((first, other), (first, other)), ((kept, other), (f"{first.name} in {kept}", other))):
        assert main(["table", *map(str, places), "--out", str(tmp_path / "out")]) == 2
        line = one_line(capsys)
        assert all(str(name) in line for name in named) and "leave one of them out" in line
    assert not (tmp_path / "out").exists()


def test_formats_say_the_same(runs: list[Path]) -> None:
    table = make_table(collect(runs))
    markdown = table_formats.as_markdown(table)
    head = next(line for line in markdown.splitlines() if line.startswith("| model"))
    assert "FW BPB ↓" in head and "Hella Acc_n ↑" in head
    row = next(line for line in markdown.splitlines() if line.startswith("| Maglev (λ=0.1) | ours | recurrent | 2 |"))
    assert "**1.2700 ± 0.0141**" in row and row.count("|") == head.count("|")
    assert "-0.0400" in markdown and "-0.0118" in markdown
    assert "By chance: LMD 0.0, PIQA 50.0, Hella 25.0," in markdown and "SIQA 33.3, BoolQ 50.0." in markdown
    text = table_formats.as_text(table)
    assert "1.2700 ± 0.0141*" in text and len({line.index("memory") for line in text.splitlines() if "memory " in line})
    rows = list(csv.DictReader(io.StringIO(table_formats.as_csv(table))))
    found = [r for r in rows if r["model"] == "Maglev (λ=0.1)" and r["numbers"] == "ours" and r["column"] == "FW BPB"]
    assert [(float(r["value"]), r["memory"], r["best"]) for r in found] == [
        (pytest.approx(1.27), "recurrent", "1"),
        (pytest.approx(1.245), "lifted", "0"),
    ]
    latex = table_formats.as_latex(table)
    assert "\\textbf{1.2700 $\\pm$ 0.0141}" in latex and "Maglev ($\\lambda$=0.1)" in latex and "Acc\\_n" in latex
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == 3 and "λ" not in latex


def test_what_runs_cost_stands_below_their_numbers(runs: list[Path]) -> None:
    table = make_table(collect(runs))
    costs = {line.model: line.costs for line in table.lines if line.origin == OURS}
    swa, double, own = costs.values()
    assert double["tokens"] == 2 * swa["tokens"] and double["training_flops"] == 2 * swa["training_flops"]
    assert own["training_flops"] > swa["training_flops"] and own["state_bytes"] == swa["state_bytes"]
    # once per model, whatever memories it was measured with; speed was not measured
    head, *rows = table_formats.cost_rows(table)
    assert head == ["model", "parameters", "tokens", "training FLOPs", "state bytes"]
    assert [row[0] for row in rows] == list(costs) and rows[0][2] == f"{swa['tokens']:,.0f}"
    shown = " | ".join(rows[0])
    assert shown in table_formats.as_markdown(table) and " & ".join(rows[0]) in table_formats.as_latex(table)
    told = [row for row in csv.DictReader(io.StringIO(table_formats.as_csv(table))) if row["column"] == "tokens"]
    assert [(row["model"], float(row["value"])) for row in told] == [
        (name, own["tokens"]) for name, own in costs.items()
    ]


def test_refined_numbers_say_their_passes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "lrt-ssss", recurrent=1.3, refined=1.28)
    value = json.loads((run / "eval" / "bpb-fineweb-refined.json").read_text())
    save_result(run, "bpb-fineweb-refined-8", value | {"passes": 8, "bpb_refined": 1.27})
    table = make_table(collect([run]), paper=False)
    assert [(line.memory, line.passes, line.cells["fw"].value) for line in table.lines] == [
        ("recurrent", None, 1.3),
        ("refined", 3, 1.28),
        ("refined", 8, 1.27),
    ]
    assert "refined, 3 passes" in table_formats.as_text(table) and "refined, 8 passes" in table_formats.as_csv(table)


def test_the_verb_writes_tables_and_figures_and_keeps_what_they_are_made_of(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra 'report' of maglev")
    out, kept = tmp_path / "out", tmp_path / "results.json"
    save_result(runs[1], "recall-pairs-4-64", {"recipe": "swa-ssss", "rows": recall_rows("swa-ssss")})
    assert main(["table", *map(str, runs), "--out", str(out), "--save", str(kept)]) == 0
    assert "1.2700 ± 0.0141*" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    pictures = {"consistency.svg", "position-fineweb.svg", "cost-fineweb.svg", "recall.svg"}
    assert names == {"table.txt", "table.md", "table.csv", "table.tex"} | pictures
    # from the one file, the same table to the byte, and no folder is needed any more
    for run in runs:
        shutil.rmtree(run)
    again = tmp_path / "again"
    assert main(["table", str(kept), "--out", str(again), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert len(value["files"]) == 8 and value["lines"][0]["memory"] == "recurrent"
    # that one is drawn by 'eval recall', with a date in it
    for name in names - {"recall.svg"}:
        assert (out / name).read_bytes() == (again / name).read_bytes(), name


def test_what_eval_bpb_finds_is_in_the_table(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained("maglev-shared-0.1"), run)
    shutil.rmtree(run / "eval", ignore_errors=True)
    words = ["eval", "bpb", str(run), "--data", str(data), "--json"]
    assert main([*words, "--rows", "2"]) == 0 and not (run / "eval").exists()
    capsys.readouterr()
    assert main([*words, "--memory", "lifted"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert main(["table", str(run), "--out", str(tmp_path / "out"), "--no-figures", "--memory", "lifted"]) == 0
    assert f"{value['bpb_lifted']:.4f}" in capsys.readouterr().out


def test_bad_requests_end_in_one_line(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = make_run(tmp_path / "bare", "swa-ssss")
    damaged = make_run(tmp_path / "damaged", "swa-ssss", recurrent=1.0)
    (damaged / "eval" / "bpb-fineweb-recurrent.json").write_text("{")
    other = tmp_path / "other.json"
    other.write_text("{}")
    partial, texts = tmp_path / "partial.json", tmp_path / "texts.json"
    partial.write_text(json.dumps({"format": "maglev-table-1", "runs": [{"run": "x"}]}))
    texts.write_text(json.dumps({"rows": [{"recipe": "swa-ssss", "bpb_recurrent": 1.0}]}))
    empty = tmp_path / "empty.json"
    save_facts(empty, [])
    for words, line in {
        (str(bare),): "has no results yet that a table shows; measure it with 'maglev eval bpb'",
        (str(damaged),): "cannot be read",
        (str(other),): "is no file of table facts",
        (str(partial),): "is no file of table facts (a run has no 'recipe')",
        (str(texts),): "is no file of table facts",
        (str(tmp_path / "nowhere"),): "is not a run folder",
        (str(runs[0]), "--memory", "own"): "--memory is 'own'",
        (str(empty),): "empty.json holds no runs; name a file with some",
        (str(runs[1]), "--memory", "lifted"): "no run has lifted numbers; choose --memory among recurrent,",
    }.items():
        capsys.readouterr()
        assert main(["table", *words, "--out", str(tmp_path / "out")]) == 2
        assert line in one_line(capsys)


def part_of_tasks(run: Path, names: Sequence[str], accuracy: float, **setting: Any) -> None:
    """What 'maglev eval tasks --tasks NAMES' leaves."""
    metrics = {task.name: task.metric for task in TASKS}
    own = {name: {f"{metrics.get(name, 'acc')}_recurrent": accuracy} for name in names}
    if "lambada_openai" in own:
        own["lambada_openai"]["perplexity_recurrent"] = 30.0
    value = {"recipe": "swa-ssss", "weights": "plain", "passes": None, "memory": "recurrent", "tasks": own}
    value["setting"] = {"fewshot": None, "max_length": 64} | setting
    words = [f"{key}-{value}" for key, value in setting.items()]
    save_result(run, "-".join(["tasks", *words, *names, "recurrent"]), value)


def test_tasks_measured_some_at_a_time_come_together_and_other_questions_stay_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "swa-ssss")
    names = [task.name for task in TASKS]
    part_of_tasks(run, names[:1], 0.5)
    part_of_tasks(run, ["copa"], 0.9)
    part_of_tasks(run, names[1:2], 0.9, fewshot=5)
    part_of_tasks(run, names[1:2], 0.9, max_length=32)
    (line,) = make_table(collect([run]), paper=False).lines
    assert {key: cell.value for key, cell in line.cells.items()} == {"lambada_openai": 50.0, "lambada_ppl": 30.0}
    part_of_tasks(run, names[1:], 0.3)
    (line,) = make_table(collect([run]), paper=False).lines
    assert {key: cell.value for key, cell in line.cells.items() if key in names[1:]} == dict.fromkeys(names[1:], 30.0)
    assert line.cells["average"].value == pytest.approx((50 + 7 * 30) / 8)
    # all of them at once have the last word
    part_of_tasks(run, names, 0.4)
    (line,) = make_table(collect([run]), paper=False).lines
    assert line.cells["piqa"].value == line.cells["average"].value == pytest.approx(40)
    # what is no task of the table alone is no line
    other = make_run(tmp_path / "other", "swa-ssss")
    part_of_tasks(other, ["copa"], 0.9)
    assert main(["table", str(other), "--out", str(tmp_path / "out")]) == 2
    assert "has no results yet that a table shows" in one_line(capsys)


def test_settings_that_came_after_a_run_do_not_make_another_line(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "maglev-closed", seed, recurrent=1.2 + seed / 10) for seed in range(3)]
    facts = collect(runs)
    del facts[0]["settings"]["objective.noise"], facts[1]["settings"]["objective.steady"]
    kept = tmp_path / "kept.json"
    save_facts(kept, facts)
    (line,) = make_table(collect([kept]), paper=False).lines
    assert line.seeds == (0, 1, 2) and line.model == "Maglev (closed)"
    # what was measured is kept as it was
    assert "objective.noise" not in collect([kept])[0]["settings"]
    facts[2]["settings"]["objective.noise"] = 0.2
    save_facts(kept, facts)
    lines = make_table(collect([kept]), paper=False).lines
    assert [(line.model, line.seeds) for line in lines] == [
        ("Maglev (closed), noise 0.0", (0, 1)),
        ("Maglev (closed), noise 0.2", (2,)),
    ]
    # of a recipe that nobody knows any more nothing is filled in
    for run in facts:
        run["recipe"] = "maglev-old"
    save_facts(kept, facts)
    assert len(make_table(collect([kept]), paper=False).lines) == 3


def test_names_do_not_break_markdown_and_latex(tmp_path: Path) -> None:
    facts = collect([make_run(tmp_path, "swa-ssss", recurrent=1.0)])
    facts[0]["bpb"][0]["data"] = name = r"a|b_c$^~{\@"
    table = make_table(facts, paper=False)
    heading = table_formats.as_markdown(table).splitlines()[0]
    assert heading.count(" | ") == table_formats.as_markdown(table).splitlines()[1].count(" | ")
    assert r"a\|b_c" in heading and name in table_formats.as_csv(table)
    written = r"a|b\_c\$\textasciicircum{}\textasciitilde{}\{\textbackslash{}@ BPB"
    assert written in table_formats.as_latex(table)


def test_recall_alone_is_drawn_and_no_empty_table_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra 'report' of maglev")
    kept, out = tmp_path / "recall.json", tmp_path / "out"
    kept.write_text(json.dumps({"rows": recall_rows("swa-ssss")}))
    assert main(["table", str(kept), "--out", str(out)]) == 0
    assert "recall by distance is drawn" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["recall.svg"]
    assert main(["table", str(kept), "--out", str(out), "--no-figures"]) == 2
    assert "recall is a figure; leave --no-figures away" in one_line(capsys)


def test_what_a_run_began_from_makes_another_line(tmp_path: Path) -> None:
    """Its cost counts as well, where that can still be told."""
    plain = make_run(tmp_path, "maglev-shared-0.1", 0, recurrent=1.28, lifted=1.25)
    begun = shutil.copytree(plain, tmp_path / "begun")
    for folder in ("swa", "gone"):
        config = json.loads((begun / CONFIG).read_text())
        config["train"] |= {"init_from": str(tmp_path / folder), "seed": 1}
        (begun / CONFIG).write_text(json.dumps(config))
        if folder == "swa":
            make_run(tmp_path, "swa-ssss", 0).rename(tmp_path / "swa")
        lines = {line.model for line in make_table(collect([plain, begun])).lines if line.origin == OURS}
        # there is no checkpoint in either
        start = ("swa-ssss" if folder == "swa" else "weights that are gone") + ", costs without those of its start"
        assert lines == {"Maglev (λ=0.1), init_from none", f"Maglev (λ=0.1), init_from {start}"}
