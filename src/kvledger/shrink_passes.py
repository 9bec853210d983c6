"""What the shrinker tries, and the total order that says which of two traces is the smaller one.

A trace has a *shape* (which events, and who shares a segment with whom) and *sizes* (every number). Each pass takes a
trace to candidates, the boldest first. A candidate may be no smaller than the trace: the search sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from itertools import combinations, product
from typing import Any

from kvledger.arithmetic import ceil_pages, ceil_tokens, floor_tokens
from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Finish,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.pool_settings import misfit_of_pools
from kvledger.request import USUAL_OUTPUT, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace

PLAIN_PREFILL: dict[str, Any] = {
    setting.name: setting.default
    for setting in fields(NodeSettings)
    if setting.name
    in (
        *("mode", "schedule_policy", "mixed_chunk", "max_running_requests", "pp_size"),
        *("preemption_threshold", "new_token_ratio_percent", "prefix_cache", "tracking_slots", "copy_on_write"),
    )
}
"""What a node does beyond the simple case, switched off."""
NODE_SIZES = tuple(setting.name for setting in fields(NodeSettings) if setting.name not in PLAIN_PREFILL)
assert NODE_SIZES[0] == "page_size", "passes that scale expect the page first"
LIMITS = tuple(
    name for name in NODE_SIZES if name not in ("page_size", "checkpoint_align", "pool_tokens", "host_tokens")
)
"""Settings of which None means: no limit."""
SECOND_POOLS: tuple[dict[str, Any], ...] = (
    dict.fromkeys(("shared_bytes", "page_bytes", "state_slot_bytes", "window_page_bytes")),
    {"state_slots": None, "tracking_slots": 0, "copy_on_write": False, "state_slot_bytes": None},
    dict.fromkeys(("window_tokens", "window_pool_tokens", "window_page_bytes")),
)
"""Second pools, each of them gone with all that says something of it."""
RULE_SIZES = ("checkpoint_align", "truncation_align")
FEW = 12
"""Of up to so many events or sizes, pairs and triples are tried too."""

# what an event costs a reader: a drain is the natural end, and what is not a request is somebody else's doing
_WEIGHTS = {
    Drain: 0,
    Round: 1,
    Decode: 1,
    Submit: 2,
    Transferred: 3,
    Finish: 3,
    Release: 3,
    Cached: 4,
    Abort: 4,
    Hold: 5,
}
_LOCKED_WEIGHT = 2
_SEGMENT_WEIGHT = 2
_SHARED_WEIGHT = 1
# events of the same weight are sorted: what was there before the requests comes before them
_PLACES = {
    kind: place
    for place, kind in enumerate((Cached, Hold, Submit, Release, Transferred, Abort, Round, Drain, Decode, Finish))
}

Sizes = tuple[int, ...]
Measure = tuple[Any, ...]
Candidates = Callable[[Trace], Iterator[Trace]]
Pass = Callable[[Trace], Generator[Trace, bool, None]]
"""Candidates out, whether each was accepted in."""


# --- the order


def measure(trace: Trace, rounds: int) -> Measure:
    """Smaller is simpler: rules, events, page, shape, rounds till it breaks, limits, then the sizes: sum, then each."""
    sizes = sizes_of(trace)
    return _rules_distance(trace.rules), outline(trace), rounds, _limits(trace.node), sum(sizes), sizes


def outline(trace: Trace) -> Measure:
    """How many events, how many tokens a page, and the shape."""
    return len(trace.events), trace.node.page_size, *shape_key(trace.events)


def shape_key(events: Sequence[Event]) -> Measure:
    """How much there is to understand in these events, sizes apart, and a code of the shape that breaks ties."""
    weight = sum(_WEIGHTS[type(event)] for event in events)
    code: list[tuple[int, ...]] = []
    segments: dict[str, int] = {}
    names: dict[str, int] = {}
    for event in events:
        details: list[int] = []
        match event:
            case Cached(tier, _, locked):
                details = [int(locked), int(tier == "host")]
                weight += _LOCKED_WEIGHT * locked
            case Submit(name, _, output) if output != USUAL_OUTPUT:
                details = [names.setdefault(name, len(names)), int(output.ignore_eos), abs(output.priority)]
                weight += sum(getattr(output, key.name) != key.default for key in fields(output))
            case Submit(name) | Transferred(name) | Finish(name) | Abort(name) | Hold(name):
                details = [names.setdefault(name, len(names))]
            case Release(name, tokens):
                details = [names.setdefault(name, len(names)), int(tokens is not None)]
                weight += tokens is not None
            case _:
                pass
        if isinstance(event, (Cached, Submit)):
            weight += _SEGMENT_WEIGHT * (len(event.prompt.segments) - 1)
            for segment, _ in event.prompt.segments:
                weight += _SHARED_WEIGHT * (segment in segments)
                details.append(segments.setdefault(segment, len(segments)))
        code.append((_PLACES[type(event)], *details))
    return weight, tuple(code)


def _rules_distance(rules: str | AccountingRules) -> int:
    """0 for a preset's name, else 1 and the switches by which it differs from the nearest preset."""
    if isinstance(rules, str):
        return 0
    return 1 + min(_switches_apart(rules, preset) for preset in PRESETS.values())


