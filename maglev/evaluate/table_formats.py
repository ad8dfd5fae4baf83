"""The table as text, Markdown, CSV and LaTeX: first the numbers, then their differences to SWA, then what ours cost."""

import csv
import io
from collections.abc import Callable, Sequence

from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.table import (
    ACCURACIES,
    AVERAGE,
    COSTS,
    FINEWEB,
    OURS,
    PAPER,
    Cell,
    Column,
    Line,
    PaperTable,
    is_fineweb,
)

HEADINGS = ("model", "numbers", "memory", "seeds")
NOTE = (
    "Ours: mean over seeds ± standard deviation, where there is more than one. Best of ours in bold among recurrent "
    "numbers, what a user gets, after as many tokens as SWA's."
)
PAPERS_NOTE = " The paper's are beside its own SWA, best in its whole table, after 43.52B tokens at depth 20."
# behind a number of fewer seeds than its line has
FEWER = "†"
DIFFERENCES, COST = "Difference to SWA", "What a run of ours took"


def note(table: PaperTable) -> str:
    theirs = PAPERS_NOTE if any(line.origin == PAPER for line in table.lines) else ""
    return NOTE + fewer_seeds(table) + chances(table) + errors(table) + theirs + several_finewebs(table)


def several_finewebs(table: PaperTable) -> str:
    """Why none of ours stands in the paper's column then."""
    names = [column.title for column in table.columns if column != FINEWEB and is_fineweb(column.title)]
    if FINEWEB not in table.columns or not names:
        return ""
    return f" {FINEWEB.title} is the paper's alone, since more than one text of ours has its name: {', '.join(names)}."


def is_of_fewer(cell: Cell, line: Line) -> bool:
    return line.origin == OURS and cell.seeds != line.seeds


def fewer_seeds(table: PaperTable) -> str:
    """What the mark of such cells stands for."""
    found = {cell.seeds for line in table.lines for cell in line.cells.values() if is_of_fewer(cell, line)}
    if not found:
        return ""
    alone = f"seed {next(iter(found))[0]} alone" if len(found) == 1 and len(next(iter(found))) == 1 else "some of them"
    return f" {FEWER} of {alone}."


def chances(table: PaperTable) -> str:
    """What a guess would get, for small models are near it."""
    by_task = {column.key: (column, task.chance) for column, task in zip(ACCURACIES, TASKS, strict=True)}
    known = [by_task[column.key] for column in table.columns if column.key in by_task]
    shown = ", ".join(f"{column.title} {column.scale * chance:.{column.digits}f}" for column, chance in known)
    return f" By chance: {shown}." if known else ""


def errors(table: PaperTable) -> str:
    """How far chance among a task's items may put accuracies, so that nobody takes such differences for real."""
    found = errors_in(table, ACCURACIES)
    if not found:
        return ""
    of_average = errors_in(table, (AVERAGE,))
    beside = f", of their average {of_average}" if of_average else ""
    return (
        f" Standard errors of our accuracies, by their items: {found}{beside}; differences of that size may be chance."
    )


def errors_in(table: PaperTable, columns: Sequence[Column]) -> str:
    """The range that is shown; empty where none was told."""
    known = [
        cell.error
        for line in table.lines
        for column in columns
        if (cell := line.cells.get(column.key)) is not None and cell.error is not None
    ]
    ends = dict.fromkeys(f"{end(known):.{columns[0].digits}f}" for end in (min, max) if known)
    return " to ".join(ends)


def number(cell: Cell | None, column: Column) -> str:
    if cell is None:
        return "–"
    spread = "" if cell.spread is None else f" ± {cell.spread:.{column.digits}f}"
    return f"{cell.value:.{column.digits}f}{spread}"


def signed(cell: Cell | None, column: Column) -> str:
    return "–" if cell is None or cell.difference is None else f"{cell.difference:+.{column.digits}f}"


def lead(line: Line) -> list[str]:
    seeds = str(len(line.seeds)) if line.origin == OURS else "–"
    memory = f"{line.memory}, {line.passes} passes" if line.passes else line.memory
    return [line.model, line.origin, memory, seeds]


def titles(table: PaperTable) -> list[str]:
    arrows = {True: "↑", False: "↓"}
    return [f"{column.title} {column.unit} {arrows[column.higher_is_better]}" for column in table.columns]


Show = Callable[[Cell | None, Column], str]


def rows_of(table: PaperTable, show: Show, embolden: Callable[[str], str]) -> list[list[str]]:
    found = []
    for line in table.lines:
        row = lead(line)
        for column in table.columns:
            cell = line.cells.get(column.key)
            text = show(cell, column)
            if show is number and cell is not None and is_of_fewer(cell, line):
                text += FEWER
            row.append(embolden(text) if show is number and cell is not None and cell.best else text)
        found.append(row)
    return found


def differing(table: PaperTable) -> PaperTable:
    """The lines that have a difference to show."""
    lines = [line for line in table.lines if any(cell.difference is not None for cell in line.cells.values())]
    return PaperTable(table.columns, tuple(lines))


