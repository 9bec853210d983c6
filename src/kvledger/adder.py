"""PrefillAdder: decides on paper who joins this round's prefill batch, and how much of whom.

It owns no memory. Any allocator with `available_size()` and any cache with `full_evictable_size()` or
`evictable_size()` will do; a cache that can lock and load back offers `inc_lock_ref(req)`, `dec_lock_ref(req)` and
`init_load_back(req)` as well. Step numbers in comments are those of a node's round: 2 resume, 3 admit, 4 align,
5 charge, 6 reserve, 7 state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

from kvledger.arithmetic import align_chunk_end, ceil_tokens, floor_or_keep, floor_tokens, whole_number
from kvledger.ledger import ComputeLedger, Due, MemoryLedger
from kvledger.rules import AccountingRules, named_rules

ChunkKind = Literal["whole", "truncated", "resumed"]


class AddReqResult(StrEnum):
    """The adder's answer: go on, memory is short, or a compute budget (or the one half-done place) is.

    It says whether to ask for another, not whether this one was admitted: who is in `can_run_list` was.
    """

    CONTINUE = "CONTINUE"
    NO_TOKEN = "NO_TOKEN"
    OTHER = "OTHER"


class PrefillRequest(Protocol):
    """What the adder reads of a request; sizes in tokens.

    `prefix_tokens` has its KV on the device: the usable device hit of a waiting request, or what a half-done one has
    computed. `host_hit_tokens` follows it and must be loaded back.
    """

    @property
    def rid(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def host_hit_tokens(self) -> int: ...


class BesidePool(Protocol):
    """A pool that a request takes of beside its KV pages (see `pools.SecondPool`)."""

    @property
    def name(self) -> str: ...
    def lock(self, req: Any) -> None: ...
    def unlock(self, req: Any) -> None: ...
    def holdable(self, req: Any, start: int, tokens: int) -> int: ...
    def make_way(self, req: Any, start: int, tokens: int) -> None: ...
    def promise(self, req: Any, start: int, tokens: int) -> None: ...
    def await_chunk(self, req: Any) -> None: ...


class Allocator(Protocol):
    """Says how many slots are free, in tokens."""

    def available_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part [start, end) of a request's prompt that this batch runs; `load_back` tokens were copied up before it."""

    request: PrefillRequest
    kind: ChunkKind
    start: int
    end: int
    load_back: int = 0

    @property
    def tokens(self) -> int:
        return self.end - self.start


def _nothing(_req: PrefillRequest) -> None:
    """Stands in for a hook that the cache does not have."""


def _check_sizes(req: PrefillRequest) -> None:
    prompt_tokens = whole_number("prompt_tokens", req.prompt_tokens, 0, of=req.rid)
    cached_tokens = whole_number("prefix_tokens", req.prefix_tokens, 0, of=req.rid)
    cached_tokens += whole_number("host_hit_tokens", req.host_hit_tokens, 0, of=req.rid)
    if cached_tokens > prompt_tokens:
        raise ValueError(
            f"prompt_tokens of {req.rid!r}: {prompt_tokens} is below its prefix_tokens and host_hit_tokens, "
            f"{cached_tokens}"
        )


class Loading:
    """Of which there is one, `LOADING`: what `init_load_back` returns where the slots are taken and locked by now, and
    what is to lie in them arrives in a later round."""


LOADING = Loading()