def _switches_apart(rules: AccountingRules, other: AccountingRules) -> int:
    return sum(getattr(rules, switch.name) != getattr(other, switch.name) for switch in fields(AccountingRules))


def _limits(node: NodeSettings) -> Measure:
    """A limit that is not there is simpler than one that is, and no host tier is simpler than one without a limit.

    What a node does beyond plain prefill counts like a limit.
    """
    limited = tuple(name for name in LIMITS if getattr(node, name) is not None)
    limited += tuple(name for name, plain in PLAIN_PREFILL.items() if getattr(node, name) != plain)
    host = 0 if node.host_tokens == 0 else 1 if node.host_tokens is None else 2
    return len(limited), host, limited


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
                if isinstance(event, Submit) and event.output.max_new_tokens > 1:
                    sizes.append(event.output.max_new_tokens)
            case Hold(tokens=tokens) | Release(tokens=int(tokens)):
                sizes.append(tokens)
            case _:
                pass
    return tuple(sizes)


def with_sizes(trace: Trace, sizes: Sizes) -> Trace | None:
    """The trace with other sizes; None where they do not fit each other."""
    if min(sizes) < 1:
        return None
    rest = iter(sizes)
    node: dict[str, Any] = {name: next(rest) for name in NODE_SIZES if getattr(trace.node, name)}
    page_size = node["page_size"]
    if node["checkpoint_align"] % page_size or node["pool_tokens"] < page_size:
        return None
    if node.get("chunked_prefill_size", page_size) < page_size:
        return None
    rules: Any = trace.rules
    if isinstance(rules, AccountingRules):
        switches: dict[str, Any] = {name: next(rest) for name in RULE_SIZES if isinstance(getattr(rules, name), int)}
        if any(size % page_size for size in switches.values()):
            return None
        rules = replace(rules, **switches) if switches else rules
    events = tuple(_resized(event, rest) for event in trace.events)
    if any(isinstance(event, Release) for event in events) and repaired(events) != events:
        return None
    settings: dict[str, Any] = {name: node.get(name, getattr(trace.node, name)) for name in NODE_SIZES}
    resized = replace(trace.node, **settings)
    return None if misfit_of_pools(resized) is not None else Trace(resized, rules, events)


def _resized(event: Event, rest: Iterator[int]) -> Event:
    match event:
        case Submit(request, prompt, output):
            prompt = Prompt([(segment, next(rest)) for segment, _ in prompt.segments])
            if output.max_new_tokens > 1:
                output = replace(output, max_new_tokens=next(rest))
            return Submit(request, prompt, output)
        case Cached(tier, prompt, locked):
            return Cached(tier, Prompt([(segment, next(rest)) for segment, _ in prompt.segments]), locked)
        case Hold(name):
            return Hold(name, next(rest))
        case Release(name, int()):
            return Release(name, next(rest))
        case _:
            return event


# --- passes over rules, events and settings


def one_at_a_time(candidates: Candidates) -> Pass:
    """A pass whose candidates all start from the same trace, so the first that is accepted ends it."""

    def make(trace: Trace) -> Generator[Trace, bool, None]:
        for candidate in candidates(trace):
            if (yield candidate):
                return

    return make


def simpler_rules(trace: Trace) -> Iterator[Trace]:
    """The presets, nearest first; then the nearest one's switches, one by one.

    Rules that close the post-mortem's hole stay so. Else a fault of a target under sound rules would end as the hole
    that `aligned` has on any target.
    """
    rules = trace.rules
    if isinstance(rules, str):
        return
    nearest = sorted(PRESETS, key=lambda name: _switches_apart(rules, PRESETS[name]))
    simpler: list[str | AccountingRules] = [*nearest]
    for switch in fields(AccountingRules):
        change: dict[str, Any] = {switch.name: getattr(PRESETS[nearest[0]], switch.name)}
        simpler.append(replace(rules, **change))
    for candidate in simpler:
        changed = trace.with_rules(candidate)
        if _tail_is_safe(changed.accounting_rules) or not _tail_is_safe(rules):
            yield changed


