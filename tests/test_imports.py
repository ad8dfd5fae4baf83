"""Rules that the code keeps by itself: imports go one way, no pickle, no probing of attributes."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "maglev"

BASE = {"errors", "files", "values", "model_config", "config", "settings", "recipes", "runs"}
# What each part may import beside itself. ENTRANCES may import anything, and nothing imports them.
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "plots": {"errors", "files"},
    "values": {"errors"},
    "model_config": {"values"},
    "config": {"errors", "model_config", "values"},
    "settings": {"config", "errors", "values"},
    "recipes": {"config", "errors", "model_config", "settings", "values"},
    "runs": {"config", "errors", "files"},
    "checkpoint": {"errors", "files"},
    "data": {"errors", "files"},
    "ops": {"errors"},
    "model": {"ops", "config", "errors", "model_config", "values"},
    "objectives": {"model", "ops"} | BASE,
    "inference": {"model", "ops", "data", "checkpoint"} | BASE,
    "serve": {"inference", "model", "ops", "data"} | BASE,
    "bench": {"train", "objectives", "inference", "model", "ops", "data", "plots"} | BASE,
    "evaluate": {"objectives", "inference", "model", "ops", "data", "checkpoint", "plots"} | BASE,
    "train": {"evaluate", "objectives", "model", "ops", "data", "checkpoint"} | BASE,
    "hf": {"inference", "objectives", "model", "ops", "data", "checkpoint"} | BASE,
    "auto_classes": {"hf"},
}
ENTRANCES = {"cli", "__main__", "__init__"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"torch.load", "torch.save", "eval", "exec"}

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.Module, path: Path) -> Iterator[str]:
    """Dotted names, those of late and of type-checking imports too."""
    package = ("maglev", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from maglev import errors` names a part, `from maglev.errors import X` lies in one
            yield from (f"{module}.{alias.name}" if module == "maglev" else module for alias in node.names)


def imported_parts(tree: ast.Module, path: Path) -> set[str]:
    found = set()
    for module in imported_modules(tree, path):
        names = module.split(".")
        if names[0] == "maglev" and len(names) > 1 and not names[1].startswith("__"):
            found.add(names[1])
    return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_every_part_has_its_rule() -> None:
    assert {part_of(path) for path in FILES} <= set(ALLOWED) | ENTRANCES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part in ENTRANCES:
        return
    beyond = imported_parts(tree_of(path), path) - ALLOWED[part] - {part}
    assert not beyond, f"{name_of(path)} imports {sorted(beyond)}; {part} may import {sorted(ALLOWED[part])}"


def test_the_rules_have_no_circle() -> None:
    left = {part: set(allowed) for part, allowed in ALLOWED.items()}
    while left:
        free = {part for part, allowed in left.items() if not allowed & set(left)}
        assert free, f"a circle among {sorted(left)}"
        left = {part: allowed for part, allowed in left.items() if part not in free}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled_or_evaluated(path: Path) -> None:
    tree = tree_of(path)
    modules = {module.split(".")[0] for module in imported_modules(tree, path)}
    assert not modules & UNSAFE_MODULES
    for call in calls(tree):
        assert dotted(call.func) not in UNSAFE_CALLS, f"{name_of(path)}:{call.lineno}"
        for keyword in call.keywords:
            unpickles = keyword.arg == "allow_pickle" and dotted_constant(keyword.value) is not False
            assert not unpickles, f"{name_of(path)}:{call.lineno} allows pickles"


def dotted_constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_models_are_not_probed(path: Path) -> None:
    if part_of(path) not in {"model", "objectives"}:
        return
    probes = [call.lineno for call in calls(tree_of(path)) if dotted(call.func) in {"getattr", "hasattr"}]
    assert not probes, f"{name_of(path)} probes attributes in lines {probes}"


@pytest.mark.parametrize("part", ["values", "model_config", "config", "settings", "recipes", "errors", "files", "data"])
def test_leaves_do_not_import_torch(part: str) -> None:
    for path in FILES:
        if part_of(path) == part:
            assert not any(m.split(".")[0] == "torch" for m in imported_modules(tree_of(path), path)), path


def test_the_rules_notice() -> None:
    """The checks themselves, on code that breaks them."""
    path = PACKAGE / "inference" / "example.py"
    for source, parts in {
        "import maglev.objectives.maglev": {"objectives"},
        "from maglev import train": {"train"},
        "from ..objectives import build": {"objectives"},
        "from . import engine": {"inference"},
        "from maglev import __version__": set(),
        "def late():\n    from maglev.hf import convert": {"hf"},
    }.items():
        assert imported_parts(ast.parse(source), path) == parts, source
    unsafe = ast.parse("torch.load(path)\nmodel.eval()\neval('1')")
    assert [dotted(call.func) for call in calls(unsafe)] == ["torch.load", "model.eval", "eval"]
