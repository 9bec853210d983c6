"""Which state slots the sequences of a call read and write, and how their tokens fall into chunks: host integers only.

KDA and the convolution share a plan, so that a recurrent state and its window are always taken at the same token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch

from kvledger.kernels.tables import TableError, host_ints, upload, whole_numbers

CHUNK = 16
"""Tokens of a sub-chunk. Sub-chunks lie at multiples of 16 from the request's first token, not from the call's."""

NO_SLOT = -1
"""As a source: start from zero. As a destination or checkpoint: drop the state."""

TABLE_COLUMNS = 8


def grid_points(start: int, tokens: int, grid: int) -> range:
    """Positions in (start, start + tokens] that are multiples of `grid`: where a call can save a checkpoint."""
    return range((start // grid + 1) * grid, start + tokens + 1, grid)


@dataclass(frozen=True)
class StateSlots:
    """Per sequence of a call: where its state comes from, where it goes, and which checkpoints are kept.

    `starts` is the request's position of the call's first token; `checkpoints` holds one slot for each position of
    `grid_points`, in order, or is empty to keep none at all. A sequence's source may be its own destination; no other
    slot that is read or written may occur twice among those written: a checkpoint's slot is neither the source nor the
    destination. `NO_SLOT` keeps no checkpoint at its position.
    """

    sources: Sequence[int]
    destinations: Sequence[int]
    starts: Sequence[int]
    checkpoints: Sequence[Sequence[int]] = ()
    grid: int = 256

    def __post_init__(self) -> None:
        for name in ("sources", "destinations", "starts"):
            object.__setattr__(self, name, whole_numbers(name, getattr(self, name)))
        if not all(isinstance(row, Iterable) for row in self.checkpoints):
            raise TableError("checkpoints: got slots, expected a list of slots for each sequence")
        rows = tuple(whole_numbers(f"checkpoints[{n}]", row) for n, row in enumerate(self.checkpoints))
        object.__setattr__(self, "checkpoints", rows)

    @classmethod
    def none(cls, sequences: int) -> StateSlots:
        """Fresh requests whose states nobody keeps."""
        return cls((NO_SLOT,) * sequences, (NO_SLOT,) * sequences, (0,) * sequences)

    def check(self, lengths: Sequence[int], pool_slots: int | None) -> None:
        """TableError unless every slot is in the pool and no program of a launch reads what another one writes.

        `pool_slots` None: there is no pool, and no slot may be named.
        """
        count = len(lengths)
        for name in ("sources", "destinations", "starts"):
            if len(getattr(self, name)) != count:
                raise TableError(f"{len(getattr(self, name))} {name} for {count} sequences")
        if self.grid <= 0 or self.grid % CHUNK:
            raise TableError(f"checkpoint grid {self.grid} is not a positive multiple of {CHUNK}")
        if min(self.starts, default=0) < 0:
            raise TableError(f"negative start {min(self.starts)}")
        if self.checkpoints and len(self.checkpoints) != count:
            raise TableError(f"{len(self.checkpoints)} checkpoint lists for {count} sequences")
        for index, (row, start, tokens) in enumerate(zip(self.checkpoints, self.starts, lengths, strict=False)):
            wanted = len(grid_points(start, tokens, self.grid))
            if len(row) != wanted:
                raise TableError(
                    f"sequence {index}: {len(row)} checkpoint slots for {wanted} multiples of {self.grid} "
                    f"in ({start}, {start + tokens}]"
                )
        self._check_aliases(pool_slots)

    def _check_aliases(self, pool_slots: int | None) -> None:
        writers: dict[int, str] = {}
        rows = self.checkpoints or ((),) * len(self.sources)
        for index, (destination, row) in enumerate(zip(self.destinations, rows, strict=True)):
            for number, slot in enumerate((*row, destination)):
                _check_range(slot, pool_slots)
                writer = f"{f'checkpoint {number}' if number < len(row) else 'the destination'} of sequence {index}"
                if slot in writers:
                    raise TableError(f"slot {slot} is written twice: as {writers[slot]} and as {writer}")
                if slot != NO_SLOT:
                    writers[slot] = writer
        for index, slot in enumerate(self.sources):
            _check_range(slot, pool_slots)
            if slot in writers and slot != self.destinations[index]:
                raise TableError(f"slot {slot} is the source of sequence {index} and written as {writers[slot]}")


def _check_range(slot: int, pool_slots: int | None) -> None:
    if pool_slots is None and slot != NO_SLOT:
        raise TableError(f"slot {slot} is named, but no pool is given")
    if pool_slots is not None and not NO_SLOT <= slot < pool_slots:
        raise TableError(f"state slot {slot} outside [{NO_SLOT}, {pool_slots})")


@dataclass(frozen=True)
class Span:
    """One sequence of a call: its rows among the call's tokens, its chunks, its slots.

    `saves` pairs a count of this call's tokens with the slot that takes the state after them, checkpoints only.
    """

    first_token: int
    tokens: int
    first_chunk: int
    chunks: int
    source: int
    destination: int
    saves: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChunkPlan:
    """Spans, and a row per chunk: token row of lane 0 (negative where lane 0 is dead), live lanes [low, high), slot
    that takes the state after the chunk, sequence.
    """

    spans: tuple[Span, ...]
    chunks: tuple[tuple[int, int, int, int, int], ...]
    _on_device: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict, compare=False, repr=False)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 tables of 8 columns for kernels: chunks, spans, saves. Kept, so that all layers of a step share them.

        A chunk's row is as in `chunks`. A span's: first chunk, chunks, source, destination, first token, tokens, first
        save, saves. A save's: tokens before it, slot; the destination is the last save of its span.
        """
        key = str(device)
        if key not in self._on_device:
            spans: list[tuple[int, ...]] = []
            saves: list[tuple[int, ...]] = []
            for span in self.spans:
                own = [*span.saves, (span.tokens, span.destination)]
                row = (span.first_chunk, span.chunks, span.source, span.destination, span.first_token, span.tokens)
                spans.append((*row, len(saves), len(own)))
                saves.extend(own)
            self._on_device[key] = (_table(self.chunks, device), _table(spans, device), _table(saves, device))
        chunks, spans_table, saves_table = self._on_device[key]
        return chunks, spans_table, saves_table