def _tail_is_safe(rules: AccountingRules) -> bool:
    """What a cut leaves over is reserved, or nobody is admitted behind a cut."""
    uncut_budget = rules.checkpoint_align == "page_size" and rules.truncation_align is None
    return rules.reserve_tail or rules.spend_gap or uncut_budget


def fewer_events(trace: Trace) -> Iterator[Trace]:
    """Halves, quarters, ... of the events dropped; then each alone; then, of a few, each two."""
    count = len(trace.events)
    length = count // 2
    while length > 1:
        for first in range(0, count, length):
            yield _without(trace, range(first, min(first + length, count)))
        length //= 2
    for index in range(count):
        yield _without(trace, (index,))
    if count <= FEW:
        for pair in combinations(range(count), 2):
            yield _without(trace, pair)


def _without(trace: Trace, dropped: Iterable[int]) -> Trace:
    gone = set(dropped)
    return _with_events(trace, [event for index, event in enumerate(trace.events) if index not in gone])


def _with_events(trace: Trace, events: Iterable[Event]) -> Trace:
    return replace(trace, events=repaired(events))


def repaired(events: Iterable[Event]) -> tuple[Event, ...]:
    """These events without those that refer to what is not there (any more)."""
    submitted: set[str] = set()
    held: dict[str, int] = {}
    kept: list[Event] = []
    for event in events:
        match event:
            case Submit(request):
                submitted.add(request)
            case Transferred(request) | Finish(request) | Abort(request) if request not in submitted:
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
    """A drain for all that follows an event; then an event made simpler, alone or with another one dropped."""
    events = trace.events
    for index in range(len(events)):
        yield _with_events(trace, (*events[:index], Drain()))
    for index, event in enumerate(events):
        for simpler in _simpler(event, _unused(trace, "request")):
            changed = replace(trace, events=(*events[:index], simpler, *events[index + 1 :]))
            yield _with_events(changed, changed.events)
            if len(events) <= FEW:
                yield from (_without(changed, (other,)) for other in range(len(events)) if other != index)


def _simpler(event: Event, unused: str) -> Iterator[Event]:
    """The other way to pass time, a request for what somebody takes, no lock, another tier, a whole release."""
    match event:
        case Round():
            yield Drain()
        case Drain():
            yield Round()
        case Decode():
            yield Round()
            yield Drain()
        case Submit(request, prompt, output) if output != USUAL_OUTPUT:
            yield Submit(request, prompt)
            for key, usual in asdict(USUAL_OUTPUT).items():
                yield Submit(request, prompt, replace(output, **{key: usual}))
        case Cached(tier, prompt, locked):
            yield Submit(unused, prompt)
            if locked:
                yield Cached(tier, prompt)
                yield Hold(unused, prompt.tokens)
            yield Cached("host" if tier == "device" else "device", prompt)
        case Hold(_, tokens):
            yield Submit(unused, Prompt([(unused, tokens)]))
            yield Cached("device", Prompt([(unused, tokens)]))
        case Release(name, int()):
            yield Release(name)
        case _:
            pass


def reordered(trace: Trace) -> Iterator[Trace]:
    """Two events swapped, or one moved to the front. Which order is the smaller one, the measure says."""
    for first, second in combinations(range(len(trace.events)), 2):
        swapped = list(trace.events)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        moved = [*trace.events[:first], trace.events[second], *trace.events[first:second], *trace.events[second + 1 :]]
        for events in (swapped, moved):
            if repaired(events) == tuple(events):
                yield replace(trace, events=tuple(events))


def simpler_prompts(trace: Trace) -> Iterator[Trace]:
    """A prompt's segments joined into one of its own, or into its first; one dropped; a shared one made its own."""
    own = _unused(trace, "segment")
    for index, event in enumerate(trace.events):
        if not isinstance(event, (Submit, Cached)):
            continue
        segments = event.prompt.segments
        several = range(len(segments) if len(segments) > 1 else 0)
        simpler = [[(own, event.prompt.tokens)], [(segments[0][0], event.prompt.tokens)]]
        simpler += [[*segments[:number], *segments[number + 1 :]] for number in several]
        simpler += [[*segments[:number], (own, segments[number][1]), *segments[number + 1 :]] for number in several]
        for runs in simpler:
            if any(tokens for _, tokens in runs):
                changed = replace(event, prompt=Prompt(runs))
                yield replace(trace, events=(*trace.events[:index], changed, *trace.events[index + 1 :]))


