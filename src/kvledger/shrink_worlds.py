"""Small worlds: the simplest experiments there are, in the shrinker's order, whatever it is that it shrinks.

Descending from a trace ends where its mechanism ends: no small step leads from a tail that a load-back spends to one
that a short prompt spends, though the second is simpler. So short shapes are tried from scratch too, simplest first, on
a few roomy nodes and with sizes at landmarks (one token, a page, what a cut leaves over, the most that fits...). What
is found depends on the target and the rules alone; that is what makes the result the same from any seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from kvledger.node import NodeSettings
from kvledger.request import Prompt
from kvledger.rules import AccountingRules
from kvledger.shrink_passes import RULE_SIZES, letters, repaired, shape_key
from kvledger.trace import Abort, Cached, Drain, Event, Hold, Round, Submit, Trace, Transferred

SHAPE_EVENTS = 4
"""Shapes of so many events are tried: there are hundreds of them, and thousands with one more."""
TRIES_PER_SHAPE = 64
_FINE, _COARSE = 1, 4
"""Page sizes tried: first without any rounding to pages, then with plenty."""

Shape = tuple[Event, ...]
"""Events whose sizes mean nothing yet: every segment and hold stands for a size to be chosen."""


@cache
def shapes() -> tuple[Shape, ...]:
    """Every shape of up to SHAPE_EVENTS events that could break something, the simplest first."""
    found: dict[tuple[object, ...], Shape] = {}
    for length in range(SHAPE_EVENTS):
        for kinds in product(_BEFORE_THE_END, repeat=length):
            for shape in _with_names(kinds):
                for end in _ends(shape):
                    whole = (*shape, end)
                    if _sensible(whole):
                        found.setdefault((len(whole), *shape_key(whole)), whole)
    return tuple(found[key] for key in sorted(found))


def _submit(segments: tuple[int, ...], events: Shape) -> Event:
    number = sum(isinstance(event, Submit) for event in events)
    return Submit(letters(number).upper(), _prompt(segments))


def _prompt(segments: Iterable[int]) -> Prompt:
    return Prompt([(letters(segment), 1) for segment in segments])


def _segments_of(events: Iterable[Event]) -> int:
    names = {name for event in events if isinstance(event, (Submit, Cached)) for name, _ in event.prompt.segments}
    return len(names)


def _new(events: Shape) -> Iterator[tuple[int, ...]]:
    """A prompt nobody has seen; one seen before; one that goes on from it."""
    fresh = _segments_of(events)
    yield (fresh,)
    for seen in range(fresh):
        yield (seen,)
        yield (seen, fresh)


_Kind = Callable[[Shape], Iterator[Event]]


def _submits(events: Shape) -> Iterator[Event]:
    return (_submit(segments, events) for segments in _new(events))


def _cached(tier: str, locked: bool) -> _Kind:
    def make(events: Shape) -> Iterator[Event]:
        for segments in _new(events):
            if len(segments) == 1:
                yield Cached(tier, _prompt(segments), locked)  # type: ignore[arg-type]

    return make


def _rounds(events: Shape) -> Iterator[Event]:
    if any(isinstance(event, Submit) for event in events):
        yield Round()


def _holds(events: Shape) -> Iterator[Event]:
    yield Hold(f"H{sum(isinstance(event, Hold) for event in events) + 1}", 1)


def _endings(events: Shape) -> Iterator[Event]:
    if any(isinstance(event, (Round, Drain)) for event in events):
        for event in events:
            if isinstance(event, Submit):
                yield Transferred(event.request)
                yield Abort(event.request)


_BEFORE_THE_END: tuple[_Kind, ...] = (
    _submits,
    _cached("device", False),
    _cached("device", True),
    _cached("host", False),
    _rounds,
    _holds,
    _endings,
)


def _with_names(kinds: tuple[_Kind, ...]) -> Iterator[Shape]:
    partial: list[Shape] = [()]
    for kind in kinds:
        partial = [(*events, event) for events in partial for event in kind(events)]
    return iter(partial)


def _ends(shape: Shape) -> Iterator[Event]:
    yield Drain()
    yield from _endings(shape)


def _sensible(shape: Shape) -> bool:
    """Somebody is submitted, and what is cached is of use to a later prompt (or takes room by its lock)."""
    if not any(isinstance(event, Submit) for event in shape):
        return False
    for index, event in enumerate(shape):
        if isinstance(event, Cached) and not event.locked and not _used(event.prompt, shape[index + 1 :]):
            return False
    return True


def _used(prompt: Prompt, later: Shape) -> bool:
    first = prompt.segments[0][0]
    return any(isinstance(event, Submit) and event.prompt.segments[0][0] == first for event in later)


# --- sizes for a shape


@dataclass(frozen=True, slots=True)
class World:
    """A roomy node, and the sizes that mean something on it."""

    node: NodeSettings
    landmarks: tuple[int, ...]


@cache
def worlds(page_size: int) -> tuple[World, ...]:
    """Chunks just below the next grid step, of whole grid steps, below the grid, inside a page; and no chunks."""
    grid = 8 * page_size
    sizes = (
        (grid, 2 * grid - page_size, 5 * grid),
        (page_size, 4 * page_size, 3 * grid),
        (grid, None, 3 * grid),
        (grid, 3 * page_size, 3 * grid),
        (grid, 3 * grid + page_size // 2, 10 * grid),
    )
    return tuple(_world(page_size, *size) for size in sizes)


def _world(page_size: int, grid: int, chunk: int | None, pool: int) -> World:
    node = NodeSettings(
        page_size=page_size,
        checkpoint_align=grid,
        chunked_prefill_size=chunk,
        max_prefill_tokens=None,
        pool_tokens=pool,
        host_tokens=None,
    )
    most = pool - page_size - 2
    landmarks = {1, page_size, grid, most, most // 2, (chunk or pool) % grid or 1, (chunk or pool // 2) + 1}
    return World(node, tuple(sorted(landmarks)))


def small_traces(shape: Shape, page_size: int, rules: str | AccountingRules) -> Iterator[Trace]:
    """Traces of a shape on the small worlds of a page size: all sizes at landmarks, or a fixed choice of them."""
    names = sorted({name for event in shape for name in _size_names(event)})
    choices = [(world, sizes) for world in worlds(page_size) for sizes in product(world.landmarks, repeat=len(names))]
    # drawn, because neighbours in the product are much alike; from a seed of its own, because it must repeat
    order = random.Random(len(choices)).sample(choices, min(TRIES_PER_SHAPE, len(choices)))
    for world, sizes in order:
        tokens = dict(zip(names, sizes, strict=True))
        yield Trace(world.node, _on_grid(rules, world.node), tuple(_sized(event, tokens) for event in shape))


def _size_names(event: Event) -> list[str]:
    match event:
        case Submit(prompt=prompt) | Cached(prompt=prompt):
            return [segment for segment, _ in prompt.segments]
        case Hold(name):
            return [name]
    return []


def _sized(event: Event, tokens: dict[str, int]) -> Event:
    match event:
        case Submit(prompt=prompt) | Cached(prompt=prompt):
            return replace(event, prompt=Prompt([(segment, tokens[segment]) for segment, _ in prompt.segments]))
        case Hold(name):
            return Hold(name, tokens[name])
    return event


def _on_grid(rules: str | AccountingRules, node: NodeSettings) -> str | AccountingRules:
    """Rules with grids of their own get the node's: numbers of another node's size would mean nothing here."""
    if isinstance(rules, str):
        return rules
    own = {name: node.checkpoint_align for name in RULE_SIZES if isinstance(getattr(rules, name), int)}
    return replace(rules, **own) if own else rules  # type: ignore[arg-type]
