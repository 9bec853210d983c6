"""What the shrinker tries, and the total order that says which of two traces is the smaller one.

A trace is taken apart into its *shape* (which events, and who shares a segment with whom) and its *sizes* (every
number). Each pass is a pure function from a trace to candidates, the boldest first; candidates may be invalid or no
smaller, the search sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

from kvledger.arithmetic import ceil_pages, ceil_tokens, floor_tokens
from kvledger.node import NodeSettings
from kvledger.request import Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.trace import Abort, Cached, Drain, Event, Hold, Release, Round, Submit, Trace, Transferred

NODE_SIZES = (
    "page_size",
    "checkpoint_align",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "pool_tokens",
    "host_tokens",
)
RULE_SIZES = ("checkpoint_align", "truncation_align")
SUBSET_LIMIT = 12
"""Above so many sizes, triples are too many to try."""

# what an event costs a reader; a drain is the natural end, and what is not a request is somebody else's doing
_WEIGHTS = {Drain: 0, Round: 1, Submit: 2, Transferred: 3, Release: 3, Cached: 4, Abort: 4, Hold: 5}
_LOCKED_WEIGHT = 2
_SEGMENT_WEIGHT = 2
_SHARED_WEIGHT = 1

Pass = Generator[Trace, bool, None]
"""Candidates out, whether each was accepted in."""

Sizes = tuple[int, ...]
Measure = tuple[Any, ...]


# --- the order


def measure(trace: Trace, rounds: int) -> Measure:
    """Smaller is simpler: rules, events, shape, rounds until it breaks, limits set, the page, then the sizes."""
    sizes = sizes_of(trace)
    return (
        rules_distance(trace.rules),
        len(trace.events),
        *shape_key(trace.events),
        rounds,
        _limits(trace.node),
        trace.node.page_size,
        sum(sizes),
        sizes,
    )


def shape_key(events: Sequence[Event]) -> tuple[int, tuple[Any, ...]]:
    """How much there is to understand in these events apart from their sizes, and a code that breaks ties."""
    weight = 0
    code: list[tuple[int, ...]] = []
    segments: dict[str, int] = {}
    names: dict[str, int] = {}
    for event in events:
        weight += _WEIGHTS[type(event)]
        match event:
            case Submit(request, prompt):
                extra, runs = _prompt_key(prompt, segments)
                weight += extra
                code.append((_WEIGHTS[Submit], names.setdefault(request, len(names)), *runs))
            case Cached(tier, prompt, locked):
                extra, runs = _prompt_key(prompt, segments)
                weight += extra + _LOCKED_WEIGHT * locked
                code.append((_WEIGHTS[Cached], int(locked), int(tier == "host"), *runs))
            case Transferred(name) | Abort(name) | Hold(name) | Release(name, None):
                code.append((_WEIGHTS[type(event)], names.setdefault(name, len(names))))
            case Release(name):
                weight += 1
                code.append((_WEIGHTS[Release], names.setdefault(name, len(names)), 1))
            case _:
                code.append((_WEIGHTS[type(event)],))
    return weight, tuple(code)


def _prompt_key(prompt: Prompt, segments: dict[str, int]) -> tuple[int, list[int]]:
    weight = _SEGMENT_WEIGHT * (len(prompt.segments) - 1)
    runs = []
    for segment, _ in prompt.segments:
        weight += _SHARED_WEIGHT * (segment in segments)
        runs.append(segments.setdefault(segment, len(segments)))
    return weight, runs


def rules_distance(rules: str | AccountingRules) -> int:
    """0 for a preset, else 1 and the switches by which it differs from the nearest one."""
    if isinstance(rules, str) or rules in PRESETS.values():
        return 0
    return 1 + min(_switches_apart(rules, preset) for preset in PRESETS.values())


def _switches_apart(rules: AccountingRules, other: AccountingRules) -> int:
    return sum(getattr(rules, switch.name) != getattr(other, switch.name) for switch in fields(AccountingRules))


def _limits(node: NodeSettings) -> tuple[int, ...]:
    """No host tier is simpler than one without a limit, and a limit that is not there than one that is."""
    host = 0 if node.host_tokens == 0 else 1 if node.host_tokens is None else 2
    return int(node.max_prefill_tokens is not None), host, int(node.chunked_prefill_size is not None)


# --- sizes, apart from what they are the sizes of


def sizes_of(trace: Trace) -> Sizes:
    """Every number of a trace that may shrink, in the order of `with_sizes`. A host of 0 is a switch, not a size."""
    sizes = [size for name in NODE_SIZES if (size := getattr(trace.node, name))]
    if isinstance(trace.rules, AccountingRules):
        sizes += [size for name in RULE_SIZES if isinstance(size := getattr(trace.rules, name), int)]
    for event in trace.events:
        match event:
            case Submit(prompt=prompt) | Cached(prompt=prompt):
                sizes += [tokens for _, tokens in prompt.segments]
            case Hold(tokens=tokens) | Release(tokens=int(tokens)):
                sizes.append(tokens)
    return tuple(sizes)


def with_sizes(trace: Trace, sizes: Sizes) -> Trace | None:
    """The trace with other sizes; None where the format would refuse them."""
    if min(sizes, default=1) < 1:
        return None
    rest = iter(sizes)
    settings = {name: next(rest) for name in NODE_SIZES if getattr(trace.node, name)}
    page_size = settings["page_size"]
    if settings["checkpoint_align"] % page_size or settings["pool_tokens"] < page_size:
        return None
    if settings.get("chunked_prefill_size", page_size) < page_size:
        return None
    rules = trace.rules
    if isinstance(rules, AccountingRules):
        switches = {name: next(rest) for name in RULE_SIZES if isinstance(getattr(rules, name), int)}
        if any(size % page_size for size in switches.values()):
            return None
        if switches:
            rules = replace(rules, **switches)  # type: ignore[arg-type]
    events = tuple(_with_sizes(event, rest) for event in trace.events)
    if any(isinstance(event, Release) for event in events) and repaired(events) != events:
        return None
    return Trace(replace(trace.node, **settings), rules, events)  # type: ignore[arg-type]


def _with_sizes(event: Event, rest: Iterator[int]) -> Event:
    match event:
        case Submit(request, prompt):
            return Submit(request, _resized(prompt, rest))
        case Cached(tier, prompt, locked):
            return Cached(tier, _resized(prompt, rest), locked)
        case Hold(name):
            return Hold(name, next(rest))
        case Release(name, int()):
            return Release(name, next(rest))
    return event


def _resized(prompt: Prompt, rest: Iterator[int]) -> Prompt:
    return Prompt([(segment, next(rest)) for segment, _ in prompt.segments])


def one_at_a_time(candidates: Callable[[Trace], Iterator[Trace]]) -> Callable[[Trace], Pass]:
    """A pass of candidates that all start from the same trace, so the first that is accepted ends it."""

    def make(trace: Trace) -> Pass:
        for candidate in candidates(trace):
            if (yield candidate):
                return

    return make


# --- passes over rules, events and settings


def simpler_rules(trace: Trace) -> Iterator[Trace]:
    """The presets, nearest first; then the nearest one's switches, one by one."""
    rules = trace.rules
    if isinstance(rules, str):
        return
    nearest = sorted(PRESETS, key=lambda name: _switches_apart(rules, PRESETS[name]))
    for name in nearest:
        yield trace.with_rules(name)
    for switch in fields(AccountingRules):
        yield trace.with_rules(replace(rules, **{switch.name: getattr(PRESETS[nearest[0]], switch.name)}))


