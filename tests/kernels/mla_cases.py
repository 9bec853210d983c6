"""A batch of requests over a poisoned pool, built in plain loops and without the code under test."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from kvledger.kernels.launch import Backend
from kvledger.kernels.mla import mla_prefill, plan_prefill
from kvledger.kernels.mla_reference import reference_prefill

Style = Literal["default", "sharp", "rising", "falling"]

NAN_WORDS = {torch.float32: 0x7FC0DEAD, torch.bfloat16: 0x7FDE}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True)
class Case:
    """``lengths[n]`` new tokens of request n after ``starts[n]`` of its own; every unused row of the pool is NaN.

    ``rising`` and ``falling`` scores move the running maximum in every key block and never; ``sharp`` ones leave a few
    keys with all the weight, as attention sinks do.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    page_size: int = 16
    heads: int = 2
    rank: int = 16
    rope: int = 8
    dtype: torch.dtype = torch.float32
    style: Style = "default"
    seed: int = 0
    spare_pages: int = 3
    layers: int = 1
    scale: float = field(default=0.25)

    @property
    def width(self) -> int:
        return self.rank + self.rope

    @property
    def ends(self) -> list[int]:
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @property
    def cu_seqlens(self) -> list[int]:
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @cached_property
    def latents(self) -> list[torch.Tensor]:
        """Per request [end, width]; a request's numbers depend on its index and the seed, not on its company."""
        drawn = []
        for n, end in enumerate(self.ends):
            values = torch.randn(end, self.width, generator=torch.Generator().manual_seed(1000 * self.seed + n))
            if self.style in ("rising", "falling"):
                slope = torch.linspace(0.0, 6.0, max(end, 1))[:end, None]
                values = values * 0.3 + (slope if self.style == "rising" else 6.0 - slope)
            drawn.append(values.to(self.dtype))
        return drawn

    @cached_property
    def queries(self) -> list[torch.Tensor]:
        """Per request [end, heads, width], one for each position, prefix too."""
        drawn = []
        for n, end in enumerate(self.ends):
            generator = torch.Generator().manual_seed(1000 * self.seed + n + 500)
            values = torch.randn(end, self.heads, self.width, generator=generator)
            if self.style in ("rising", "falling"):
                values = values * 0.3 + 0.3
            drawn.append((values * (6.0 if self.style == "sharp" else 1.0)).to(self.dtype))
        return drawn

    @property
    def q(self) -> torch.Tensor:
        parts = [query[start:] for query, start in zip(self.queries, self.starts, strict=True)]
        return torch.cat(parts) if parts else torch.zeros(0, self.heads, self.width, dtype=self.dtype)


@dataclass(frozen=True)
class Memory:
    """A pool [num_pages, page_size, width] and each request's pages in it."""

    pages: torch.Tensor
    tables: list[list[int]]

    @property
    def page_table(self) -> torch.Tensor:
        """[N, longest + 1] int32; what no request needs is a number far outside the pool."""
        longest = max([1, *(len(table) + 1 for table in self.tables)])
        table = torch.full((len(self.tables), longest), 1 << 30, dtype=torch.int32)
        for n, numbers in enumerate(self.tables):
            table[n, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        return table


def lay_out(case: Case, *, page_seed: int = 0, ends: list[int] | None = None, garbage: float | None = None) -> Memory:
    """Put each request's latents, up to ``ends``, into pages picked at random; the rest is NaN, or ``garbage``."""
    ends = case.ends if ends is None else ends
    needed = [-(-end // case.page_size) for end in case.ends]
    num_pages = sum(needed) + case.spare_pages
    whole = torch.empty(num_pages, case.layers, case.page_size, case.width, dtype=case.dtype)
    if garbage is None:
        whole.view(INTEGERS[case.dtype]).fill_(NAN_WORDS[case.dtype])
    else:
        whole.fill_(garbage)
    pages = whole[:, case.layers - 1]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_seed)).tolist()
    tables, taken = [], 0
    for n, count in enumerate(needed):
        tables.append(order[taken : taken + count])
        taken += count
        for position in range(ends[n]):
            pages[tables[n][position // case.page_size], position % case.page_size] = case.latents[n][position]
    return Memory(pages, tables)


def run(
    case: Case, memory: Memory, *, backend: Backend = "torch", block: tuple[int, int] | None = None
) -> torch.Tensor:
    plan = plan_prefill(memory.pages, memory.page_table, case.cu_seqlens, case.starts, backend=backend, block=block)
    out: torch.Tensor = mla_prefill(case.q, memory.pages, plan, scale=case.scale, rank=case.rank)
    return out


def reference(case: Case, memory: Memory) -> torch.Tensor:
    lengths, starts = list(case.lengths), list(case.starts)
    out: torch.Tensor = reference_prefill(case.q, memory.pages, memory.tables, lengths, starts, case.scale, case.rank)
    return out


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(words(one), words(other))


def error_ratios(out: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root-mean-square error over the whole batch, and of the worst token, relative to the exact result's."""
    if not exact.numel():
        return 0.0, 0.0
    error, size = (out.double() - exact).square().mean((1, 2)), exact.square().mean((1, 2))
    return float((error.mean() / size.mean()).sqrt()), float((error / size).max().sqrt())
