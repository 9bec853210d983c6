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
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from kvledger.arithmetic import ceil_pages
from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Fault,
    Faulty,
    Finish,
    Hold,
    Pause,
    Pin,
    Ranks,
    Release,
    Resume,
    Round,
    Submit,
    Transferred,
    Unpin,
)
from kvledger.faults import FAULT_AMOUNTS
from kvledger.pool_settings import misfit_of_pools
from kvledger.request import Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.saving import write_whole
from kvledger.schema import Schema, Unusable, escaped, show, show_path
from kvledger.settings import USUAL_RATIO_PERCENT, NodeSettings, RankSettings

FORMAT = "kvledger-trace/1"
MAX_TOKENS = 2**28
MAX_PROMPT_PAGES = 2**23
MAX_FILE_BYTES = 2**28
FIRST_SWITCHES = frozenset(
    {"checkpoint_align", "reserve_tail", "spend_gap", "truncation_align", "on_shortage", "decode_yields"}
)
OUTPUT_KEYS = tuple(key.name for key in fields(Output))
# more digits than any size has, fewer than Python's own limit can be set to
MAX_DIGITS = 640


class TraceError(ValueError):
    """A document is no valid trace. Its text is one line of printable ASCII: file, place, value and what is wrong."""


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
    document["node"] = _unusual(trace.node)
    document["rules"] = trace.rules if isinstance(trace.rules, str) else _rules_document(trace.rules)
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


def is_document(trace: Trace) -> bool:
    """The trace can be written down and read again: its sizes, settings and events fit each other."""
    try:
        return parse(to_document(trace), "trace") == trace
    except TraceError:
        return False


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
    node = _node(document["node"])
    _check_node(node)
    rules = document["rules"]
    if not isinstance(rules, str):
        rules = AccountingRules(**rules)
        _check_rules(rules, node.page_size)
    if node.ranks:
        _check_beside_ranks(document["events"])
    reader = _EventReader(node)
    events = tuple(reader.read(index, event) for index, event in enumerate(document["events"]))
    return Trace(node, rules, events, title, dict(document.get("expect", {})))


def _node(document: dict[str, Any]) -> NodeSettings:
    ranks = tuple(RankSettings(**rank) for rank in document.get("ranks", ()))
    return NodeSettings(**{**document, "ranks": ranks})


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
    if node.mixed_chunk and node.mode == "prefill":
        raise _MisfitError("a prefill node decodes nothing that could join a chunk", "node", "mixed_chunk")
    _check_decode(node)
    _check_ranks(node)
    misfit = misfit_of_pools(node)
    if misfit is not None:
        raise _MisfitError(misfit.message, "node", misfit.key)


def _check_decode(node: NodeSettings) -> None:
    """Settings that would say nothing are more likely a mistake."""
    slots = node.max_running_requests
    if node.pp_size > 1 and slots is None:
        raise _MisfitError(f"{node.pp_size} stages share nothing without max_running_requests", "node", "pp_size")
    if node.preemption_threshold is not None and (node.mode != "unified" or node.schedule_policy != "priority"):
        message = f'{node.preemption_threshold} needs "mode": "unified" and "schedule_policy": "priority"'
        raise _MisfitError(message, "node", "preemption_threshold")
    if node.new_token_ratio_percent != USUAL_RATIO_PERCENT and node.mode != "unified":
        message = f'{node.new_token_ratio_percent} needs "mode": "unified": a prefill node has no running requests'
        raise _MisfitError(message, "node", "new_token_ratio_percent")


NOT_BESIDE_RANKS = ("state_slots", "window_tokens", "shared_bytes")
EVENTS_NOT_BESIDE_RANKS = frozenset({"fault", "pin", "unpin", "pause", "resume"})
"""Keys and events that a pipeline's ranks do not have here: a model of them would be a guess."""


def _check_ranks(node: NodeSettings) -> None:
    if not node.ranks:
        return
    if node.mode != "prefill":
        raise _MisfitError(
            'pipeline ranks are modelled on a prefill node only, not with "mode": "unified"', "node", "ranks"
        )
    for key in NOT_BESIDE_RANKS:
        if getattr(node, key) is not None:
            raise _MisfitError(f"pipeline ranks are not modelled beside {key}", "node", "ranks")
    if node.pp_size not in (1, len(node.ranks) + 1):
        message = f"{node.pp_size} stages are not the {len(node.ranks) + 1} ranks that the node has"
        raise _MisfitError(message, "node", "pp_size")
    for number, rank in enumerate(node.ranks):
        if isinstance(rank.pool_tokens, int) and rank.pool_tokens < node.page_size:
            message = f"{rank.pool_tokens} is below page_size {node.page_size}: the pool would not have one page"
            raise _MisfitError(message, "node", "ranks", number, "pool_tokens")


