"""Prompts as lists of named segments, the cached pages they share, and a request's life on the node."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class OutputOf(str):
    """The segment that a request's own output is: no segment of a prompt equals it, whatever that is called."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputOf) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as [segment, tokens] runs. A token's identity is (segment, position in that run)."""

    segments: tuple[tuple[str, int], ...]
    tokens: int = field(init=False, compare=False)
    _page_keys: dict[int, tuple[Hashable, ...]] = field(init=False, compare=False, repr=False)

    def __init__(self, segments: Iterable[tuple[str, int]]) -> None:
        object.__setattr__(self, "segments", tuple((segment, tokens) for segment, tokens in segments))
        object.__setattr__(self, "tokens", sum(tokens for _, tokens in self.segments))
        object.__setattr__(self, "_page_keys", {})

    def page_keys(self, page_size: int) -> tuple[Hashable, ...]:
        """The identity of each full page: equal keys under equal parents hold the same tokens. Computed once a size."""
        keys = self._page_keys.get(page_size)
        if keys is None:
            keys = self._page_keys[page_size] = tuple(_page_keys(self.segments, page_size))
        return keys


def _page_keys(segments: Iterable[tuple[str, int]], page_size: int) -> Iterable[Hashable]:
    """(segment, offset) for a page inside one run, a tuple of (segment, offset, tokens) pieces for one across runs."""
    pieces: list[tuple[str, int, int]] = []
    room = page_size
    for segment, tokens in segments:
        offset = 0
        if pieces:
            offset = min(room, tokens)
            if offset:
                pieces.append((segment, 0, offset))
                room -= offset
            if room:
                continue
            yield tuple(pieces)
        whole_end = offset + (tokens - offset) // page_size * page_size
        for start in range(offset, whole_end, page_size):
            yield (segment, start)
        rest = tokens - whole_end
        pieces = [(segment, whole_end, rest)] if rest else []
        room = page_size - rest


@dataclass(frozen=True, slots=True)
class Output:
    """What a request may make of its prompt: at most `max_new_tokens`, all of them if it ignores the end of sequence.

    A larger `priority` goes first, where the schedule policy asks.
    """

    max_new_tokens: int = 1
    ignore_eos: bool = False
    priority: int = 0


USUAL_OUTPUT = Output()


class CachedPage:
    """One full page of a cached prefix. `page` is its device page number, None while it is only on the host."""

    __slots__ = (
        "children",
        "device_children",
        "key",
        "last_used",
        "lock_refs",
        "page",
        "parent",
        "pinned_refs",
        "serial",
    )

    def __init__(self, key: Hashable, parent: CachedPage | None, serial: int) -> None:
        self.key = key
        self.parent = parent
        self.serial = serial
        self.children: dict[Hashable, CachedPage] = {}
        self.device_children = 0
        self.page: int | None = None
        self.lock_refs = 0
        self.pinned_refs = 0
        self.last_used = 0


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    """In this round's batch, or half done between rounds: its prompt is not wholly computed."""
    IN_FLIGHT = "in flight"
    RUNNING = "running"
    """Its prompt is done and it decodes here, or joins those who do when the round ends."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """One request on the node; sizes in tokens, `pages` is its page table.

    The first `shared_pages` entries of `pages` live in the prefix tree, locked by this request; the rest are its own.
    """

    rid: str
    prompt: Prompt
    state: RequestState = RequestState.WAITING
    prefix_tokens: int = 0
    host_hit_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    device_hit: list[CachedPage] = field(default_factory=list)
    host_hit: list[CachedPage] = field(default_factory=list)
    locked: list[CachedPage] = field(default_factory=list)
    output: Output = USUAL_OUTPUT
    arrival: int = 0
    origin: Prompt | None = None
    generated_tokens: int = 0
    most_new_tokens: int | None = None

    @property
    def origin_tokens(self) -> int:
        """The prompt as it was submitted."""
        return (self.origin or self.prompt).tokens

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV it holds, or will when its prompt is done."""
        return max(self.prefix_tokens, self.prompt.tokens)

    @property
    def prompt_tokens(self) -> int:
        """What there is to compute before a new token; one that was sent back computes its output again too."""
        return self.prompt.tokens

    @property
    def max_new_tokens(self) -> int:
        return self.output.max_new_tokens

    @property
    def ignore_eos(self) -> bool:
        return self.output.ignore_eos

    @property
    def priority(self) -> int:
        return self.output.priority

    @property
    def shared_pages(self) -> int:
        return len(self.locked)
