"""A hook of the site: the command line's reference, from the verbs themselves. `<!-- commands -->` marks its place."""

from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    import typer

    from maglev.cli.app import app

    return "\n".join(sections(typer.main.get_command(app), "maglev"))


def sections(command: Any, path: str) -> list[str]:
    """A verb with its arguments and options, or those of a group one after another."""
    import click

    if isinstance(command, click.Group) or hasattr(command, "commands"):
        return [line for name, inner in command.commands.items() for line in sections(inner, f"{path} {name}")]
    lines = [f"## `{path}`", "", (command.help or "").split("\f")[0].strip(), ""]
    lines += ["| argument or option | meaning | default |", "|---|---|---|"]
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        lines.append(f"| {shown(parameter)} | {cell(getattr(parameter, 'help', '') or '')} | {default(parameter)} |")
    return [*lines, ""]


def shown(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or callable(value) or value == ():
        return ""
    return f"`{value}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