def _check_beside_ranks(events: list[dict[str, Any]]) -> None:
    for index, event in enumerate(events):
        if event["event"] in EVENTS_NOT_BESIDE_RANKS:
            message = f'pipeline ranks are not modelled beside "{event["event"]}", as in events[{index}]'
            raise _MisfitError(message, "node", "ranks")


def _check_rules(rules: AccountingRules, page_size: int) -> None:
    for key in ("checkpoint_align", "truncation_align", "continuation_limit", "chunk_grid"):
        value = getattr(rules, key)
        if isinstance(value, int) and value % page_size:
            raise _MisfitError(f"{value} is not a multiple of page_size {page_size}", "rules", key)


class _EventReader:
    """Makes events of their documents, in order, and checks each against the ones before it."""

    def __init__(self, node: NodeSettings) -> None:
        self._node = node
        self._submitted_at: dict[str, int] = {}
        self._held_tokens: dict[tuple[str, int], int] = {}
        self._pinned: set[str] = set()
        self._paused = False
        self._prompt_pages = 0

    def read(self, index: int, document: dict[str, Any]) -> Event:
        try:
            return self._event(index, document)
        except _MisfitError as misfit:
            raise _MisfitError(misfit.message, "events", index, *misfit.path) from None

    def _event(self, index: int, document: dict[str, Any]) -> Event:
        match document["event"]:
            case "cached":
                locked = document.get("locked", False)
                return Cached(document["tier"], self._prompt(document["prompt"]), locked, self._ranks(document))
            case "submit":
                request = self._new_request(document["request"], index)
                return Submit(request, self._prompt(document["prompt"]), self._output(document))
            case "round":
                return Round()
            case "decode":
                self._only_unified("event", '"decode"')
                return Decode()
            case "finish":
                self._only_unified("event", '"finish"')
                self._ranks(document)
                return Finish(self._known_request(document["request"]))
            case "drain":
                self._pinned.clear()
                self._paused = False
                return Drain()
            case "transferred":
                return Transferred(self._known_request(document["request"]), self._ranks(document))
            case "abort":
                return Abort(self._known_request(document["request"]), self._ranks(document))
            case "hold":
                return self._hold(document["name"], document["tokens"], self._ranks(document))
            case "release":
                return self._release(document["name"], document.get("tokens"), self._ranks(document))
        return self._faulty_event(document)

    def _ranks(self, document: dict[str, Any]) -> Ranks:
        """The ranks that an event reaches, in order; None where it does not say, which is all of them."""
        named = document.get("ranks")
        if named is None:
            return None
        count = len(self._node.ranks) + 1
        if not self._node.ranks:
            raise _MisfitError(f"{named} needs ranks on the node, and this one has none", "ranks")
        if max(named) >= count:
            raise _MisfitError(f"{max(named)} is no rank of a node that has 0 to {count - 1}", "ranks")
        if len(set(named)) < len(named):
            raise _MisfitError(f"{named} names a rank twice", "ranks")
        return tuple(sorted(named))

    def _faulty_event(self, document: dict[str, Any]) -> Event:
        match document["event"]:
            case "fault":
                return self._fault(document)
            case "pin":
                _check_text(document["name"], "name")
                self._pinned.add(document["name"])
                return Pin(document["name"], self._prompt(document["prompt"]))
            case "unpin":
                return self._unpin(document["name"])
            case "pause" | "resume":
                return self._pause(document["event"])
        raise AssertionError(f"the schema allows an event that is not read: {document['event']!r}")

    def _fault(self, document: dict[str, Any]) -> Fault:
        kind = document["kind"]
        wanted = FAULT_AMOUNTS.get(kind)
        for key in sorted({*FAULT_AMOUNTS.values()}):
            if key == wanted and key not in document:
                raise _MisfitError(f"{show(kind)} needs the key {show(key)}", "kind")
            if key != wanted and key in document:
                raise _MisfitError(f"{document[key]} says nothing of a fault of kind {show(kind)}", key)
        request = self._known_request(document["request"])
        return Fault(kind, request, document[wanted] if wanted else None)

    def _unpin(self, name: str) -> Unpin:
        if name not in self._pinned:
            raise _MisfitError(f"{show(name)} pins nothing here", "name")
        self._pinned.remove(name)
        return Unpin(name)

    def _pause(self, event: str) -> Pause | Resume:
        """A drain resumes, so that what follows it is not paused."""
        pauses = event == "pause"
        if pauses == self._paused:
            raise _MisfitError(f"the node {'is paused already' if pauses else 'is not paused'} here", "event")
        self._paused = pauses
        return Pause() if pauses else Resume()

    def _prompt(self, pairs: list[list[Any]]) -> Prompt:
        for number, (segment, _) in enumerate(pairs):
            _check_text(segment, "prompt", number, 0)
        tokens = sum(tokens for _, tokens in pairs)
        if not 1 <= tokens <= MAX_TOKENS:
            raise _MisfitError(f"a prompt of {tokens} tokens, not of 1 to {MAX_TOKENS}", "prompt")
        self._prompt_pages += ceil_pages(tokens, self._node.page_size)
        if self._prompt_pages > MAX_PROMPT_PAGES:
            message = f"the prompts up to here have {self._prompt_pages} pages, more than {MAX_PROMPT_PAGES} in all"
            raise _MisfitError(message, "prompt")
        return Prompt(tuple((segment, tokens) for segment, tokens in pairs))

    def _output(self, document: dict[str, Any]) -> Output:
        output = Output(**{key: document[key] for key in OUTPUT_KEYS if key in document})
        if output.max_new_tokens > 1:
            self._only_unified("max_new_tokens", output.max_new_tokens)
        if output.ignore_eos:
            self._only_unified("ignore_eos", "true")
        if output.priority and self._node.schedule_policy != "priority":
            message = f"{output.priority} orders nothing under schedule_policy {show(self._node.schedule_policy)}"
            raise _MisfitError(message, "priority")
        return output

    def _only_unified(self, key: str, value: object) -> None:
        if self._node.mode != "unified":
            raise _MisfitError(f'{value} needs "mode": "unified": a prefill node makes one token', key)

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

    def _reached(self, ranks: Ranks) -> tuple[int, ...]:
        return ranks if ranks is not None else tuple(range(len(self._node.ranks) + 1))

    def _hold(self, name: str, tokens: int, ranks: Ranks) -> Hold:
        _check_text(name, "name")
        for rank in self._reached(ranks):
            self._held_tokens[name, rank] = self._held_tokens.get((name, rank), 0) + tokens
        return Hold(name, tokens, ranks)

    def _holding(self, name: str, ranks: Ranks) -> tuple[int, ...]:
        """The named ranks; else those on which it holds any, or rank 0."""
        if ranks is not None:
            return ranks
        return tuple(rank for rank in self._reached(None) if self._held_tokens.get((name, rank))) or (0,)

    def _release(self, name: str, tokens: int | None, ranks: Ranks) -> Release:
        for rank in self._holding(name, ranks):
            on = "" if ranks is None else f" on rank {rank}"
            held_tokens = self._held_tokens.get((name, rank), 0)
            if held_tokens == 0:
                raise _MisfitError(f"{show(name)} holds nothing here{on}", "name")
            if tokens is not None and tokens > held_tokens:
                message = f"{tokens} is more than the {held_tokens} that {show(name)} still holds{on}"
                raise _MisfitError(message, "tokens")
            self._held_tokens[name, rank] = 0 if tokens is None else held_tokens - tokens
        return Release(name, tokens, ranks)


