"""The schema interpreter against the jsonschema library, and the published schema against the code it speaks for."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from importlib import resources
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.request import Output
from kvledger.rules import PRESETS, AccountingRules
from kvledger.schema import Problem, Schema, SchemaError, Unusable, escaped, show, show_path
from kvledger.settings import NodeSettings
from kvledger.trace import FORMAT, MAX_PROMPT_PAGES, MAX_TOKENS

REPEATABLE = settings(derandomize=True, deadline=None, database=None)

PUBLISHED: dict[str, Any] = json.loads(resources.files("kvledger").joinpath("trace.schema.json").read_text("utf-8"))
TRACE_SCHEMA = Schema(PUBLISHED)

# The one declared difference: JSON Schema calls 64.0 an integer, kvledger does not.
STRICT_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
    "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
)
Stock = jsonschema.Draft202012Validator
Strict = jsonschema.validators.extend(Stock, type_checker=STRICT_TYPES)
STOCK_LIBRARY, STRICT_LIBRARY = Stock(PUBLISHED), Strict(PUBLISHED)


def has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(has_whole_float(each) for each in value.values())
    if isinstance(value, list):
        return any(has_whole_float(each) for each in value)
    return isinstance(value, float) and value.is_integer()


def agreed_problem(schema: Schema, library: Any, document: Any) -> Problem | None:
    """Our answer, after a check that the library agrees: on whether there is a problem, and that one is there."""
    problem = schema.first_problem(document)
    places = [tuple(error.absolute_path) for error in library.iter_errors(document)]
    assert (problem is None) == (not places), (document, problem, places)
    if problem is not None:
        assert problem.path in places, (document, problem, places)
    return problem


# --- the published schema ---


def test_published_schema_is_a_valid_schema():
    Stock.check_schema(PUBLISHED)


def fields_of(schema: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field, wherever a schema can hide one; a condition's `properties` is a question, not a field."""
    for keyword in ("properties", "$defs"):
        for name, field in schema.get(keyword, {}).items():
            yield f"{place}.{name}", field
            yield from fields_of(field, f"{place}.{name}")
    items = [*schema.get("prefixItems", []), *([schema["items"]] if "items" in schema else [])]
    for number, item in enumerate(items):
        if "$ref" not in item:
            yield f"{place}[{number}]", item
            yield from fields_of(item, f"{place}[{number}]")


def test_every_field_is_described():
    described = dict(fields_of(PUBLISHED, ""))
    assert {".node", ".expect.aligned", ".node.page_size", ".prompt[0][1]", ".release.tokens"} <= {
        place.replace(".$defs", "") for place in described
    }
    assert [place for place, field in described.items() if len(field.get("description", "")) < 5] == []


def test_schema_and_code_name_the_same_things():
    defs, top = PUBLISHED["$defs"], PUBLISHED["properties"]
    assert top["format"]["const"] == FORMAT
    assert defs["preset"]["enum"] == list(top["expect"]["properties"]) == list(PRESETS)
    names = [each.name for each in fields(NodeSettings)]
    assert list(defs["node"]["properties"]) == names
    assert defs["node"]["required"] == [each.name for each in fields(NodeSettings) if each.default is MISSING]
    assert_defaults(defs["node"]["properties"], NodeSettings)
    assert_defaults(defs["submit"]["properties"], Output)
    rules = defs["rules"]["properties"]
    assert {name: rule["default"] for name, rule in rules.items()} == asdict(AccountingRules())
    kinds = [branch["if"]["properties"]["event"]["const"] for branch in defs["event"]["allOf"]]
    assert kinds == defs["event"]["properties"]["event"]["enum"]
    assert str(MAX_TOKENS) in PUBLISHED["description"]
    assert str(MAX_PROMPT_PAGES) in PUBLISHED["description"]


def assert_defaults(properties: Any, kind: type) -> None:
    """A key that may be left out says what it then is, unless that is nothing at all."""
    for each in fields(kind):
        if each.default is not MISSING:
            default = list(each.default) if isinstance(each.default, tuple) else each.default
            assert properties[each.name].get("default") == default, each.name


