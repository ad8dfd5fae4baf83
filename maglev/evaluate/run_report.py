"""What a report shows of a run: its curves from metrics.jsonl, its bits per byte from RUN/eval or its validations."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from maglev.errors import RequestError
from maglev.evaluate.report_content import SOURCES, Curve, Report, RunReport, StateGrowth
from maglev.evaluate.results import load_results
from maglev.evaluate.table import LABELS
from maglev.model.accounting import BYTES, describe, full_attention_nbytes, state_nbytes, training_steps
from maglev.model_config import ModelConfig
from maglev.runs import read_config, read_metrics

# bits per byte, and by position, of each memory source
Bits = Mapping[str, tuple[float, Curve | None]]
BASELINE = "swa-ssss"
LENGTHS = [2**power for power in range(4, 18)]


def describe_run(run: Path, bits: Bits, state_bytes: int, name: str, label: str) -> RunReport:
    """`name` picks its colour."""
    metrics = read_metrics(run)
    rows = [row for row in metrics if row["kind"] == "train" and row["next_token_loss"] is not None]
    at = [row["step"] for row in rows]
    # where there is no consistency it stands as 0 or not at all
    apart = [row.get("consistency_loss") for row in rows]
    checks = [row for row in metrics if row["kind"] == "validation" and row.get("disturbance_left")]
    checked = [row["step"] for row in checks]
    contraction = {}
    if checks:
        last = f"{checks[-1]['disturbance_steps']} steps"
        contraction = {
            after: Curve(checked, [number(row["disturbance_left"][place]) for row in checks])
            for after, place in (("one step", 0), (last, -1))
        }
        contraction["one pass"] = Curve(checked, [number(row["contraction_pass"]) for row in checks])
    layers = min((len(row["memory_share"]) for row in checks), default=0)
    return RunReport(
        name=name,
        label=label,
        training=Curve(at, [row["next_token_loss"] for row in rows]),
        consistency=Curve(at, [number(value) for value in apart]) if any(apart) else None,
        contraction=contraction,
        bits_per_byte={source: value for source, (value, _) in bits.items()},
        by_position={source: curve for source, (_, curve) in bits.items() if curve is not None},
        state_bytes=state_bytes,
        gap=gap_in(checks, "bpb"),
        recall_gap=gap_in(checks, "recall"),
        memory_share=[
            Curve(checked, [number(row["memory_share"][layer]) for row in checks]) for layer in range(layers)
        ],
    )


def gap_in(checks: Sequence[Mapping[str, float]], metric: str) -> Curve | None:
    found = [row for row in checks if f"{metric}_recurrent_minus_lifted" in row]
    gaps = [number(row[f"{metric}_recurrent_minus_lifted"]) for row in found]
    return Curve([row["step"] for row in found], gaps) if found else None


def number(value: float | None) -> float:
    """What is no number stands in JSON as null."""
    return float("nan") if value is None else value


def report_of(runs: Sequence[Path]) -> Report:
    """Of any runs, each once, with the bits per byte of one text that all of them were measured on, or else of the
    validations in training: never of both."""
    twice = [run for run in runs if [other.resolve() for other in runs].count(run.resolve()) > 1]
    if twice:
        raise RequestError(f"{twice[0]} is named twice; name every run once")
    configs = [read_config(run) for run in runs]
    names = names_of(runs, [config.recipe for config in configs])
    evaluated = [evaluations(run, training_steps(config)) for run, config in zip(runs, configs, strict=True)]
    common = set(evaluated[0]).intersection(*evaluated[1:])
    if common:
        # the largest text, by its bytes
        chosen = max(common, key=lambda key: (key[2], key))
        found: list[Bits] = [own[chosen] for own in evaluated]
        told = f"Bits per byte are of {chosen[0]} ({chosen[1]}, {chosen[2]:,} bytes), by 'maglev eval bpb'."
    elif any(found := [validated(run) for run in runs]):
        rows = sorted({config.train.validation_rows for config in configs})
        told = (
            f"Bits per byte are of the last validation in training, of {' or '.join(map(str, rows))} rows: to compare "
            f"runs, measure all of them on one text with 'maglev eval bpb' and write the report again."
        )
    else:
        told = "No bits per byte have been measured, neither in training nor by 'maglev eval bpb'."
    parts = []
    for run, config, name, bits in zip(runs, configs, names, found, strict=True):
        state = state_nbytes(config.model, BYTES["bfloat16"])
        parts.append(describe_run(run, bits, state, name, LABELS.get(name, name)))
    if not any(part.training.x or part.bits_per_byte for part in parts):
        raise RequestError(
            f"{', '.join(map(str, runs))}: nothing to report, there are neither metrics of training nor results of "
            f"'maglev eval bpb'; name runs that were trained here, or measure them first"
        )
    facts: dict[str, object] = {}
    for run, config, name in zip(runs, configs, names, strict=True):
        told_of, model = describe(config), config.model
        facts[LABELS.get(name, name)] = (
            f"{config.recipe} in {run}: {model.depth} layers of width {model.width}, W {model.window}, context "
            f"{model.context}, {told_of['parameters']['deployed']:,} deployed parameters, seed {config.train.seed}, "
            f"{reached(run):,} of {training_steps(config):,} steps of {config.train.tokens_per_step:,} tokens"
            f"{recalled(run)}"
        )
    return Report(
        title="Maglev: " + ", ".join(LABELS.get(name, name) for name in names),
        introduction=f"{told} Recurrent is the number that counts: there a model runs on its own memories.",
        runs=parts,
        # validations may be of other texts, rows and steps
        baseline=BASELINE if common and names.count(BASELINE) == 1 and len(names) > 1 else "",
        growth=next(
            (growth_of(config.model, BYTES["bfloat16"]) for config in configs if config.model.memory != "none"), None
        ),
        facts=facts,
        commands=["maglev report " + " ".join(map(str, runs))],
    )


def reached(run: Path) -> int:
    return max((row["step"] for row in read_metrics(run)), default=0)


def recalled(run: Path) -> str:
    """What the last validation of a run on the recall task found."""
    rows = [row for row in read_metrics(run) if row["kind"] == "validation" and "recall_recurrent" in row]
    found = [(source, rows[-1].get(f"recall_{source}")) for source in SOURCES] if rows else []
    words = [f"{source} {value:.3f}" for source, value in found if value is not None]
    return f"; recall beyond the plain reach {', '.join(words)}" if words else ""


def names_of(runs: Sequence[Path], recipes: Sequence[str]) -> list[str]:
    """The recipe, or the folder where there are several of it; as given where folders have one name."""
    folders = [run.resolve().name for run in runs]
    found = [recipe if recipes.count(recipe) == 1 else folder for recipe, folder in zip(recipes, folders, strict=True)]
    return [name if found.count(name) == 1 else str(run) for name, run in zip(found, runs, strict=True)]


def growth_of(model: ModelConfig, size: int) -> StateGrowth:
    """With elements of so many bytes."""
    return StateGrowth(
        lengths=LENGTHS,
        full_attention=[full_attention_nbytes(model, length, size) for length in LENGTHS],
        bounded=[state_nbytes(model, size)] * len(LENGTHS),
    )


def evaluations(run: Path, last: int) -> dict[tuple[str, str, int], Bits]:
    """By text, split and bytes, what 'maglev eval bpb' kept of the finished run with plain weights."""
    found: dict[tuple[str, str, int], dict[str, tuple[float, Curve | None]]] = {}
    for result in load_results(run, "bpb"):
        source = result.get("memory")
        if result.get("step") != last or result.get("weights") != "plain" or source not in SOURCES:
            continue
        value, places = result[f"bpb_{source}"], result["by_position"]
        middles = [(place["first"] + place["last"]) / 2 for place in places]
        curve = Curve(middles, [number(place[f"bpb_{source}"]) for place in places])
        found.setdefault((result["data"], result["split"], result["bytes"]), {})[source] = number(value), curve
    return {key: bits for key, bits in found.items() if "recurrent" in bits}


def validated(run: Path) -> Bits:
    rows = [row for row in read_metrics(run) if row["kind"] == "validation"]
    if not rows:
        return {}
    return {source: (number(rows[-1][f"bpb_{source}"]), None) for source in SOURCES if f"bpb_{source}" in rows[-1]}
