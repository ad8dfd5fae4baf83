"""The paper's table: ours beside theirs, and both as differences to SWA. Every line names its memory source.

A line of ours is the mean over the runs that differ in their seed alone, with their standard deviation.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maglev.errors import RequestError
from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.table_checks import SOURCES
from maglev.evaluate.table_facts import Facts, all_settings, has_lines, row_of

BASELINE = "swa-ssss"
OURS, PAPER = "ours", "paper"
# the paper does not say whether its numbers come from the decoder's own memories
UNSTATED = "not stated"


@dataclass(frozen=True)
class Column:
    key: str
    # two lines of a heading
    title: str
    unit: str
    digits: int
    higher_is_better: bool
    # what a stored number is multiplied with
    scale: float = 1.0


FINEWEB = Column("fw", "FW", "BPB", 4, False)
PERPLEXITY = Column("lambada_ppl", "LMD", "PPL", 2, False)
TITLES = ("LMD", "PIQA", "Hella", "Wino", "ARC-E", "ARC-C", "SIQA", "BoolQ")
ACCURACIES = tuple(
    Column(task.name, title, "Acc_n" if task.metric == "acc_norm" else "Acc", 1, True, 100)
    for task, title in zip(TASKS, TITLES, strict=True)
)
AVERAGE = Column("average", "Avg", "Acc", 1, True, 100)
# facts of a run beside its numbers
COSTS = {
    "parameters": "parameters",
    "tokens": "tokens",
    "training_flops": "training FLOPs",
    "state_bytes": "state bytes",
    "tokens_per_second": "tokens/s",
    "row_seconds": "seconds in all",
    # rows that run side by side on one device slow each other down
    "rows_at_a_time": "rows at a time, at most",
}
SPEEDS = ("tokens_per_second",)

LABELS = {
    "transformer-slsl": "Transformer (SLSL)",
    "lrt-slsl": "LRT (SLSL)",
    "swa-ssss": "SWA (SSSS)",
    "lrt-ssss": "LRT (SSSS)",
    "maglev-shared-0.1": "Maglev (λ=0.1)",
    "maglev-shared-1": "Maglev (λ=1)",
    "maglev-separate-0.1": "Maglev (sep. λ=0.1)",
    "maglev-separate-1": "Maglev (sep. λ=1)",
    "maglev-closed": "Maglev (closed)",
    "gated-deltanet": "Gated DeltaNet",
    "mamba-2": "Mamba-2",
}
# Table 1 of the paper, after 43.52B tokens: bits per byte, LAMBADA's perplexity, the eight accuracies, their average
PUBLISHED = {
    "transformer-slsl": (0.7373, 8.44, 45.9, 73.7, 53.0, 57.7, 68.6, 38.8, 41.7, 56.9, 54.5),
    "lrt-slsl": (0.7292, 7.94, 47.7, 72.4, 54.9, 58.1, 70.1, 39.4, 40.7, 63.6, 55.9),
    "swa-ssss": (0.7413, 8.54, 46.2, 70.5, 53.3, 57.1, 68.4, 40.1, 41.3, 56.2, 54.1),
    "lrt-ssss": (0.7331, 7.92, 47.3, 72.3, 54.9, 58.8, 70.4, 39.8, 40.7, 56.2, 55.0),
    "maglev-shared-0.1": (0.7295, 8.06, 47.3, 72.0, 55.2, 58.7, 70.0, 41.3, 41.6, 63.6, 56.2),
    "maglev-shared-1": (0.7320, 8.27, 46.3, 72.4, 53.8, 56.4, 69.7, 39.8, 41.2, 51.1, 53.9),
    "maglev-separate-0.1": (0.7276, 7.73, 48.7, 72.2, 54.7, 57.9, 69.2, 40.5, 42.7, 62.0, 56.0),
    "maglev-separate-1": (0.7251, 8.06, 47.4, 72.6, 55.2, 57.4, 69.7, 42.7, 42.1, 64.0, 56.4),
}


@dataclass(frozen=True)
class Cell:
    """In the column's unit. Without a second seed there is no spread."""

    value: float
    spread: float | None = None
    # of the mean over a task's items, which are the same for all seeds: more seeds do not make it smaller
    error: float | None = None
    # to SWA's of the same origin
    difference: float | None = None
    best: bool = False
    # a line may have measured some numbers of fewer runs
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    model: str
    recipe: str
    origin: str
    memory: str
    seeds: tuple[int, ...]
    cells: dict[str, Cell] = field(default_factory=dict)
    # of refined memories
    passes: int | None = None
    # of one run of ours, by COSTS
    costs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]


