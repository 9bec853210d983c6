"""The rules a scheduler keeps its books by: orthogonal switches, and the three presets of the post-mortem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingRules:
    """Switches of the admission accounting; sizes in tokens.

    checkpoint_align: where a non-final chunk must end: "node" takes the node's own grid, "page_size" any page
        boundary (upstream), a number is a grid of its own.
    reserve_tail: a cut request's tail and first token go into `rem_total_token_offset` (the fix).
    spend_gap: a cut zeroes the chunk budget, so that nobody is admitted behind it (the other fix).
    truncation_align: a fresh cut's length is rounded down to this split size (deterministic inference).
    continuation_limit: the half-done request runs no more than this in one round.
    chunk_grid: a cut's length, fresh or resumed, is rounded down to this grid of a kernel, which counts from the
        chunk's start; what is left of a half-done request's budget below one cell of it runs all the same.
    on_shortage: what happens to a half-done request when nothing remains: "force" its chunk, or "defer" it.
    decode_yields: decode leaves alone what a cut request was promised: running requests are sent back to the queue
        before they take a slot of a reserved tail, and what they may still grow does not shorten its chunk. Without
        `reserve_tail` there is no such promise, and nothing to yield to.
    rank_view: what the deciding pipeline rank counts with: "least", the smallest baseline of all ranks and the hit on
        which all agree, or its "own" alone.
    replay_gate: what a replaying rank does with the plan: "follow" it, "check" it against books of its own, or
        "reserve" tails in those too.
    promise_pools: what is admitted is promised in the second pools too until it is taken; without it a gate looks at
        what each of them can give right now.
    """

    checkpoint_align: int | Literal["node", "page_size"] = "node"
    reserve_tail: bool = False
    spend_gap: bool = False
    truncation_align: int | None = None
    continuation_limit: int | None = None
    chunk_grid: int | None = None
    on_shortage: Literal["force", "defer"] = "force"
    decode_yields: bool = True
    rank_view: Literal["least", "own"] = "least"
    replay_gate: Literal["follow", "check", "reserve"] = "follow"
    promise_pools: bool = True

    @property
    def tail_first(self) -> bool:
        """A reserved tail comes before decode."""
        return self.reserve_tail and self.decode_yields

    @property
    def cut_unit(self) -> int | None:
        """What a fresh cut's length is a multiple of, in tokens, before its end is aligned; None: of anything."""
        units = [unit for unit in (self.truncation_align, self.chunk_grid) if unit is not None]
        return math.lcm(*units) if units else None

    @property
    def uses_up_budget(self) -> bool:
        """A cut leaves less than a page of the chunk budget, so that nobody is admitted behind it."""
        shortened = self.cut_unit is not None or self.continuation_limit is not None
        return self.spend_gap or (self.checkpoint_align == "page_size" and not shortened)

    def grid_tokens(self, *, page_size: int, node_align: int) -> int:
        """The checkpoint grid in tokens on a node with this page size and grid."""
        if self.checkpoint_align == "node":
            return node_align
        if self.checkpoint_align == "page_size":
            return page_size
        return self.checkpoint_align


PRESETS: Mapping[str, AccountingRules] = MappingProxyType(
    {
        "upstream": AccountingRules(checkpoint_align="page_size"),
        "aligned": AccountingRules(),
        "tail-reserved": AccountingRules(reserve_tail=True),
    }
)

SOUND_PRESETS = frozenset({"upstream", "tail-reserved"})
"""Presets under which nothing may break on a prefill node that serves in order of arrival."""

SOUND_BESIDE_DECODE = frozenset({"tail-reserved"})
"""Presets under which no admitted prefill may break beside decode and under any schedule policy.

`upstream` is not among them: what shields its tails is that a cut uses up the chunk budget, and neither a running
request nor the continuation limit of shortest-prefill-first asks for that.
"""


def named_rules(name: str) -> AccountingRules:
    """A preset by its name. ValueError, one line, if there is none."""
    if name not in PRESETS:
        raise ValueError(f"{name!r} is none of {', '.join(PRESETS)}")
    return PRESETS[name]