class PrefillAdder:
    """One round's admission: fresh offsets, `add_chunked_req` for the half-done request, `add_one_req` for the others.

    Sizes are tokens. `rem_chunk_tokens` None turns chunking off, `rem_input_tokens` None lifts the prefill limit.
    `tree_cache` needs `full_evictable_size()` (preferred, for hybrid pools) or `evictable_size()`. Only the deciding
    rank reserves tails: a rank that replays a plan must not refuse what was admitted. `chunked_req_limit` is for a
    schedule policy that keeps a part of the chunk budget from the half-done request. `pools` are asked after the gate:
    a candidate is admitted in all of them or in none; `short_of` names the one that refused the last one.

    `init_load_back(req)` may say that less than the host hit came: it returns the tokens that did and can be used,
    which are then in `req.prefix_tokens`, locked with the rest, with nothing left in `req.host_hit_tokens`; the request
    is decided on afresh. It may also return `LOADING`: the request is admitted, is in `loading`, and is no chunk of
    this batch; `await_load` promises it anew in each round, until `add_loaded_req` may run it.

    ValueError, one line with argument and value, for sizes that cannot be, and for a request that is in the batch.
    """

    output_kind = "first_token"

    def __init__(
        self,
        page_size: int,
        tree_cache: Any,
        token_to_kv_pool_allocator: Allocator,
        *,
        rem_input_tokens: int | None,
        rem_chunk_tokens: int | None,
        rules: AccountingRules | str = "tail-reserved",
        checkpoint_align: int = 256,
        first_token: int = 1,
        deciding_rank: bool = True,
    ) -> None:
        self.page_size = whole_number("page_size", page_size, 1)
        for name, budget in (("rem_input_tokens", rem_input_tokens), ("rem_chunk_tokens", rem_chunk_tokens)):
            if budget is not None:
                whole_number(name, budget, 0)
        whole_number("checkpoint_align", checkpoint_align, 1)
        whole_number("first_token", first_token, 0)
        self.rules = named_rules(rules) if isinstance(rules, str) else rules
        self.grid_tokens = self.rules.grid_tokens(page_size=page_size, node_align=checkpoint_align)
        self.first_token = first_token
        self.deciding_rank = deciding_rank
        self.compute = ComputeLedger(rem_chunk_tokens, rem_input_tokens)
        evictable: Callable[[], int] = getattr(tree_cache, "full_evictable_size", None) or tree_cache.evictable_size
        available = token_to_kv_pool_allocator.available_size
        self.memory = MemoryLedger(lambda: available() + evictable())
        self._lock: Callable[[PrefillRequest], Any] = getattr(tree_cache, "inc_lock_ref", _nothing)
        self._unlock: Callable[[PrefillRequest], Any] = getattr(tree_cache, "dec_lock_ref", _nothing)
        self._load_back: Callable[[PrefillRequest], int | Loading | None] = getattr(
            tree_cache, "init_load_back", _nothing
        )
        self.can_run_list: list[Chunk] = []
        self._taken: dict[str, str] = {}
        self.loading: list[PrefillRequest] = []
        self.chunked_req: PrefillRequest | None = None
        self.chunked_req_limit: int | None = None
        self.pools: Sequence[BesidePool] = ()
        self.short_of: str | None = None
        self._resuming: PrefillRequest | None = None
        self.forced = False
        self.deferred = False

    @property
    def rem_total_tokens(self) -> int:
        return self.memory.rem_total_tokens

    @property
    def cur_rem_tokens(self) -> int:
        return self.memory.cur_rem_tokens

    @property
    def rem_chunk_tokens(self) -> int | None:
        return self.compute.rem_chunk_tokens

    @property
    def rem_input_tokens(self) -> int | None:
        return self.compute.rem_input_tokens

    def output_tokens(self, req: PrefillRequest) -> int:
        """What gate and charge count on of a request's output."""
        return self._output_tokens(req)

    def budget_state(self) -> AddReqResult:
        """Step 7: may another candidate be looked at?"""
        if self.rem_total_tokens <= 0 or self.cur_rem_tokens <= 0:
            return AddReqResult.NO_TOKEN
        return AddReqResult.OTHER if self.compute.exhausted else AddReqResult.CONTINUE

    def add_chunked_req(self, req: PrefillRequest) -> PrefillRequest | None:
        """Step 2: the half-done request goes on before anyone else. Returns it if it is still half done, else None."""
        self._check(req)
        self._output_tokens(req)  # refuses an output that cannot be before anything is promised
        left = req.prompt_tokens - req.prefix_tokens
        self._resuming = req
        tokens = self._resumable_tokens(left)
        if tokens is None:
            self.deferred = True
            self.chunked_req = req
            self._taken[req.rid] = "deferred in this round"
            self._reserve(req, left)
            return req
        cut = tokens < left
        if cut:
            tokens = self._resumed_cut_tokens(req.prefix_tokens, tokens)
        self._add(req, "resumed", req.prefix_tokens, tokens, final=not cut)
        self.chunked_req = req if cut else None
        return self.chunked_req

    def _check(self, req: PrefillRequest) -> None:
        """A request's slots are promised once a round, and what is cached is a part of its prompt."""
        try:
            rid, prompt, cached, host = req.rid, req.prompt_tokens, req.prefix_tokens, req.host_hit_tokens
        except AttributeError as error:
            raise ValueError(
                f"{error.name} of {getattr(req, 'rid', req)!r}: it has none, and each request needs one"
            ) from error
        if rid in self._taken:
            raise ValueError(f"rid: {rid!r} is {self._taken[rid]} already")
        if not (type(prompt) is type(cached) is type(host) is int and 0 <= cached <= cached + host <= prompt):
            _check_sizes(req)

    def _resumed_cut_tokens(self, start: int, tokens: int) -> int:
        """Step 4 for the half-done request: down to the kernel's grid, and then the end to the checkpoint grid.

        Neither brings it back to its start: it has to come to an end.
        """
        return align_chunk_end(start, floor_or_keep(tokens, self.rules.chunk_grid), self.grid_tokens)

    def _resumable_tokens(self, left: int) -> int | None:
        """How much of the `left` tokens may run now; None defers. What remains decides, until nothing does."""
        most = self._most_of_half_done()
        if most is not None and most <= 0:
            return None  # no compute is left for it, which is no shortage of memory
        budget = self._room_of_half_done()
        if most is not None:
            budget = min(most, budget)
        req = self._resuming
        if self.pools and req is not None and budget > 0:
            budget = self._held(req, req.prefix_tokens, min(budget, left))
        if budget <= 0:
            if self.rules.on_shortage == "defer":
                return None
            self.forced = True
            budget = left if most is None else most
        return min(budget, left)

    def _most_of_half_done(self) -> int | None:
        """What the compute budget leaves to the half-done request; None: no limit."""
        limits = (self.rem_chunk_tokens, self.chunked_req_limit, self.rules.continuation_limit)
        return min((limit for limit in limits if limit is not None), default=None)

    def _room_of_half_done(self) -> int:
        """What memory leaves to the half-done request, in whole tokens: rounded down."""
        return math.floor(self.rem_total_tokens)

    def add_one_req(self, req: PrefillRequest) -> AddReqResult:
        """Step 3: decide one waiting request, on paper first; a refusal leaves no lock, no load-back and no promise.

        The answer is about the next one: with NO_TOKEN or OTHER too `req` is admitted if `can_run_list` has it.
        """
        self._check(req)
        self.short_of = None
        self._lock(req)
        for pool in self.pools:
            pool.lock(req)
        try:
            tokens = self._decided_tokens(req)
        except ValueError:  # of an output that cannot be
            self._unlock_everywhere(req)
            raise
        if isinstance(tokens, AddReqResult):
            self._unlock_everywhere(req)
            return tokens
        for pool in self.pools:
            pool.make_way(req, req.prefix_tokens + req.host_hit_tokens, tokens)
        load_back = req.host_hit_tokens
        came = self._load_back(req) if load_back else None
        if isinstance(came, Loading):
            self.await_load(req)
            return self.budget_state()
        if came is not None and came < load_back:
            load_back = came
            tokens = self._decided_tokens(req)
            if isinstance(tokens, AddReqResult):
                self._unlock_everywhere(req)
                return tokens
        start = req.prefix_tokens + req.host_hit_tokens
        cut = start + tokens < req.prompt_tokens
        if load_back and self._load_back is _nothing:
            # it is not allocated here and now, so the baseline will not show it
            self.memory.promise(req.rid, "load_back", ceil_tokens(load_back, self.page_size), Due.NOW)
        self._add(req, "truncated" if cut else "whole", start, tokens, final=not cut, load_back=load_back)
        if cut:
            self.chunked_req = req
        return self.budget_state()

    def _decided_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        """What every pool admits of a candidate whose hit is locked, or the reason for its refusal."""
        tokens = self._admissible_tokens(req)
        if self.pools and not isinstance(tokens, AddReqResult):
            return self._in_every_pool(req, tokens)
        return tokens

    def _unlock_everywhere(self, req: PrefillRequest) -> None:
        for pool in self.pools:
            pool.unlock(req)
        self._unlock(req)

    # --- admitted, and what is to be loaded for it arrives late

    def await_load(self, req: PrefillRequest) -> None:
        """What is left of a request whose load goes on is promised like a tail: it has been let in, and runs later."""
        self.loading.append(req)
        for pool in self.pools:
            pool.await_chunk(req)
        if self.rules.reserve_tail:
            self._reserve(req, req.prompt_tokens - req.prefix_tokens - req.host_hit_tokens)

    def add_loaded_req(self, req: PrefillRequest) -> bool:
        """One that `await_load` has promised and whose load is there: it runs if the batch has room for it, in place of
        the promise; else it goes on waiting, promise and all. It may be cut if nobody else is half done."""
        own = [kind for kind in ("tail", self.output_kind) if self.memory.take_back(req.rid, kind)]
        tokens = self._loaded_tokens(req)
        if tokens is None:
            if own:
                self._reserve(req, req.prompt_tokens - req.prefix_tokens)
            return False
        self.loading = [each for each in self.loading if each is not req]
        cut = req.prefix_tokens + tokens < req.prompt_tokens
        self._add(req, "resumed", req.prefix_tokens, tokens, final=not cut)
        if cut:
            self.chunked_req = req
        return True

    def _loaded_tokens(self, req: PrefillRequest) -> int | None:
        """How much of it may run now; None: it waits."""
        self.forced = False
        if self.can_run_list and self.compute.exhausted:
            return None
        tokens = self._tokens_in_budget(req)
        if isinstance(tokens, AddReqResult):
            return None
        room = self._room_of_loaded()
        if room < tokens:
            # only where memory was taken that had been promised
            if self.rules.on_shortage == "force":
                self.forced = room <= 0
                room = tokens if self.forced else room
            if room < self.page_size or (room < tokens and self.chunked_req is not None):
                self.forced = False
                return None
            if room < tokens:
                tokens = self._resumed_cut_tokens(req.prefix_tokens, floor_tokens(room, self.page_size))
        held = self._in_every_pool(req, tokens) if self.pools else tokens
        return None if isinstance(held, AddReqResult) else held

    def _room_of_loaded(self) -> int:
        """What others were promised beyond the slots of their prompts is slack, and no reason to keep it waiting."""
        slack = ("page_overhead", self.output_kind)
        return self._room_of_half_done() + math.floor(sum(e.tokens for e in self.memory.entries() if e.kind in slack))

    def withdraw(self, chunk: Chunk) -> None:
        """The chunk is not run after all: nothing is promised to its request any more."""
        self.can_run_list = [each for each in self.can_run_list if each is not chunk]
        self.memory.forget(chunk.request.rid)
        if self.chunked_req is chunk.request:
            self.chunked_req = None

    def _admissible_tokens(self, req: PrefillRequest) -> int | AddReqResult:
        """Tokens of `req` to run in this batch, or the reason for its refusal; its device part is locked already."""
        return self._tokens_in_budget(req) if self._passes_gate(req) else AddReqResult.NO_TOKEN

    def _tokens_in_budget(self, req: PrefillRequest) -> int | AddReqResult:
        """What the compute budgets leave to it."""
        left = req.prompt_tokens - req.prefix_tokens - req.host_hit_tokens
        left_ceiled = ceil_tokens(left, self.page_size)
        if self.rem_chunk_tokens is None:
            too_long = self.rem_input_tokens is not None and left_ceiled >= self.rem_input_tokens
            return AddReqResult.OTHER if too_long and self.can_run_list else left
        if left_ceiled <= self.rem_chunk_tokens:
            return left
        return self._truncated_tokens(req, self.rem_chunk_tokens)

    def _in_every_pool(self, req: PrefillRequest, tokens: int) -> int | AddReqResult:
        """The chunk, cut to what every second pool holds; NO_TOKEN where one holds nothing, or it cannot be cut."""
        start = req.prefix_tokens + req.host_hit_tokens
        held = self._held(req, start, tokens)
        if held == tokens:
            return tokens
        if held <= 0 or self.chunked_req is not None or self.rem_chunk_tokens is None:
            return AddReqResult.NO_TOKEN
        self.short_of = None
        # a grid coarser than what the pool holds would keep the request waiting for ever
        cut = floor_tokens(held, self.rules.cut_unit or 1) or floor_or_keep(held, self.rules.chunk_grid)
        return align_chunk_end(start, cut, self.grid_tokens)

    def _held(self, req: PrefillRequest, start: int, tokens: int) -> int:
        """Of a chunk, as much as every second pool can hold; `short_of` is then the one that holds least."""
        for pool in self.pools:
            held = pool.holdable(req, start, tokens)
            if held < tokens:
                self.short_of, tokens = pool.name, held
            if tokens <= 0:
                break
        return tokens

    def _passes_gate(self, req: PrefillRequest) -> bool:
        return self._needed_tokens(req) < self.rem_total_tokens

    def _needed_tokens(self, req: PrefillRequest) -> int:
        """The gate: all that `req` will ever take from the pool here, host hit included, and a page of slack."""
        return req.prompt_tokens - req.prefix_tokens + self._output_tokens(req) + self.page_size

    def _output_tokens(self, req: PrefillRequest) -> int:  # noqa: ARG002 - for those who decode
        """What a promise counts on of the output: a prefill node makes the first token."""
        return self.first_token

    def _truncated_tokens(self, req: PrefillRequest, rem_chunk_tokens: int) -> int | AddReqResult:
        tokens = floor_tokens(rem_chunk_tokens, self.page_size)
        if self.rules.cut_unit is not None:
            tokens = floor_tokens(tokens, self.rules.cut_unit)
        if tokens <= 0 or self.chunked_req is not None:
            return AddReqResult.OTHER
        return align_chunk_end(req.prefix_tokens + req.host_hit_tokens, tokens, self.grid_tokens)

    def _add(
        self, req: PrefillRequest, kind: ChunkKind, start: int, tokens: int, *, final: bool, load_back: int = 0
    ) -> None:
        self._taken[req.rid] = "in this batch"
        self.can_run_list.append(Chunk(req, kind, start, start + tokens, load_back))
        self._charge(req, tokens, final=final)
        for pool in self.pools:
            pool.promise(req, start, tokens)
        if not final:
            self._cut(req, req.prompt_tokens - start - tokens)

    def _charge(self, req: PrefillRequest, tokens: int, *, final: bool) -> None:
        """Step 5: the chunk in whole pages and a page of slack now; the first token later, once the prompt is done."""
        chunk_tokens = ceil_tokens(tokens, self.page_size)
        self.memory.promise(req.rid, "chunk", chunk_tokens, Due.NOW)
        self.memory.promise(req.rid, "page_overhead", self.page_size, Due.NOW)
        if final:
            self.memory.promise(req.rid, self.output_kind, self._output_tokens(req), Due.LATER)
        self.compute.spend(chunk_tokens)

    def _cut(self, req: PrefillRequest, tail_tokens: int) -> None:
        """What a cut does to the books: the tail is reserved, the chunk budget given up, or (upstream) nothing."""
        if self.rules.reserve_tail:
            self._reserve(req, tail_tokens)
        if self.rules.spend_gap:
            self.compute.spend_gap()

    def _reserve(self, req: PrefillRequest, tail_tokens: int) -> None:
        """Step 6: the tail, page-ceiled, and the first token, both due in later rounds."""
        if tail_tokens <= 0 or not self.deciding_rank:
            return
        self.memory.promise(req.rid, "tail", ceil_tokens(tail_tokens, self.page_size), Due.LATER)
        self.memory.promise(req.rid, self.output_kind, self._output_tokens(req), Due.LATER)