def _table(rows: Iterable[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    padded = [(*row, *(0,) * (TABLE_COLUMNS - len(row))) for row in rows]
    return upload(torch.tensor(padded, dtype=torch.int64).reshape(-1, TABLE_COLUMNS), device)


@lru_cache(maxsize=32)
def plan_chunks(lengths: tuple[int, ...], slots: StateSlots) -> ChunkPlan:
    """Cut sequences of `lengths` tokens, concatenated, into sub-chunks; kept, so that all layers of a step share it."""
    spans: list[Span] = []
    chunks: list[tuple[int, int, int, int, int]] = []
    for index, tokens in enumerate(lengths):
        first_token = spans[-1].first_token + spans[-1].tokens if spans else 0
        saves = checkpoint_saves(slots, index, tokens)
        own = cut_span(slots.starts[index], tokens, saves, first_token, index)
        source, destination = slots.sources[index], slots.destinations[index]
        spans.append(Span(first_token, tokens, len(chunks), len(own), source, destination, saves))
        chunks.extend(own)
    return ChunkPlan(tuple(spans), tuple(chunks))


def checkpoint_saves(slots: StateSlots, index: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """Checkpoints that sequence `index` keeps: tokens of the call before each, and its slot."""
    start = slots.starts[index]
    points = grid_points(start, tokens, slots.grid)
    row = slots.checkpoints[index] if slots.checkpoints else (NO_SLOT,) * len(points)
    return tuple((point - start, slot) for point, slot in zip(points, row, strict=True) if slot != NO_SLOT)


def cut_span(
    start: int, tokens: int, saves: tuple[tuple[int, int], ...], first_token: int, index: int
) -> list[tuple[int, int, int, int, int]]:
    """Rows of `ChunkPlan.chunks` for one sequence whose first token is at `start` in its request."""
    chunks = []
    after = dict(saves)
    for position in range(start // CHUNK * CHUNK, start + tokens, CHUNK) if tokens else ():
        low, high = max(start - position, 0), min(start + tokens - position, CHUNK)
        save = after.get(position + CHUNK - start, NO_SLOT)
        chunks.append((first_token + position - start, low, high, save, index))
    return chunks


def sequence_lengths(
    batch: int, tokens: int, cu_seqlens: torch.Tensor | Sequence[int] | None, *, state_rows: int | None = None
) -> tuple[int, ...]:
    """Tokens per sequence, from `cu_seqlens` [N + 1] over a batch of one, or one sequence per batch row.

    A CUDA tensor costs a synchronisation: a caller that has the numbers on the host passes them as a sequence.
    """
    if cu_seqlens is None:
        lengths = (tokens,) * batch
    else:
        if isinstance(cu_seqlens, torch.Tensor):
            if cu_seqlens.dim() != 1:
                raise TableError(f"cu_seqlens: got {[*cu_seqlens.shape]}, expected [N + 1]")
            cu_seqlens = cu_seqlens.cpu()
        bounds = host_ints("cu_seqlens", cu_seqlens).tolist()
        if batch != 1:
            raise TableError(f"cu_seqlens needs a batch of 1, not {batch}")
        if not bounds or bounds[0] != 0 or bounds[-1] != tokens:
            raise TableError(f"cu_seqlens must run from 0 to {tokens}, not {[*bounds[:1], *bounds[-1:]]}")
        lengths = tuple(end - begin for begin, end in pairwise(bounds))
        if min(lengths, default=0) < 0:
            raise TableError("cu_seqlens decreases")
    if state_rows is not None and state_rows != len(lengths):
        raise TableError(f"{state_rows} states for {len(lengths)} sequences")
    return lengths
