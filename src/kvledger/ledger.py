"""The two ledgers of one prefill round: memory (what the pool can still give) and compute (what the batch may run).

remaining = baseline (free + evictable, read live) - offset (promised this round and not yet allocated). An offset is
the sum of its entries, so a report can always say who was promised what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Due(StrEnum):
    """When a promise is allocated: in this batch, or in a later round."""

    NOW = "now"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class Promise:
    """`tokens` slots promised to `request`. Kinds: chunk, page_overhead, load_back, first_token, tail; beside decode
    also output (in the place of first_token), running (what it may still grow) and decode (a token of this batch).
    """

    request: str
    kind: str
    tokens: int
    due: Due


class MemoryLedger:
    """Promises of one round against a live baseline; all figures in tokens.

    The figures are whole, but beside decode, where a share of an output is an exact `Fraction`: it goes in and comes
    out as it is.

    The totals are kept beside the entries so that a read costs the same for one promise and for a thousand;
    `check` says whether they still are the entries' sums.
    """

    def __init__(self, baseline: Callable[[], int]) -> None:
        self._read_baseline = baseline
        self._entries: dict[str, list[Promise]] = {}
        self._due_tokens: dict[Due, int] = {Due.NOW: 0, Due.LATER: 0}

    @property
    def baseline(self) -> int:
        return self._read_baseline()

    @property
    def cur_rem_token_offset(self) -> int:
        """Promised for this batch."""
        return self._due_tokens[Due.NOW]

    @property
    def rem_total_token_offset(self) -> int:
        """Promised for this batch and for later rounds."""
        return self._due_tokens[Due.NOW] + self._due_tokens[Due.LATER]

    @property
    def cur_rem_tokens(self) -> int:
        """What this batch may still allocate."""
        return self.baseline - self.cur_rem_token_offset

    @property
    def rem_total_tokens(self) -> int:
        """What may still be promised."""
        return self.baseline - self.rem_total_token_offset

    def promise(self, request: str, kind: str, tokens: int, due: Due) -> None:
        self._entries.setdefault(request, []).append(Promise(request, kind, tokens, due))
        self._due_tokens[due] += tokens

    def promise_each(self, kind: str, shares: Iterable[tuple[str, int]], sum_tokens: int, due: Due) -> None:
        """A promise of one kind to each of many requests, whose sum is known and costs nothing to add up again."""
        for request, tokens in shares:
            self._entries.setdefault(request, []).append(Promise(request, kind, tokens, due))
        self._due_tokens[due] += sum_tokens

    def settle(self, request: str) -> None:
        """The request's share of this batch is allocated: from now on the baseline shows it."""
        entries = self._entries.get(request, [])
        kept = [entry for entry in entries if entry.due is not Due.NOW]
        self._due_tokens[Due.NOW] -= sum(entry.tokens for entry in entries if entry.due is Due.NOW)
        self._entries[request] = kept

    def forget(self, request: str) -> None:
        """Nothing is promised to this request any more."""
        for entry in self._entries.pop(request, []):
            self._due_tokens[entry.due] -= entry.tokens

    def take_back(self, request: str, kind: str, tokens: int | None = None) -> bool:
        """One promise of this kind (and so many `tokens`) is open to others again, to the last fraction; says whether
        there was one.
        """
        entries = self._entries.get(request, [])
        found = next((each for each in entries if each.kind == kind and tokens in (None, each.tokens)), None)
        if found is not None:
            self._due_tokens[found.due] -= found.tokens
            self._entries[request] = [entry for entry in entries if entry is not found]
        return found is not None

    def entries(self) -> Iterator[Promise]:
        """All open promises, in the order of the requests' admission."""
        for entries in self._entries.values():
            yield from entries

    def check(self) -> None:
        """Both offsets are the sums of their entries."""
        for due in Due:
            entries_tokens = sum(entry.tokens for entry in self.entries() if entry.due is due)
            assert entries_tokens == self._due_tokens[due], (
                f"offset due {due}: entries sum to {entries_tokens} tokens, the running total says "
                f"{self._due_tokens[due]}"
            )


@dataclass(slots=True)
class ComputeLedger:
    """New tokens this batch may still run; None is no limit (chunking off, no prefill limit)."""

    rem_chunk_tokens: int | None
    rem_input_tokens: int | None = field(default=None)

    def spend(self, tokens: int) -> None:
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= tokens
        if self.rem_input_tokens is not None:
            self.rem_input_tokens -= tokens

    def spend_gap(self) -> None:
        """Give up what is left of the chunk budget."""
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens = 0

    @property
    def exhausted(self) -> bool:
        return (self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0) or (
            self.rem_input_tokens is not None and self.rem_input_tokens <= 0
        )