def fewer_events(trace: Trace) -> Iterator[Trace]:
    """Halves, quarters, ... of the events dropped; then each alone; then in a short trace each two."""
    count = len(trace.events)
    length = count // 2
    while length > 1:
        for first in range(0, count, length):
            yield _without(trace, range(first, min(first + length, count)))
        length //= 2
    for index in range(count):
        yield _without(trace, (index,))
    if count <= SUBSET_LIMIT:
        for pair in combinations(range(count), 2):
            yield _without(trace, pair)


def _without(trace: Trace, dropped: Iterable[int]) -> Trace:
    gone = set(dropped)
    return replace(trace, events=repaired([event for index, event in enumerate(trace.events) if index not in gone]))


def repaired(events: Iterable[Event]) -> tuple[Event, ...]:
    """These events without those that refer to what is not there (any more)."""
    submitted: set[str] = set()
    held: dict[str, int] = {}
    kept: list[Event] = []
    for event in events:
        match event:
            case Submit(request):
                submitted.add(request)
            case Transferred(request) | Abort(request) if request not in submitted:
                continue
            case Hold(name, tokens):
                held[name] = held.get(name, 0) + tokens
            case Release(name, tokens):
                if not held.get(name) or (tokens or 0) > held[name]:
                    continue
                held[name] = 0 if tokens is None else held[name] - tokens
            case _:
                pass
        kept.append(event)
    return tuple(kept)


