"""`maglev eval names`"""

from typing import Annotated, Any

import typer

from maglev.cli.options import AsJson, DataFolder, Device, Memory, RunArgument, Split, memory_source
from maglev.cli.output import console, emit, keep, progress, say
from maglev.errors import RequestError

# readings at a time, of 8,192 tokens each
STEPPED_ROWS = 1024
DOCUMENTS, TOKENS, MOST = 16, 8192, 63


def names(
    run: RunArgument,
    data: DataFolder,
    memory: Memory = "recurrent",
    split: Split = "validation",
    documents: Annotated[int, typer.Option("--documents", help="So many of its longest documents.")] = DOCUMENTS,
    tokens: Annotated[int, typer.Option("--tokens", help="Of each document, from its beginning.")] = TOKENS,
    most: Annotated[int, typer.Option("--names", help="Of each document, the farthest apart.")] = MOST,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Whether a name that was read once, long ago, raises its own probability."""
    source = memory_source(memory)
    for name, value in (("--documents", documents), ("--tokens", tokens), ("--names", most)):
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    from maglev.evaluate import names as probe
    from maglev.evaluate.memories import DEFAULT_PASSES
    from maglev.evaluate.recall import plain_reach
    from maglev.evaluate.runs import load_objective, open_matching_data
    from maglev.train.distributed import resolve_device

    place = resolve_device(device, setting="--device")
    config, objective, step = load_objective(run, place, say, with_prefiller=memory == "lifted")
    found = open_matching_data(run, data)
    if split not in found.splits:
        raise RequestError(f"{data} has no split {split!r}; it has {', '.join(found.splits)}")
    texts = probe.read_documents(found.splits[split], documents, tokens)
    asked = probe.find_documents(texts, found.tokenizer.token_bytes, most)
    if not asked:
        raise RequestError(f"no name comes twice in the {len(texts)} longest documents of {data}; give longer ones")
    with progress("documents") as meter:
        # a step costs a GPU its launches, however many rows it has
        stepped = place.type == "cuda" and memory == "recurrent" and objective.decoder.injection is not None
        answers = probe.ask(
            objective, asked, source, DEFAULT_PASSES,
            lambda done, total: meter.update(f"names, {memory}", done, total),
            STEPPED_ROWS if stepped else 0,
        )  # fmt: skip
    reach = plain_reach(config.model)
    result: dict[str, Any] = {"run": str(run), "recipe": config.recipe, "step": step, "data": data.resolve().name}
    result |= {"split": split, "memory": memory, "passes": DEFAULT_PASSES if memory == "refined" else None}
    result |= {"plain_reach": reach, "documents": len(asked), "longest": tokens}
    result["rows"] = probe.by_distance(answers, reach)
    asked_for = {"split": split, "documents": documents, "tokens": tokens, "names": most}
    usual = {"split": "validation", "documents": DOCUMENTS, "tokens": TOKENS, "names": MOST}
    words = [f"{name}-{value}" for name, value in asked_for.items() if value != usual[name]]
    keep(run, "-".join(["names", result["data"], memory, *words]), result)
    emit(result, as_json, render)


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(f"distance / {value['plain_reach']}", title=f"{value['recipe']}, {value['memory']} memories")
    for title in ("names", "nats of a name", "gain", "helped"):
        table.add_column(title, justify="right")
    for row in value["rows"]:
        gain = f"{row['gain']:+.4f}" + ("" if row["error"] is None else f" ± {row['error']:.4f}")
        table.add_row(row["distance"], str(row["names"]), f"{row['nats']:.3f}", gain, f"{row['helped']:.0%}")
    console().print(table)
    console().print(
        "'gain': nats that a name costs more where it comes again if another one stood in its first place; 0: nothing "
        "was remembered; ± is the standard error over names, as if they were independent. Distances in plain reaches, "
        "layers x (W - 1).",
        soft_wrap=True,
    )
