from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from kvledger.node import PrefillNode, Watcher
from kvledger.pool import OutOfPages, PagePool
from kvledger.record import Decision, RoundRecord
from kvledger.request import CachedPage
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from tests.unit.builders import INCIDENT_NODE, node_settings, prompt


def make_node(rules: str | AccountingRules = "tail-reserved", **sizes: Any) -> PrefillNode:
    return PrefillNode(node_settings(**sizes), PRESETS[rules] if isinstance(rules, str) else rules)


def submit(node: PrefillNode, **prompt_tokens: int) -> None:
    """Each request's prompt is one run of its own name."""
    for rid, tokens in prompt_tokens.items():
        assert node.submit(rid, prompt((rid, tokens))) is None


def admitted(record: RoundRecord) -> list[tuple[str, str, int, int]]:
    return [(d.request, d.kind, d.start, d.end) for d in record.joined]


def refused(record: RoundRecord) -> list[tuple[str, str]]:
    return [(d.request, str(d.reason)) for d in record.refused]


def figures(record: RoundRecord) -> tuple[int, int, int, int | None]:
    return record.baseline, record.cur_rem_tokens, record.rem_total_tokens, record.rem_chunk_tokens


def usage(node: PrefillNode) -> tuple[int, int, int]:
    """Free, evictable and protected pages."""
    return node.pool.free_pages, node.tree.evictable_pages, node.tree.protected_pages


def cached_tokens(node: PrefillNode, *runs: tuple[str, int]) -> tuple[int, int]:
    """Tokens of the prompt's full pages that are found on the device, and then on the host."""
    found = node.tree.match(prompt(*runs).page_keys(node.page_size))
    on_device = sum(page.page is not None for page in found)
    return on_device * node.page_size, (len(found) - on_device) * node.page_size


# --- the incident of 2026-11-02


def incident_node(rules: str) -> PrefillNode:
    node = PrefillNode(INCIDENT_NODE, PRESETS[rules])
    node.cache_on_device(prompt(("keim", 86784)), locked=True)
    node.cache_on_host(prompt(("xpkq", 15360)))
    for rid, segment, tokens in (("v9uj", "v9uj", 13888), ("1keim", "keim", 94024), ("xpkq", "xpkq", 15545)):
        assert node.submit(rid, prompt((segment, tokens))) is None
    return node


def test_the_incident_before_the_fix() -> None:
    node = incident_node("aligned")
    first = node.run_round()
    assert admitted(first) == [
        ("v9uj", "whole", 0, 13888),
        ("1keim", "truncated", 86784, 89088),
        ("xpkq", "whole", 15360, 15545),
    ]
    after_keim = first.decisions[1]
    assert (after_keim.baseline, after_keim.cur_rem_tokens, after_keim.rem_total_tokens) == (34624, 18304, 18303)
    assert (after_keim.rem_chunk_tokens, after_keim.tokens, after_keim.tail_tokens) == (192, 2304, 4936)
    assert (first.decisions[2].load_back, first.decisions[2].tokens) == (15360, 185)
    assert figures(first) == (34624 - 15360, 2688, 2686, 0)
    assert (first.free, first.evictable) == (2880, 0)

    second, third = node.run_round(), node.run_round()
    assert admitted(second) == [("1keim", "resumed", 89088, 91904)]
    assert (second.joined[0].tokens, second.free, second.forced) == (2816, 64, False)
    assert admitted(third) == [("1keim", "resumed", 91904, 91968)]
    assert (third.joined[0].tokens, third.free, third.forced) == (64, 0, False)

    last = node.run_round()
    assert admitted(last) == [("1keim", "resumed", 91968, 94024)]
    assert (last.joined[0].tokens, last.forced) == (2056, True)
    assert last.failure is not None
    assert (last.failure.request, last.failure.wanted) == ("1keim", 2056)
    assert (last.failure.free, last.failure.evictable) == (0, 0)
    assert "1keim tries to allocate 2056 tokens, available 0" in last.failure.message


