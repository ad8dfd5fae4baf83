"""Text and JSON to values of the type that a field has, with one clear line for what is none."""

import dataclasses
import json
from typing import Any, Literal, get_args, get_origin, get_type_hints

from maglev.errors import RequestError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


def parse_value(key: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        require(value in choices, f"{key} is {value!r}; it must be one of {', '.join(map(str, choices))}")
        return value
    if hint is str:
        return str(value)
    if hint is bool:
        words = {"true": True, "false": False, "1": True, "0": False, "on": True, "off": False}
        word = str(value).lower()
        require(word in words, f"{key} is {value!r}; it must be true or false")
        return words[word]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RequestError(f"{key} is {value!r}; it must be a number") from None
    require(number == number and abs(number) != float("inf"), f"{key} is {value!r}; it must be a finite number")
    if hint is int:
        require(number == int(number), f"{key} is {value!r}; it must be a whole number")
        return int(str(value)) if str(value).lstrip("+-").isdigit() else int(number)
    return number


def read_section(name: str, content: dict[str, Any], types: dict[str, Any]) -> Any:
    """A section of a stored configuration as its dataclass, each value as its type."""
    require(name in types, f"unknown section {name!r} in the run's configuration")
    hints = get_type_hints(types[name])
    for key in content:
        require(key in hints, f"unknown key {name}.{key} in the run's configuration")
    values = {key: parse_value(f"{name}.{key}", value, hints[key]) for key, value in content.items()}
    missing = [
        f"{name}.{item.name}"
        for item in dataclasses.fields(types[name])
        if item.default is dataclasses.MISSING and item.name not in values
    ]
    require(not missing, f"the run's configuration lacks {', '.join(missing)}")
    return types[name](**values)


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
