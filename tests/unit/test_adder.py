from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.adder import AddReqResult, Chunk, PrefillAdder
from kvledger.arithmetic import ceil_tokens
from kvledger.ledger import Due
from kvledger.rules import PRESETS, AccountingRules
from tests.unit.builders import REPEATABLE, refusal

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER

PLENTY = 2**20
"""More slots than any test here asks for."""


@dataclass(frozen=True)
class Req:
    rid: str
    prompt_tokens: int
    prefix_tokens: int = 0
    host_hit_tokens: int = 0


@dataclass
class Allocator:
    free_tokens: int

    def available_size(self) -> int:
        return self.free_tokens


@dataclass
class BareCache:
    """A cache of the smallest interface: no locks, no host."""

    evictable_tokens: int = 0

    def evictable_size(self) -> int:
        return self.evictable_tokens


@dataclass
class Cache(BareCache):
    """Records what the adder calls. A device hit is evictable until it is locked; a load-back allocates at once."""

    allocator: Allocator | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    locked_before: set[str] = field(default_factory=set)

    def inc_lock_ref(self, req: Req) -> None:
        self.calls.append(("lock", req.rid))
        self.evictable_tokens -= self.evictable_hit(req)

    def dec_lock_ref(self, req: Req) -> None:
        self.calls.append(("unlock", req.rid))
        self.evictable_tokens += self.evictable_hit(req)

    def evictable_hit(self, req: Req) -> int:
        return 0 if req.rid in self.locked_before else req.prefix_tokens

    def init_load_back(self, req: Req) -> None:
        self.calls.append(("load back", req.rid))
        assert self.allocator is not None
        self.allocator.free_tokens -= req.host_hit_tokens


@dataclass
class Bench:
    """An adder on fakes; `calls` are the cache's."""

    adder: PrefillAdder
    cache: Cache

    @property
    def calls(self) -> list[tuple[str, str]]:
        return self.cache.calls


def bench(
    free: int = PLENTY,
    *,
    evictable: int = 0,
    chunk: int | None = 704,
    max_prefill: int | None = None,
    rules: AccountingRules | str = "tail-reserved",
    **options: Any,
) -> Bench:
    allocator = Allocator(free)
    cache = Cache(evictable, allocator)
    adder = PrefillAdder(
        64, cache, allocator, rem_input_tokens=max_prefill, rem_chunk_tokens=chunk, rules=rules, **options
    )
    return Bench(adder, cache)


def chunks(adder: PrefillAdder) -> list[tuple[str, str, int, int]]:
    return [(chunk.request.rid, chunk.kind, chunk.start, chunk.end) for chunk in adder.can_run_list]


def promises(adder: PrefillAdder, rid: str) -> list[tuple[str, int, str]]:
    return [(p.kind, p.tokens, str(p.due)) for p in adder.memory.entries() if p.request == rid]


def state(adder: PrefillAdder) -> tuple[Any, ...]:
    """All that a refusal must leave as it was."""
    return (
        adder.rem_total_tokens,
        adder.cur_rem_tokens,
        adder.rem_chunk_tokens,
        adder.rem_input_tokens,
        tuple(adder.can_run_list),
        adder.chunked_req,
        tuple(adder.memory.entries()),
        adder.budget_state(),
    )


def assert_refused(on: Bench, req: Req, reason: AddReqResult) -> None:
    """The reason, the lock taken and given back, and nothing else."""
    before, calls_before = state(on.adder), len(on.calls)
    assert on.adder.add_one_req(req) is reason
    assert on.calls[calls_before:] == [("lock", req.rid), ("unlock", req.rid)]
    assert state(on.adder) == before


# --- step 1: what an adder starts from, and what it asks of its parts


def test_a_fresh_adder_has_promised_nothing_and_keeps_the_tail_rule() -> None:
    adder = bench(1000, evictable=234, chunk=704, max_prefill=2000).adder
    assert adder.rules == PRESETS["tail-reserved"]
    assert (adder.memory.baseline, adder.rem_total_tokens, adder.cur_rem_tokens) == (1234, 1234, 1234)
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (704, 2000)
    assert (adder.can_run_list, adder.chunked_req, adder.forced, adder.deferred) == ([], None, False, False)
    assert adder.budget_state() is CONTINUE


def test_a_cache_that_only_counts_its_evictable_slots_will_do() -> None:
    adder = PrefillAdder(64, BareCache(500), Allocator(1000), rem_input_tokens=None, rem_chunk_tokens=704)
    assert adder.rem_total_tokens == 1500
    assert adder.add_one_req(Req("whole", 100, prefix_tokens=64)) is CONTINUE
    assert adder.add_one_req(Req("from the host", 356, host_hit_tokens=256)) is CONTINUE
    assert adder.add_one_req(Req("too long", 5000)) is NO_TOKEN
    assert chunks(adder) == [("whole", "whole", 64, 100), ("from the host", "whole", 256, 356)]