def test_the_incident_after_the_fix() -> None:
    node = incident_node("tail-reserved")
    first = node.run_round()
    assert admitted(first) == [("v9uj", "whole", 0, 13888), ("1keim", "truncated", 86784, 89088)]
    assert refused(first) == [("xpkq", "NO_TOKEN")]
    assert figures(first) == (34624, 18304, 13310, 192)
    assert first.batch_is_full
    assert cached_tokens(node, ("xpkq", 15360)) == (0, 15360), "no load-back was started"

    second = node.run_round()
    assert admitted(second) == [("1keim", "resumed", 89088, 94024)]
    assert refused(second) == [("xpkq", "NO_TOKEN")]
    assert figures(second) == (18432, 13376, 13375, 11392)

    waiting = node.run_round()
    assert (admitted(waiting), refused(waiting)) == ([], [("xpkq", "NO_TOKEN")])
    assert node.in_flight() == ("v9uj", "1keim")
    for rid in node.in_flight():
        node.transferred(rid)

    last = node.run_round()
    assert admitted(last) == [("xpkq", "whole", 15360, 15545)]
    assert node.in_flight() == ("xpkq",)
    assert not node.has_work


def test_the_incident_with_the_shortage_deferred_waits_for_a_transfer() -> None:
    node = PrefillNode(INCIDENT_NODE, AccountingRules(on_shortage="defer"))
    node.cache_on_device(prompt(("keim", 86784)), locked=True)
    node.cache_on_host(prompt(("xpkq", 15360)))
    node.submit("v9uj", prompt(("v9uj", 13888)))
    node.submit("1keim", prompt(("keim", 94024)))
    node.submit("xpkq", prompt(("xpkq", 15545)))
    for _ in range(3):
        node.run_round()
    deferred = node.run_round()
    assert [(d.request, d.kind, d.start, d.end) for d in deferred.decisions] == [("1keim", "deferred", 91968, 91968)]
    assert (deferred.failure, deferred.forced, deferred.joined) == (None, False, ())
    assert figures(deferred) == (0, 0, -2113, 16384)
    assert [(p.kind, p.tokens) for p in deferred.promises] == [("tail", 2112), ("first_token", 1)]
    node.transferred("v9uj")
    assert admitted(node.run_round()) == [("1keim", "resumed", 91968, 94024)]


# --- entry


@pytest.mark.parametrize("pool_tokens", [640, 650, 703])
def test_the_entry_takes_what_the_gate_takes_of_an_empty_pool_and_no_token_more(pool_tokens: int) -> None:
    node = make_node(pool_tokens=pool_tokens)
    submit(node, fits=640 - 64 - 2)
    reason = node.submit("too long", prompt(("x", 640 - 64 - 1)))
    assert reason == "prompt 575 + first token 1 + page 64 = 640 tokens is not below the empty pool's 640"
    assert list(node.waiting) == ["fits"]
    assert (node.settings.fits_empty_pool(574), node.settings.fits_empty_pool(575)) == (True, False)
    record = node.run_round()
    assert admitted(record) == [("fits", "whole", 0, 574)]
    assert (record.failure, node.in_flight()) == (None, ("fits",))


def test_the_longest_prompt_that_is_let_in_finishes_in_chunks_too() -> None:
    node = make_node(chunked_prefill_size=128, checkpoint_align=64)
    submit(node, A=574)
    ends = []
    while node.has_work:
        ends.append(node.run_round().joined[0].end)
    assert ends == [128, 256, 384, 512, 574]
    assert usage(node) == (1, 0, 8)


# --- step 3: the usable hit


@pytest.mark.parametrize(
    ("rules", "cached", "prompt_tokens", "hit"),
    [
        pytest.param("upstream", 256, 400, 256, id="all of it, on a grid of pages"),
        pytest.param("upstream", 256, 256, 192, id="never the page of the last token"),
        pytest.param("upstream", 256, 257, 256, id="one token behind the hit is enough"),
        pytest.param("aligned", 320, 400, 256, id="floored to the grid"),
        pytest.param("aligned", 256, 256, 0, id="without the last token's page it does not reach the grid"),
        pytest.param("aligned", 255, 400, 0, id="only full pages are cached"),
    ],
)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_usable_hit(rules: str, cached: int, prompt_tokens: int, hit: int, tier: str) -> None:
    node = make_node(rules)
    if tier == "device":
        node.cache_on_device(prompt(("doc", cached)), locked=False)
    else:
        node.cache_on_host(prompt(("doc", cached)))
    node.submit("A", prompt(("doc", prompt_tokens)))
    (decision,) = node.run_round().joined
    assert (decision.start, decision.end) == (hit, prompt_tokens)
    assert (decision.prefix_tokens, decision.load_back) == ((hit, 0) if tier == "device" else (0, hit))
    assert decision.newly_locked_tokens == decision.prefix_tokens


