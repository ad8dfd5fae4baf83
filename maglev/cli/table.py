"""`maglev table`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from maglev.cli.options import AsJson
from maglev.cli.output import check_folder, check_place, console, emit
from maglev.errors import RequestError


def table(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders with results, files that --save wrote, or recall's --results."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where tables and figures go.")] = Path("table"),
    memory: Annotated[
        str, typer.Option("--memory", help="Memory sources to show, with commas between them.")
    ] = "recurrent,lifted,refined",
    paper: Annotated[bool, typer.Option("--paper/--no-paper", help="The paper's numbers beside ours.")] = True,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Keep all that the table is made of in a JSON file.")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures too.")] = True,
    as_json: AsJson = False,
) -> None:
    """The paper's table, ours beside theirs: text, Markdown, CSV, LaTeX and figures.

    It shows what 'maglev eval bpb', 'maglev eval tasks' and 'maglev eval recall' left in the runs' folders.
    """
    from maglev import files
    from maglev.evaluate import table_formats
    from maglev.evaluate.table import OURS, SOURCES, make_table
    from maglev.evaluate.table_facts import collect, save_facts
    from maglev.evaluate.table_figures import draw_figures

    sources = [word.strip() for word in memory.split(",") if word.strip()]
    for source in sources or [memory]:
        if source not in SOURCES:
            raise RequestError(f"--memory is {memory!r}; its words must be among {', '.join(SOURCES)}")
    facts = collect(runs)
    found = make_table(facts, sources, paper)
    if not any(line.origin == OURS for line in found.lines) and not any(run["recall"] for run in facts):
        raise RequestError(f"no run has {' or '.join(sources)} numbers; choose --memory among {', '.join(SOURCES)}")
    texts = {
        "table.txt": table_formats.as_text(found),
        "table.md": table_formats.as_markdown(found),
        "table.csv": table_formats.as_csv(found),
        "table.tex": table_formats.as_latex(found),
    }
    if not found.lines:
        # recall alone is drawn
        texts = {}
    check_folder("--out", out)
    if save is not None:
        check_place("--save", save)
    for name, content in texts.items():
        files.write_text(out / name, content)
    if save is not None:
        save_facts(save, facts)
    drawn = draw_figures(out, facts, found) if figures else []
    lines = [
        {"model": line.model, "recipe": line.recipe, "numbers": line.origin, "memory": line.memory}
        | {"passes": line.passes, "seeds": list(line.seeds), "costs": line.costs}
        | {"cells": {key: vars(cell) for key, cell in line.cells.items()}}
        for line in found.lines
    ]
    written = [str(out / name) for name in texts] + [str(path) for path in drawn]
    text = texts.get("table.txt", "No run has numbers for a table; recall by distance is drawn.")
    if not written:
        raise RequestError("no run has numbers for a table, and recall is a figure; leave --no-figures away")
    emit({"lines": lines, "files": written, "text": text}, as_json, render)


def render(value: dict[str, Any]) -> None:
    print(value["text"])
    console().print("written: " + ", ".join(value["files"]), markup=False)
