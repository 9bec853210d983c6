"""A counted target's class, cut out of its module with what it needs there, for a script that has no kvledger."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvledger.targets.standalone import NoScriptError, body_of, packaged

BASE = "CountedTarget"
_ANNOTATIONS = ("annotation", "returns")


def counted_world(target: type, base: type) -> str:
    """The text of `World` for a subclass of CountedTarget. NoScriptError if it needs more of kvledger than its base.

    Classes between the two come along, from their own modules too, as long as these do not use one name for two things.
    """
    classes = [each for each in reversed(target.__mro__) if issubclass(each, base) and each is not base]
    parts: dict[str, None] = {}
    meanings: dict[str, str] = {}
    for each in classes:
        others = {other.__name__: other.__module__ for other in classes if other.__module__ != each.__module__}
        for text in _texts(each, others):
            parts[text] = None
            for name, meaning in _meanings(text):
                if meanings.setdefault(name, meaning) != meaning:
                    raise NoScriptError(f"two modules below {target.__name__} each define {name}: a script has one")
    return "\n\n".join(
        [
            body_of(f"What stands in for kvledger's {BASE}.", packaged("counted_world.py")),
            *parts,
            f"def World(node, rules):\n    return CountedWorld({target.__name__}, node, rules)",
        ]
    )


def _texts(target: type, provided: Mapping[str, str]) -> list[str]:
    """What a script needs of one class's module."""
    try:
        source = inspect.getsource(sys.modules[target.__module__])
    except (OSError, KeyError):
        raise NoScriptError(f"the source of {target.__name__} cannot be read") from None
    package = getattr(sys.modules[target.__module__], "__package__", None) or ""
    return excerpt(source, target.__name__, package, provided)


def _meanings(text: str) -> Iterator[tuple[str, str]]:
    """Each name that a statement defines, and what it stands for: an import's origin, else the text itself."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], f"import {module}{alias.name}"
        else:
            yield from ((name, text) for name in _names_defined(node))


def excerpt(source: str, root: str, package: str = "", provided: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The top-level statements that define `root` and, one through the other, all that it names but its base.

    `provided` names are classes of other modules, each with its module, whose own excerpts stand before this one.
    """
    statements = ast.parse(source).body
    defined = {name: node for node in statements for name in _names_defined(node)}
    needed: dict[ast.stmt, None] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        node = defined.get(name)
        if node is None or node in needed or name == BASE or _is_provided(node, name, package, provided):
            continue
        _check_no_kvledger(node, name, package)
        _check_not_of_a_base(node, name, package, provided)
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


def _is_provided(node: ast.stmt, name: str, package: str, provided: Mapping[str, str]) -> bool:
    return isinstance(node, ast.ImportFrom) and provided.get(name) == _absolute(node, package)


def _check_not_of_a_base(node: ast.stmt, name: str, package: str, provided: Mapping[str, str]) -> None:
    """A base class's module imports kvledger, so a script cannot import it; the class alone comes along."""
    for module in _modules(node, package):
        if module in provided.values():
            raise NoScriptError(
                f"line {node.lineno} takes {name} from {module}; of a base class's module a script has the class "
                "alone, under its own name"
            )


def _check_no_kvledger(node: ast.stmt, name: str, package: str) -> None:
    if any(module.partition(".")[0] == "kvledger" for module in _modules(node, package)):
        raise NoScriptError(f"line {node.lineno} takes {name} from kvledger; a script has only {BASE} of it")


def _text(node: ast.stmt, lines: list[str], package: str) -> str:
    if isinstance(node, ast.ImportFrom) and node.level:
        return ast.unparse(ast.ImportFrom(_absolute(node, package), node.names, 0))
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])