def test_a_hit_is_on_the_device_first_and_then_on_the_host() -> None:
    node = make_node("upstream")
    node.cache_on_host(prompt(("doc", 448)))
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    node.submit("A", prompt(("doc", 500)))
    record = node.run_round()
    (decision,) = record.joined
    assert (decision.prefix_tokens, decision.load_back, decision.start) == (128, 320, 448)
    # free: 10 pages, 2 cached, 5 loaded back, 1 computed
    assert usage(node) == (2, 0, 7)
    assert cached_tokens(node, ("doc", 448)) == (448, 0)


def test_the_grid_cuts_a_hit_inside_its_host_part() -> None:
    node = make_node("aligned")
    node.cache_on_host(prompt(("doc", 448)))
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    node.submit("A", prompt(("doc", 500)))
    (decision,) = node.run_round().joined
    assert (decision.prefix_tokens, decision.load_back, decision.start) == (128, 128, 256)


def test_a_load_back_evicts_others_if_it_must() -> None:
    node = make_node("aligned")
    node.cache_on_device(prompt(("old", 512)), locked=False)
    node.cache_on_host(prompt(("doc", 256)))
    node.submit("A", prompt(("doc", 300)))
    record = node.run_round()
    assert admitted(record) == [("A", "whole", 256, 300)]
    # 2 pages were free; the load-back needs 4, the chunk 1
    assert record.evicted_pages == 3
    assert cached_tokens(node, ("old", 512)) == (320, 192)
    assert record.baseline == 640 - 256


def test_a_page_locked_before_is_not_newly_locked() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 256)), locked=True)
    node.submit("A", prompt(("doc", 300)))
    assert node.run_round().joined[0].newly_locked_tokens == 0


# --- step 3: order, and what ends a round


def test_the_first_candidate_is_asked_even_if_nothing_is_left() -> None:
    node = make_node()
    node.hold("everything", 640)
    submit(node, A=10)
    record = node.run_round()
    assert (refused(record), record.batch_is_full) == ([("A", "NO_TOKEN")], True)


def test_the_first_candidate_behind_a_deferred_request_is_asked_too() -> None:
    """Nothing has been added to the batch, so the state is not asked before it."""
    node = make_node(AccountingRules(on_shortage="defer"), chunked_prefill_size=256)
    submit(node, A=500)
    node.run_round()
    node.hold("other", 384)
    submit(node, B=10)
    record = node.run_round()
    assert [(d.request, d.kind) for d in record.decisions] == [("A", "deferred"), ("B", "refused")]
    assert record.batch_is_full


def test_the_queue_is_asked_in_order_until_an_answer_that_is_not_continue() -> None:
    node = make_node(chunked_prefill_size=256)
    submit(node, A=100, B=128, C=64)
    record = node.run_round()
    assert admitted(record) == [("A", "whole", 0, 100), ("B", "whole", 0, 128)]
    assert (len(record.decisions), list(node.waiting)) == (2, ["C"])
    assert (str(record.budget_state), record.batch_is_full) == ("OTHER", False)


def test_a_refusal_ends_the_round_even_if_others_behind_it_would_fit() -> None:
    node = make_node()
    submit(node, A=300, B=300, C=10)
    record = node.run_round()
    assert (admitted(record), refused(record)) == ([("A", "whole", 0, 300)], [("B", "NO_TOKEN")])
    assert list(node.waiting) == ["B", "C"]


def test_nobody_is_asked_once_a_resumed_chunk_has_spent_the_budget() -> None:
    node = make_node(chunked_prefill_size=256, pool_tokens=1280)
    submit(node, A=600, B=10)
    node.run_round()
    second = node.run_round()
    assert admitted(second) == [("A", "resumed", 256, 512)]
    assert len(second.decisions) == 1
    assert not second.batch_is_full
    assert admitted(node.run_round()) == [("A", "resumed", 512, 600), ("B", "whole", 0, 10)]


def test_the_prefill_limit_ends_a_batch() -> None:
    node = make_node(max_prefill_tokens=128, pool_tokens=1280)
    submit(node, A=100, B=10)
    record = node.run_round()
    assert (admitted(record), str(record.budget_state)) == ([("A", "whole", 0, 100)], "OTHER")
    assert not record.batch_is_full


