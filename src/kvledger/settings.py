"""What a node is built from: sizes in tokens, and the bounds that its entry and its gate share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from kvledger.arithmetic import ceil_pages, ceil_tokens, floor_tokens, pages_of_window
from kvledger.decode import promised_output
from kvledger.policy import SchedulePolicy
from kvledger.request import USUAL_OUTPUT, Output
from kvledger.rules import SOUND_BESIDE_DECODE, SOUND_PRESETS, AccountingRules

Mode = Literal["prefill", "unified"]

FIRST_TOKEN = 1
"""A prefill node makes one token per request; the rest of the output is the decode node's."""

USUAL_RATIO_PERCENT = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a pipeline rank after the first has of its own, in tokens; "same": as much as rank 0."""

    pool_tokens: int | Literal["same"] = "same"
    host_tokens: int | Literal["same"] | None = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """A node's sizes in tokens. None: chunking off, no prefill limit, no host limit; host_tokens 0: no host tier.

    `state_slots` counts the recurrent states, of requests and of checkpoints, that the node has room for; None: no
    limit. `mode`: prefill alone, or decode beside it, where `mixed_chunk` lets decodes join a prefill batch.
    `max_running_requests` are the request slots (None: no limit), of which each of `pp_size` pipeline stages has its
    share. `preemption_threshold`: by how much more important a newcomer must be to put a running request back (None:
    never does). `new_token_ratio_percent`: the part of what is left of an output that is reserved at first.
    `prefix_cache`: whether computed prompts are kept for others. `ranks` are the pipeline ranks after the first, which
    is the node itself: they replay what it decides.

    Second pools, beside `state_slots`: each live request has `tracking_slots` state slots beside its own, and with
    `copy_on_write` a hit's checkpoint stays while its state is copied. `window_tokens`: a sliding window, whose pages
    come from a pool of `window_pool_tokens`. `shared_bytes` are what the KV pool, at `page_bytes` a page, and the state
    slots or window pages, at `state_slot_bytes` or `window_page_bytes`, are cut from.
    """

    page_size: int
    checkpoint_align: int
    chunked_prefill_size: int | None
    max_prefill_tokens: int | None
    pool_tokens: int
    host_tokens: int | None
    state_slots: int | None = None
    mode: Mode = "prefill"
    schedule_policy: SchedulePolicy = "fcfs"
    mixed_chunk: bool = False
    max_running_requests: int | None = None
    pp_size: int = 1
    preemption_threshold: int | None = None
    new_token_ratio_percent: int = USUAL_RATIO_PERCENT
    prefix_cache: bool = True
    ranks: tuple[RankSettings, ...] = ()
    tracking_slots: int = 0
    copy_on_write: bool = False
    window_tokens: int | None = None
    window_pool_tokens: int | None = None
    shared_bytes: int | None = None
    page_bytes: int | None = None
    state_slot_bytes: int | None = None
    window_page_bytes: int | None = None

    @property
    def pool_pages(self) -> int:
        """Whole pages in the pool, rounded down."""
        return self.pool_tokens // self.page_size

    @property
    def least_pool_pages(self) -> int:
        """Whole pages of the smallest pool of all ranks: what no rank has, nobody can be promised."""
        return min(of_rank(self, rank).pool_pages for rank in range(len(self.ranks) + 1))

    def needed_tokens(self, prompt_tokens: int, output: Output = USUAL_OUTPUT) -> int:
        """The one bound that entry and gate share: the most that a request's gate can ask of an empty pool.

        A request that was sent back asks no more, however much it has generated (see `most_new_tokens`). Where its
        gate is a simulation, that counts all of the output, and a page more as the prompt's last page moves.
        """
        if self.simulates(output):
            return prompt_tokens + output.max_new_tokens + 2 * self.page_size
        return prompt_tokens + promised_output(output.max_new_tokens, 0) + self.page_size

    def simulates(self, output: Output) -> bool:
        """Nothing is cached and the output's length is known: the gate asks whether everybody can come to an end."""
        return output.ignore_eos and not self.prefix_cache

    def fits_empty_pool(self, prompt_tokens: int, output: Output = USUAL_OUTPUT) -> bool:
        """The entry asks what the gate will ask."""
        return self.needed_tokens(prompt_tokens, output) < self.least_pool_pages * self.page_size

    def most_new_tokens(self, prompt_tokens: int) -> int:
        """The longest output that a gate counts on: with more, it could ask for more than there is."""
        return self.pool_pages * self.page_size - 1 - self.page_size - prompt_tokens

    def some_batch_holds(self, tokens: int, rules: AccountingRules) -> bool:
        """So much to compute fits a chunk, or can be cut under these rules; a prefill node does not ask (#36344)."""
        chunk = self.chunked_prefill_size
        if self.mode == "prefill" or chunk is None or ceil_tokens(tokens, self.page_size) <= chunk:
            return True
        most = floor_tokens(chunk, self.page_size)
        return floor_tokens(most, rules.cut_unit or self.page_size) > 0

    @property
    def sound_presets(self) -> frozenset[str]:
        """Presets under which nothing may break on such a node."""
        in_turn = self.mode == "prefill" and self.schedule_policy != "shortest-prefill-first" and not self.ranks
        in_turn = in_turn and self.window_tokens is None  # a window cuts a chunk before its budget is used up
        return SOUND_PRESETS if in_turn else SOUND_BESIDE_DECODE

    @property
    def request_slots(self) -> int | None:
        """A pipeline stage's share of the request slots; at least one."""
        limit = self.max_running_requests
        return None if limit is None else max(1, limit // self.pp_size)

    @property
    def window_pool_pages(self) -> int:
        """Whole pages in the window pool, rounded down; 0 where there is none."""
        return (self.window_pool_tokens or 0) // self.page_size

    @property
    def window_pages(self) -> int:
        """The most pages that a sliding window reaches into."""
        return 0 if self.window_tokens is None else pages_of_window(self.window_tokens, self.page_size)

    @property
    def slots_of_one(self) -> int:
        """State slots that a request's admission asks for, and what it must leave alone, at most."""
        return 1 + self.tracking_slots + (1 if self.copy_on_write else 0)

    def misfit_in_pools(self, prompt_tokens: int) -> str | None:
        """Why an empty second pool could never hold such a request, in words, or None."""
        pages = ceil_pages(prompt_tokens, self.page_size)
        if self.window_tokens is not None and self.chunked_prefill_size is None and pages > self.window_pool_pages:
            return (
                f"prompt {prompt_tokens} takes {pages} pages in one piece, more than the {self.window_pool_pages} of "
                "window_pool"
            )
        if self.shared_bytes is None:
            return None
        need = self.bytes_of_one(prompt_tokens)
        return (
            None
            if need <= self.shared_bytes
            else (f"prompt {prompt_tokens} takes {need} bytes, more than the {self.shared_bytes} of shared_bytes")
        )

    def bytes_of_one(self, prompt_tokens: int) -> int:
        """What one request's gate can ask of empty shared bytes: all its pages, its slots, and the pages of its window.

        Checkpoints are made of what is left, and those on its own hit are given up for it: but for the one that is
        copied, which only a prompt of more than a page can have.
        """
        pages = ceil_pages(prompt_tokens, self.page_size)
        need = pages * (self.page_bytes or 0)
        if self.state_slot_bytes is not None:
            copied = 1 if self.copy_on_write and pages == 1 else 0
            need += (self.slots_of_one - copied) * self.state_slot_bytes
        if self.window_page_bytes is not None:
            whole = self.chunked_prefill_size is None
            need += (pages if whole else min(pages, self.window_pages + 1)) * self.window_page_bytes
        return need

    @property
    def host_pages(self) -> int | None:
        return None if self.host_tokens is None else self.host_tokens // self.page_size


@lru_cache(maxsize=256)
def of_rank(node: NodeSettings, rank: int) -> NodeSettings:
    """The settings of one rank alone; rank 0 is the node."""
    if rank == 0:
        return replace(node, ranks=()) if node.ranks else node
    own = node.ranks[rank - 1]
    return replace(
        node,
        ranks=(),
        pool_tokens=node.pool_tokens if own.pool_tokens == "same" else own.pool_tokens,
        host_tokens=node.host_tokens if own.host_tokens == "same" else own.host_tokens,
    )