def simpler_events(trace: Trace) -> Iterator[Trace]:
    """A drain for all that follows an event, or for one round; no lock, the device for the host, a whole release."""
    events = trace.events
    for index in range(len(events)):
        yield replace(trace, events=(*events[:index], Drain()))
    for index, event in enumerate(events):
        simpler: Event | None = None
        match event:
            case Round():
                simpler = Drain()
            case Cached(tier, prompt, True):
                simpler = Cached(tier, prompt)
            case Cached("host", prompt):
                simpler = Cached("device", prompt)
            case Release(name, int()):
                simpler = Release(name)
            case _:
                pass
        if simpler is not None:
            yield replace(trace, events=repaired((*events[:index], simpler, *events[index + 1 :])))


def reordered(trace: Trace) -> Iterator[Trace]:
    """Two events swapped. Which order is the smaller one, the measure says."""
    for first, second in combinations(range(len(trace.events)), 2):
        events = list(trace.events)
        events[first], events[second] = events[second], events[first]
        if repaired(events) == tuple(events):
            yield replace(trace, events=tuple(events))


def simpler_prompts(trace: Trace) -> Iterator[Trace]:
    """A prompt's segments joined into one of its own, or into its first; one dropped; a shared one made its own."""
    taken = {
        segment for event in trace.events if isinstance(event, (Submit, Cached)) for segment, _ in event.prompt.segments
    }
    own = next(name for number in range(len(taken) + 1) if (name := f"own {number}") not in taken)
    for index, event in enumerate(trace.events):
        if not isinstance(event, (Submit, Cached)):
            continue
        segments = event.prompt.segments
        whole = event.prompt.tokens
        simpler = [((own, whole),)]
        if len(segments) > 1:
            simpler.append(((segments[0][0], whole),))
        simpler += [
            (*segments[:number], *segments[number + 1 :]) for number in range(len(segments)) if len(segments) > 1
        ]
        simpler += [
            (*segments[:number], (own, tokens), *segments[number + 1 :]) for number, (_, tokens) in enumerate(segments)
        ]
        for runs in simpler:
            if any(tokens for _, tokens in runs):
                changed = replace(event, prompt=Prompt(runs))
                yield replace(trace, events=(*trace.events[:index], changed, *trace.events[index + 1 :]))


def fewer_limits(trace: Trace) -> Iterator[Trace]:
    """No prefill limit, no host tier or one without a limit, no chunking; a grid of one page; pages of one token."""
    node = trace.node
    yield replace(trace, node=replace(node, max_prefill_tokens=None, host_tokens=0, chunked_prefill_size=None))
    yield replace(trace, node=replace(node, max_prefill_tokens=None))
    yield replace(trace, node=replace(node, host_tokens=0))
    yield replace(trace, node=replace(node, host_tokens=None))
    yield replace(trace, node=replace(node, chunked_prefill_size=None))
    yield replace(trace, node=replace(node, checkpoint_align=node.page_size))


# --- passes over sizes