def limits_of(schema: Any) -> Iterator[tuple[str, int]]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in {"maximum", "maxLength", "maxItems"}:
                yield key, value
            yield from limits_of(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from limits_of(each)


def test_limits_are_the_decided_ones():
    assert {limit for limit in limits_of(PUBLISHED) if limit != ("maxItems", 2)} == {
        ("maximum", 2**28),
        ("maximum", 2**40),
        ("maximum", 65_536),
        ("maximum", 100),
        ("maximum", 63),
        ("maxItems", 63),
        ("maxItems", 64),
        ("maxLength", 65_536),
        ("maxItems", 65_536),
        ("maxItems", 1_000_000),
    }


def test_everything_of_open_size_has_a_limit():
    """An integer, string or list without an upper limit is a hole; an enum or a const is its own limit."""
    limit_of = {"integer": "maximum", "string": "maxLength", "array": "maxItems"}
    for place, field in fields_of(PUBLISHED, ""):
        for kind in [field["type"]] if isinstance(field.get("type"), str) else field.get("type", []):
            if kind in limit_of and "if" not in field:
                assert limit_of[kind] in field, place
    assert "maximum" in PUBLISHED["$defs"]["rules"]["properties"]["checkpoint_align"]


# --- agreement with jsonschema on documents that are almost traces ---

NODE = {
    "page_size": 64,
    "checkpoint_align": 256,
    "chunked_prefill_size": 4096,
    "max_prefill_tokens": None,
    "pool_tokens": 12032,
    "host_tokens": 0,
}
EVENTS: list[dict[str, Any]] = [
    {"event": "cached", "tier": "host", "prompt": [["doc", 6144]]},
    {"event": "cached", "tier": "device", "prompt": [["doc", 6144], ["c", 0]], "locked": True},
    {"event": "submit", "request": "A", "prompt": [["a", 1088]]},
    {"event": "round"},
    {"event": "transferred", "request": "A"},
    {"event": "abort", "request": "A"},
    {"event": "hold", "name": "h", "tokens": 64},
    {"event": "release", "name": "h", "tokens": 32},
    {"event": "release", "name": "h"},
    {"event": "drain"},
]
RULES = {
    "checkpoint_align": 128,
    "reserve_tail": True,
    "spend_gap": False,
    "truncation_align": 64,
    "on_shortage": "defer",
}
NAMED = {
    "format": FORMAT,
    "title": "t",
    "node": NODE,
    "rules": "aligned",
    "events": EVENTS,
    "expect": {"aligned": "ok"},
}
SWITCHED = {**NAMED, "rules": RULES}

SCALARS: list[Any] = [None, True, False, -1, 0, 1, 2**28, 2**28 + 1, 10**30, 64.0, -0.0, 1.5, 1e300]
STRINGS = [
    "",
    "x",
    "x" * 65_536,
    "x" * 65_537,
    "aligned",
    "ok",
    "node",
    "page_size",
    "force",
    "host",
    "kvledger-trace/2",
]
EVENT_NAMES = [str(event["event"]) for event in EVENTS]
CONTAINERS: list[Any] = [[], {}, [[]], [["a", 1]], [["a", 1, 1]], [["a"]], {"event": "round"}, {"a": 1}, ["a", 2]]
VALUES = [*SCALARS, *STRINGS, *dict.fromkeys(EVENT_NAMES), *CONTAINERS]
KEYS = ["", "x", "event", "tokens", "locked", "request", "Title", "title", "upstream", "$ref"]


def places_in(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from places_in(value, (*place, key))


def at(document: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        document = document[step]
    return document


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    result = copy.deepcopy(document)
    at(result, place[:-1])[place[-1]] = value
    return result


def without(document: Any, place: tuple[Any, ...]) -> Any:
    result = copy.deepcopy(document)
    del at(result, place[:-1])[place[-1]]
    return result


def with_key(document: Any, place: tuple[Any, ...], key: str, value: Any) -> Any:
    result = copy.deepcopy(document)
    if isinstance(at(result, place), dict):
        at(result, place)[key] = value
    return result


def check_trace_agreement(document: Any) -> bool:
    problem = agreed_problem(TRACE_SCHEMA, STRICT_LIBRARY, document)
    if problem is None:
        assert STOCK_LIBRARY.is_valid(document)
    elif not has_whole_float(document):
        assert not STOCK_LIBRARY.is_valid(document)
    return problem is None


# The part of a document that is changed; one event in each, because the library is slow.
PARTS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    *(({**document, "events": EVENTS[3:4]}, ()) for document in (NAMED, SWITCHED)),
    *(({**NAMED, "events": [event]}, ("events",)) for event in EVENTS),
]


@pytest.mark.parametrize(("document", "changing"), PARTS, ids=range(len(PARTS)))
def test_every_single_change_is_judged_as_jsonschema_judges_it(document, changing):
    assert check_trace_agreement(document)
    judged = Counter[bool]()
    for place in places_in(at(document, changing), changing):
        changes = [replaced(document, place, value) for value in VALUES]
        changes += [with_key(document, place, key, 1) for key in KEYS]
        changes += [without(document, place)] if place else []
        judged.update(check_trace_agreement(changed) for changed in changes)
    assert judged[True] >= 5
    assert judged[False] > 100


@st.composite
def changed_documents(draw: st.DrawFn) -> Any:
    document = draw(st.sampled_from([NAMED, SWITCHED]))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.sampled_from(list(places_in(document))))
        kind = draw(st.sampled_from(["replace", "delete", "add", "number"]))
        if kind == "replace":
            document = replaced(document, place, draw(st.sampled_from(VALUES)))
        elif kind == "number":
            document = replaced(document, place, draw(st.integers(-2, 2**29) | st.floats(-4, 2**29)))
        elif kind == "add":
            document = with_key(document, place, draw(st.sampled_from(KEYS) | st.text()), draw(st.sampled_from(VALUES)))
        elif place:
            document = without(document, place)
    return document


@given(changed_documents())
@settings(REPEATABLE, max_examples=300)
def test_several_changes_are_judged_as_jsonschema_judges_them(document):
    check_trace_agreement(document)


@pytest.mark.parametrize("place", [("node", "page_size"), ("events", 6, "tokens"), ("events", 2, "prompt", 0, 1)])
def test_whole_float_is_the_declared_difference(place):
    document = replaced(NAMED, place, 64.0)
    assert STOCK_LIBRARY.is_valid(document)
    problem = TRACE_SCHEMA.first_problem(document)
    assert problem is not None
    assert (problem.path, problem.message) == (place, "64.0 is not an integer (write 64)")


# --- agreement with jsonschema on schemas of every kind ---

NAMES = st.sampled_from(["a", "b", "c"])
SMALL_VALUES = st.recursive(
    st.sampled_from([None, True, False, -1, 0, 1, 2, 1.5, 2.0, "", "a", "b", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
TYPE_NAMES = st.sampled_from(["null", "boolean", "integer", "string", "array", "object"])
LEAF_KEYWORDS = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPE_NAMES | st.lists(TYPE_NAMES, min_size=1, max_size=3, unique=True),
        "enum": st.lists(st.sampled_from(["", "a", "b"]), min_size=1, unique=True),
        "const": st.sampled_from(["", "a", "b"]),
        "minimum": st.integers(-1, 2),
        "maximum": st.integers(-1, 2),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(0, 3),
        "minItems": st.integers(0, 3),
        "maxItems": st.integers(0, 3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": st.just(False),
        "description": st.just("words"),
    },
)


def wider(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas with `inner` ones inside, two kinds of nesting each, and keywords of their own."""
    either = st.one_of(
        st.fixed_dictionaries({}, optional={"items": inner}),
        st.fixed_dictionaries({"prefixItems": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"properties": st.dictionaries(NAMES, inner, max_size=2)}),
        st.just({"$ref": "#/$defs/some"}),
    )
    return st.builds(lambda one, two, leaf: {**one, **two, **leaf}, either, either, LEAF_KEYWORDS).filter(
        lambda schema: not {"items", "prefixItems"} <= schema.keys()
    )


SCHEMAS = st.one_of(LEAF_KEYWORDS, wider(LEAF_KEYWORDS), wider(LEAF_KEYWORDS | wider(LEAF_KEYWORDS)))


@given(SCHEMAS, LEAF_KEYWORDS, st.lists(SMALL_VALUES, min_size=3, max_size=8))
@settings(REPEATABLE, max_examples=300)
def test_any_schema_of_the_subset_means_what_jsonschema_says(schema, some, values):
    published = {**schema, "$defs": {"some": some}}
    ours, library = Schema(published), Strict(published)
    for value in values:
        agreed_problem(ours, library, value)


# --- what the interpreter does not know, it does not pass over ---


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"pattern": "a"}, "'pattern' is not implemented"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "'uniqueItems' is not implemented"),
        ({"$defs": {"unused": {"oneOf": []}}}, "'oneOf' is not implemented"),
        ({"if": {}, "then": {"format": "uri"}}, "'format' is not implemented"),
        ({"if": {"not": {}}}, "'not' is not implemented"),
        ({"allOf": [{}, {"multipleOf": 2}]}, "'multipleOf' is not implemented"),
        ({"prefixItems": [{"$defs": {}}]}, "'\\$defs' is not implemented"),
        ({"additionalProperties": {"type": "string"}}, "'additionalProperties' is not implemented"),
        ({"prefixItems": [{}], "items": {}}, "'items' is not implemented"),
        ({"then": {}}, "'then' is not implemented"),
        ({"else": {}}, "'else' is not implemented"),
        ({"items": False}, "a schema is an object here, not False"),
        ({"type": "number"}, "unknown type 'number'"),
        ({"type": ["string", "float"]}, "unknown type 'float'"),
        ({"const": 1}, "strings only"),
        ({"enum": ["a", None]}, "strings only"),
        ({"minimum": 0.5}, "minimum takes an integer, not 0.5"),
        ({"maxLength": True}, "maxLength takes an integer, not True"),
        ({"$ref": "#/$defs/gone"}, "leads nowhere: '#/\\$defs/gone'"),
        ({"$ref": "other.json"}, "leads nowhere: 'other.json'"),
        ({"$ref": "name", "$defs": {"name": {}}}, "leads nowhere: 'name'"),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, "leads back to itself: '#/\\$defs/a'"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "not a schema of .*2020-12"),
    ],
)
def test_schema_beyond_the_subset_is_an_error(schema, fault):
    with pytest.raises(SchemaError, match=fault):
        Schema(schema)


def test_keywords_are_tried_in_the_order_of_the_schema():
    keywords = {"required": ["a"], "additionalProperties": False, "properties": {"b": {"type": "null"}}}
    document = {"b": 1, "c": 2}
    said = []
    for first, argument in keywords.items():
        problem = Schema({first: argument, **keywords}).first_problem(document)
        assert problem is not None
        said.append((show_path(problem.path), problem.message))
    assert said == [
        ("top level", '"a" is missing'),
        ("top level", '"c" is not a known key'),
        ("b", "1 is not null"),
    ]


def test_unusable_value_is_reported_where_it_stands():
    for value_schema in ({"type": "integer"}, {"enum": ["a"]}):
        schema = Schema({"properties": {"a": {"items": value_schema}}})
        problem = schema.first_problem({"a": [Unusable("no good")]})
        assert problem is not None
        assert (problem.path, problem.message) == (("a", 0), "no good")


# --- words for hostile values ---

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=200)


@given(ANY_TEXT, st.integers(3, 80), st.booleans())
@settings(REPEATABLE, max_examples=300)
def test_escaped_text_is_short_and_plain_and_keeps_what_it_can(text, limit, keep_end):
    result = escaped(text, limit, keep_end=keep_end)
    assert len(result) <= limit
    assert result.isascii()
    assert result.isprintable() or not result
    whole = json.dumps(text)[1:-1]
    if len(whole) <= limit:
        assert result == whole
    else:
        kept = result[3:] if keep_end else result[:-3]
        assert result == ("..." + kept if keep_end else kept + "...")
        assert whole.endswith(kept) if keep_end else whole.startswith(kept)
        # the longest escape is a surrogate pair, 12 characters
        assert len(kept) > limit - len("...") - 12


class Odd:
    def __repr__(self) -> str:
        raise AssertionError("a hostile value is not asked to describe itself")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (-5, "-5"),
        (10**59, "1" + "0" * 59),
        (-(10**70), "an integer of about 71 digits"),
        (10**5000, "an integer of about 5001 digits"),
        (64.0, "64.0"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        ('a"\n\u202e\ud800\x7f', '"a\\"\\n\\u202e\\ud800\\u007f"'),
        ("x" * 10_000, f'"{"x" * 55}..." (10000 characters)'),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object of 1"),
        (Odd(), "a Python Odd"),
        ((1,), "a Python tuple"),
    ],
    ids=lambda value: "value" if not isinstance(value, str) else None,
)
def test_show(value, shown):
    assert show(value) == shown


def test_show_path():
    assert show_path(("events", 3, "prompt", 0, 1)) == "events[3].prompt[0][1]"
    assert show_path(()) == "top level"
