"""The Typer app: which verbs there are. A new one is an import and a line in the list at the end."""

import difflib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from maglev import __version__
from maglev.cli import (
    bench,
    bench_train,
    data,
    demo,
    evaluate,
    export,
    generate,
    history,
    info,
    length,
    names,
    recall,
    report,
    serve,
    table,
    tasks,
    train,
)
from maglev.errors import RequestError


class VerbGroup(TyperGroup):
    """A group whose unknown and missing verbs end in one line that names the nearest one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and args[0] not in self.commands:
            raise RequestError(
                f"unknown verb {args[0]!r}; did you mean '{nearest(args[0], ctx)}'? See '{ctx.command_path} --help'"
            )
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args and not ctx.resilient_parsing:
            verbs = ", ".join(self.commands)
            raise RequestError(f"no verb given; choose one of {verbs}. See '{ctx.command_path} --help'")
        return super().parse_args(ctx, args)


def nearest(word: str, ctx: Any) -> str:
    """The verb closest to `word`, as typed; also one level down: `prepare` finds `data prepare`."""
    names = {}
    for name, command in ctx.command.commands.items():
        names[name] = name
        for inner in getattr(command, "commands", ()):
            names[inner] = f"{name} {inner}"
    return f"{ctx.command_path} {names[difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]]}"


def verb_group(help: str) -> typer.Typer:
    return typer.Typer(
        cls=VerbGroup, help=help, subcommand_metavar="VERB ...", add_completion=False, rich_markup_mode=None
    )


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"maglev {__version__}")
        raise typer.Exit


app = verb_group("Language models with a bounded state: prepare text, train, evaluate, write.")
data_group = verb_group("From raw text to a tokenizer and token shards.")
eval_group = verb_group("Measure a run.")
bench_group = verb_group("Speed on this machine, beside its measured limits.")


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    pass


app.add_typer(data_group, name="data")
app.add_typer(eval_group, name="eval")
app.add_typer(bench_group, name="bench")
data_group.command("prepare")(data.prepare)
app.command("info")(info.info)
app.command("train")(train.train)
eval_group.command("bpb")(evaluate.bpb)
eval_group.command("tasks")(tasks.tasks)
eval_group.command("score")(tasks.score)
eval_group.command("recall")(recall.recall)
eval_group.command("names")(names.names)
eval_group.command("length")(length.length)
eval_group.command("history")(history.history)
app.command("table")(table.table)
app.command("report")(report.report)
app.command("generate")(generate.generate)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
bench_group.command("read")(bench.read)
bench_group.command("decode")(bench.decode)
bench_group.command("train")(bench_train.train)
