"""The trace, `kvledger-trace/1`: one JSON document that is a whole experiment, and the values it becomes.

A document is checked in two steps. `trace.schema.json` says what it is made of, and every limit; the code below checks
what a schema cannot say: sizes that must fit each other, and events that refer to earlier ones. What it refuses, it
refuses with `TraceError`: one line that names the file, the place and the value.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from kvledger.arithmetic import ceil_pages
from kvledger.node import NodeSettings
from kvledger.request import Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.saving import write_whole
from kvledger.schema import Schema, Unusable, escaped, show, show_path

FORMAT = "kvledger-trace/1"
MAX_TOKENS = 2**28
MAX_PROMPT_PAGES = 2**23
MAX_FILE_BYTES = 2**28
# more digits than any size has, fewer than Python's own limit can be set to
MAX_DIGITS = 640

Tier = Literal["host", "device"]


class TraceError(ValueError):
    """A document is no valid trace. Its text is one line of printable ASCII: file, place, value and what is wrong."""


@dataclass(frozen=True, slots=True)
class Cached:
    """The full pages of `prompt` are cached in `tier`; `locked`: by someone outside the trace, so never evicted."""

    tier: Tier
    prompt: Prompt
    locked: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """A request with a name of its own joins the end of the waiting queue."""

    request: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Round:
    """One round is run."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Rounds are run until nothing waits or is half done; transfers complete as late as is fair."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """A request's KV has reached the decode node. Valid for every submitted request, in whatever state."""

    request: str


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends, wherever it is."""

    request: str


@dataclass(frozen=True, slots=True)
class Hold:
    """`name` takes `tokens` plain slots out of the pool; holds of one name add up."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Release:
    """`name` gives `tokens` of its slots back; None: all that it still holds."""

    name: str
    tokens: int | None = None


Event = Cached | Submit | Round | Drain | Transferred | Abort | Hold | Release


@dataclass(frozen=True, slots=True)
class Trace:
    """One experiment. `rules` is a preset's name or switches; `expect` maps presets to the verdicts of a replay."""

    node: NodeSettings
    rules: str | AccountingRules
    events: tuple[Event, ...]
    title: str = ""
    # a plain dict, because a mapping proxy can be neither pickled nor copied; the type forbids writing to it
    expect: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def accounting_rules(self) -> AccountingRules:
        """The switches themselves. Raises `KeyError` for a name that is no preset."""
        return PRESETS[self.rules] if isinstance(self.rules, str) else self.rules

    def with_rules(self, rules: str | AccountingRules) -> Trace:
        """The same experiment under other rules."""
        return replace(self, rules=rules)