def cost_rows(table: PaperTable) -> list[list[str]]:
    """A head and a row per model of ours; what no run tells is left out."""
    lines = list({line.model: line for line in reversed(table.lines) if line.costs}.values())[::-1]
    known = [key for key in COSTS if any(key in line.costs for line in lines)]
    rows = [[line.model, *(amount(line.costs.get(key)) for key in known)] for line in lines]
    return [["model", *(COSTS[key] for key in known)], *rows] if rows else []


def amount(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value < 1e12 else f"{value:.3g}"


def as_text(table: PaperTable) -> str:
    """Aligned with spaces; the best has a star."""
    parts = []
    for title, own, show in (("", table, number), (DIFFERENCES, differing(table), signed)):
        rows = [[*HEADINGS, *titles(own)], *rows_of(own, show, lambda text: text + "*")]
        if len(rows) > 1:
            parts.append((title + "\n" if title else "") + aligned(rows))
    if costs := cost_rows(table):
        parts.append(f"{COST}\n" + aligned(costs, names=1))
    return "\n\n".join([*parts, note(table).replace("in bold", "with a star")]) + "\n"


def aligned(rows: Sequence[Sequence[str]], names: int = 3) -> str:
    """The first columns are names."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    cells = [
        [text.ljust(size) if index < names else text.rjust(size) for index, (text, size) in enumerate(zip(row, widths))]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def as_markdown(table: PaperTable) -> str:
    parts = []
    for title, own, show in (("", table, number), (DIFFERENCES, differing(table), signed)):
        rows = rows_of(own, show, lambda text: f"**{text}**")
        if rows:
            lines = ruled([*HEADINGS, *titles(own)], rows)
            parts.append((f"{title}:\n\n" if title else "") + lines)
    if costs := cost_rows(table):
        parts.append(f"{COST}:\n\n" + ruled(costs[0], costs[1:], names=1))
    return "\n\n".join([*parts, note(table)]) + "\n"


def ruled(head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 3) -> str:
    rule = ["---"] * names + ["---:"] * (len(head) - names)
    rows_of_text = ([text.replace("|", "\\|") for text in row] for row in (head, *rows))
    first, *others = ("| " + " | ".join(row) + " |" for row in rows_of_text)
    return "\n".join([first, "| " + " | ".join(rule) + " |", *others])


def as_csv(table: PaperTable) -> str:
    """One row per number, for whoever computes on."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HEADINGS, "column", "value", "spread", "standard_error", "difference_to_swa", "best"])
    costed = set()
    for line in table.lines:
        model, origin, memory, _ = lead(line)
        for column in table.columns:
            cell = line.cells.get(column.key)
            if cell is not None:
                name = f"{column.title} {column.unit}"
                numbers = [cell.value, cell.spread, cell.error, cell.difference]
                shown = ["" if value is None else repr(value) for value in numbers]
                seeds = " ".join(map(str, cell.seeds))
                writer.writerow([model, origin, memory, seeds, name, *shown, int(cell.best)])
        for key, value in line.costs.items():
            if (model, key) not in costed:
                seeds = " ".join(map(str, line.seeds))
                writer.writerow([model, origin, "", seeds, COSTS[key], repr(value), "", "", "", 0])
                costed.add((model, key))
    return out.getvalue()


def as_latex(table: PaperTable) -> str:
    """With booktabs; the paper's layout, a block of lines per model."""
    columns = "llll" + "r" * len(table.columns)
    parts = ["% needs \\usepackage{booktabs}"]
    for title, own, show in (("", table, number), (DIFFERENCES, differing(table), signed)):
        rows = rows_of(own, show, lambda text: f"@{text}@")
        if not rows:
            continue
        units = [
            f"{latex(column.title)} {latex(column.unit)} $\\{'uparrow' if column.higher_is_better else 'downarrow'}$"
            for column in own.columns
        ]
        body = ["\\toprule", " & ".join([*HEADINGS, *units]) + " \\\\", "\\midrule"]
        for index, (line, row) in enumerate(zip(own.lines, rows, strict=True)):
            if index and own.lines[index - 1].recipe != line.recipe:
                body.append("\\midrule")
            body.append(" & ".join(latex(cell) for cell in row) + " \\\\")
        comment = [f"% {title}"] if title else []
        parts += [*comment, f"\\begin{{tabular}}{{{columns}}}", *body, "\\bottomrule", "\\end{tabular}"]
    if costs := cost_rows(table):
        body = [" & ".join(latex(cell) for cell in row) + " \\\\" for row in costs]
        columns = "l" + "r" * (len(costs[0]) - 1)
        parts += [f"% {COST}", f"\\begin{{tabular}}{{{columns}}}", "\\toprule", body[0], "\\midrule", *body[1:]]
        parts += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join([*parts, f"% {note(table)}"]) + "\n"


# signs of names and numbers that LaTeX takes for its own, or does not have
WRITTEN = {sign: f"\\{sign}" for sign in "&%_#${}"} | {
    "\\": "\\textbackslash{}",
    "^": "\\textasciicircum{}",
    "~": "\\textasciitilde{}",
    "λ": "$\\lambda$",
    "±": "$\\pm$",
    "†": "$^\\dagger$",
    "–": "--",
}


def latex(text: str) -> str:
    bold = len(text) > 1 and text.startswith("@") and text.endswith("@")
    plain = "".join(WRITTEN.get(sign, sign) for sign in (text[1:-1] if bold else text))
    return f"\\textbf{{{plain}}}" if bold else plain
