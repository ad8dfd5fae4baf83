"""The remote code of an export: our sources as one file that needs torch and transformers alone.

Every module that the model imports goes in, in the order of their imports, with its text as it stands. Imports among
them fall away; a name that two of them give to different things gets its module's name in front.
"""

import ast
import builtins
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from maglev.hf.modeling_maglev import GENERATED

ENTRANCE = "maglev.hf.modeling_maglev"
HEADER = f"""{GENERATED}; see maglev/hf/one_file.py. Apache-2.0.
# ruff: noqa
# mypy: ignore-errors
"""
Span = tuple[int, int]  # bytes of a source


@dataclass
class Source:
    """One module: its text, what it defines, and what its names stand for elsewhere."""

    name: str
    text: bytes
    tree: ast.Module
    defined: set[str] = field(default_factory=set)
    # local name -> (module, name there); the name is empty for a module itself
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    # local name -> the statement that imports it from outside of maglev
    external: dict[str, str] = field(default_factory=dict)
    dropped: list[ast.stmt] = field(default_factory=list)

    @property
    def stem(self) -> str:
        return self.name.rsplit(".", 1)[-1]


@cache
def generate() -> str:
    sources: dict[str, Source] = {}
    collect(ENTRANCE, sources)
    renamed = new_names(sources)
    imports = sorted({statement for source in sources.values() for statement in source.external.values()})
    parts = [HEADER, "\n".join(imports) + "\n"]
    for source in sources.values():
        parts.append(f"# {source.name.replace('.', '/')}\n\n" + rewrite(source, sources, renamed).strip() + "\n")
    return "\n\n".join(parts)


def collect(name: str, sources: dict[str, Source]) -> None:
    """Add a module after those it imports: the order in which Python would execute them."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_bytes()
    source = Source(name, text, ast.parse(text))
    for statement in source.tree.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                shown = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                source.external[alias.asname or alias.name.split(".")[0]] = shown
        elif isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] != "maglev":
            for alias in statement.names:
                shown = f"from {statement.module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                source.external[alias.asname or alias.name] = shown
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module is not None and statement.level == 0
            take_own_import(source, statement, sources)
        else:
            source.defined |= bound_by(statement)
    source.dropped = [each for each in source.tree.body if not stays(each)]
    sources[name] = source


def take_own_import(source: Source, statement: ast.ImportFrom, sources: dict[str, Source]) -> None:
    module = statement.module or ""
    for alias in statement.names:
        inner = f"{module}.{alias.name}"
        is_module = is_package(module) and find_spec(inner) is not None
        target = inner if is_module else module
        if target not in sources:
            collect(target, sources)
        source.imported[alias.asname or alias.name] = (target, "" if is_module else alias.name)


def is_package(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return names - {"__all__"}


def stays(statement: ast.stmt) -> bool:
    """Imports, lists of exports and docstrings go; nothing else does."""
    if isinstance(statement, ast.Assign):
        return bool(bound_by(statement))
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not (isinstance(statement, ast.Import | ast.ImportFrom) or is_docstring)


def new_names(sources: dict[str, Source]) -> dict[tuple[str, str], str]:
    """(module, name) -> the name in the one file"""
    owners: dict[str, list[str]] = {}
    outside: dict[str, str] = {}
    for source in sources.values():
        for name, statement in source.external.items():
            assert outside.setdefault(name, statement) == statement, f"{name} is imported as two things"
        for name in source.defined:
            owners.setdefault(name, []).append(source.name)
    found = {}
    for name, modules in owners.items():
        taken = len(modules) > 1 or name in outside or hasattr(builtins, name)
        for module in modules:
            found[module, name] = f"{sources[module].stem}_{name}" if taken else name
    assert len(set(found.values())) == len(found), "two names became one"
    assert not set(found.values()) & set(outside), "a name became one that is imported"
    return found


def resolve(module: str, name: str, sources: dict[str, Source], renamed: dict[tuple[str, str], str]) -> str:
    """What a module's name is called in the one file, also where that module has it from another."""
    while (module, name) not in renamed:
        source = sources[module]
        if name in source.external:
            return name
        module, name = source.imported[name]
    return renamed[module, name]


def rewrite(source: Source, sources: dict[str, Source], renamed: dict[tuple[str, str], str]) -> str:
    """The module's text without its imports, its names as they are in the one file."""
    starts = line_starts(source.text)

    def span(node: ast.stmt | ast.expr) -> Span:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    names = {name: renamed[source.name, name] for name in source.defined}
    modules = {}
    for local, (module, name) in source.imported.items():
        if name:
            names[local] = resolve(module, name, sources, renamed)
        else:
            modules[local] = module
    changed = {local: new for local, new in names.items() if local != new}
    check_scopes(source, set(changed) | set(modules))
    edits: list[tuple[Span, str]] = [(span(statement), "") for statement in source.dropped]
    inside = {id(node) for statement in source.dropped for node in ast.walk(statement)}
    for node in ast.walk(source.tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            edits.append((span(node), resolve(modules[node.value.id], node.attr, sources, renamed)))
        elif isinstance(node, ast.Name) and node.id in changed:
            edits.append((span(node), changed[node.id]))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in changed and node in source.tree.body:
            keyword = "def " if isinstance(node, ast.FunctionDef) else "class "
            at = starts[node.lineno - 1] + len(keyword)
            edits.append(((at, at + len(node.name.encode())), changed[node.name]))
    text = source.text
    for (begin, end), new in sorted(edits, reverse=True):
        text = text[:begin] + new.encode() + text[end:]
    return text.decode()


def line_starts(text: bytes) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def check_scopes(source: Source, changed: set[str]) -> None:
    """A name that changes must mean the same in every function of its module: parameters and locals keep theirs."""
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef | ast.Lambda):
            bound = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            stores = (node for node in ast.walk(function) if isinstance(node, ast.Name))
            bound |= {node.id for node in stores if isinstance(node.ctx, ast.Store)}
            shadowed = sorted(bound & changed)
            assert not shadowed, f"{source.name}: {shadowed} are also names of something else; rename the local ones"
