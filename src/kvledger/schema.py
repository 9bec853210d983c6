"""The part of JSON Schema 2020-12 that the trace format needs, and words for what is wrong with a document.

A schema is compiled once and answers with the first problem it meets. Keywords are tried in the order in which the
schema lists them, so the schema's author decides what is reported first. A keyword that is not implemented here is
an error in the schema: a published schema must never say more than is checked. Two deliberate restrictions: 64.0 is
not an integer (JSON Schema says it is), and `const` and `enum` compare strings only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, NamedTuple

JsonPath = tuple[int | str, ...]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class SchemaError(Exception):
    """The schema itself is at fault: a keyword, a type or a reference that this interpreter does not know."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Stands in a document for what was read but cannot be used. It has no type: it is reported where it stands."""

    message: str


class Problem(NamedTuple):
    """What is wrong: `fault` says it of `value`, found at the end of `path` from the top of the document down."""

    path: JsonPath
    value: object
    fault: str

    @property
    def message(self) -> str:
        """The problem in one phrase of printable ASCII, without its place."""
        # put into words only here: the conditions of a schema find problems that nobody is told
        return self.value.message if isinstance(self.value, Unusable) else f"{show(self.value)} {self.fault}"

    def under(self, step: int | str) -> Problem:
        """The same problem, seen from one level further up."""
        return Problem((step, *self.path), self.value, self.fault)


Check = Callable[[Any], Problem | None]


def escaped(text: str, limit: int, *, keep_end: bool = False) -> str:
    """`text` in printable ASCII, escaped as in JSON and cut to `limit` characters; `keep_end` cuts at the front."""
    pieces: list[str] = []
    length = 0
    for character in reversed(text) if keep_end else text:
        pieces.append(json.dumps(character)[1:-1])
        length += len(pieces[-1])
        if length > limit:
            while length > limit - len("..."):
                length -= len(pieces.pop())
            pieces.append("...")
            break
    return "".join(reversed(pieces) if keep_end else pieces)


def show(value: object, limit: int = 60) -> str:
    """A value from a hostile document in one short ASCII phrase; what a list or an object holds is not looked at."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        # Python refuses to print integers of more than 4,300 digits; a bit is 0.30103 of a digit
        digits = value.bit_length() * 30103 // 100000 + 1
        return int.__repr__(value) if digits <= limit else f"an integer of about {digits} digits"
    if isinstance(value, float):
        return json.dumps(float(value))
    if isinstance(value, str):
        quoted = f'"{escaped(value, limit - 2)}"'
        return quoted if len(value) <= limit else f"{quoted} ({len(value)} characters)"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    return f"a Python {escaped(type(value).__name__, limit)}"


def show_path(path: JsonPath) -> str:
    """A path as people write it, `events[3].tokens`. Its names are the schema's own, so none of them is hostile."""
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return steps.removeprefix(".") or "top level"


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "null": ("null", lambda value: value is None),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "integer": ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "string": ("a string", lambda value: isinstance(value, str)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
}

# what each limit applies to, and what it says of a value beyond it
_LIMITS: dict[str, tuple[type | UnionType, str]] = {
    "minimum": (int | float, "is below the minimum"),
    "maximum": (int | float, "is above the maximum"),
    "minLength": (str, "is shorter than the minimum of characters,"),
    "maxLength": (str, "is longer than the maximum of characters,"),
    "minItems": (list, "is shorter than the minimum of entries,"),
    "maxItems": (list, "is longer than the maximum of entries,"),
}

# said to the reader of a schema, not to the checker
_ANNOTATIONS = frozenset({"$comment", "title", "description", "default", "examples"})


def _type(names: Any) -> Check:
    names = [names] if isinstance(names, str) else names
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise SchemaError(f"unknown type {unknown[0]!r}")
    tests = [_TYPES[name][1] for name in names]
    fault = f"is not {' or '.join(_TYPES[name][0] for name in names)}"

    def check(value: Any) -> Problem | None:
        for test in tests:
            if test(value):
                return None
        if "integer" in names and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return Problem((), value, f"{fault} (write {show(int(value))})")
        return Problem((), value, fault)

    return check


def _one_of(values: list[Any]) -> Check:
    if not all(isinstance(value, str) for value in values):
        raise SchemaError("const and enum take strings only")
    fault = ("is not " if len(values) == 1 else "is none of ") + escaped(", ".join(values), 100)

    def check(value: Any) -> Problem | None:
        return None if isinstance(value, str) and value in values else Problem((), value, fault)

    return check


