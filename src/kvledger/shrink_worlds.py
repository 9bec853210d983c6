"""Small worlds: the simplest experiments there are, in the shrinker's order, whatever it is that it shrinks.

Descending from a trace ends where its mechanism ends: no small step leads from a tail that a load-back spends to one
that a short prompt spends, though the second is simpler. So short shapes are tried from scratch too, simplest first, on
a few roomy nodes and with sizes at landmarks (one token, a page, what a cut leaves over, the most that fits...). What
is found depends on the target and the rules alone; that is what makes the result the same from any seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

from kvledger.arithmetic import ceil_tokens
from kvledger.events import (
    Abort,
    Cached,
    Drain,
    Event,
    Hold,
    Round,
    Submit,
    Tier,
    Transferred,
)
from kvledger.request import Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.shrink_passes import RULE_SIZES, Measure, letters, shape_key
from kvledger.trace import Trace

SHAPE_EVENTS = 4
"""Shapes of up to so many events are tried: about a hundred, and thousands with one more."""
TRIES = 128
"""So many traces are tried of a shape of up to three events on nodes of the finest pages, half as many of four."""
COARSE_PAGES: Mapping[int, int] = {2: 32, 4: 32}
"""Page sizes with a little and with plenty of rounding, and how many traces are tried with each."""

Shape = tuple[Event, ...]
"""Events whose sizes mean nothing yet: every segment and hold stands for a size to be chosen."""


def small_worlds(rules: str | AccountingRules, finest: int = 1) -> Iterator[tuple[Measure, Iterator[Trace]]]:
    """Small traces in the order of their outlines, and each outline. `finest` is the smallest page size to try."""
    pages = {finest: TRIES} | {page: tries for page, tries in COARSE_PAGES.items() if page > finest}
    for length in range(1, SHAPE_EVENTS + 1):
        for page, tries in pages.items():
            for shape in shapes(length):
                yield (length, page, *shape_key(shape)), _instances(shape, page, rules, tries)


# --- shapes


@cache
def shapes(length: int) -> tuple[Shape, ...]:
    """Every shape of so many events that could break something, the simplest first."""
    found: dict[Measure, Shape] = {}
    for kinds in product(_KINDS, repeat=length - 1):
        for shape in _shapes_of(kinds):
            for end in _ends(shape):
                if _sensible((*shape, end)):
                    found.setdefault(shape_key((*shape, end)), (*shape, end))
    return tuple(found[key] for key in sorted(found))


Kind = Callable[[Shape], Iterable[Event]]
"""The events of a kind that may follow a shape."""


def _shapes_of(kinds: Iterable[Kind]) -> list[Shape]:
    shapes: list[Shape] = [()]
    for kind in kinds:
        shapes = [(*shape, event) for shape in shapes for event in kind(shape)]
    return shapes


def _submits(shape: Shape) -> Iterator[Event]:
    """A prompt nobody has seen, one seen before, and one that goes on from it."""
    name = letters(_count(shape, Submit)).upper()
    segments = _segments(shape)
    fresh = letters(len(segments))
    yield Submit(name, _prompt(fresh))
    for seen in segments:
        yield Submit(name, _prompt(seen))
        yield Submit(name, _prompt(seen, fresh))


def _cached(tier: Tier, *, locked: bool = False) -> Kind:
    def kind(shape: Shape) -> Iterator[Event]:
        segments = _segments(shape)
        for segment in (*segments, letters(len(segments))):
            yield Cached(tier, _prompt(segment), locked)

    return kind


def _holds(shape: Shape) -> Iterator[Event]:
    yield Hold(f"H{_count(shape, Hold) + 1}", 1)


def _rounds(shape: Shape) -> Iterator[Event]:
    if _count(shape, Submit):
        yield Round()


def _ends(shape: Shape) -> Iterator[Event]:
    """Where something may break: as requests run, as one ends, or as somebody else takes slots of what is in use."""
    yield Drain()
    yield from _endings(shape)
    if not shape or _count(shape, Round):
        yield from _cached("device")(shape)
        yield from _holds(shape)


def _endings(shape: Shape) -> Iterator[Event]:
    """What may end each request, once a round has begun any."""
    for event in shape:
        if isinstance(event, Submit) and _count(shape, Round):
            yield Transferred(event.request)
            yield Abort(event.request)


_KINDS: tuple[Kind, ...] = (
    _submits,
    _cached("device"),
    _cached("device", locked=True),
    _cached("host"),
    _holds,
    _rounds,
    _endings,
)


def _sensible(shape: Shape) -> bool:
    """Somebody is submitted; what is cached matters to somebody; and no other order of events says the same."""
    if not _count(shape, Submit):
        return len(shape) == 1 and not _count(shape, Drain)
    for index, (event, following) in enumerate(pairwise(shape)):
        if isinstance(event, Round) and isinstance(following, Drain):
            return False
        if isinstance(event, Submit) and isinstance(following, (Cached, Hold)):
            return False
        if isinstance(event, Cached) and not event.locked and not _continued(event.prompt, shape[index + 1 :]):
            return False
    return True


def _continued(prompt: Prompt, later: Shape) -> bool:
    first, _ = prompt.segments[0]
    return any(isinstance(event, Submit) and event.prompt.segments[0][0] == first for event in later)


def _count(shape: Shape, kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in shape)


def _segments(shape: Shape) -> tuple[str, ...]:
    """The segments so far, in order of appearance, which is that of their letters."""
    names = {name for event in shape if isinstance(event, (Submit, Cached)) for name, _ in event.prompt.segments}
    return tuple(sorted(names))


def _prompt(*segments: str) -> Prompt:
    return Prompt([(segment, 1) for segment in segments])


# --- sizes for a shape


@cache
def nodes(page_size: int) -> tuple[NodeSettings, ...]:
    """Chunks that end half a grid step too far, on each page, below the first grid step, inside a page; and none."""
    grid = 8 * page_size
    sizes = (
        (grid, grid + grid // 2, 4 * grid),
        (page_size, 4 * page_size, 3 * grid),
        (grid, grid - 2 * page_size, 3 * grid),
        (grid, grid + page_size // 2, 3 * grid),
        (page_size, None, 3 * grid),
    )
    return tuple(
        NodeSettings(
            page_size=page_size,
            checkpoint_align=align,
            chunked_prefill_size=chunk,
            max_prefill_tokens=None,
            pool_tokens=pool,
            host_tokens=None,
        )
        for align, chunk, pool in sizes
    )


def _instances(shape: Shape, page_size: int, rules: str | AccountingRules, tries: int) -> Iterator[Trace]:
    """Traces of a shape: a fixed choice of nodes, and of a landmark for each segment and hold."""
    names = list(dict.fromkeys(name for event in shape for name in _size_names(event)))
    choices = [(node, marks) for node in nodes(page_size) for marks in product(_LANDMARKS, repeat=len(names))]
    tries = min(tries if len(shape) < SHAPE_EVENTS else tries // 2, len(choices))
    # drawn, because neighbours in the product are much alike; from a seed of its own, because it must repeat
    for node, marks in random.Random(0).sample(choices, tries):
        tokens = _tokens(node, names, marks)
        yield Trace(node, _on_grid(rules, node), tuple(_sized(event, tokens) for event in shape))


Landmark = Callable[[NodeSettings, int], int]
"""A size on a node where `room` tokens still pass the gate of a sound scheduler."""


def _one(_node: NodeSettings, _room: int) -> int:
    return 1


def _half_grid(node: NodeSettings, _room: int) -> int:
    """Fits in what a cut leaves of the chunk budget, if anything of use does."""
    return max(node.page_size, node.checkpoint_align // 2)


def _half(_node: NodeSettings, room: int) -> int:
    return room // 2


def _just_fits(_node: NodeSettings, room: int) -> int:
    return room


def _page_too_many(node: NodeSettings, room: int) -> int:
    return room + node.page_size


_LANDMARKS: tuple[Landmark, ...] = (_one, _half_grid, _half, _just_fits, _page_too_many)


def _tokens(node: NodeSettings, names: Iterable[str], marks: Iterable[Landmark]) -> dict[str, int]:
    """A size for each name, each at its landmark once those before it have been charged."""
    tokens: dict[str, int] = {}
    room = node.pool_tokens - node.page_size - 2
    for name, mark in zip(names, marks, strict=True):
        tokens[name] = max(1, mark(node, room))
        room -= ceil_tokens(tokens[name], node.page_size) + node.page_size + 1
        if room < 1:
            room = node.pool_tokens - node.page_size - 2
    return tokens


def _size_names(event: Event) -> list[str]:
    match event:
        case Submit(prompt=prompt) | Cached(prompt=prompt):
            return [segment for segment, _ in prompt.segments]
        case Hold(name):
            return [name]
        case _:
            return []


def _sized(event: Event, tokens: Mapping[str, int]) -> Event:
    match event:
        case Submit(prompt=prompt) | Cached(prompt=prompt):
            return replace(event, prompt=Prompt([(segment, tokens[segment]) for segment, _ in prompt.segments]))
        case Hold(name):
            return Hold(name, tokens[name])
        case _:
            return event


def _on_grid(rules: str | AccountingRules, node: NodeSettings) -> str | AccountingRules:
    """Rules with grids of their own get this node's: numbers meant for another would mean nothing here."""
    if isinstance(rules, str):
        return rules
    own: dict[str, Any] = {name: node.checkpoint_align for name in RULE_SIZES if isinstance(getattr(rules, name), int)}
    return replace(rules, **own) if own else rules
