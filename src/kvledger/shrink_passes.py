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
    Fault,
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
from kvledger.faults import FAULT_KINDS
from kvledger.pool_settings import misfit_of_pools
from kvledger.request import USUAL_OUTPUT, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings, RankSettings
from kvledger.trace import Trace

PLAIN_PREFILL: dict[str, Any] = {
    setting.name: setting.default
    for setting in fields(NodeSettings)
    if setting.name
    in (
        *("mode", "schedule_policy", "mixed_chunk", "max_running_requests", "pp_size"),
        *("preemption_threshold", "new_token_ratio_percent", "prefix_cache", "ranks"),
        *("tracking_slots", "copy_on_write"),
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
RANK_SIZES = tuple(setting.name for setting in fields(RankSettings))
RULE_SIZES = ("checkpoint_align", "truncation_align", "continuation_limit", "chunk_grid")
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
    Fault: 4,
    Pin: 5,
    Unpin: 3,
    Pause: 4,
    Resume: 3,
}
WITH_PROMPT = (Submit, Cached, Pin)
_LOCKED_WEIGHT = 2
_SEGMENT_WEIGHT = 2
_SHARED_WEIGHT = 1
_APART_WEIGHT = 1
# events of the same weight are sorted: what was there before the requests comes before them
_PLACES = {
    kind: place
    for place, kind in enumerate(
        (
            *(Cached, Hold, Submit, Release, Transferred, Abort, Round, Drain, Decode, Finish),
            *(Fault, Pin, Unpin, Pause, Resume),
        )
    )
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
        reached = getattr(event, "ranks", None)
        weight += _APART_WEIGHT * (reached is not None)
        match event:
            case Cached(tier, _, locked):
                details = [int(locked), int(tier == "host")]
                weight += _LOCKED_WEIGHT * locked
            case Submit(name, _, output) if output != USUAL_OUTPUT:
                details = [names.setdefault(name, len(names)), int(output.ignore_eos), abs(output.priority)]
                weight += sum(getattr(output, key.name) != key.default for key in fields(output))
            case Fault(kind, name, amount):
                details = [names.setdefault(name, len(names)), FAULT_KINDS.index(kind), int(bool(amount))]
                weight += bool(amount)
            case Submit(name) | Transferred(name) | Finish(name) | Abort(name) | Hold(name) | Pin(name) | Unpin(name):
                details = [names.setdefault(name, len(names))]
            case Release(name, tokens):
                details = [names.setdefault(name, len(names)), int(tokens is not None)]
                weight += tokens is not None
            case _:
                pass
        if isinstance(event, WITH_PROMPT):
            weight += _SEGMENT_WEIGHT * (len(event.prompt.segments) - 1)
            for segment, _ in event.prompt.segments:
                weight += _SHARED_WEIGHT * (segment in segments)
                details.append(segments.setdefault(segment, len(segments)))
        code.append((_PLACES[type(event)], *details, *(() if reached is None else (-1, *reached))))
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
    return len(limited), len(node.ranks), _own_sizes(node), host, limited


def _own_sizes(node: NodeSettings) -> int:
    """Sizes in which a pipeline's ranks are not like the first."""
    return sum(getattr(rank, name) != "same" for rank in node.ranks for name in RANK_SIZES)


# --- sizes, apart from what they are the sizes of


def sizes_of(trace: Trace) -> Sizes:
    """Every number of a trace that may shrink, in the order of `with_sizes`. A host of 0 is a switch, not a size."""
    sizes = [size for name in NODE_SIZES if (size := getattr(trace.node, name))]
    sizes += [size for rank in trace.node.ranks for name in RANK_SIZES if _is_size(size := getattr(rank, name))]
    if isinstance(trace.rules, AccountingRules):
        sizes += [size for name in RULE_SIZES if isinstance(size := getattr(trace.rules, name), int)]
    for event in trace.events:
        match event:
            case Submit(prompt=prompt) | Cached(prompt=prompt) | Pin(prompt=prompt):
                sizes += [tokens for _, tokens in prompt.segments]
                if isinstance(event, Submit) and event.output.max_new_tokens > 1:
                    sizes.append(event.output.max_new_tokens)
            case Hold(tokens=tokens) | Release(tokens=int(tokens)):
                sizes.append(tokens)
            case Fault(amount=int(amount)) if amount:
                sizes.append(amount)  # none at all is another thing than few
            case _:
                pass
    return tuple(sizes)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


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
    ranks = tuple(_rank_resized(rank, rest) for rank in trace.node.ranks)
    if any(isinstance(rank.pool_tokens, int) and rank.pool_tokens < page_size for rank in ranks):
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
    resized = replace(trace.node, ranks=ranks, **settings)
    return None if misfit_of_pools(resized) is not None else Trace(resized, rules, events)


def _rank_resized(rank: RankSettings, rest: Iterator[int]) -> RankSettings:
    sizes: dict[str, Any] = {name: next(rest) for name in RANK_SIZES if _is_size(getattr(rank, name))}
    return replace(rank, **sizes)


def _resized(event: Event, rest: Iterator[int]) -> Event:
    match event:
        case Submit(request, prompt, output):
            prompt = Prompt([(segment, next(rest)) for segment, _ in prompt.segments])
            if output.max_new_tokens > 1:
                output = replace(output, max_new_tokens=next(rest))
            return Submit(request, prompt, output)
        case Cached(prompt=prompt) | Pin(prompt=prompt):
            return replace(event, prompt=Prompt([(segment, next(rest)) for segment, _ in prompt.segments]))
        case Fault(kind, request, int(amount)) if amount:
            return Fault(kind, request, next(rest))
        case Hold() | Release(tokens=int()):
            return replace(event, tokens=next(rest))
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
    return rules.reserve_tail or rules.uses_up_budget


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
    held: dict[tuple[str, Ranks], int] = {}
    nesting = _Nesting()
    kept: list[Event] = []
    for event in events:
        match event:
            case Submit(request):
                submitted.add(request)
            case Transferred(request) | Finish(request) | Abort(request) if request not in submitted:
                continue
            case Fault(_, request) if request not in submitted:
                continue
            case Pin() | Unpin() | Pause() | Resume() | Drain() if not nesting.allows(event):
                continue
            case Hold(name, tokens, ranks):
                held[name, ranks] = held.get((name, ranks), 0) + tokens
            case Release(name, tokens, ranks):
                of = [key for key in held if key[0] == name and held[key] and ranks in (None, key[1])]
                if not of or (tokens or 0) > min(held[key] for key in of):
                    continue
                held.update((key, 0 if tokens is None else held[key] - tokens) for key in of)
            case _:
                pass
        kept.append(event)
    return tuple(kept)


class _Nesting:
    """What is pinned and whether the node is paused, event by event; a drain ends both."""

    def __init__(self) -> None:
        self._pinned: set[str] = set()
        self._paused = False

    def allows(self, event: Event) -> bool:
        """The event refers to what is there; it then happens."""
        match event:
            case Pin(name):
                self._pinned.add(name)
            case Unpin(name):
                if name not in self._pinned:
                    return False
                self._pinned.remove(name)
            case Pause() | Resume():
                if self._paused == isinstance(event, Pause):
                    return False
                self._paused = not self._paused
            case _:
                self._pinned.clear()
                self._paused = False
        return True


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
                yield replace(event, locked=False)
                yield Hold(unused, prompt.tokens, event.ranks)
            yield replace(event, tier="host" if tier == "device" else "device", locked=False)
        case Hold(_, tokens):
            yield Submit(unused, Prompt([(unused, tokens)]))
            yield Cached("device", Prompt([(unused, tokens)]), ranks=event.ranks)
        case Release(tokens=int()):
            yield replace(event, tokens=None)
        case Fault("load-short", request, amount) if amount:
            yield Fault("load-short", request, 0)
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
        if not isinstance(event, WITH_PROMPT):
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
            yield replace(_reaching_all(trace) if "ranks" in change else trace, node=simpler)


def simpler_ranks(trace: Trace) -> Iterator[Trace]:
    """A rank less; one like rank 0, in all or in one size, or without a host; an event that reaches all, or one."""
    ranks = trace.node.ranks
    for index, rank in enumerate(ranks):
        yield _without_rank(trace, index + 1)
        likes = [
            RankSettings(),
            replace(rank, pool_tokens="same"),
            replace(rank, host_tokens="same"),
            replace(rank, host_tokens=0),
        ]
        for like in likes:
            yield replace(trace, node=replace(trace.node, ranks=(*ranks[:index], like, *ranks[index + 1 :])))
    for index, event in enumerate(trace.events):
        reached: Ranks = getattr(event, "ranks", None)
        for fewer in () if reached is None else (None, *(((rank,) for rank in reached) if len(reached) > 1 else ())):
            changed = _on(event, fewer)
            yield _with_events(trace, (*trace.events[:index], changed, *trace.events[index + 1 :]))


def _on(event: Event, ranks: Ranks) -> Event:
    """The event as it reaches these ranks; what always reaches all stays."""
    match event:
        case Cached() | Transferred() | Abort() | Hold() | Release():
            return replace(event, ranks=ranks)
        case _:
            return event


def _without_rank(trace: Trace, gone: int) -> Trace:
    """The ranks after it move up; what reached it alone is gone with it."""
    node = replace(trace.node, ranks=(*trace.node.ranks[: gone - 1], *trace.node.ranks[gone:]))
    if not node.ranks:
        return replace(_reaching_all(trace), node=node)
    events: list[Event] = []
    for event in trace.events:
        reached: Ranks = getattr(event, "ranks", None)
        if reached is None:
            events.append(event)
            continue
        left = tuple(rank - (rank > gone) for rank in reached if rank != gone)
        if left:
            events.append(_on(event, left))
    return _with_events(replace(trace, node=node), events)


def _reaching_all(trace: Trace) -> Trace:
    """The same events on every rank: those that only others than rank 0 saw are gone."""
    events: list[Event] = []
    for event in trace.events:
        reached: Ranks = getattr(event, "ranks", None)
        if reached is None:
            events.append(event)
        elif 0 in reached:
            events.append(_on(event, None))
    return _with_events(trace, events)


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
    plain = _reaching_all(replace(trace, events=tuple(events)))
    return replace(plain, node=replace(trace.node, **PLAIN_PREFILL))


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
    """Requests A, B, C..., segments a, b, c..., holds H1, H2..., write-backs W1, W2..., each by first appearance; no
    segment of 0 tokens."""
    requests: dict[str, str] = {}
    segments: dict[str, str] = {}
    holds: dict[str, str] = {}
    pins: dict[str, str] = {}
    events: list[Event] = []
    for event in trace.events:
        match event:
            case Submit(request, prompt, output):
                name = requests.setdefault(request, letters(len(requests)).upper())
                events.append(Submit(name, _renamed(prompt, segments), output))
            case Cached(prompt=prompt):
                events.append(replace(event, prompt=_renamed(prompt, segments)))
            case Transferred(request) | Finish(request) | Abort(request):
                events.append(replace(event, request=requests[request]))
            case Fault(kind, request, amount):
                events.append(Fault(kind, requests[request], amount))
            case Pin(name, prompt):
                name = pins.setdefault(name, f"W{len(pins) + 1}")
                events.append(Pin(name, _renamed(prompt, segments)))
            case Unpin(name):
                events.append(Unpin(pins[name]))
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
        segment for event in trace.events if isinstance(event, WITH_PROMPT) for segment, _ in event.prompt.segments
    }
    taken |= {event.request for event in trace.events if isinstance(event, Submit)}
    return next(name for number in range(len(taken) + 1) if (name := f"{prefix} {number}") not in taken)
