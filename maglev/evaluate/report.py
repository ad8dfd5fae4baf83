"""One self-contained HTML page about a set of runs: numbers by memory source, plots, samples, setting."""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from maglev.evaluate.figures import (
    colours,
    consistency_figure,
    contraction_figure,
    gap_figure,
    growth_figure,
    position_figure,
    share_figure,
    training_figure,
)
from maglev.evaluate.report_content import SOURCES, Curve, Report, RunReport, Sample, StateGrowth
from maglev.evaluate.report_style import STYLE
from maglev.files import write_text

__all__ = ["Curve", "Report", "RunReport", "Sample", "StateGrowth", "write_report"]


def write_report(path: Path, content: Report) -> None:
    """Write `content` as one HTML file that needs nothing beside itself."""
    for run in content.runs:
        unknown = (set(run.bits_per_byte) | set(run.by_position)) - set(SOURCES)
        assert not unknown, f"{run.name}: unknown memory source {unknown}"
    write_text(Path(path), "\n".join(page(content)) + "\n")


def page(content: Report) -> Iterator[str]:
    title = html.escape(content.title)
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<meta name="color-scheme" content="light dark">\n<style>{STYLE}</style>\n</head>\n<body>\n<main>'
    yield f"<header>\n<h1>{title}</h1>"
    if content.introduction:
        yield f"<p>{html.escape(content.introduction)}</p>"
    yield from key_numbers(content)
    yield "</header>"
    yield from comparison_table(content)
    yield from plots(content)
    yield from written_samples(content.samples)
    yield from how_it_was_made(content)
    yield "</main>\n</body>\n</html>"


def measured(run: RunReport) -> list[tuple[str, float]]:
    """(memory source, bits per byte) in the fixed order of sources, without what was not measured."""
    return [(s, run.bits_per_byte[s]) for s in SOURCES if math.isfinite(run.bits_per_byte.get(s, math.nan))]


def key_numbers(content: Report) -> Iterator[str]:
    palette = colours([run.name for run in content.runs])
    yield '<div class="cards">'
    for run in content.runs:
        for source, value in measured(run):
            yield (
                f'<div class="card {source}" style="--colour: {palette[run.name]}">'
                f'<span class="who">{html.escape(run.label)} <b>{source}</b></span>'
                f'<span class="value">{value:.4f}</span>'
                f'<span class="unit">bits per byte, {source}</span></div>'
            )
    yield "</div>"
    for sentence in verdicts(content):
        yield f'<p class="verdict">{html.escape(sentence)}</p>'


def verdicts(content: Report) -> Iterator[str]:
    """How each run does against the baseline where it counts: on its own memory."""
    base = next((run for run in content.runs if run.name == content.baseline), None)
    if base is None or "recurrent" not in dict(measured(base)):
        return
    reference = base.bits_per_byte["recurrent"]
    for run in content.runs:
        value = dict(measured(run)).get("recurrent")
        if run is base or value is None:
            continue
        word = "fewer" if value < reference else "more"
        yield (
            f"On its own memory (recurrent), {run.label} needs {abs(value - reference):.4f} bits per byte "
            f"{word} than {base.label} ({value:.4f} against {reference:.4f}; lower is better)."
        )


def comparison_table(content: Report) -> Iterator[str]:
    sources = [source for source in SOURCES if any(source in dict(measured(run)) for run in content.runs)]
    yield "<section>\n<h2>Bits per byte by memory source</h2>"
    yield (
        "<p>Bits per byte say how well a model predicts text it has not seen: the bits it would need, on "
        "average, to store one byte. Lower is better. A model with a memory gives a different number "
        "depending on <em>where that memory comes from</em>, so every number here names its source.</p>\n<dl>"
    )
    for source in sources:
        yield f"<dt>{source}</dt><dd>{SOURCES[source]}</dd>"
    yield '</dl>\n<div class="scroll"><table>\n<thead><tr><th>run</th>'
    yield ("".join(f"<th>{source}</th>" for source in sources) + "<th>state while writing</th></tr></thead>\n<tbody>")
    for run in content.runs:
        values = dict(measured(run))
        cells = "".join(f"<td>{values[s]:.4f}</td>" if s in values else "<td>–</td>" for s in sources)
        state = "–" if run.state_bytes is None else f"{run.state_bytes:,} bytes"
        yield f"<tr><th>{html.escape(run.label)}</th>{cells}<td>{state}</td></tr>"
    yield "</tbody></table></div>\n</section>"


