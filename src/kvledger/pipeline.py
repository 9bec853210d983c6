"""A pipeline: rank 0 decides, the others replay its plan on pools, caches and hosts of their own.

Why no rank fails where rank 0 counts with the least of all ranks (`rank_view: least`, tails reserved). All ranks run
the same chunks, so that a request still needs the same pages on each of them: ceil(prompt) less what its table holds.
Only the baseline B differs. Claim: after each decision B >= those needs, summed, on every rank. (1) A candidate's hit
is agreed on (the least of all ranks, on the grid) and locked on every rank before the gate is asked, so that no
load-back in between can evict it. The gate passes if prompt - d + slack < B - offset on every rank, with the d that
is on that rank's device, and there the single node's argument goes through. (The smallest B beside the smallest d
would be safe as well and starve: they may be of different ranks.) (2) A load-back takes h slots of B and h of the
need. Evicting for it, or for a chunk, moves slots from evictable to free and leaves B; a page that turns out to be
cached already gives its copy back, and B is no smaller. (3) A transfer or an abort that comes late, a prefix that
somebody locks, a hold: all are in that rank's B, which is read afresh at each decision, and none takes slots that were
promised, but for an outsider's hold or lock. (4) Who has ended on rank 0 ends on the others with the head of the next
plan, before anything is decided, so that nobody runs what another rank has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from kvledger.adder import PrefillAdder
from kvledger.follower import PlanEntry, ReplayingRank, cut_hit
from kvledger.node import PrefillNode, Watcher
from kvledger.pool import OutOfPages, PrefillOutOfMemory
from kvledger.record import Decision, RoundRecord, Snapshot
from kvledger.request import USUAL_OUTPUT, Output, Prompt, Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings, of_rank

Ranks = tuple[int, ...] | None


class OutOfPagesOnRank(OutOfPages):
    """What an outsider asked of one rank's pool, and that has not."""

    def __init__(self, rank: int, error: OutOfPages) -> None:
        super().__init__(error.wanted_tokens, error.free_tokens, error.evictable_tokens)
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank}: {super().__str__()}"


class LeastMemory:
    """Every rank's cache and pool as one: the sizes of the rank that has the least left, hooks that lock on all.

    Load-backs differ from rank to rank. Rank 0's own is the adder's; by how much another's is larger is owed there from
    the lock on, until that rank has taken the request in.
    """

    def __init__(self, pipeline: PipelineNode) -> None:
        self._pipeline = pipeline
        self._owed_tokens: dict[int, int] = {}

    def _tightest(self) -> PrefillNode:
        return min(self._pipeline.ranks(), key=lambda node: baseline_tokens(node) - self._owed(node))

    def _owed(self, node: PrefillNode) -> int:
        return self._owed_tokens.get(node.rank, 0)

    def available_size(self) -> int:
        node = self._tightest()
        return node.pool.available_size() - self._owed(node)

    def evictable_size(self) -> int:
        return self._tightest().tree.evictable_size()

    def inc_lock_ref(self, req: Request) -> None:
        for node, own in self._pipeline.copies(req):
            node.tree.inc_lock_ref(own)
            self._owed_tokens[node.rank] = own.host_hit_tokens - req.host_hit_tokens

    def dec_lock_ref(self, req: Request) -> None:
        for node, own in self._pipeline.copies(req):
            node.tree.dec_lock_ref(own)
        self.settle()

    def init_load_back(self, req: Request) -> None:
        """Rank 0's. The others hear of the admission next, and load theirs."""
        self._pipeline.tree.init_load_back(req)
        for node, own in self._pipeline.copies(req):
            self._owed_tokens[node.rank] = 0 if node is self._pipeline else own.host_hit_tokens

    def settle(self) -> None:
        """Nothing is owed any more: it is loaded on every rank, or refused."""
        self._owed_tokens.clear()


def baseline_tokens(node: PrefillNode) -> int:
    """Free and evictable on one rank."""
    return node.pool.available_size() + node.tree.evictable_size()


