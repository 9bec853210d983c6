"""What a node is built from: sizes in tokens, and the bounds that its entry and its gate share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from kvledger.arithmetic import ceil_tokens, floor_tokens
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
        return SOUND_PRESETS if in_turn else SOUND_BESIDE_DECODE

    @property
    def request_slots(self) -> int | None:
        """A pipeline stage's share of the request slots; at least one."""
        limit = self.max_running_requests
        return None if limit is None else max(1, limit // self.pp_size)

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