def test_a_hybrid_caches_full_evictable_size_is_preferred() -> None:
    class HybridCache(BareCache):
        def full_evictable_size(self) -> int:
            return 70

    adder = PrefillAdder(64, HybridCache(500), Allocator(1000), rem_input_tokens=None, rem_chunk_tokens=704)
    assert adder.rem_total_tokens == 1070


def test_full_evictable_size_alone_will_do() -> None:
    class FullCache:
        def full_evictable_size(self) -> int:
            return 0

    adder = PrefillAdder(64, FullCache(), Allocator(1000), rem_input_tokens=None, rem_chunk_tokens=704)
    assert adder.rem_total_tokens == 1000


def test_the_baseline_is_read_live_from_both_sides() -> None:
    on = bench(1000, evictable=100)
    assert on.cache.allocator is not None
    on.cache.allocator.free_tokens = 600
    on.cache.evictable_tokens = 10
    assert (on.adder.memory.baseline, on.adder.rem_total_tokens) == (610, 610)


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": -64}, "rem_chunk_tokens: -64 is below the minimum 0"),
        ({"max_prefill": -1}, "rem_input_tokens: -1 is below the minimum 0"),
        ({"checkpoint_align": 0}, "checkpoint_align: 0 is below the minimum 1"),
        ({"checkpoint_align": None}, "checkpoint_align: None is not a whole number"),
        ({"first_token": -1}, "first_token: -1 is below the minimum 0"),
        ({"rules": "best"}, "'best' is none of upstream, aligned, tail-reserved"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name_and_value(options: dict[str, Any], message: str) -> None:
    assert refusal(lambda: bench(**options)) == message


@pytest.mark.parametrize("page_size", [0, -64, None, 64.0])
def test_a_page_has_a_slot(page_size: Any) -> None:
    with pytest.raises(ValueError, match=rf"^page_size: {page_size} is (below the minimum 1|not a whole number)$"):
        PrefillAdder(page_size, BareCache(), Allocator(9), rem_input_tokens=None, rem_chunk_tokens=None)


@pytest.mark.parametrize("add", ["add_one_req", "add_chunked_req"])
@pytest.mark.parametrize(
    ("req", "message"),
    [
        (Req("A", -1), "prompt_tokens of 'A': -1 is below the minimum 0"),
        (Req("A", 100, prefix_tokens=-1), "prefix_tokens of 'A': -1 is below the minimum 0"),
        (Req("A", 100, host_hit_tokens=-64), "host_hit_tokens of 'A': -64 is below the minimum 0"),
        (Req("A", 100, 64, 64), "prompt_tokens of 'A': 100 is below its prefix_tokens and host_hit_tokens, 128"),
    ],
)
def test_a_request_whose_sizes_cannot_be_costs_nothing(add: str, req: Req, message: str) -> None:
    on = bench(10_000)
    before = state(on.adder)
    assert refusal(lambda: getattr(on.adder, add)(req)) == message
    assert (state(on.adder), on.calls) == (before, [])


@pytest.mark.parametrize("again", ["add_one_req", "add_chunked_req"])
@pytest.mark.parametrize(
    ("first", "chunk", "rules", "where"),
    [
        ("add_one_req", 704, AccountingRules(), "in this batch"),
        ("add_chunked_req", 704, AccountingRules(), "in this batch"),
        ("add_chunked_req", 0, AccountingRules(on_shortage="defer"), "deferred in this round"),
    ],
)
def test_a_request_is_promised_its_slots_once_a_round(
    first: str, chunk: int, rules: AccountingRules, where: str, again: str
) -> None:
    on = bench(10_000, chunk=chunk, rules=rules)
    getattr(on.adder, first)(Req("A", 2000))
    before, calls = state(on.adder), list(on.calls)
    assert refusal(lambda: getattr(on.adder, again)(Req("A", 100))) == f"rid: 'A' is {where} already"
    assert (state(on.adder), on.calls) == (before, calls)


def test_a_refused_request_may_ask_again() -> None:
    on = bench(100)
    assert on.adder.add_one_req(Req("A", 100)) is NO_TOKEN
    assert on.cache.allocator is not None
    on.cache.allocator.free_tokens = 1000
    assert on.adder.add_one_req(Req("A", 100)) is CONTINUE


# --- step 3: the gate


@pytest.mark.parametrize(
    ("req", "need"),
    [
        pytest.param(Req("A", 100), 100 + 1 + 64, id="no hit"),
        pytest.param(Req("A", 612, host_hit_tokens=512), 612 + 1 + 64, id="a host hit must be allocated too"),
        pytest.param(Req("A", 612, prefix_tokens=512), 100 + 1 + 64, id="a device hit is there already"),
        pytest.param(Req("A", 868, 512, 256), 356 + 1 + 64, id="both hits"),
        pytest.param(Req("A", 5000), 5000 + 1 + 64, id="the whole prompt, not only the chunk that fits"),
    ],
)
def test_the_gate_asks_for_strictly_less_than_what_remains(req: Req, need: int) -> None:
    assert_refused(bench(need - req.prefix_tokens, evictable=2 * req.prefix_tokens), req, NO_TOKEN)
    on = bench(need - req.prefix_tokens + 1, evictable=2 * req.prefix_tokens)
    on.adder.add_one_req(req)
    assert [chunk.request for chunk in on.adder.can_run_list] == [req]
    assert ("unlock", "A") not in on.calls


def test_the_gate_asks_after_the_lock_has_taken_its_slots_away() -> None:
    req = Req("A", 612, prefix_tokens=512)
    assert_refused(bench(165, evictable=512), req, NO_TOKEN)
    on = bench(166, evictable=512)
    on.adder.add_one_req(req)
    assert chunks(on.adder) == [("A", "whole", 512, 612)]


def test_a_refusal_gives_the_locked_slots_back() -> None:
    on = bench(100, evictable=512)
    on.adder.add_one_req(Req("A", 612, prefix_tokens=512))
    assert on.cache.evictable_tokens == 512


def test_the_gate_counts_what_the_batch_was_promised() -> None:
    on = bench(1000)
    on.adder.add_one_req(Req("A", 500))
    assert on.adder.rem_total_tokens == 1000 - 512 - 64 - 1
    assert_refused(on, Req("B", 423 - 65), NO_TOKEN)
    on.adder.add_one_req(Req("C", 422 - 65))
    assert len(on.adder.can_run_list) == 2


def test_memory_is_asked_before_compute() -> None:
    """A candidate that fails both is refused for memory, which is what makes a batch full."""
    on = bench(2000, chunk=63)
    assert_refused(on, Req("too long", 3000), NO_TOKEN)
    assert_refused(on, Req("long", 1000), OTHER)


# --- step 3: whole or truncated


@pytest.mark.parametrize(
    ("left", "kind", "end"),
    [
        pytest.param(1, "whole", 1, id="one token"),
        pytest.param(640, "whole", 640, id="exactly the budget's pages"),
        pytest.param(700, "whole", 700, id="a partly filled last page within the budget"),
        pytest.param(704, "whole", 704, id="exactly the budget"),
        pytest.param(705, "truncated", 512, id="one token above it, and the cut is aligned"),
    ],
)
def test_what_fits_the_chunk_budget_in_pages_is_whole(left: int, kind: str, end: int) -> None:
    on = bench()
    on.adder.add_one_req(Req("A", left))
    assert chunks(on.adder) == [("A", kind, 0, end)]


def test_a_prompt_whose_pages_exceed_a_budget_between_two_pages_is_cut_at_the_page() -> None:
    adder = bench(chunk=127).adder
    adder.add_one_req(Req("A", 65))
    assert chunks(adder) == [("A", "truncated", 0, 64)]
    assert adder.rem_chunk_tokens == 63


@pytest.mark.parametrize(
    ("checkpoint_align", "end"),
    [
        pytest.param(256, 1024, id="down to the grid"),
        pytest.param(64, 1216, id="every page is on the grid"),
        pytest.param(2048, 1216, id="the grid is out of reach: the length stays"),
    ],
)
def test_a_cut_after_a_hit_is_aligned_by_where_it_ends(checkpoint_align: int, end: int) -> None:
    adder = bench(chunk=704, checkpoint_align=checkpoint_align).adder
    adder.add_one_req(Req("A", 5000, prefix_tokens=256, host_hit_tokens=256))
    assert chunks(adder) == [("A", "truncated", 512, end)]


def test_the_rules_grid_goes_before_the_nodes() -> None:
    for rules, end in (("upstream", 704), ("aligned", 512), (AccountingRules(checkpoint_align=128), 640)):
        adder = bench(rules=rules, checkpoint_align=256).adder
        adder.add_one_req(Req("A", 5000))
        assert chunks(adder) == [("A", "truncated", 0, end)]


def test_a_hit_that_ends_off_the_grid_is_cut_on_the_grid() -> None:
    """Our node never shows one; another cache may."""
    adder = bench(chunk=704).adder
    adder.add_one_req(Req("A", 5000, prefix_tokens=64, host_hit_tokens=64))
    assert chunks(adder) == [("A", "truncated", 128, 768)]


def test_a_budget_below_one_page_truncates_nobody() -> None:
    assert_refused(bench(chunk=63), Req("A", 64), OTHER)


def test_the_one_half_done_place_is_taken_by_a_truncated_request() -> None:
    on = bench()
    on.adder.add_one_req(Req("A", 5000))
    assert on.adder.rem_chunk_tokens == 192
    assert on.adder.chunked_req == Req("A", 5000)
    assert_refused(on, Req("B", 193), OTHER)
    assert on.adder.add_one_req(Req("C", 192)) is OTHER
    assert [chunk.kind for chunk in on.adder.can_run_list] == ["truncated", "whole"]


def test_the_one_half_done_place_is_taken_by_a_resumed_request_that_is_still_cut() -> None:
    on = bench()
    assert on.adder.add_chunked_req(Req("A", 5000, prefix_tokens=512)) is on.adder.chunked_req
    assert on.adder.chunked_req == Req("A", 5000, prefix_tokens=512)
    assert_refused(on, Req("B", 193), OTHER)


def test_a_request_that_finishes_in_this_batch_is_no_longer_half_done() -> None:
    on = bench()
    assert on.adder.add_chunked_req(Req("A", 600, prefix_tokens=512)) is None
    assert on.adder.chunked_req is None
    on.adder.add_one_req(Req("B", 5000))
    assert chunks(on.adder) == [("A", "resumed", 512, 600), ("B", "truncated", 0, 512)]


def test_a_deferred_request_keeps_the_half_done_place() -> None:
    """Only a deferral without the tail's reservation leaves a newcomer enough memory to get as far as this."""
    on = bench(0, rules=AccountingRules(on_shortage="defer"), deciding_rank=False)
    on.adder.add_chunked_req(Req("A", 5000, prefix_tokens=512))
    assert on.cache.allocator is not None
    on.cache.allocator.free_tokens = PLENTY
    assert_refused(on, Req("B", 5000), OTHER)


# --- step 3: admission


def test_an_admitted_request_is_locked_once_and_loaded_back_once() -> None:
    on = bench(2000, evictable=256)
    req = Req("A", 868, prefix_tokens=256, host_hit_tokens=512)
    on.adder.add_one_req(req)
    assert on.calls == [("lock", "A"), ("load back", "A")]
    assert on.adder.can_run_list == [Chunk(req, "whole", 768, 868, load_back=512)]
    assert on.adder.can_run_list[0].tokens == 100


def test_a_load_back_lowers_the_baseline_and_not_the_offset() -> None:
    adder = bench(2000).adder
    adder.add_one_req(Req("A", 612, host_hit_tokens=512))
    assert adder.memory.baseline == 2000 - 512
    assert adder.memory.cur_rem_token_offset == 128 + 64
    assert adder.rem_chunk_tokens == 704 - 128


def test_a_truncated_request_is_loaded_back_too() -> None:
    on = bench()
    req = Req("A", 5000, host_hit_tokens=512)
    on.adder.add_one_req(req)
    assert on.calls == [("lock", "A"), ("load back", "A")]
    assert on.adder.can_run_list == [Chunk(req, "truncated", 512, 1024, load_back=512)]


def test_nothing_is_loaded_back_without_a_host_hit() -> None:
    on = bench(evictable=512)
    on.adder.add_one_req(Req("A", 600, prefix_tokens=512))
    assert on.calls == [("lock", "A")]


def test_an_admission_answers_with_the_state_after_it() -> None:
    assert bench().adder.add_one_req(Req("A", 100)) is CONTINUE
    assert bench().adder.add_one_req(Req("A", 704)) is OTHER
    assert bench(102 + 64).adder.add_one_req(Req("A", 100)) is NO_TOKEN


# --- step 3: chunking off


def test_with_chunking_off_nothing_is_truncated() -> None:
    adder = bench(chunk=None).adder
    assert adder.add_one_req(Req("A", 100_000)) is CONTINUE
    assert chunks(adder) == [("A", "whole", 0, 100_000)]
    assert adder.rem_chunk_tokens is None


def test_with_chunking_off_the_first_may_exceed_the_prefill_limit_and_nobody_after_it() -> None:
    on = bench(chunk=None, max_prefill=640)
    assert on.adder.add_one_req(Req("A", 700)) is OTHER
    assert chunks(on.adder) == [("A", "whole", 0, 700)]
    assert on.adder.rem_input_tokens == 640 - 704


@pytest.mark.parametrize(
    ("left", "answer"),
    [
        pytest.param(512, CONTINUE, id="a page below the limit"),
        pytest.param(513, OTHER, id="in pages it reaches the limit"),
        pytest.param(577, OTHER, id="above the limit"),
    ],
)
def test_with_chunking_off_what_reaches_the_prefill_limit_is_refused(left: int, answer: AddReqResult) -> None:
    on = bench(chunk=None, max_prefill=640)
    on.adder.add_one_req(Req("A", 64))
    assert on.adder.rem_input_tokens == 576
    if answer is OTHER:
        assert_refused(on, Req("B", left), OTHER)
    else:
        assert on.adder.add_one_req(Req("B", left)) is answer


def test_with_chunking_off_and_no_prefill_limit_memory_alone_decides() -> None:
    on = bench(3000, chunk=None, max_prefill=None)
    assert on.adder.add_one_req(Req("A", 1000)) is CONTINUE
    assert on.adder.add_one_req(Req("B", 1000)) is CONTINUE
    assert_refused(on, Req("C", 1000), NO_TOKEN)


def test_with_chunking_off_a_half_done_request_runs_as_far_as_memory_goes() -> None:
    adder = bench(640, chunk=None).adder
    adder.add_chunked_req(Req("A", 5000, prefix_tokens=512))
    assert chunks(adder) == [("A", "resumed", 512, 1024)]


def test_with_chunking_on_the_prefill_limit_ends_the_batch_but_cuts_nobody() -> None:
    on = bench(max_prefill=128)
    assert on.adder.add_one_req(Req("A", 300)) is OTHER
    assert chunks(on.adder) == [("A", "whole", 0, 300)]
    assert (on.adder.rem_chunk_tokens, on.adder.rem_input_tokens) == (704 - 320, 128 - 320)


# --- step 2: the half-done request


@pytest.mark.parametrize(
    ("free", "prefix", "end", "kept"),
    [
        pytest.param(PLENTY, 512, 1024, True, id="the chunk budget limits it, aligned"),
        pytest.param(640, 512, 1024, True, id="memory limits it, aligned"),
        pytest.param(64, 512, 576, True, id="one page is left: the grid is out of reach"),
        pytest.param(1, 512, 513, True, id="one slot is left"),
        pytest.param(PLENTY, 1296, 2000, False, id="exactly the budget is left of it: last, not aligned"),
        pytest.param(PLENTY, 1295, 1792, True, id="one token more than the budget is left of it"),
        pytest.param(500, 1500, 2000, False, id="memory is exactly what is left of it"),
        pytest.param(499, 1500, 1792, True, id="memory is one token short of what is left of it"),
    ],
)
def test_a_resumed_chunk_is_what_budget_memory_and_grid_allow(free: int, prefix: int, end: int, kept: bool) -> None:
    on = bench(free)
    req = Req("A", 2000, prefix_tokens=prefix)
    assert on.adder.add_chunked_req(req) is (req if kept else None)
    assert chunks(on.adder) == [("A", "resumed", prefix, end)]
    assert (on.adder.forced, on.adder.deferred) == (False, False)
    assert on.calls == [], "its pages are locked already"


@pytest.mark.parametrize(
    ("left", "chunk", "ran"),
    [
        pytest.param(5000, 704, 512, id="the chunk budget, aligned"),
        pytest.param(300, 704, 300, id="all that is left of it"),
        pytest.param(5000, None, 5000, id="chunking off: all that is left"),
    ],
)
@pytest.mark.parametrize("free", [0, -64])
def test_when_nothing_remains_a_chunk_is_forced(left: int, chunk: int | None, ran: int, free: int) -> None:
    on = bench(free, chunk=chunk, rules="aligned")
    on.adder.add_chunked_req(Req("A", 512 + left, prefix_tokens=512))
    assert (on.adder.forced, on.adder.deferred) == (True, False)
    assert chunks(on.adder) == [("A", "resumed", 512, 512 + ran)]


@pytest.mark.parametrize("reserve_tail", [False, True])
def test_when_nothing_remains_a_deferred_request_reserves_its_remainder(reserve_tail: bool) -> None:
    on = bench(0, rules=AccountingRules(reserve_tail=reserve_tail, on_shortage="defer"))
    req = Req("A", 600, prefix_tokens=512)
    assert on.adder.add_chunked_req(req) is req
    assert (on.adder.forced, on.adder.deferred, on.adder.chunked_req) == (False, True, req)
    assert on.adder.can_run_list == []
    assert promises(on.adder, "A") == [("tail", 128, "later"), ("first_token", 1, "later")]
    assert (on.adder.cur_rem_tokens, on.adder.rem_total_tokens, on.adder.rem_chunk_tokens) == (0, -129, 704)


def test_one_remaining_slot_is_no_shortage() -> None:
    on = bench(1, rules=AccountingRules(on_shortage="defer"))
    on.adder.add_chunked_req(Req("A", 5000, prefix_tokens=512))
    assert chunks(on.adder) == [("A", "resumed", 512, 513)]


# --- steps 5 and 6: what is charged and what is reserved


def test_a_whole_chunk_is_charged_its_pages_one_more_and_its_first_token() -> None:
    adder = bench(5000, max_prefill=2000).adder
    adder.add_one_req(Req("A", 100))
    assert promises(adder, "A") == [("chunk", 128, "now"), ("page_overhead", 64, "now"), ("first_token", 1, "later")]
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (5000 - 192, 5000 - 193)
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (704 - 128, 2000 - 128)


@pytest.mark.parametrize(
    ("rules", "reserved"),
    [
        ("upstream", []),
        ("aligned", []),
        ("tail-reserved", [("tail", 512, "later"), ("first_token", 1, "later")]),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_cut_is_charged_without_a_first_token_and_its_tail_as_the_rules_say(
    rules: str, reserved: list[tuple[str, int, str]], resumed: bool
) -> None:
    adder = bench(5000, rules=rules, checkpoint_align=64).adder
    add = adder.add_chunked_req if resumed else adder.add_one_req
    add(Req("A", 512 + 704 + 450, prefix_tokens=512))
    assert promises(adder, "A") == [("chunk", 704, "now"), ("page_overhead", 64, "now"), *reserved]
    assert adder.cur_rem_tokens - adder.rem_total_tokens == sum(tokens for _, tokens, _ in reserved)


def test_a_last_resumed_chunk_is_charged_like_a_whole_request() -> None:
    adder = bench(5000).adder
    adder.add_chunked_req(Req("A", 600, prefix_tokens=512))
    assert promises(adder, "A") == [("chunk", 128, "now"), ("page_overhead", 64, "now"), ("first_token", 1, "later")]


def test_a_chunk_that_starts_inside_a_page_is_charged_by_its_length() -> None:
    adder = bench(5000).adder
    adder.add_chunked_req(Req("A", 165, prefix_tokens=100))
    assert promises(adder, "A")[0] == ("chunk", 128, "now")


def test_the_first_tokens_size_is_the_callers() -> None:
    adder = bench(5000, first_token=30).adder
    adder.add_one_req(Req("A", 100))
    assert promises(adder, "A")[-1] == ("first_token", 30, "later")
    assert_refused(bench(100 + 30 + 64, first_token=30), Req("B", 100), NO_TOKEN)


@pytest.mark.parametrize(("deciding_rank", "reserved"), [(True, 256 + 1), (False, 0)])
@pytest.mark.parametrize("resumed", [False, True])
def test_only_the_deciding_rank_reserves_a_tail(resumed: bool, deciding_rank: bool, reserved: int) -> None:
    adder = bench(deciding_rank=deciding_rank).adder
    add = adder.add_chunked_req if resumed else adder.add_one_req
    add(Req("A", 512 + 705, prefix_tokens=512))
    assert chunks(adder)[0][2:] == (512, 1024), "the chunk itself does not depend on the rank"
    assert adder.cur_rem_tokens - adder.rem_total_tokens == reserved


def test_a_rank_that_replays_a_plan_reserves_nothing_for_a_deferred_request_either() -> None:
    on = bench(0, rules=AccountingRules(on_shortage="defer"), deciding_rank=False)
    on.adder.add_chunked_req(Req("A", 600, prefix_tokens=512))
    assert on.adder.deferred
    assert list(on.adder.memory.entries()) == []


# --- further switches


@pytest.mark.parametrize("resumed", [False, True])
def test_spend_gap_zeroes_the_chunk_budget_at_a_cut(resumed: bool) -> None:
    adder = bench(max_prefill=2000, rules=AccountingRules(spend_gap=True)).adder
    add = adder.add_chunked_req if resumed else adder.add_one_req
    add(Req("A", 5000, prefix_tokens=512))
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (0, 2000 - 512)
    assert adder.budget_state() is OTHER
    assert [p for p in promises(adder, "A") if p[0] == "tail"] == []


@pytest.mark.parametrize("resumed", [False, True])
def test_spend_gap_leaves_the_budget_behind_a_request_that_finishes(resumed: bool) -> None:
    adder = bench(rules=AccountingRules(spend_gap=True)).adder
    add = adder.add_chunked_req if resumed else adder.add_one_req
    add(Req("A", 612, prefix_tokens=512))
    assert adder.rem_chunk_tokens == 704 - 128


@pytest.mark.parametrize(
    ("truncation_align", "end"),
    [
        pytest.param(320, 640, id="floored to a split size that is not the grid's"),
        pytest.param(704, 704, id="a split size that fits exactly"),
    ],
)
def test_a_fresh_cut_is_floored_to_the_split_size(truncation_align: int, end: int) -> None:
    rules = AccountingRules(checkpoint_align="page_size", truncation_align=truncation_align)
    adder = bench(rules=rules).adder
    adder.add_one_req(Req("A", 5000))
    assert chunks(adder) == [("A", "truncated", 0, end)]
    assert adder.rem_chunk_tokens == 704 - end, "the upstream path with the same hole"


def test_a_cut_is_aligned_after_it_was_floored_to_the_split_size() -> None:
    adder = bench(rules=AccountingRules(truncation_align=320)).adder
    adder.add_one_req(Req("A", 5000))
    assert chunks(adder) == [("A", "truncated", 0, 512)]


def test_a_budget_below_the_split_size_truncates_nobody() -> None:
    on = bench(chunk=704, rules=AccountingRules(truncation_align=768))
    assert_refused(on, Req("A", 5000), OTHER)
    on.adder.add_one_req(Req("B", 704))
    assert chunks(on.adder) == [("B", "whole", 0, 704)]


def test_a_resumed_chunk_knows_no_split_size() -> None:
    adder = bench(rules=AccountingRules(checkpoint_align="page_size", truncation_align=512)).adder
    adder.add_chunked_req(Req("A", 5000, prefix_tokens=512))
    assert chunks(adder) == [("A", "resumed", 512, 512 + 704)]


# --- further causes of a residue


def test_the_half_done_request_runs_no_more_than_its_limit() -> None:
    adder = bench(rules=AccountingRules(checkpoint_align="page_size", continuation_limit=128)).adder
    assert adder.add_chunked_req(Req("A", 5000, prefix_tokens=512)) is not None
    assert chunks(adder) == [("A", "resumed", 512, 640)]
    assert adder.rem_chunk_tokens == 704 - 128, "the residue that somebody else may use"


def test_a_limit_is_for_the_half_done_request_alone() -> None:
    adder = bench(rules=AccountingRules(checkpoint_align="page_size", continuation_limit=128)).adder
    adder.add_one_req(Req("A", 5000))
    assert chunks(adder) == [("A", "truncated", 0, 704)]


def test_a_limit_that_is_not_reached_cuts_nobody() -> None:
    adder = bench(rules=AccountingRules(continuation_limit=128)).adder
    assert adder.add_chunked_req(Req("A", 640, prefix_tokens=512)) is None
    assert chunks(adder) == [("A", "resumed", 512, 640)]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        pytest.param(0, 640, id="fresh"),
        pytest.param(64, 704, id="resumed: counted from its start, not from the prompt's"),
        pytest.param(512, 1152, id="resumed on the grid"),
    ],
)
def test_a_cut_is_as_long_as_whole_cells_of_the_chunk_grid(start: int, end: int) -> None:
    adder = bench(rules=AccountingRules(checkpoint_align="page_size", chunk_grid=320)).adder
    if start:
        adder.add_chunked_req(Req("A", 5000, prefix_tokens=start))
    else:
        adder.add_one_req(Req("A", 5000))
    assert [chunk[2:] for chunk in chunks(adder)] == [(start, end)]
    assert adder.rem_chunk_tokens == 704 - 640


def test_the_chunk_grid_brings_no_half_done_request_back_to_its_start() -> None:
    adder = bench(rules=AccountingRules(checkpoint_align="page_size", chunk_grid=768)).adder
    adder.add_chunked_req(Req("A", 5000, prefix_tokens=512))
    assert chunks(adder) == [("A", "resumed", 512, 512 + 704)]


def test_a_budget_below_a_cell_of_the_chunk_grid_truncates_nobody() -> None:
    on = bench(chunk=704, rules=AccountingRules(chunk_grid=768))
    assert_refused(on, Req("A", 5000), OTHER)
    on.adder.add_one_req(Req("B", 704))
    assert chunks(on.adder) == [("B", "whole", 0, 704)], "no grid for what runs to its end"


def test_the_checkpoint_grid_has_the_last_word() -> None:
    adder = bench(rules=AccountingRules(chunk_grid=320)).adder
    adder.add_one_req(Req("A", 5000))
    assert chunks(adder) == [("A", "truncated", 0, 512)]


# --- step 7


@pytest.mark.parametrize(
    ("free", "due_now", "due_later", "chunk", "max_prefill", "answer"),
    [
        pytest.param(1, 0, 0, 1, 1, CONTINUE, id="one of each is left"),
        pytest.param(100, 40, 59, 1, 1, CONTINUE, id="one slot is left of all that is promised"),
        pytest.param(100, 40, 60, 1, 1, NO_TOKEN, id="all is promised"),
        pytest.param(100, 101, -50, 1, 1, NO_TOKEN, id="this batch alone is too much"),
        pytest.param(1, 0, 0, 0, 1, OTHER, id="no chunk budget"),
        pytest.param(1, 0, 0, 1, 0, OTHER, id="no prefill budget"),
        pytest.param(1, 0, 0, None, None, CONTINUE, id="no compute limits"),
        pytest.param(0, 0, 0, 0, 0, NO_TOKEN, id="memory goes before compute"),
    ],
)
def test_budget_state(
    free: int, due_now: int, due_later: int, chunk: int | None, max_prefill: int | None, answer: AddReqResult
) -> None:
    adder = bench(free, chunk=chunk, max_prefill=max_prefill).adder
    adder.memory.promise("A", "chunk", due_now, Due.NOW)
    adder.memory.promise("A", "tail", due_later, Due.LATER)
    assert adder.budget_state() is answer


# --- any sequence of candidates

REQUESTS = st.builds(
    Req,
    st.sampled_from(["A", "B", "C", "D"]),
    st.integers(1537, 4000),
    st.sampled_from([0, 256, 512]),
    st.sampled_from([0, 256, 1024]),
)
RULES = st.builds(
    AccountingRules,
    checkpoint_align=st.sampled_from(["node", "page_size"]),
    reserve_tail=st.booleans(),
    spend_gap=st.booleans(),
    truncation_align=st.none() | st.just(128),
    on_shortage=st.sampled_from(["force", "defer"]),
)


def owed(adder: PrefillAdder) -> tuple[int, int]:
    """(due now, due at all), counted from the batch alone by the post-mortem's two sums."""
    now = later = 0
    for chunk in adder.can_run_list:
        now += ceil_tokens(chunk.tokens, 64) + 64
        tail = chunk.request.prompt_tokens - chunk.end
        if not tail:
            later += 1
        elif adder.rules.reserve_tail:
            later += ceil_tokens(tail, 64) + 1
    if adder.deferred:
        assert adder.chunked_req is not None
        later += ceil_tokens(adder.chunked_req.prompt_tokens - adder.chunked_req.prefix_tokens, 64) + 1
    return now, now + later


@REPEATABLE
@given(
    free=st.integers(0, 12_000),
    chunk=st.none() | st.integers(64, 5000),
    rules=RULES,
    half_done=st.none() | REQUESTS.map(lambda req: replace(req, rid="half done")),
    waiting=st.lists(REQUESTS, max_size=4, unique_by=lambda req: req.rid),
)
def test_the_books_are_what_the_batch_comes_to(
    free: int, chunk: int | None, rules: AccountingRules, half_done: Req | None, waiting: Sequence[Req]
) -> None:
    adder = bench(free, evictable=2048, chunk=chunk, rules=rules).adder
    if half_done is not None:
        adder.add_chunked_req(half_done)
    for req in waiting:
        batch = list(adder.can_run_list)
        before = state(adder)
        adder.add_one_req(req)
        assert adder.can_run_list != batch or state(adder) == before
        adder.memory.check()
        assert (adder.memory.cur_rem_token_offset, adder.memory.rem_total_token_offset) == owed(adder)
        assert adder.cur_rem_tokens >= adder.rem_total_tokens
    cut = [c for c in adder.can_run_list if c.end < c.request.prompt_tokens]
    assert len(cut) <= 1
    assert all(chunk.tokens > 0 for chunk in adder.can_run_list)


# --- the post-mortem's two unit cases: page 64, chunk 704, align 256


@pytest.mark.parametrize(("rules", "admitted"), [("tail-reserved", False), ("aligned", True)])
def test_a_truncated_requests_tail_blocks_a_host_load_back(rules: str, admitted: bool) -> None:
    on = bench(2560, chunk=704, rules=rules)
    assert on.adder.add_one_req(Req("cut", 2000)) is CONTINUE
    assert chunks(on.adder) == [("cut", "truncated", 0, 512)]
    assert on.adder.rem_chunk_tokens == 192
    assert on.adder.cur_rem_tokens == 1984
    assert on.adder.rem_total_tokens == (1984 if admitted else 1984 - 1537)
    newcomer = Req("load-back", 1152, host_hit_tokens=1024)
    if admitted:
        assert on.adder.add_one_req(newcomer) is CONTINUE
        assert on.calls[-1] == ("load back", "load-back")
        assert on.adder.memory.baseline - 512 - 128 < 2000 - 512, "the tail no longer fits"
    else:
        assert_refused(on, newcomer, NO_TOKEN)


@pytest.mark.parametrize(("rules", "admitted"), [("tail-reserved", False), ("aligned", True)])
def test_a_resumed_requests_tail_blocks_an_ordinary_waiting_request(rules: str, admitted: bool) -> None:
    on = bench(1728, chunk=704, rules=rules)
    half_done = Req("half done", 2000, prefix_tokens=512)
    assert on.adder.add_chunked_req(half_done) is half_done
    assert chunks(on.adder) == [("half done", "resumed", 512, 1024)]
    assert on.adder.budget_state() is CONTINUE
    assert on.adder.cur_rem_tokens == 1152
    assert on.adder.rem_total_tokens == (1152 if admitted else 1152 - 1025)
    newcomer = Req("waiting", 128)
    if admitted:
        on.adder.add_one_req(newcomer)
        assert chunks(on.adder)[1:] == [("waiting", "whole", 0, 128)]
    else:
        assert_refused(on, newcomer, NO_TOKEN)


# --- the incident of 2026-11-02, as the adder saw it


@pytest.mark.parametrize(
    ("rules", "rem_total_tokens", "answer"), [("aligned", 18303, OTHER), ("tail-reserved", 13310, NO_TOKEN)]
)
def test_the_incident(rules: str, rem_total_tokens: int, answer: AddReqResult) -> None:
    on = bench(34624, chunk=16384, max_prefill=16384, rules=rules)
    on.cache.locked_before.add("1keim")
    keim = Req("1keim", 94024, prefix_tokens=86784)
    assert on.adder.add_one_req(Req("v9uj", 13888)) is CONTINUE
    assert on.adder.add_one_req(keim) is CONTINUE
    assert chunks(on.adder) == [("v9uj", "whole", 0, 13888), ("1keim", "truncated", 86784, 89088)]
    assert keim.prompt_tokens - on.adder.can_run_list[-1].end == 4936
    assert on.adder.memory.baseline == 34624
    assert (on.adder.rem_chunk_tokens, on.adder.rem_input_tokens) == (192, 192)
    assert on.adder.cur_rem_tokens == 18304
    assert on.adder.rem_total_tokens == rem_total_tokens
    assert on.adder.add_one_req(Req("xpkq", 15545, host_hit_tokens=15360)) is answer
    assert (("load back", "xpkq") in on.calls) is (rules == "aligned")