class PipelineNode(PrefillNode):
    """Rank 0 of a pipeline, and the ranks that replay its plan. `at` is the rank that takes slots just now.

    What reaches some ranks alone says so with `ranks`; None is all of them. An abort that reaches a rank before rank 0
    waits for the plan; one that has reached rank 0 is in the next plan, or acts at once where it comes first.
    """

    features = frozenset({"lpm", "shortest-prefill-first", "priority", "ranks"})
    rank_type: ClassVar[type[ReplayingRank]] = ReplayingRank
    view_type: ClassVar[type[LeastMemory]] = LeastMemory

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(of_rank(settings, 0), rules, watcher)
        self.settings = settings
        self.others = tuple(
            self.rank_type(of_rank(settings, rank), rules, rank) for rank in range(1, len(settings.ranks) + 1)
        )
        self.counts_least = rules.rank_view == "least"
        self.at = 0
        self._least = self.view_type(self)
        self._rank_hits: tuple[tuple[int, int], ...] = ()
        self._ended: list[str] = []
        self._admitted: dict[str, None] = {}

    def ranks(self) -> tuple[PrefillNode, ...]:
        """All of them, by number."""
        return (self, *self.others)

    def copies(self, request: Request) -> Iterator[tuple[PrefillNode, Request]]:
        """A waiting request as each rank knows it."""
        yield self, request
        for other in self.others:
            if request.rid in other.waiting:
                yield other, other.waiting[request.rid]

    # --- what arrives from outside

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        """The entry asks the smallest pool; whom it lets in waits on every rank."""
        reason = super().submit(rid, prompt, output)
        if reason is None:
            for other in self.others:
                other.submit(rid, prompt, output)
        return reason

    def transferred(self, rid: str, ranks: Ranks = None) -> None:
        """Each rank sends its own KV, and its part of the request ends with it."""
        if _reaches(ranks, 0):
            super().transferred(rid)
        for other in self._named(ranks):
            other.transferred(rid)

    def abort(self, rid: str, ranks: Ranks = None) -> None:
        if _reaches(ranks, 0) and self._decides_on(rid):
            self._ended.append(rid)
            super().abort(rid)
        if not self._decides_on(rid):
            for other in self._named(ranks):
                other.abort(rid)

    def cache_on_device(self, prompt: Prompt, *, locked: bool, ranks: Ranks = None) -> None:
        own = super().cache_on_device
        self._on_each(ranks, lambda: own(prompt, locked=locked), lambda o: o.cache_on_device(prompt, locked=locked))

    def cache_on_host(self, prompt: Prompt, ranks: Ranks = None) -> None:
        own = super().cache_on_host
        self._on_each(ranks, lambda: own(prompt), lambda other: other.cache_on_host(prompt))

    def hold(self, name: str, tokens: int, ranks: Ranks = None) -> None:
        own = super().hold
        self._on_each(ranks, lambda: own(name, tokens), lambda other: other.hold(name, tokens))

    def release(self, name: str, tokens: int | None = None, ranks: Ranks = None) -> None:
        own = super().release
        self._on_each(ranks, lambda: own(name, tokens), lambda other: other.release(name, tokens))

    def _decides_on(self, rid: str) -> bool:
        return rid in self.waiting or rid in self.live

    def _named(self, ranks: Ranks) -> list[ReplayingRank]:
        return [other for other in self.others if _reaches(ranks, other.rank)]

    def _on_each(self, ranks: Ranks, own: Callable[[], None], on: Callable[[ReplayingRank], None]) -> None:
        if _reaches(ranks, 0):
            own()
        for other in self._named(ranks):
            try:
                on(other)
            except OutOfPages as error:
                raise OutOfPagesOnRank(other.rank, error) from error

    # --- one round

    def _open_books(self) -> PrefillAdder:
        """The plan's head goes out first: whose pages are free again counts in this round."""
        for other in self.others:
            other.open_round(self._ended)
        self._ended = []
        self._admitted = {rid: None for rid in self._admitted if any(rid in node.live for node in self.ranks())}
        return super()._open_books()

    def _memory_in_view(self) -> tuple[Any, Any]:
        if not self.counts_least:
            return super()._memory_in_view()
        return self._least, self._least

    def _match(self, request: Request) -> None:
        """The agreed hit is the least of all ranks, wherever it is on each."""
        super()._match(request)
        if not self.counts_least:
            return
        found_tokens = [request.prefix_tokens + request.host_hit_tokens]
        found_tokens += [other.match(request.rid) for other in self.others if request.rid in other.waiting]
        for node, own in self.copies(request):
            cut_hit(own, min(found_tokens), node.page_size)

    def _newly_locked_pages(self, request: Request) -> int:
        """Rank 0's; what it is on the others is kept for the record."""
        self._rank_hits = ()
        if self.counts_least:
            self._rank_hits = tuple(
                (own.prefix_tokens, node.page_size * sum(1 for cached in own.device_hit if not cached.lock_refs))
                for node, own in self.copies(request)
                if node is not self
            )
        return super()._newly_locked_pages(request)

    def _has_request_slot(self) -> bool:
        """A stage on which a transfer is late has its slot taken still."""
        slots = self.settings.request_slots
        counted = self.ranks() if self.counts_least else (self,)
        return slots is None or max(len(node.live) for node in counted) < slots

    def _decided(self, decisions: list[Decision], decision: Decision) -> None:
        """The others hear of it before anybody looks: a refusal is not in the plan."""
        if decision.kind in ("whole", "truncated"):
            self._admitted[decision.request] = None
        if decision.kind != "refused":
            entry = PlanEntry(decision.request, decision.kind, decision.start, decision.end)
            for other in self.others:
                self.at = other.rank
                other.replay(entry)
            self.at = 0
            self._least.settle()
        if decision.kind not in ("resumed", "deferred"):
            decision = replace(decision, rank_hits=self._rank_hits)
        super()._decided(decisions, decision)

    def _allocate_batch(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        failure = super()._allocate_batch(adder)
        for other in self.others:
            if failure is None:
                self.at = other.rank
                failure = other.allocate()
        return failure

    def _run_batch(self, adder: PrefillAdder) -> None:
        self.at = 0
        super()._run_batch(adder)
        for other in self.others:
            other.run()

    def _record(
        self,
        facts: dict[str, Any],
        counters: tuple[int, int, int],
        decisions: tuple[Decision, ...] = (),
        batch_is_full: bool = False,
        failure: PrefillOutOfMemory | None = None,
    ) -> RoundRecord:
        record = super()._record(facts, counters, decisions, batch_is_full, failure)
        failed = record.failure
        if failed is not None and self.at:
            failed = replace(failed, rank=self.at, message=f"rank {self.at}: {failed.message}")
        return replace(record, failure=failed, ranks=tuple(other.told() for other in self.others))

    # --- what the outside may see

    def in_flight(self) -> tuple[str, ...]:
        """Whose KV is being sent from any rank, in admission order."""
        own = super().in_flight()
        flying = {*own, *(rid for other in self.others for rid in other.in_flight())}
        return tuple(rid for rid in self._admitted if rid in flying)

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), ranks=tuple(other.snapshot() for other in self.others))


def _reaches(ranks: Ranks, rank: int) -> bool:
    return ranks is None or rank in ranks


PrefillNode.modes["ranks"] = PipelineNode