def _limit(keyword: str, limit: Any) -> Check:
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise SchemaError(f"{keyword} takes an integer, not {limit!r}")
    kind, words = _LIMITS[keyword]
    fault = f"{words} {limit}"
    at_least = keyword.startswith("min")

    def check(value: Any) -> Problem | None:
        if isinstance(value, bool) or not isinstance(value, kind):
            return None
        figure: Any = len(value) if isinstance(value, str | list) else value
        return None if (figure >= limit if at_least else figure <= limit) else Problem((), value, fault)

    return check


def _required(names: list[str]) -> Check:
    def check(value: Any) -> Problem | None:
        if isinstance(value, dict):
            for name in names:
                if name not in value:
                    return Problem((), name, "is missing")
        return None

    return check


def _closed(known: Iterable[str]) -> Check:
    names = frozenset(known)

    def check(value: Any) -> Problem | None:
        if isinstance(value, dict):
            for key in value:
                if key not in names:
                    return Problem((), key, "is not a known key")
        return None

    return check


def _properties(checks: Mapping[str, Check]) -> Check:
    def check(value: Any) -> Problem | None:
        if isinstance(value, dict):
            for name, each in checks.items():
                if name in value and (problem := each(value[name])):
                    return problem.under(name)
        return None

    return check


def _prefix_items(checks: list[Check]) -> Check:
    def check(value: Any) -> Problem | None:
        if isinstance(value, list):
            for index, (each, item) in enumerate(zip(checks, value, strict=False)):
                if problem := each(item):
                    return problem.under(index)
        return None

    return check


def _items(each: Check) -> Check:
    def check(value: Any) -> Problem | None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                if problem := each(item):
                    return problem.under(index)
        return None

    return check


def _all_of(checks: list[Check]) -> Check:
    def check(value: Any) -> Problem | None:
        for each in checks:
            if problem := each(value):
                return problem
        return None

    return check


def _conditional(condition: Check, then: Check, otherwise: Check) -> Check:
    return lambda value: otherwise(value) if condition(value) else then(value)


_LEAVES: dict[str, Callable[[Any], Check]] = {
    "type": _type,
    "const": lambda value: _one_of([value]),
    "enum": _one_of,
    "required": _required,
}


class Schema:
    """A compiled schema. Raises `SchemaError` at once if any part of it uses what is not implemented here."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        if document.get("$schema", DIALECT) != DIALECT:
            raise SchemaError(f"not a schema of {DIALECT}")
        self._sources: Mapping[str, Any] = document.get("$defs", {})
        self._compiled: dict[str, Check] = {}
        self._open: list[str] = []
        for name in self._sources:
            self._reference(f"#/$defs/{name}")
        self._check = self._compile({key: document[key] for key in document if key not in {"$schema", "$id", "$defs"}})

    def first_problem(self, value: object) -> Problem | None:
        """The first thing wrong with a document (JSON as Python reads it), or None."""
        return self._check(value)

    def _compile(self, schema: Any) -> Check:
        if not isinstance(schema, Mapping):
            raise SchemaError(f"a schema is an object here, not {schema!r}")
        checks = [
            self._keyword(keyword, argument, schema)
            for keyword, argument in schema.items()
            if keyword not in _ANNOTATIONS
        ]
        return checks[0] if len(checks) == 1 else _all_of(checks)

    def _keyword(self, keyword: str, argument: Any, schema: Mapping[str, Any]) -> Check:
        if keyword in _LEAVES:
            return _LEAVES[keyword](argument)
        if keyword in _LIMITS:
            return _limit(keyword, argument)
        match keyword:
            case "$ref":
                return self._reference(argument)
            case "properties":
                return _properties({name: self._compile(each) for name, each in argument.items()})
            case "additionalProperties" if argument is False:
                return _closed(schema.get("properties", {}))
            case "prefixItems":
                return _prefix_items([self._compile(each) for each in argument])
            case "items" if "prefixItems" not in schema:
                return _items(self._compile(argument))
            case "allOf":
                return _all_of([self._compile(each) for each in argument])
            case "if":
                branches = (self._compile(schema.get(branch, {})) for branch in ("then", "else"))
                return _conditional(self._compile(argument), *branches)
            case "then" | "else" if "if" in schema:
                return _all_of([])
        raise SchemaError(f"the keyword {keyword!r} is not implemented (or not with {argument!r})")

    def _reference(self, pointer: str) -> Check:
        name = pointer.removeprefix("#/$defs/")
        if name not in self._sources or name == pointer:
            raise SchemaError(f"$ref leads nowhere: {pointer!r}")
        if name in self._open:
            raise SchemaError(f"$ref leads back to itself: {pointer!r}")
        if name not in self._compiled:
            self._open.append(name)
            self._compiled[name] = self._compile(self._sources[name])
            self._open.pop()
        return self._compiled[name]
