"""The table's figures: what is drawn, and of whom."""

import json
from pathlib import Path

import pytest

from maglev.evaluate.recall_results import draw_recall
from maglev.evaluate.results import save_result
from maglev.evaluate.table import FINEWEB, LABELS, make_table
from maglev.evaluate.table_facts import collect, save_facts
from maglev.evaluate.table_figures import draw_cost, draw_figures, draw_positions, draw_training
from tests.evaluate.table_runs import five_runs, make_run, recall_rows


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return five_runs(tmp_path)


def test_runs_of_recall_alone_are_drawn_and_change_no_line(runs: list[Path], tmp_path: Path) -> None:
    """Be it a folder, which has other settings than those of text, or the file of many."""
    Figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib, the extra 'report' of maglev").Figure
    recalled = make_run(tmp_path / "recall", "maglev-shared-0.1", steps=7)
    save_result(
        recalled, "recall-pairs-4-64", {"recipe": "maglev-shared-0.1", "rows": recall_rows("maglev-shared-0.1")}
    )
    many = tmp_path / "recall.json"
    many.write_text(json.dumps({"rows": recall_rows("swa-ssss") + recall_rows("swa-ssss", 1)}))
    facts = collect([*runs, recalled, many])
    assert make_table(facts) == make_table(collect(runs))
    drawn = draw_figures(tmp_path / "figures", facts, make_table(facts), ".png")
    assert "recall.png" in [path.name for path in drawn]
    # a legend of many curves stands beside them
    for recipes, inside in ((["swa-ssss"], True), ([*LABELS][:9], False)):
        figure = Figure()
        draw_recall(figure, [row for recipe in recipes for row in recall_rows(recipe)])
        assert (figure.axes[0].get_legend() is not None, len(figure.legends)) == (inside, not inside)
    kept = tmp_path / "kept.json"
    save_facts(kept, facts)
    assert collect([kept]) == facts


def test_every_row_has_a_curve_by_position_and_its_difference_to_swa(runs: list[Path]) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib").Figure()
    draw_positions(figure, collect(runs), "fineweb")
    values, differences = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in values.lines}
    assert drawn == {
        "SWA (SSSS), steps 50": [pytest.approx(1.31)],
        "SWA (SSSS), steps 100": [pytest.approx(1.29)],
        "Maglev (λ=0.1)": [pytest.approx(1.27)],
    }
    # lifted too
    found = [line.get_ydata()[0] for line in differences.lines]
    assert found == pytest.approx([0, -0.02, -0.04, 1.245 - 1.31])


def test_losses_of_training_are_drawn_beside_those_of_swa_at_the_same_step(tmp_path: Path) -> None:
    """Of its seed and length, where there is one; else as they are, without the first steps' scale."""
    Figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib").Figure
    own = make_run(tmp_path, "maglev-closed", recurrent=1.25)
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    lowered = [row | {"next_token_loss": row["next_token_loss"] - 0.25} for row in rows]
    (own / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lowered))
    other_seed = make_run(tmp_path, "swa-ssss", 1, recurrent=1.3)
    longer = make_run(tmp_path, "swa-ssss", 0, 100, recurrent=1.3)
    for swa, compares in ((other_seed, False), (longer, False), (make_run(tmp_path, "swa-ssss", recurrent=1.3), True)):
        facts = collect([own, swa])
        figure = Figure()
        draw_training(figure, facts[:1], facts)
        losses = figure.axes[1]
        drawn = next(list(line.get_ydata()) for line in losses.lines if line.get_label() == "Maglev (closed)")
        assert ("less SWA's" in losses.get_ylabel()) is compares
        if compares:
            assert drawn == pytest.approx([-0.25] * len(rows))
        else:
            assert max(drawn) > 4 and losses.get_ylim()[1] < 3


def test_models_of_equal_cost_do_not_hide_each_other(tmp_path: Path) -> None:
    """Their state is the same: each has a place and a sign of its own, in the order of the table."""
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib").Figure()
    recipes = ("transformer-slsl", "swa-ssss", "lrt-ssss", "maglev-shared-0.1")
    table = make_table(collect([make_run(tmp_path, recipe, recurrent=1.3) for recipe in recipes]), paper=False)
    draw_cost(figure, table, FINEWEB)
    state = figure.axes[1]
    signs = [line.get_marker() for line in state.lines]
    places = [float(line.get_xdata()[0]) for line in state.lines]
    assert len(set(signs)) == len(recipes)
    full, bounded = places[0], places[1:]
    costs = [line.costs["state_bytes"] for line in table.lines]
    assert full == pytest.approx(costs[0]) and costs[1] == costs[2] == costs[3]
    assert bounded == sorted(bounded) and bounded[1] == pytest.approx(costs[1])
    assert bounded[1] / bounded[0] == pytest.approx(bounded[2] / bounded[1]) and bounded[1] > 1.009 * bounded[0]


def test_a_diverged_run_has_a_line_where_it_has_numbers(runs: list[Path], tmp_path: Path) -> None:
    """Its recurrent numbers are null, by position and in all, and so are its losses."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra 'report' of maglev")
    run = make_run(tmp_path, "maglev-separate-1", recurrent=9.0, lifted=1.25)
    path = run / "eval" / "bpb-fineweb-recurrent.json"
    path.write_text(path.read_text().replace("9.0", "null"))
    metrics = [
        json.loads(line) | {"consistency_loss": None} for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    facts = collect([*runs, run])
    table = make_table(facts, paper=False)
    assert [line.memory for line in table.lines if line.recipe == "maglev-separate-1"] == ["lifted"]
    assert len(draw_figures(tmp_path / "figures", facts, table, ".png")) == 3