def test_a_full_batch_is_asked_afresh_in_the_next_round() -> None:
    node = make_node()
    submit(node, A=300, B=400)
    assert node.run_round().batch_is_full
    node.transferred("A")
    record = node.run_round()
    assert (admitted(record), record.batch_is_full) == ([("B", "whole", 0, 400)], False)


def test_a_state_of_no_token_after_an_admission_is_a_full_batch() -> None:
    node = make_node()
    submit(node, A=574)
    record = node.run_round()
    assert (record.rem_total_tokens, str(record.budget_state), record.batch_is_full) == (-1, "NO_TOKEN", True)


def test_a_state_of_no_token_before_the_first_candidate_is_a_full_batch() -> None:
    node = make_node("aligned", chunked_prefill_size=256)
    submit(node, A=500)
    node.run_round()
    node.hold("other", 128)
    submit(node, B=10)
    record = node.run_round()
    assert admitted(record) == [("A", "resumed", 256, 500)]
    assert (len(record.decisions), record.rem_total_tokens, record.batch_is_full) == (1, 640 - 256 - 128 - 321, True)


def test_a_truncated_request_becomes_the_half_done_one_and_nobody_else_does() -> None:
    node = make_node(chunked_prefill_size=704, pool_tokens=6400)
    submit(node, A=1000, B=1000)
    first = node.run_round()
    assert (admitted(first), refused(first)) == ([("A", "truncated", 0, 512)], [("B", "OTHER")])
    assert not first.batch_is_full
    second = node.run_round()
    # A finishes, so B may be cut: 192 tokens of budget are left, and the grid is out of their reach
    assert admitted(second) == [("A", "resumed", 512, 1000), ("B", "truncated", 0, 192)]
    assert (node.in_flight(), node.chunked_req) == (("A",), node.live["B"])


# --- steps 8 and 9


def test_the_pages_of_finished_and_unfinished_chunks_are_cached_and_locked() -> None:
    node = make_node(chunked_prefill_size=256, pool_tokens=1280)
    submit(node, A=600)
    assert (node.run_round().protected, usage(node)) == (256, (16, 0, 4))
    node.run_round()
    last = node.run_round()
    # 600 tokens: nine full pages cached, a tenth partly filled and private
    assert (last.free, last.evictable, last.protected) == (640, 0, 576)
    assert node.live["A"].shared_pages == 9
    assert len(node.live["A"].pages) == 10


def test_a_transfer_makes_cached_pages_evictable_and_frees_the_partly_filled_one() -> None:
    node = make_node()
    submit(node, A=100)
    node.run_round()
    assert usage(node) == (8, 0, 1)
    node.transferred("A")
    assert usage(node) == (9, 1, 0)
    assert node.live == {}
    assert cached_tokens(node, ("A", 100)) == (64, 0)


def test_a_prompt_of_whole_pages_leaves_nothing_private() -> None:
    node = make_node()
    submit(node, A=128)
    node.run_round()
    assert node.live["A"].shared_pages == len(node.live["A"].pages) == 2
    node.transferred("A")
    assert usage(node) == (8, 2, 0)


def test_a_chunk_that_ends_inside_a_page_goes_on_in_the_same_page() -> None:
    """A chunk budget of 100 is no multiple of the page, and 256 is out of its reach at first."""
    node = make_node(chunked_prefill_size=100)
    submit(node, A=400)
    tables: list[list[int]] = []
    ends = []
    while node.has_work:
        record = node.run_round()
        ends.append(record.joined[0].end)
        tables.append(list(node.live["A"].pages))
    assert ends == [64, 164, 256, 356, 400]
    assert [len(table) for table in tables] == [1, 3, 4, 6, 7]
    for shorter, longer in pairwise(tables):
        assert longer[: len(shorter)] == shorter
    assert node.live["A"].shared_pages == 6
    assert usage(node) == (3, 0, 6)


def test_a_chunk_inside_a_page_that_fills_it_is_cached_only_then() -> None:
    node = make_node(chunked_prefill_size=100)
    submit(node, A=400)
    node.run_round()
    node.run_round()
    assert (node.live["A"].prefix_tokens, node.live["A"].shared_pages) == (164, 2)
    node.run_round()
    assert (node.live["A"].prefix_tokens, node.live["A"].shared_pages) == (256, 4)