def plots(content: Report) -> Iterator[str]:
    runs = content.runs
    yield '<section class="plots">\n<h2>What happened</h2>'
    if any(len(run.training.x) for run in runs):
        yield figure(
            training_figure(runs),
            "Training loss",
            "How wrong the guess of the next token is while training, in nats (lower is better): the thin "
            "line is each step, the thick one their running average; the first steps lie above the picture. "
            "A Maglev is trained on memory from its prefiller (lifted).",
        )
    if any(run.consistency is not None for run in runs):
        yield figure(
            consistency_figure(runs),
            "Consistency during training",
            "How far the memory that the decoder makes itself is from the one it was given. Where this is "
            "small, the decoder can go on from its own: the step from lifted to recurrent costs little.",
        )
    if any(run.contraction for run in runs):
        yield figure(
            contraction_figure(runs),
            "Whether the loop holds",
            "What is left of a small disturbance of the memory after one step of the recurrence, after some more, and "
            "after one parallel pass. Below 1 what an error leaves dies out, above 1 it grows. Whether the memory is "
            "the right one is told by the next figure, not by this.",
        )
    if any(run.gap is not None for run in runs):
        yield figure(
            gap_figure(runs, lambda run: run.gap, "bits per byte"),
            "What closing the loop costs",
            "How much worse the decoder predicts on memory of its own (recurrent) than on its prefiller's (lifted), on "
            "validation text. Below zero it is better by itself.",
        )
    if any(run.recall_gap is not None for run in runs):
        yield figure(
            gap_figure(runs, lambda run: run.recall_gap, "recall"),
            "What closing the loop costs in recall",
            "How much less the decoder recalls from beyond its windows on memory of its own (recurrent) than on its "
            "prefiller's (lifted): at zero it has lost nothing, at minus one all.",
        )
    if any(run.memory_share for run in runs):
        yield figure(
            share_figure(runs),
            "How much of attention is memory",
            "The part of the mixed keys and values that comes from the memory, by their lengths: a line per layer, "
            "the first one faintest.",
        )
    if any(run.by_position for run in runs):
        yield figure(
            position_figure(runs, content.baseline),
            "Bits per byte by position",
            "Later positions have more text before them and are easier. A window alone stops helping once it "
            "is full, a memory can carry what left it. Solid: recurrent, dashed: lifted, dotted: refined. "
            "A lower panel shows the difference to the baseline: below zero is better than it.",
        )
    if content.growth is not None:
        yield figure(
            growth_figure(content.growth),
            "Size of the state against length",
            "What must be kept to write the next token. Full attention keeps keys and values of everything "
            f"read, so it grows with the text; {content.growth.bounded_label} keeps one window and one "
            "memory, whatever the length.",
        )
    yield "</section>"


def figure(svg: str, title: str, caption: str) -> str:
    return f"<figure>\n<h3>{title}</h3>\n{svg}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


def written_samples(samples: Sequence[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield "<section>\n<h2>Written by the bounded decoder</h2>"
    yield "<p>The prompt is in bold, the rest is the model's. After minutes of training, it babbles.</p>"
    for sample in samples:
        assert sample.source in SOURCES, f"unknown memory source {sample.source}"
        yield (
            f'<blockquote><p class="who">{html.escape(sample.label)}, memory: {sample.source}</p>'
            f"<pre><b>{html.escape(sample.prompt)}</b>{html.escape(sample.text)}</pre></blockquote>"
        )
    yield "</section>"


def how_it_was_made(content: Report) -> Iterator[str]:
    if content.facts:
        yield '<section>\n<h2>Setting</h2>\n<div class="scroll"><table class="facts"><tbody>'
        for name, value in content.facts.items():
            yield f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        yield "</tbody></table></div>\n</section>"
    if content.commands:
        yield "<section>\n<h2>Commands that made it</h2>"
        yield f"<pre>{html.escape(chr(10).join(content.commands))}</pre>\n</section>"