def make_table(facts: Sequence[Facts], sources: Sequence[str] = SOURCES, paper: bool = True) -> PaperTable:
    """Recipes in the paper's order, then others; of each our lines by memory source, then the paper's if wished."""
    texts = bpb_columns(facts)
    others = (column for column in texts.values() if column != FINEWEB)
    columns = (FINEWEB, *others, PERPLEXITY, *ACCURACIES, AVERAGE)
    found: list[Line] = []
    groups = labelled_groups(facts)
    for index, (label, group) in enumerate(groups):
        recipe = group[0]["recipe"]
        for source in sources:
            lines = [our_line(group, label, source, passes, texts) for passes in passes_of(group, source)]
            found += [line for line in lines if line.cells]
        is_last = index + 1 == len(groups) or groups[index + 1][1][0]["recipe"] != recipe
        if paper and is_last and recipe in PUBLISHED:
            found.append(published_line(recipe))
    used = {key for line in found for key in line.cells}
    return PaperTable(tuple(c for c in columns if c.key in used), compared(found, columns))


def bpb_columns(facts: Sequence[Facts]) -> dict[str, Column]:
    """By text. The paper's is FineWeb-Edu's, where one text alone bears that name; any other has one of its own."""
    names = dict.fromkeys(result["data"] for run in facts for result in run["bpb"])
    check_texts(facts)
    named = [name for name in names if is_fineweb(name)]
    return {name: FINEWEB if named == [name] else Column(f"bpb {name}", name, "BPB", 4, False) for name in names}


def check_texts(facts: Sequence[Facts]) -> None:
    """A text is known by its folder's name; where its bytes differ, numbers of two texts would stand in one column."""
    seen: dict[str, tuple[str, int]] = {}
    for run in facts:
        for result in run["bpb"]:
            first, size = seen.setdefault(result["data"], (run["run"], result["bytes"]))
            if result["bytes"] != size:
                raise RequestError(
                    f"{first} and {run['run']} were measured on {size:,} and {result['bytes']:,} bytes of a text "
                    f"that both call {result['data']!r}; measure them on the same one, or name the folders apart"
                )


def is_fineweb(name: str) -> bool:
    return "fineweb" in name.lower()


def labelled_groups(facts: Sequence[Facts]) -> list[tuple[str, list[Facts]]]:
    """(name, runs) of every row of the table: recipes in the paper's order, then others. Runs that have neither bits
    per byte nor tasks, such as those of recall alone, are none."""
    groups = group_runs([run for run in facts if has_lines(run)])
    order = {recipe: index for index, recipe in enumerate(LABELS)}
    for group in groups:
        order.setdefault(group[0]["recipe"], len(order))
    groups.sort(key=lambda group: order[group[0]["recipe"]])
    found = []
    for group in groups:
        recipe: str = group[0]["recipe"]
        own = [other for other in groups if other[0]["recipe"] == recipe]
        found.append((LABELS.get(recipe, recipe) + distinction(group, own) + unfinished(group[0]), group))
    return found


def unfinished(run: Facts) -> str:
    """Runs of a line have stopped at the same step, and begun alike."""
    stopped = (
        f", after {run['stopped_at']:,} of {run['settings']['train.steps']:,} steps" if "stopped_at" in run else ""
    )
    return stopped + (", costs without those of its start" if run.get("without_start") else "")


def passes_of(group: Sequence[Facts], source: str) -> list[int | None]:
    """How many passes results of this source took, each number once; none are counted but for refined ones."""
    results = [result for run in group for result in (*run["bpb"], *run["tasks"]) if result["memory"] == source]
    return sorted({result["passes"] for result in results}, key=lambda passes: passes or 0)


def group_runs(facts: Sequence[Facts]) -> list[list[Facts]]:
    """Runs that differ in nothing but their seed, in order of appearance."""
    groups: dict[str, dict[int, Facts]] = {}
    for run in facts:
        group = groups.setdefault(row_of(run), {})
        # `collect` refuses two runs of a seed: one would stand for both
        assert run["seed"] not in group, run["run"]
        group[run["seed"]] = run
    return [list(group.values()) for group in groups.values()]


def distinction(group: Sequence[Facts], others: Sequence[Sequence[Facts]]) -> str:
    """In what a row differs from the others of its recipe."""
    every = [all_settings(other[0]) for other in others]
    own = all_settings(group[0])
    telling = [key for key in own if len({json.dumps(settings.get(key)) for settings in every}) > 1]
    return "".join(f", {key.split('.', 1)[1]} {'none' if own[key] == '' else own[key]}" for key in telling)


def our_line(group: Sequence[Facts], label: str, source: str, passes: int | None, texts: Mapping[str, Column]) -> Line:
    values: dict[str, dict[int, float]] = {}
    errors: dict[str, list[float]] = {}
    for run in sorted(group, key=lambda run: run["seed"]):
        for key, value in numbers_of(run, source, passes, texts).items():
            values.setdefault(key, {})[run["seed"]] = value
        for key, value in errors_of(run, source, passes).items():
            errors.setdefault(key, []).append(value)
    cells = {}
    for key, by_seed in values.items():
        own = list(by_seed.values())
        spread = statistics.stdev(own) if len(own) > 1 else None
        error = statistics.fmean(errors[key]) if key in errors else None
        cells[key] = Cell(statistics.fmean(own), spread, error, seeds=tuple(by_seed))
    seeds = tuple(sorted({seed for by_seed in values.values() for seed in by_seed}))
    costs = {
        key: statistics.fmean(known)
        for key in COSTS
        if (known := [run[key] for run in group if run.get(key) is not None and (key not in SPEEDS or was_alone(run))])
    }
    if "rows_at_a_time" in costs:
        costs["rows_at_a_time"] = max(run.get("rows_at_a_time", 1) for run in group)
    return Line(label, group[0]["recipe"], OURS, source, seeds, cells, passes, costs)