def fewer_limits(trace: Trace) -> Iterator[Trace]:
    """Plain prefill; no limits at all and no host tier; then one limit less, another host tier, a grid of one page."""
    node = trace.node
    none: dict[str, Any] = {**dict.fromkeys(LIMITS), "tracking_slots": 0, "copy_on_write": False}
    changes: list[dict[str, Any]] = [{**none, "host_tokens": 0}, *({name: None} for name in LIMITS)]
    changes += [{"host_tokens": 0}, {"host_tokens": None}, {"checkpoint_align": node.page_size}]
    changes += SECOND_POOLS
    if replace(node, **PLAIN_PREFILL) != node:
        yield _plain_prefill(trace)
        changes += [{name: plain} for name, plain in PLAIN_PREFILL.items() if name != "mode"]
    for change in changes:
        simpler = replace(node, **change)
        if misfit_of_pools(simpler) is None:
            yield replace(trace, node=simpler)


def _plain_prefill(trace: Trace) -> Trace:
    """The same prompts on a node that decodes nothing."""
    events: list[Event] = []
    for event in trace.events:
        match event:
            case Submit(request, prompt):
                events.append(Submit(request, prompt))
            case Decode():
                events.append(Round())
            case Finish(request):
                events.append(Transferred(request))
            case _:
                events.append(event)
    return replace(trace, node=replace(trace.node, **PLAIN_PREFILL), events=tuple(events))


# --- passes over sizes


def scaled(trace: Trace) -> Iterator[Trace]:
    """All sizes in one go: to pages of one token or of two; then those but the page to an eighth, a quarter, ..."""
    page_size, *sizes = sizes_of(trace)
    for page in (1, 2):
        if page < page_size:
            yield from _fit(trace, (page, *(ceil_pages(size * page, page_size) for size in sizes)))
            yield from _fit(trace, (page, *(max(1, size * page // page_size) for size in sizes)))
    for times, divisor in ((1, 8), (1, 4), (1, 2), (2, 3)):
        shares = [max(1, size * times // divisor) for size in sizes]
        yield from _fit(trace, (page_size, *shares))
        for round_to_page in (ceil_tokens, floor_tokens):
            yield from _fit(trace, (page_size, *(round_to_page(size, page_size) for size in shares)))


def lowered(trace: Trace) -> Generator[Trace, bool, None]:
    """Sizes lowered alone, in pairs and in triples, by the same step, the largest first; what works is repeated."""
    count = len(sizes_of(trace))
    for together in (1, 2, 3) if count <= FEW else (1, 2):
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
    """Up to four sizes one (token, then page) up or down: what no step in one direction can reach."""
    sizes = sizes_of(trace)
    for unit in sorted({1, trace.node.page_size}):
        for together in (2, 3, 4) if len(sizes) <= FEW else (2,):
            for subset in combinations(range(len(sizes)), together):
                for signs in product((-unit, unit), repeat=together):
                    steps = dict(zip(subset, signs, strict=True))
                    changed = tuple(size + steps.get(index, 0) for index, size in enumerate(sizes))
                    if (sum(steps.values()), changed) < (0, sizes):
                        yield from _fit(trace, changed)


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
            case Submit(request, prompt, output):
                name = requests.setdefault(request, letters(len(requests)).upper())
                events.append(Submit(name, _renamed(prompt, segments), output))
            case Cached(tier, prompt, locked):
                events.append(Cached(tier, _renamed(prompt, segments), locked))
            case Transferred(request) | Finish(request) | Abort(request):
                events.append(type(event)(requests[request]))
            case Hold(name) | Release(name):
                events.append(replace(event, name=holds.setdefault(name, f"H{len(holds) + 1}")))
            case _:
                events.append(event)
    return Trace(trace.node, named_rules(trace.rules), tuple(events))


def named_rules(rules: str | AccountingRules) -> str | AccountingRules:
    """The name of the preset that these rules are, if they are one."""
    return next((name for name, preset in PRESETS.items() if preset == rules), rules)


def _renamed(prompt: Prompt, names: dict[str, str]) -> Prompt:
    runs = [(segment, tokens) for segment, tokens in prompt.segments if tokens]
    return Prompt([(names.setdefault(segment, letters(len(names))), tokens) for segment, tokens in runs])


def letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ... for 0, 1, ..."""
    first, last = divmod(number, 26)
    return (letters(first - 1) if first else "") + chr(ord("a") + last)


def _unused(trace: Trace, prefix: str) -> str:
    """A name that no request and no segment of this trace has."""
    taken = {
        segment for event in trace.events if isinstance(event, (Submit, Cached)) for segment, _ in event.prompt.segments
    }
    taken |= {event.request for event in trace.events if isinstance(event, Submit)}
    return next(name for number in range(len(taken) + 1) if (name := f"{prefix} {number}") not in taken)
