"""`maglev info`"""

from typing import Annotated

import typer

from maglev.cli.options import AsJson
from maglev.cli.output import console, emit


def info(
    run_or_recipe: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_RECIPE", help="A run folder, a recipe, or weights that come with maglev."),
    ],
    depth: Annotated[
        int | None,
        typer.Option("--depth", help="Layers of a recipe, 20 unless given; width 64 x depth."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of a recipe.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Parameters, FLOPs, state bytes, and every setting that --set takes."""
    from maglev.cli.runs import config_of
    from maglev.cli.tables import print_sections
    from maglev.model.accounting import describe
    from maglev.settings import setting_values

    config = config_of(run_or_recipe, depth, settings or [])
    description = describe(config) | {"settings": setting_values(config)}
    emit(description, as_json, lambda value: print_sections(console(), value))