def scaled(trace: Trace) -> Iterator[Trace]:
    """Everything in one go: pages of one token, of two; then all but the page to an eighth, a quarter, ..."""
    sizes = sizes_of(trace)
    page_size = trace.node.page_size
    for page in (1, 2):
        if page < page_size:
            yield from _fit(trace, (page, *(ceil_pages(size * page, page_size) for size in sizes[1:])))
            yield from _fit(trace, (page, *(max(1, size * page // page_size) for size in sizes[1:])))
    for divisor, times in ((8, 1), (4, 1), (2, 1), (3, 2)):
        shares = [max(1, size * times // divisor) for size in sizes[1:]]
        yield from _fit(trace, (page_size, *shares))
        for round_to_page in (ceil_tokens, floor_tokens):
            yield from _fit(trace, (page_size, *(round_to_page(size, page_size) for size in shares)))


def lowered(trace: Trace) -> Pass:
    """Sizes lowered alone, in pairs and in triples, by the same step, the largest first; what works is repeated."""
    count = len(sizes_of(trace))
    for together in (1, 2, 3) if count <= SUBSET_LIMIT else (1, 2):
        for subset in combinations(range(count), together):
            for step in _steps(trace):
                while (candidate := _less(trace, subset, step)) is not None and (yield candidate):
                    trace = candidate


def _less(trace: Trace, subset: Sequence[int], step: int) -> Trace | None:
    return with_sizes(trace, tuple(size - step * (index in subset) for index, size in enumerate(sizes_of(trace))))


def _steps(trace: Trace) -> list[int]:
    """Powers of two, and the sizes that things come in; the largest first."""
    node = trace.node
    steps = {1 << bits for bits in range(max(sizes_of(trace)).bit_length())}
    return sorted(steps | {node.page_size, node.checkpoint_align, node.chunked_prefill_size or 1}, reverse=True)


def neighbours(trace: Trace) -> Iterator[Trace]:
    """Up to four sizes one (token, and page) up or down: what no step in one direction can reach."""
    sizes = sizes_of(trace)
    for unit in {1: None, trace.node.page_size: None}:
        for together in (2, 3, 4) if len(sizes) <= SUBSET_LIMIT else (2,):
            for subset in combinations(range(len(sizes)), together):
                for signs in product((-1, 1), repeat=together):
                    changed = list(sizes)
                    for index, sign in zip(subset, signs, strict=True):
                        changed[index] += sign * unit
                    if (sum(changed), changed) < (sum(sizes), list(sizes)):
                        yield from _fit(trace, tuple(changed))


def _fit(trace: Trace, sizes: Sizes) -> Iterator[Trace]:
    resized = with_sizes(trace, sizes)
    if resized is not None:
        yield resized


# --- names


def normal_form(trace: Trace) -> Trace:
    """Requests A, B, C..., segments a, b, c..., holds H1, H2..., each by first appearance; no segment of 0 tokens."""
    requests: dict[str, str] = {}
    segments: dict[str, str] = {}
    holds: dict[str, str] = {}
    events: list[Event] = []
    for event in trace.events:
        match event:
            case Submit(request, prompt):
                name = requests.setdefault(request, letters(len(requests)).upper())
                events.append(Submit(name, _renamed(prompt, segments)))
            case Cached(tier, prompt, locked):
                events.append(Cached(tier, _renamed(prompt, segments), locked))
            case Transferred(request) | Abort(request):
                events.append(type(event)(requests[request]))
            case Hold(name) | Release(name):
                events.append(replace(event, name=holds.setdefault(name, f"H{len(holds) + 1}")))
            case _:
                events.append(event)
    rules = trace.rules
    preset = next((name for name, preset in PRESETS.items() if preset == rules), rules)
    return Trace(trace.node, preset, tuple(events))


def _renamed(prompt: Prompt, names: dict[str, str]) -> Prompt:
    return Prompt(
        [(names.setdefault(segment, letters(len(names))), tokens) for segment, tokens in prompt.segments if tokens]
    )


def letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ... for 0, 1, ..."""
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("a") + letter) + name
    return name