def load(path: str | os.PathLike[str]) -> Trace:
    """The trace in a UTF-8 JSON file. Raises `TraceError`, whatever is wrong with the file."""
    source = os.fsdecode(path)
    try:
        with open(source, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TraceError(_line(source, escaped(error.strerror or type(error).__name__, 80))) from None
    except ValueError:
        raise TraceError(_line(source, "not a file name")) from None
    return loads(data, source)


def loads(data: bytes, source: str) -> Trace:
    """The trace in the UTF-8 JSON text `data`; `source` names it in errors. Raises `TraceError`."""
    try:
        if len(data) > MAX_FILE_BYTES:
            raise TraceError(_line(source, f"longer than {MAX_FILE_BYTES} bytes"))
        text = data.decode("utf-8-sig")
        if not text.strip():
            raise TraceError(_line(source, "the file is empty"))
        return parse(json.loads(text, object_pairs_hook=_object, parse_int=_integer), source)
    except UnicodeDecodeError as error:
        raise TraceError(_line(source, f"byte {error.start}: not UTF-8 text")) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise TraceError(_line(source, f"{place}: not JSON: {escaped(error.msg, 80)}")) from None
    except RecursionError:
        raise TraceError(_line(source, "nested too deeply")) from None


def parse(document: object, source: str) -> Trace:
    """The trace in a document (JSON as Python reads it); `source` names it in errors. Raises `TraceError`."""
    problem = _schema().first_problem(document)
    if problem is not None:
        raise TraceError(_line(source, f"{show_path(problem.path)}: {problem.message}"))
    assert isinstance(document, dict), "the schema asks for an object"
    try:
        return _trace(document)
    except _MisfitError as misfit:
        raise TraceError(_line(source, f"{show_path(misfit.path)}: {misfit.message}")) from None


def to_document(trace: Trace) -> dict[str, Any]:
    """The document of a trace: what `parse` turns back into an equal one."""
    document: dict[str, Any] = {"format": FORMAT}
    if trace.title:
        document["title"] = trace.title
    document["node"] = {name: size for name, size in asdict(trace.node).items() if name != "state_slots" or size}
    document["rules"] = trace.rules if isinstance(trace.rules, str) else asdict(trace.rules)
    document["events"] = [_event_document(event) for event in trace.events]
    if trace.expect:
        document["expect"] = dict(trace.expect)
    return document


def dumps(trace: Trace) -> str:
    """The text of a trace: ASCII, one event a line, the same for equal traces; ends in a newline."""
    parts = []
    for key, value in to_document(trace).items():
        if key == "node":
            items = [f'"{name}": {json.dumps(size)}' for name, size in value.items()]
            text = f"{{{', '.join(items[:4])},\n           {', '.join(items[4:])}}}"
        elif key == "events" and value:
            text = "[\n" + ",\n".join(f"    {json.dumps(event)}" for event in value) + "\n  ]"
        else:
            text = json.dumps(value)
        parts.append(f'  "{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes `dumps(trace)` to a file that is either wholly new or left as it was. Raises OSError or ValueError."""
    write_whole(path, [dumps(trace)])


class _MisfitError(Exception):
    """The schema allows it, the format does not: what is wrong, and the path that leads there."""

    def __init__(self, message: str, *path: int | str) -> None:
        super().__init__(message)
        self.message = message
        self.path = path


@cache
def _schema() -> Schema:
    return Schema(json.loads(resources.files("kvledger").joinpath("trace.schema.json").read_text("utf-8")))


def _line(source: str, message: str) -> str:
    return f"{escaped(source, 100, keep_end=True)}: {message}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Unusable:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    count = Counter(key for key, _ in pairs)
    return Unusable(f"the key {show(next(key for key in count if count[key] > 1))} is there twice")


def _integer(digits: str) -> int | Unusable:
    if len(digits) <= MAX_DIGITS:
        return int(digits)
    return Unusable(f"an integer of {len(digits.lstrip('-'))} digits is not a size")


def _trace(document: dict[str, Any]) -> Trace:
    title = document.get("title", "")
    _check_text(title, "title")
    node = NodeSettings(**document["node"])
    _check_node(node)
    rules = document["rules"]
    if not isinstance(rules, str):
        rules = AccountingRules(**rules)
        _check_rules(rules, node.page_size)
    reader = _EventReader(node.page_size)
    events = tuple(reader.read(index, event) for index, event in enumerate(document["events"]))
    return Trace(node, rules, events, title, dict(document.get("expect", {})))


def _check_text(text: str, *path: int | str) -> None:
    """JSON can escape half a surrogate pair; such a name could be neither printed nor saved."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _MisfitError(f"{show(text)} is not text: it has half a surrogate pair", *path) from None


def _check_node(node: NodeSettings) -> None:
    page_size = node.page_size
    if node.checkpoint_align % page_size:
        raise _MisfitError(f"{page_size} does not divide checkpoint_align {node.checkpoint_align}", "node", "page_size")
    if node.chunked_prefill_size is not None and node.chunked_prefill_size < page_size:
        message = f"{node.chunked_prefill_size} is below page_size {page_size}: no chunk could ever run"
        raise _MisfitError(message, "node", "chunked_prefill_size")
    if node.pool_tokens < page_size:
        message = f"{node.pool_tokens} is below page_size {page_size}: the pool would not have one page"
        raise _MisfitError(message, "node", "pool_tokens")


def _check_rules(rules: AccountingRules, page_size: int) -> None:
    for key in ("checkpoint_align", "truncation_align"):
        value = getattr(rules, key)
        if isinstance(value, int) and value % page_size:
            raise _MisfitError(f"{value} is not a multiple of page_size {page_size}", "rules", key)


class _EventReader:
    """Makes events of their documents, in order, and checks each against the ones before it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._submitted_at: dict[str, int] = {}
        self._held_tokens: dict[str, int] = {}
        self._prompt_pages = 0

    def read(self, index: int, document: dict[str, Any]) -> Event:
        try:
            return self._event(index, document)
        except _MisfitError as misfit:
            raise _MisfitError(misfit.message, "events", index, *misfit.path) from None

    def _event(self, index: int, document: dict[str, Any]) -> Event:
        match document["event"]:
            case "cached":
                return Cached(document["tier"], self._prompt(document["prompt"]), document.get("locked", False))
            case "submit":
                return Submit(self._new_request(document["request"], index), self._prompt(document["prompt"]))
            case "round":
                return Round()
            case "drain":
                return Drain()
            case "transferred":
                return Transferred(self._known_request(document["request"]))
            case "abort":
                return Abort(self._known_request(document["request"]))
            case "hold":
                return self._hold(document["name"], document["tokens"])
            case "release":
                return self._release(document["name"], document.get("tokens"))
        raise AssertionError(f"the schema allows an event that is not read: {document['event']!r}")

    def _prompt(self, pairs: list[list[Any]]) -> Prompt:
        for number, (segment, _) in enumerate(pairs):
            _check_text(segment, "prompt", number, 0)
        tokens = sum(tokens for _, tokens in pairs)
        if not 1 <= tokens <= MAX_TOKENS:
            raise _MisfitError(f"a prompt of {tokens} tokens, not of 1 to {MAX_TOKENS}", "prompt")
        self._prompt_pages += ceil_pages(tokens, self._page_size)
        if self._prompt_pages > MAX_PROMPT_PAGES:
            message = f"the prompts up to here have {self._prompt_pages} pages, more than {MAX_PROMPT_PAGES} in all"
            raise _MisfitError(message, "prompt")
        return Prompt(tuple((segment, tokens) for segment, tokens in pairs))

    def _new_request(self, request: str, index: int) -> str:
        _check_text(request, "request")
        if request in self._submitted_at:
            raise _MisfitError(
                f"{show(request)} was submitted before, by events[{self._submitted_at[request]}]", "request"
            )
        self._submitted_at[request] = index
        return request

    def _known_request(self, request: str) -> str:
        if request not in self._submitted_at:
            raise _MisfitError(f"{show(request)} is not submitted by any earlier event", "request")
        return request

    def _hold(self, name: str, tokens: int) -> Hold:
        _check_text(name, "name")
        self._held_tokens[name] = self._held_tokens.get(name, 0) + tokens
        return Hold(name, tokens)

    def _release(self, name: str, tokens: int | None) -> Release:
        held_tokens = self._held_tokens.get(name, 0)
        if held_tokens == 0:
            raise _MisfitError(f"{show(name)} holds nothing here", "name")
        if tokens is not None and tokens > held_tokens:
            raise _MisfitError(f"{tokens} is more than the {held_tokens} that {show(name)} still holds", "tokens")
        self._held_tokens[name] = 0 if tokens is None else held_tokens - tokens
        return Release(name, tokens)


def _event_document(event: Event) -> dict[str, Any]:
    match event:
        case Cached(tier, prompt, locked):
            document = {"event": "cached", "tier": tier, "prompt": [list(pair) for pair in prompt.segments]}
            return document | {"locked": True} if locked else document
        case Submit(request, prompt):
            return {"event": "submit", "request": request, "prompt": [list(pair) for pair in prompt.segments]}
        case Round():
            return {"event": "round"}
        case Drain():
            return {"event": "drain"}
        case Transferred(request):
            return {"event": "transferred", "request": request}
        case Abort(request):
            return {"event": "abort", "request": request}
        case Hold(name, tokens):
            return {"event": "hold", "name": name, "tokens": tokens}
        case Release(name, None):
            return {"event": "release", "name": name}
        case Release(name, tokens):
            return {"event": "release", "name": name, "tokens": tokens}
