"""What documents say of the small table is what `maglev table` makes of results/small-table.json."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from maglev.__main__ import main
from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.table import ACCURACIES, AVERAGE, FINEWEB, PUBLISHED, Cell, Line, make_table
from maglev.evaluate.table_facts import collect
from tests.documents import REPOSITORY

RESULTS = REPOSITORY / "results" / "small-table.json"
HEAD = ["model", "bounded state", "memories", "held-out text", "FineWeb-Edu", "tasks", "training FLOPs"]
# of the README's rows
MODELS = {
    "SWA (SSSS)": "SWA (SSSS), steps 761",
    "Transformer (SLSL)": "Transformer (SLSL)",
    "LRT (SSSS)": "LRT (SSSS)",
    "LRT (SLSL)": "LRT (SLSL)",
    "Maglev, shared, 0.1: the paper's objective": "Maglev (λ=0.1)",
    "Maglev, shared, 1": "Maglev (λ=1)",
    "Maglev, separate, 0.1": "Maglev (sep. λ=0.1)",
    "Maglev, separate, 1": "Maglev (sep. λ=1)",
    "`maglev-closed`": "Maglev (closed)",
    "SWA (SSSS), two passes over the text": "SWA (SSSS), steps 1522",
    "Gated DeltaNet, our learning rates": "Gated DeltaNet",
    "Mamba-2, our learning rates": "Mamba-2",
}


@pytest.fixture(scope="module")
def lines() -> dict[tuple[str, str], Line]:
    """Ours by model and memory, but for refined memories, which the README leaves out."""
    found = make_table(collect([RESULTS]), ("recurrent", "lifted"), paper=False).lines
    return {(line.model, line.memory): line for line in found}


def readme_rows() -> list[list[str]]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    table = text[text.index(f"| {' | '.join(HEAD)} |") :].split("\n\n")[0]
    _, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    return rows


def bare(value: float, digits: int) -> str:
    """As the README writes numbers below one."""
    return f"{value:.{digits}f}".removeprefix("0")


def bits(cell: Cell) -> str:
    text = f"{cell.value:.4f}" + ("" if cell.spread is None else f" ± {bare(cell.spread, 4)}")
    return f"**{text}**" if cell.best else text


def seeds_of(recipe: str) -> list[float]:
    """Recurrent bits per byte of held-out text, of every seed."""
    results = [result for run in collect([RESULTS]) if run["recipe"] == recipe for result in run["bpb"]]
    return [each["bpb_recurrent"] for each in results if (each["data"], each["memory"]) == ("text", "recurrent")]


def test_the_page_is_what_the_verb_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(RESULTS), "--no-figures", "--out", str(tmp_path)]) == 0
    page = (REPOSITORY / "docs" / "small-table.md").read_text(encoding="utf-8")
    shown = page[page.index("| model |") :]
    assert shown == (tmp_path / "table.md").read_text(encoding="utf-8"), (
        "put the verb's table.md below the page's words"
    )


def test_every_number_of_the_readmes_table_on_text_is_measured(lines: dict[tuple[str, str], Line]) -> None:
    unit = lines["Maglev (λ=0.1)", "recurrent"].costs["training_flops"]
    shown, model = [], ""
    for row in readme_rows():
        model = MODELS[row[0]] if row[0] else model
        memory = "recurrent" if row[2] == "-" else row[2].strip("*")
        shown.append((model, memory))
        line = lines[model, memory]
        average = line.cells.get(AVERAGE.key)
        cost = line.costs["training_flops"] / unit
        assert row[3:] == [
            bits(line.cells["bpb text"]),
            bits(line.cells[FINEWEB.key]),
            "" if average is None else f"{average.value:.1f}",
            "1" if round(cost, 2) == 1 else bare(cost, 2),
        ], (model, memory)
        # the paragraph above says of which seeds they are
        assert line.cells["bpb text"].seeds in ((0, 1, 2), (0,)) and (average is None or average.seeds == (0,))
    assert sorted(shown) == sorted(lines)


def test_what_the_readme_says_of_the_table_is_measured(lines: dict[tuple[str, str], Line]) -> None:
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    own = {model: line.cells["bpb text"] for (model, memory), line in lines.items() if memory == "recurrent"}
    closed = own["Maglev (closed)"].value
    bounded = min(own[name].value for name in own if name.startswith(("Maglev (λ", "Maglev (s", "LRT (SSSS", "Gated")))
    lrt, full = own["LRT (SLSL)"], own["Transformer (SLSL)"]
    assert f"is {bare(bounded - closed, 3)} below the next bounded model with as much text" in text
    assert f"and {bare(lrt.value - closed, 4)} and {bare(full.value - closed, 4)} below LRT and the Transformer" in text
    assert lrt.spread is not None and f"LRT's seeds are {bare(lrt.spread, 4)} apart by standard deviation" in text
    worst, best = max(seeds_of("maglev-closed")), min(seeds_of("lrt-slsl"))
    assert f"{best:.4f}" == f"{worst:.4f}" and f"its best one ({best:.4f}) is as good as the worst of" in text
    chance = 100 * sum(task.chance for task in TASKS) / len(TASKS)
    (error,) = {
        bare(cell.error, 1)
        for line in lines.values()
        if (cell := line.cells.get(AVERAGE.key)) is not None and cell.error is not None
    }
    assert f"near chance at this size, which would be {chance:.1f}, with a standard error of {error}, and " in text


# as docs/results.md calls them
NAMES = {
    "separate 1": "maglev-separate-1",
    "shared 0.1": "maglev-shared-0.1",
    "separate 0.1": "maglev-separate-0.1",
    "LRT SLSL": "lrt-slsl",
    "LRT SSSS": "lrt-ssss",
    "Transformer SLSL": "transformer-slsl",
    "SWA": "swa-ssss",
    "shared 1": "maglev-shared-1",
    "`maglev-closed`": "maglev-closed",
}


def in_order(averages: dict[str, float]) -> str:
    names = sorted(NAMES, key=lambda name: -averages.get(NAMES[name], 0))
    return ", ".join(name for name in names if NAMES[name] in averages)


def test_what_the_results_say_of_the_tasks_is_measured(lines: dict[tuple[str, str], Line]) -> None:
    text = " ".join((REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8").split())
    ours = {
        line.recipe: [line.cells[column.key].value for column in ACCURACIES]
        for (model, memory), line in lines.items()
        if memory == "recurrent" and AVERAGE.key in line.cells and "1522" not in model
    }
    theirs = {recipe: list(numbers[2:10]) for recipe, numbers in PUBLISHED.items()}
    assert f"the paper's order is another: {in_order({name: sum(own) for name, own in theirs.items()})}." in text
    assert f"Ours, seed 0: {in_order({name: sum(own) for name, own in ours.items()})}." in text

    def ends(values: Iterable[float]) -> tuple[str, str]:
        known = [*values]
        return f"{min(known):.1f}", f"{max(known):.1f}"

    by_task = dict(zip((task.name for task in TASKS), zip(*ours.values(), strict=True), strict=True))
    twice = lines["SWA (SSSS), steps 1522", "recurrent"].cells["lambada_openai"].value
    first, last = ends(by_task["lambada_openai"])
    assert f"LAMBADA ({first} to {last}, where a guess gets 0; {twice:.1f} after two passes" in text
    first, last = ends(by_task["arc_easy"])
    assert f"ARC-Easy ({first} to {last}, guess 25)" in text
    near = ("piqa", "hellaswag", "winogrande", "arc_challenge", "social_iqa")
    assert all(abs(v - 100 * task.chance) < 5 for task in TASKS if task.name in near for v in by_task[task.name])
    first, last = ends(by_task["boolq"])
    assert f"it runs from {first} to {last}, and 62.2% of its answers are yes" in text
    rest = {name: sum(own[:-1]) / 7 for name, own in ours.items()}
    first, last = ends(rest.values())
    guess = 100 * sum(task.chance for task in TASKS if task.name != "boolq") / 7
    assert f"lie between {first} and {last}, by a guess {guess:.1f}, `maglev-closed` first" in text
    assert max(rest, key=rest.__getitem__) == "maglev-closed" and sorted(rest.values()).index(rest["swa-ssss"]) in (
        4,
        5,
    )
    first, last = ends(own[-1] for own in theirs.values())
    assert f"BoolQ moves most, from {first} to {last};" in text
    spans = [max(each) - min(each) for each in zip(*theirs.values(), strict=True)]
    assert max(spans) == spans[-1]
    ahead = [sum(theirs[NAMES[name]][:-1]) for name in ("shared 0.1", "separate 0.1", "separate 1")]
    assert min(ahead) > max(sum(theirs[name][:-1]) for name in ("lrt-slsl", "lrt-ssss", "transformer-slsl"))


def test_answers_of_boolq_are_mostly_yes(shared_folder: Path) -> None:
    file = shared_folder / "data" / "eval" / "boolq.jsonl"
    if not file.is_file():
        pytest.skip("needs the file of BoolQ")
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    share = 100 * sum(answers) / len(answers)
    text = " ".join((REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8").split())
    assert f"{share:.1f}% of its answers are yes, so that who always says no gets {100 - share:.1f}." in text