def test_two_identical_prompts_in_one_batch_share_their_pages() -> None:
    node = make_node()
    node.submit("A", prompt(("doc", 200)))
    node.submit("B", prompt(("doc", 200)))
    record = node.run_round()
    assert admitted(record) == [("A", "whole", 0, 200), ("B", "whole", 0, 200)]
    assert record.shared_pages == 3
    a, b = node.live["A"], node.live["B"]
    assert a.pages[:3] == b.pages[:3]
    assert a.pages[3] != b.pages[3], "each has a partly filled page of its own"
    assert usage(node) == (5, 0, 3)
    node.transferred("A")
    assert usage(node) == (6, 0, 3), "B still holds the shared pages"
    node.transferred("B")
    assert usage(node) == (7, 3, 0)


def test_a_half_done_prompt_shares_what_another_finished_meanwhile() -> None:
    node = make_node(chunked_prefill_size=256, pool_tokens=1280)
    node.submit("long", prompt(("doc", 512)))
    node.run_round()
    node.cache_on_device(prompt(("doc", 448)), locked=False)
    record = node.run_round()
    assert (admitted(record), record.shared_pages) == ([("long", "resumed", 256, 512)], 3)
    assert usage(node) == (12, 0, 8)


def test_an_allocation_evicts_the_least_recently_used_unlocked_leaves() -> None:
    node = make_node()
    for name in ("oldest", "middle", "newest"):
        node.cache_on_device(prompt((name, 128)), locked=False)
    submit(node, A=400)
    record = node.run_round()
    assert record.evicted_pages == 3
    assert [cached_tokens(node, (name, 128)) for name in ("oldest", "middle", "newest")] == [
        (0, 128),
        (64, 64),
        (128, 0),
    ]


def test_what_a_round_evicted_dropped_and_shared_is_counted_for_that_round_alone() -> None:
    node = make_node(host_tokens=64)
    node.cache_on_device(prompt(("old", 512)), locked=False)
    submit(node, A=300, B=60)
    first, second = node.run_round(), node.run_round()
    assert (first.evicted_pages, first.dropped_pages) == (4, 3), "five pages and one, two were free, one stays on host"
    assert (second.evicted_pages, second.dropped_pages, second.shared_pages) == (0, 0, 0)
    node.submit("C", prompt(("A", 300)))
    assert node.run_round().shared_pages == 0, "a hit is no copy"


def test_a_batch_is_allocated_in_order_and_what_fails_is_in_the_record() -> None:
    node = make_node("aligned", chunked_prefill_size=256)
    submit(node, A=500)
    node.run_round()
    node.hold("other", 384)
    record = node.run_round()
    assert record.forced
    assert record.failure is not None
    assert (record.failure.request, record.failure.wanted) == ("A", 244)
    assert (record.failure.free, record.failure.evictable) == (0, 0)
    assert (record.free, record.evictable, record.protected) == (0, 0, 256)