def _unusual(values: NodeSettings | RankSettings | Output) -> dict[str, Any]:
    """What is not left at its default."""
    unusual = {key.name: value for key in fields(values) if (value := getattr(values, key.name)) != key.default}
    if "ranks" in unusual:
        unusual["ranks"] = [_unusual(rank) for rank in unusual["ranks"]]
    return unusual


def _rules_document(rules: AccountingRules) -> dict[str, Any]:
    """The switches that the format began with, and of the others those that are not left at their default: a trace
    that is older than a switch keeps its text."""
    unusual = {key.name for key in fields(rules) if getattr(rules, key.name) != key.default}
    return {name: value for name, value in asdict(rules).items() if name in FIRST_SWITCHES or name in unusual}


def _event_document(event: Event) -> dict[str, Any]:
    ranks = getattr(event, "ranks", None)
    return _bare_document(event) | ({} if ranks is None else {"ranks": list(ranks)})


def _bare_document(event: Event) -> dict[str, Any]:
    match event:
        case Cached(tier, prompt, locked):
            document = {"event": "cached", "tier": tier, "prompt": [list(pair) for pair in prompt.segments]}
            return document | {"locked": True} if locked else document
        case Submit(request, prompt, output):
            document = {"event": "submit", "request": request, "prompt": [list(pair) for pair in prompt.segments]}
            return document | _unusual(output)
        case Round():
            return {"event": "round"}
        case Decode():
            return {"event": "decode"}
        case Finish(request):
            return {"event": "finish", "request": request}
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
        case Fault() | Pin() | Unpin() | Pause() | Resume():
            return _faulty_document(event)


def _faulty_document(event: Faulty) -> dict[str, Any]:
    match event:
        case Fault(kind, request, amount):
            document: dict[str, Any] = {"event": "fault", "kind": kind, "request": request}
            return document if amount is None else document | {FAULT_AMOUNTS[kind]: amount}
        case Pin(name, prompt):
            return {"event": "pin", "name": name, "prompt": [list(pair) for pair in prompt.segments]}
        case Unpin(name):
            return {"event": "unpin", "name": name}
        case Pause():
            return {"event": "pause"}
        case Resume():
            return {"event": "resume"}
