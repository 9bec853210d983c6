"""A counted target's class, cut out of its module with what it needs there, for a script that has no kvledger."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from kvledger.targets.standalone import NoScriptError, body_of, packaged

BASE = "CountedTarget"
_ANNOTATIONS = ("annotation", "returns")


def counted_world(target: type, base: type) -> str:
    """The text of `World` for a subclass of CountedTarget. NoScriptError if it needs more of kvledger than its base."""
    between = [each for each in target.__mro__ if issubclass(each, base) and each not in (target, base)]
    if between:
        raise NoScriptError(f"{target.__name__} is built on {between[0].__name__}, not on {BASE} alone")
    try:
        source = inspect.getsource(sys.modules[target.__module__])
    except (OSError, KeyError):
        raise NoScriptError(f"the source of {target.__name__} cannot be read") from None
    package = getattr(sys.modules[target.__module__], "__package__", None) or ""
    return "\n\n".join(
        [
            body_of(f"What stands in for kvledger's {BASE}.", packaged("counted_world.py")),
            *excerpt(source, target.__name__, package),
            f"def World(node, rules):\n    return CountedWorld({target.__name__}, node, rules)",
        ]
    )


def excerpt(source: str, root: str, package: str = "") -> list[str]:
    """The top-level statements that define `root` and, one through the other, all that it names but its base."""
    statements = ast.parse(source).body
    defined = {name: node for node in statements for name in _names_defined(node)}
    needed: dict[ast.stmt, None] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        node = defined.get(name)
        if node is None or node in needed or name == BASE:
            continue
        _check_no_kvledger(node, name, package)
        needed[node] = None
        todo += _names_used(node)
    lines = source.splitlines()
    return [_text(node, lines, package) for node in statements if node in needed]


def _names_defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
        case ast.Assign() | ast.AnnAssign():
            targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _names_used(node: ast.AST) -> Iterator[str]:
    """Annotations aside: a script does not evaluate them."""
    if isinstance(node, ast.Name):
        yield node.id
    for field, value in ast.iter_fields(node):
        if field not in _ANNOTATIONS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _names_used(child)


def _modules(node: ast.stmt, package: str) -> list[str]:
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom():
            return [_absolute(node, package)]
    return []


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that is imported from, as somebody outside the package names it."""
    name = "." * node.level + (node.module or "")
    return importlib.util.resolve_name(name, package) if node.level else name


def _check_no_kvledger(node: ast.stmt, name: str, package: str) -> None:
    if any(module.partition(".")[0] == "kvledger" for module in _modules(node, package)):
        raise NoScriptError(f"line {node.lineno} takes {name} from kvledger; a script has only {BASE} of it")


def _text(node: ast.stmt, lines: list[str], package: str) -> str:
    if isinstance(node, ast.ImportFrom) and node.level:
        return ast.unparse(ast.ImportFrom(_absolute(node, package), node.names, 0))
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])
