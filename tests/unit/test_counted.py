"""A scheduler that can only be counted: what the base class makes of its five methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from kvledger.events import (
    Abort,
    Cached,
    Drain,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import NodeSettings, Watcher
from kvledger.replay import Replay, Target
from kvledger.request import Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.targets.counted import CountedTarget, Ran
from kvledger.trace import Trace

NODE = NodeSettings(
    page_size=4,
    checkpoint_align=8,
    chunked_prefill_size=16,
    max_prefill_tokens=None,
    pool_tokens=64,
    host_tokens=0,
)


class FirstComeFirstServed(CountedTarget):
    """One request at a time, a chunk a round; `careless` begins the next before the first is done."""

    careless = False

    def __init__(self, settings: NodeSettings, _rules: AccountingRules, watcher: Watcher) -> None:
        super().__init__(settings, watcher)
        self.queue: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.pages: dict[str, int] = {}

    def enqueue(self, rid: str, prompt_tokens: int) -> None:
        self.queue[rid] = prompt_tokens

    def cancel(self, rid: str) -> bool:
        return self.queue.pop(rid, None) is not None

    def step(self) -> Iterable[Ran]:
        unfinished = [rid for rid in self.queue if self.done.get(rid, 0) < self.queue[rid]]
        ran = []
        for rid in unfinished if self.careless else unfinished[:1]:
            start = self.done.get(rid, 0)
            if not start and not self.careless and self.queue[rid] > self.free_tokens():
                break
            end = min(self.queue[rid], start + 16)
            pages = -(-end // 4) - self.pages.get(rid, 0)
            if pages * 4 > self.free_tokens():
                raise MemoryError(f"{rid} wants {pages} pages")
            self.done[rid], self.pages[rid] = end, self.pages.get(rid, 0) + pages
            ran.append((rid, start, end))
        return ran

    def finish(self, rid: str) -> None:
        del self.queue[rid], self.done[rid], self.pages[rid]

    def free_tokens(self) -> int:
        return 64 - 4 * sum(self.pages.values())

    def allocated_tokens(self) -> Mapping[str, int]:
        return {rid: 4 * pages for rid, pages in self.pages.items()}


class Careless(FirstComeFirstServed):
    careless = True


def _trace(*tokens: int) -> Trace:
    submits = [Submit(name, Prompt([(name, size)])) for name, size in zip("ABCD", tokens, strict=False)]
    return Trace(NODE, "tail-reserved", (*submits, Drain()))


def test_is_a_target() -> None:
    assert isinstance(FirstComeFirstServed(NODE, PRESETS["upstream"], Watcher()), Target)


def test_the_base_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError):
        CountedTarget(NODE, Watcher()).step()


def test_one_at_a_time_is_ok() -> None:
    outcome = checked_replay(_trace(40, 30, 20), target=FirstComeFirstServed)
    assert outcome.verdict == "ok"
    assert [(d.request, d.kind, d.start, d.end) for r in outcome.rounds for d in r.joined][:3] == [
        ("A", "truncated", 0, 16),
        ("A", "resumed", 16, 32),
        ("A", "resumed", 32, 40),
    ]


def test_the_chunk_that_spends_a_tail_is_named_and_the_failure_follows() -> None:
    outcome = checked_replay(_trace(40, 40), target=Careless)
    assert outcome.verdict == "oom"
    assert (outcome.broken[0].invariant, outcome.broken[0].request) == ("promises-covered", "B")
    assert outcome.failure is not None
    assert outcome.failure.request == "A", "the oldest unfinished one stands for whoever failed"


class Leaking(FirstComeFirstServed):
    leaked_pages = 0

    def finish(self, rid: str) -> None:
        self.leaked_pages += 1
        super().finish(rid)

    def free_tokens(self) -> int:
        return super().free_tokens() - 4 * self.leaked_pages


def test_a_leak_is_called_one() -> None:
    outcome = checked_replay(_trace(40, 30), target=Leaking)
    assert outcome.broken[0].invariant == "conserved"
    assert "1 belong to nobody" in outcome.broken[0].message


def test_too_large_a_prompt_is_rejected_at_submit() -> None:
    outcome = checked_replay(_trace(59, 58), target=FirstComeFirstServed)
    assert [rid for rid, _ in outcome.rejected_at_submit] == ["A"]
    assert outcome.verdict == "ok"


def test_what_it_cannot_show_is_skipped_by_name() -> None:
    monitor = InvariantMonitor()
    Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=monitor)
    assert {"no-use-after-free", "order", "refusal-is-free", "on-grid"} <= set(monitor.skipped)
    assert not {"promises-covered", "admitted-finishes", "progress", "conserved", "quiescent"} & set(monitor.skipped)


def test_aborts_end_requests_waiting_begun_and_in_flight() -> None:
    replay = Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=InvariantMonitor())
    for name, tokens in (("A", 16), ("B", 30), ("C", 8)):
        replay.apply(Submit(name, Prompt([(name, tokens)])))
    replay.apply(Round())
    replay.apply(Round())
    assert replay.target.in_flight() == ("A",)
    for name in ("A", "B", "C", "C"):
        replay.apply(Abort(name))
    assert not replay.target.has_work
    assert replay.target.snapshot().free_pages == 16
    assert not replay.outcome.broken


def test_outsiders_do_nothing_here() -> None:
    replay = Replay(NODE, PRESETS["upstream"], target=FirstComeFirstServed, monitor=InvariantMonitor())
    for tier in ("host", "device"):
        replay.apply(Cached(tier, Prompt([("doc", 16)])))
    replay.apply(Hold("somebody", 8))
    replay.apply(Release("somebody"))
    replay.apply(Submit("A", Prompt([("A", 8)])))
    replay.apply(Transferred("A"))
    assert replay.target.snapshot().free_pages == 16
    assert replay.target.has_work