def was_alone(run: Facts) -> bool:
    """Of several at a time on one device each is slower, and by how much depends on the others."""
    return run.get("rows_at_a_time", 1) == 1


def numbers_of(run: Facts, source: str, passes: int | None, texts: Mapping[str, Column]) -> dict[str, float]:
    """By column, in its unit; plain weights alone, and the whole validation split."""
    found: dict[str, float | None] = {}
    for result in run["bpb"]:
        if (result["memory"], result["passes"], result["weights"]) == (source, passes, "plain"):
            found[texts[result["data"]].key] = result[f"bpb_{source}"]
    for result in task_results(run, source, passes):
        for task, column in zip(TASKS, ACCURACIES, strict=True):
            own: dict[str, Any] = result["tasks"].get(task.name, {})
            if f"perplexity_{source}" in own:
                found[PERPLEXITY.key] = own[f"perplexity_{source}"]
            if (value := own.get(f"{task.metric}_{source}")) is not None:
                found[column.key] = column.scale * value
    known = [value for column in ACCURACIES if (value := found.get(column.key)) is not None]
    if len(known) == len(ACCURACIES):
        found[AVERAGE.key] = statistics.fmean(known)
    return {key: value for key, value in found.items() if value is not None and math.isfinite(value)}


def errors_of(run: Facts, source: str, passes: int | None) -> dict[str, float]:
    """Standard errors, as far as the results have them; of the average where all eight do, whose items differ."""
    found: dict[str, float | None] = {}
    for result in task_results(run, source, passes):
        for task, column in zip(TASKS, ACCURACIES, strict=True):
            own: dict[str, Any] = result["tasks"].get(task.name, {})
            if f"perplexity_{source}" in own:
                found[PERPLEXITY.key] = own.get(f"perplexity_{source}_stderr")
            if own:
                error = own.get(f"{task.metric}_{source}_stderr")
                found[column.key] = None if error is None else column.scale * error
    known = [error for column in ACCURACIES if (error := found.get(column.key)) is not None]
    if len(known) == len(ACCURACIES):
        found[AVERAGE.key] = math.hypot(*known) / len(ACCURACIES)
    return {key: value for key, value in found.items() if value is not None and math.isfinite(value)}


def task_results(run: Facts, source: str, passes: int | None) -> list[dict[str, Any]]:
    """Those of fewer tasks first, so that one of all of them has the last word."""
    kind = (source, passes, "plain")
    found = [result for result in run["tasks"] if (result["memory"], result["passes"], result["weights"]) == kind]
    return sorted(found, key=lambda result: len(result["tasks"]))


def compared(lines: Sequence[Line], columns: Sequence[Column]) -> tuple[Line, ...]:
    """With differences to SWA and the best marked: ours among what a user gets after as many tokens, the paper's in its
    whole table."""
    base = {
        origin: next((line for line in lines if (line.recipe, line.origin) == (BASELINE, origin)), None)
        for origin in (OURS, PAPER)
    }
    published = [published_line(recipe) for recipe in PUBLISHED]
    ours = [line for line in lines if line.origin == OURS and line.memory == "recurrent"]
    usual = (base[OURS] or ours[0]).costs.get("tokens") if ours else None
    rivals = {OURS: [line for line in ours if line.costs.get("tokens") in (usual, None)], PAPER: published}
    found = []
    for line in lines:
        cells = {}
        for column in columns:
            if column.key not in line.cells:
                continue
            cell, reference = line.cells[column.key], base[line.origin]
            compares = reference is not None and reference is not line and column.key in reference.cells
            difference = cell.value - reference.cells[column.key].value if reference and compares else None
            competes = line.origin == PAPER or line in rivals[OURS]
            best = competes and is_best(cell, rivals[line.origin], column)
            cells[column.key] = replace(cell, difference=difference, best=best)
        found.append(replace(line, cells=cells))
    return tuple(found)


def is_best(cell: Cell, rivals: Sequence[Line], column: Column) -> bool:
    """As far as digits are shown; one alone has no rival."""
    values = [line.cells[column.key].value for line in rivals if column.key in line.cells]
    pick = max if column.higher_is_better else min
    return len(values) > 1 and round(cell.value, column.digits) == round(pick(values), column.digits)


def published_line(recipe: str) -> Line:
    keys = [column.key for column in (FINEWEB, PERPLEXITY, *ACCURACIES, AVERAGE)]
    cells = {key: Cell(value) for key, value in zip(keys, PUBLISHED[recipe], strict=True)}
    return Line(LABELS[recipe], recipe, PAPER, UNSTATED, (), cells)
