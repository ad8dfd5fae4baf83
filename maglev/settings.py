"""A run's configuration by dotted keys, as `--set KEY=VALUE` has them."""

import dataclasses
import difflib
from typing import Any, get_type_hints

from maglev.config import RunConfig
from maglev.errors import RequestError
from maglev.values import parse_value, require


def setting_keys(config: RunConfig) -> list[str]:
    """Every KEY that `--set KEY=VALUE` takes for this run."""
    keys = []
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            keys += [f"{section.name}.{item.name}" for item in dataclasses.fields(value) if item.name != "kind"]
    return keys


def setting_values(config: RunConfig) -> dict[str, Any]:
    values = config.to_dict()
    return {key: values[key.split(".", 1)[0]][key.split(".", 1)[1]] for key in setting_keys(config)}


def check_keys(config: RunConfig, settings: dict[str, Any]) -> None:
    known = setting_keys(config)
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise RequestError(f"unknown setting {key!r} for {config.recipe}; did you mean {near[0]!r}?")


def parse_section(section: type, settings: dict[str, Any]) -> dict[str, Any]:
    """`{"section.name": "text"}` to `{"name": value}`, each value read as the type of its field."""
    hints = get_type_hints(section)
    return {
        key.split(".", 1)[1]: parse_value(key, value, hints[key.split(".", 1)[1]]) for key, value in settings.items()
    }


def with_settings(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """Replace values by dotted key; the result is checked as a whole."""
    check_keys(config, settings)
    changes = {}
    for section in {key.split(".", 1)[0] for key in settings}:
        current = getattr(config, section)
        mine = {key: value for key, value in settings.items() if key.split(".", 1)[0] == section}
        changes[section] = dataclasses.replace(current, **parse_section(type(current), mine))
    return dataclasses.replace(config, **changes)


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """`KEY=VALUE` strings of `--set`."""
    settings: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        require(bool(equals) and bool(key), f"--set {assignment!r} is not of the form KEY=VALUE")
        settings[key.strip()] = value.strip()
    return settings