def test_a_load_back_that_finds_no_slots_is_a_failed_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own gate never lets this happen; a record says it all the same."""
    node = make_node()
    node.cache_on_host(prompt(("doc", 256)))
    node.submit("A", prompt(("doc", 300)))

    def fail(_req: Any) -> None:
        raise OutOfPages(256, 128, 64)

    monkeypatch.setattr(node.tree, "init_load_back", fail)
    record = node.run_round()
    assert record.failure is not None
    assert (record.failure.request, record.failure.wanted) == ("A", 256)
    assert (record.failure.free, record.failure.evictable) == (128, 64)
    assert (record.joined, node.in_flight(), record.batch_is_full) == ((), (), False)


def test_allocated_promises_are_settled_and_unallocated_ones_stay_open() -> None:
    node = make_node("aligned", chunked_prefill_size=256)
    submit(node, A=500)
    record = node.run_round()
    assert [(p.kind, p.tokens, str(p.due)) for p in record.promises] == [
        ("chunk", 256, "now"),
        ("page_overhead", 64, "now"),
    ]
    assert node.snapshot().open_promises == ()
    node.hold("other", 384)
    node.run_round()
    assert [(p.kind, p.tokens) for p in node.snapshot().open_promises] == [("chunk", 256), ("page_overhead", 64)]


# --- refusals are free


def test_a_refused_candidates_prefix_stays_the_first_to_be_evicted() -> None:
    node = make_node()
    node.cache_on_device(prompt(("old", 256)), locked=False)
    node.cache_on_device(prompt(("new", 128)), locked=False)
    node.hold("other", 64)
    node.submit("refused", prompt(("old", 256), ("x", 256)))
    before = node.snapshot()
    record = node.run_round()
    assert refused(record) == [("refused", "NO_TOKEN")]
    assert node.snapshot() == before
    node.hold("more", 64 * 5)
    assert (cached_tokens(node, ("old", 256)), cached_tokens(node, ("new", 128))) == ((128, 128), (128, 0))


def test_an_admitted_candidates_prefix_becomes_the_last_to_be_evicted() -> None:
    node = make_node()
    node.cache_on_device(prompt(("old", 256)), locked=False)
    node.cache_on_device(prompt(("new", 128)), locked=False)
    node.submit("A", prompt(("old", 256), ("x", 10)))
    node.run_round()
    node.transferred("A")
    node.hold("more", 64 * 6)
    assert (cached_tokens(node, ("old", 256)), cached_tokens(node, ("new", 128))) == ((256, 0), (0, 128))


def test_a_refusal_with_other_changes_nothing_either() -> None:
    node = make_node(chunked_prefill_size=704, pool_tokens=6400)
    node.cache_on_host(prompt(("doc", 1024)))
    submit(node, A=1000)
    node.submit("B", prompt(("doc", 1024), ("x", 500)))
    watcher = SnapshotsAround(node)
    node.watcher = watcher
    record = node.run_round()
    assert refused(record) == [("B", "OTHER")]
    assert watcher.before == watcher.after
    assert cached_tokens(node, ("doc", 1024)) == (0, 1024)


class SnapshotsAround(Watcher):
    """The node before and after the last decision."""

    def __init__(self, node: PrefillNode) -> None:
        self.node = node
        self.decisions: list[Decision] = []
        self.calls: list[str] = []

    def before_decision(self) -> None:
        self.calls.append("before")
        self.before = self.node.snapshot()

    def after_decision(self, decision: Decision) -> None:
        self.calls.append("after")
        self.after = self.node.snapshot()
        self.decisions.append(decision)


def test_the_watcher_is_told_of_every_decision_in_order() -> None:
    node = make_node(chunked_prefill_size=704, pool_tokens=6400)
    submit(node, A=1000, B=1000)
    watcher = SnapshotsAround(node)
    node.watcher = watcher
    records = [node.run_round(), node.run_round()]
    assert watcher.decisions == [decision for record in records for decision in record.decisions]
    assert watcher.calls == ["before", "after"] * len(watcher.decisions)
    assert [(d.request, d.kind) for d in watcher.decisions[:2]] == [("A", "truncated"), ("B", "refused")]


# --- abort and transfer, wherever a request is


def node_with_a_request_everywhere() -> PrefillNode:
    """`done` is in flight, `half` is half done, `queued` waits."""
    node = make_node(chunked_prefill_size=704, pool_tokens=6400)
    submit(node, done=100, half=1000, queued=1000)
    node.run_round()
    assert (node.in_flight(), node.chunked_req, list(node.waiting)) == (("done",), node.live["half"], ["queued"])
    return node


def test_a_snapshot_shows_who_holds_what() -> None:
    snapshot = node_with_a_request_everywhere().snapshot()
    assert [(r.rid, r.prompt_tokens, len(r.pages), r.shared_pages, r.in_flight) for r in snapshot.live] == [
        ("done", 100, 2, 1, True),
        ("half", 1000, 8, 8, False),
    ]
    assert (snapshot.page_size, snapshot.pool_pages, snapshot.free_pages) == (64, 100, 90)


def test_a_refused_decision_has_no_chunk_and_loads_nothing_back() -> None:
    node = make_node(chunked_prefill_size=704, pool_tokens=6400)
    node.cache_on_device(prompt(("doc", 256)), locked=False)
    node.cache_on_host(prompt(("doc", 512)))
    submit(node, A=1000)
    node.submit("B", prompt(("doc", 512), ("x", 500)))
    (decision,) = node.run_round().refused
    assert (decision.prompt_tokens, decision.prefix_tokens, decision.newly_locked_tokens) == (1012, 256, 256)
    assert (decision.start, decision.tokens, decision.load_back) == (256, 0, 0)


@pytest.mark.parametrize(
    ("rid", "left"),
    [
        # half: 384 of 576 left on the grid of 256 are [0, 512); done: one full page and a private one
        pytest.param("queued", (100 - 8 - 2, 0, 9), id="waiting"),
        pytest.param("half", (100 - 8 - 2, 8, 1), id="half done"),
        pytest.param("done", (100 - 8 - 1, 1, 8), id="in flight: its private page is freed"),
    ],
)
def test_abort_ends_a_request_wherever_it_is(rid: str, left: tuple[int, int, int]) -> None:
    node = node_with_a_request_everywhere()
    node.abort(rid)
    assert usage(node) == left
    assert rid not in {*node.waiting, *node.live}
    node.abort(rid)
    node.transferred(rid)
    assert usage(node) == left, "a second end does nothing"


def test_after_an_aborted_half_done_request_another_may_be_cut() -> None:
    node = node_with_a_request_everywhere()
    node.abort("half")
    assert node.chunked_req is None
    assert admitted(node.run_round()) == [("queued", "truncated", 0, 512)]


def test_an_aborted_half_done_request_leaves_its_chunks_to_be_hit() -> None:
    node = node_with_a_request_everywhere()
    node.abort("half")
    node.abort("queued")
    node.submit("again", prompt(("half", 1000)))
    (decision,) = node.run_round().joined
    assert (decision.prefix_tokens, decision.start) == (512, 512)


def test_an_abort_inside_a_page_frees_the_page_that_is_not_full() -> None:
    node = make_node(chunked_prefill_size=100)
    submit(node, A=400)
    node.run_round()
    node.run_round()
    assert usage(node) == (7, 0, 2)
    node.abort("A")
    assert usage(node) == (8, 2, 0)


@pytest.mark.parametrize("rid", ["queued", "half", "nobody"])
def test_a_transfer_of_what_is_not_in_flight_does_nothing(rid: str) -> None:
    node = node_with_a_request_everywhere()
    before = node.snapshot()
    node.transferred(rid)
    assert node.snapshot() == before
    assert (node.chunked_req, list(node.waiting)) == (node.live["half"], ["queued"])


def test_in_flight_is_in_the_order_of_admission() -> None:
    node = make_node(chunked_prefill_size=256, pool_tokens=6400)
    submit(node, long=300)
    node.run_round()
    submit(node, short=10)
    node.run_round()
    assert node.in_flight() == ("long", "short")


# --- the environment: cached pages, holds, the host


def test_a_locked_prompt_is_never_evicted() -> None:
    node = make_node()
    node.cache_on_device(prompt(("pinned", 256)), locked=True)
    node.cache_on_device(prompt(("loose", 256)), locked=False)
    assert usage(node) == (2, 4, 4)
    node.hold("all the rest", 384)
    assert usage(node) == (0, 0, 4)
    with pytest.raises(OutOfPages):
        node.hold("one more", 1)
    assert [(page.lock_refs, page.pinned_refs) for page in node.snapshot().pages()] == [(1, 1)] * 4


def test_a_locked_prompt_stays_locked_when_a_request_that_used_it_ends() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 256)), locked=True)
    node.submit("A", prompt(("doc", 300)))
    node.run_round()
    node.transferred("A")
    assert usage(node) == (6, 0, 4)


def test_caching_on_the_device_allocates_only_what_is_not_there_yet() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    node.cache_on_host(prompt(("doc", 256)))
    node.cache_on_device(prompt(("doc", 384)), locked=False)
    assert usage(node) == (4, 6, 0)
    assert cached_tokens(node, ("doc", 384)) == (384, 0)
    assert node.tree.host_pages == 0


def test_caching_a_prompt_again_makes_it_recent() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    node.cache_on_device(prompt(("new", 128)), locked=False)
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    node.hold("x", 64 * 8)
    assert (cached_tokens(node, ("doc", 128)), cached_tokens(node, ("new", 128))) == ((128, 0), (0, 128))


def test_caching_what_does_not_fit_changes_nothing() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    before = node.snapshot()
    with pytest.raises(OutOfPages) as error:
        node.cache_on_device(prompt(("doc", 704)), locked=True)
    # its own two pages are locked for as long as this takes, so they are not evictable for it
    assert (error.value.wanted_tokens, error.value.free_tokens, error.value.evictable_tokens) == (576, 512, 0)
    assert node.snapshot() == before


def test_caching_a_prompt_does_not_evict_its_own_beginning() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 128)), locked=False)
    node.cache_on_device(prompt(("new", 448)), locked=False)
    node.cache_on_device(prompt(("doc", 256)), locked=False)
    assert cached_tokens(node, ("doc", 256)) == (256, 0)
    assert cached_tokens(node, ("new", 448)) == (384, 64)


def test_holds_of_one_name_add_up_and_are_given_back_in_whole_pages() -> None:
    node = make_node()
    node.hold("x", 100)
    node.hold("x", 28)
    assert usage(node) == (7, 0, 0)
    assert len(node.snapshot().held) == 3
    node.release("x", 64)
    assert usage(node) == (9, 0, 0), "64 of 128 tokens are left, in one page"
    node.release("x")
    assert usage(node) == (10, 0, 0)
    assert node.snapshot().held == ()


def test_releasing_a_part_of_a_page_keeps_the_page() -> None:
    node = make_node()
    node.hold("x", 64)
    node.release("x", 1)
    assert usage(node) == (9, 0, 0)
    node.release("x", 63)
    assert usage(node) == (10, 0, 0)


def test_each_name_holds_for_itself() -> None:
    node = make_node()
    node.hold("x", 64)
    node.hold("y", 128)
    node.release("x")
    node.release("nobody")
    assert usage(node) == (8, 0, 0)


def test_a_hold_evicts_and_what_it_cannot_have_it_does_not_touch() -> None:
    node = make_node()
    node.cache_on_device(prompt(("doc", 256)), locked=False)
    node.hold("x", 448)
    assert usage(node) == (0, 3, 0)
    before = node.snapshot()
    with pytest.raises(OutOfPages):
        node.hold("x", 193)
    assert node.snapshot() == before


@pytest.mark.parametrize(("host_tokens", "kept"), [(0, 0), (63, 0), (64, 64), (128, 128), (None, 128)])
def test_the_host_keeps_what_it_has_room_for(host_tokens: int | None, kept: int) -> None:
    node = make_node(host_tokens=host_tokens)
    node.cache_on_device(prompt(("doc", 256)), locked=False)
    node.hold("x", 512)
    assert cached_tokens(node, ("doc", 256)) == (128, kept)


def test_without_a_host_tier_nothing_is_loaded_back() -> None:
    node = make_node(host_tokens=0)
    node.cache_on_host(prompt(("doc", 256)))
    node.submit("A", prompt(("doc", 300)))
    (decision,) = node.run_round().joined
    assert (decision.start, decision.load_back) == (0, 0)


# --- what a round costs


class CountingQueue(OrderedDict[str, Any]):
    """A waiting queue that knows how many of its requests were looked at."""

    looked_at = 0

    def values(self) -> Any:
        for request in super().values():
            self.looked_at += 1
            yield request

    def items(self) -> Any:
        raise AssertionError("a round walks the queue once, by its values")

    def __iter__(self) -> Any:
        raise AssertionError("a round walks the queue once, by its values")


def test_admission_does_not_touch_the_rest_of_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(chunked_prefill_size=256, pool_tokens=64_000)
    submit(node, **{f"r{number}": 100 for number in range(10_000)})
    queue = node.waiting = CountingQueue(node.waiting)
    requests = list(dict.values(queue))
    matches: list[int] = []
    match = node.tree.match

    def counting_match(keys: Sequence[Any]) -> list[CachedPage]:
        matches.append(len(keys))
        return match(keys)

    monkeypatch.setattr(node.tree, "match", counting_match)
    for round_number in range(1, 101):
        record = node.run_round()
        assert len(record.joined) == 2, "128 tokens each in a budget of 256"
        assert queue.looked_at <= 3 * round_number
        assert len(matches) <= 3 * round_number
    assert sum(bool(request.prompt._page_keys) for request in requests) == len(matches) == 200


def test_a_large_batch_looks_at_each_request_once_and_reads_the_pool_a_few_times_each() -> None:
    node = make_node(chunked_prefill_size=None, pool_tokens=64 * 9_000)
    submit(node, **{f"r{number}": 10 for number in range(3_000)})
    queue = node.waiting = CountingQueue(node.waiting)
    pool = node.pool = node.tree.pool = CountingPool(node.settings.pool_pages, 64)
    assert len(node.run_round().joined) == queue.looked_at == 3_000
    assert pool.reads <= 20 * 3_000


class CountingPool(PagePool):
    reads = 0

    def available_size(self) -> int:
        self.reads += 1
        return super().available_size()


def test_sizes_are_whole_pages_rounded_down() -> None:
    settings = node_settings(pool_tokens=703, host_tokens=130)
    assert (settings.pool_pages, settings.host_pages) == (10, 2)
    assert node_settings(host_tokens=None).host_pages is None
    assert isinstance(settings, NodeSettings)
