"""`--weights` of the verbs that run a trained decoder."""

from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from maglev.errors import RequestError

if TYPE_CHECKING:
    from maglev.ops.matrix import WeightFormat

Weights = Annotated[str, typer.Option("--weights", help="The decoder's matrices: plain, or rounded to int8 or fp8.")]


def weight_format(weights: str) -> "WeightFormat":
    from maglev.ops.matrix import WeightFormat

    if weights not in get_args(WeightFormat):
        raise RequestError(f"--weights is {weights!r}; it must be one of {', '.join(get_args(WeightFormat))}")
    return cast("WeightFormat", weights)
