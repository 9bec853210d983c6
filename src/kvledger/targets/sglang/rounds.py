"""One prefill pass around sglang's adder: who is asked, in what order, and what each answer was.

Written from what the scheduler's documentation and its objects say of themselves: the half-done request goes first,
then the queue in the policy's order until an answer that is not CONTINUE; only then is anything allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvledger.adder import AddReqResult
from kvledger.node import Watcher
from kvledger.record import AllocationFailure, Decision, DecisionKind
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.targets.sglang.adders import Books, adder_class
from kvledger.targets.sglang.engine import UNLIMITED_TOKENS, Figures
from kvledger.targets.sglang.views import failure_of, is_out_of_memory, result_of
from kvledger.targets.sglang.world import World


@dataclass(slots=True)
class Queue:
    """What waits, what is half done, and what decodes; requests are sglang's own."""

    running: Any
    waiting: list[Any] = field(default_factory=list)
    chunked: Any = None


@dataclass(slots=True)
class PrefillPass:
    """Decides one batch, tells the watcher of each decision, and allocates. `no_token`: memory ended it."""

    world: World
    settings: NodeSettings
    rules: AccountingRules
    watcher: Watcher
    queue: Queue
    policy: Any
    new_token_ratio: float
    on_admitted: Callable[[Any], None]
    decisions: list[Decision] = field(default_factory=list)
    no_token: bool = False
    adder: Any = field(init=False)
    books: Books = field(init=False)

    figures_at_end: Figures = field(init=False)
    state_at_end: AddReqResult = field(init=False)

    def __post_init__(self) -> None:
        self._open_books()
        self._close_books()

    def _close_books(self) -> None:
        """The figures as they stand now: an allocation will move them."""
        self.figures_at_end = self.books.figures()
        self.state_at_end = result_of(self.adder.budget_state())

    def _open_books(self) -> None:
        """A fresh adder over today's pool; decodes that are to join a mixed batch are charged to it at once."""
        mixed = self.queue.running.batch_size() if self.settings.mixed_chunk else 0
        self.adder = adder_class(self.world.engine, self.rules)(
            self.settings.page_size,
            self.world.tree,
            self.world.allocator,
            self.queue.running,
            self.new_token_ratio,
            self.settings.max_prefill_tokens or UNLIMITED_TOKENS,
            self.settings.chunked_prefill_size,
            mixed,
        )
        self.books = Books.open(self.world.engine, self.adder)

    def decide(self) -> list[Any]:
        """The batch, in order; the queue is left with those that were not admitted. Empty if nothing can be formed."""
        running = self.queue.running
        if self.settings.mode == "prefill" or self.settings.schedule_policy == "priority" or running.is_empty():
            running.batch_is_full = False
        if self.queue.chunked is None and (running.batch_is_full or not self.queue.waiting):
            return []
        self.policy.calc_priority(self.queue.waiting, running)
        self._open_books()
        if self.queue.chunked is not None:
            self._resume()
        self._admit()
        self._close_books()
        batch = list(self.adder.can_run_list)
        joined = {id(request) for request in batch}
        self.queue.waiting = [request for request in self.queue.waiting if id(request) not in joined]
        if self.adder.new_chunked_req is not None:
            assert self.queue.chunked is None, "two requests are half done"
            self.queue.chunked = self.adder.new_chunked_req
        if self.queue.chunked is not None and batch:
            self.queue.chunked.inflight_middle_chunks += 1
        return batch

    def allocate(self, batch: list[Any]) -> tuple[Any, AllocationFailure | None]:
        """A schedule batch with its slots, or why there are none."""
        engine = self.world.engine
        schedule = engine.batch(self.world, batch, self.queue.chunked)
        engine.start_loads(self.world.tree)
        try:
            schedule.prepare_for_extend()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None, failure_of(self.world, batch, error)
        return schedule, None

    def _resume(self) -> None:
        engine, request = self.world.engine, self.queue.chunked
        request.init_next_round_input()
        start, remaining = engine.prefix_tokens(request), self.books.figures()
        engine.limit_continuation(self.adder, self.policy, request, self.queue.waiting, self.settings.page_size)
        self.watcher.before_decision()
        self.queue.chunked = self.adder.add_chunked_req(request)
        joined = bool(self.adder.can_run_list)
        end = engine.chunk_end(request) if joined else start
        cut = joined and end < engine.fill_tokens(request)
        self.books.charged(request.rid, "chunk", page_overhead=engine.page_overhead(self.adder), cut=cut)
        forced = joined and remaining.baseline - remaining.total_offset <= 0
        self._decided(request, "resumed" if joined else "deferred", start, end, prefix_tokens=start, forced=forced)

    def _admit(self) -> None:
        running = self.queue.running
        for request in list(self.queue.waiting):
            if result_of(self.adder.budget_state()) is AddReqResult.OTHER:
                return
            if len(self.adder.can_run_list) >= self.world.rows.available_size() + self._held_rows():
                running.batch_is_full = True
            if running.batch_is_full and not self._preempted_for(request):
                return
            answer = self._ask(request)
            if answer is not AddReqResult.CONTINUE:
                self.no_token = answer is AddReqResult.NO_TOKEN
                if self.no_token:
                    running.batch_is_full = bool(self.adder.can_run_list) or not running.is_empty()
                return

    def _held_rows(self) -> int:
        return sum(1 for request in self.adder.can_run_list if request.kv.holds_kv)

    def _preempted_for(self, request: Any) -> bool:
        """Under the priority policy a full batch may make room for a request of higher priority."""
        if self.settings.schedule_policy != "priority" or not self.adder.preempt_to_schedule(request):
            return False
        self.watcher.preempted()
        return True

    def _ask(self, request: Any) -> AddReqResult:
        """One candidate: match, ask, and read what came of it."""
        engine = self.world.engine
        engine.match(self.world.tree, request)
        hit = engine.prefix_tokens(request)
        newly_locked = self.world.lock_cost(request.last_node)
        self.watcher.before_decision()
        before = len(self.adder.can_run_list)
        answer = result_of(engine.ask(self.adder, request, self.queue.chunked is not None, self.rules.truncation_align))
        joined = len(self.adder.can_run_list) > before
        if not joined:
            self._decided(request, "refused", hit, hit, prefix_tokens=hit, newly_locked=newly_locked, reason=answer)
            return answer
        start, end = engine.prefix_tokens(request), engine.chunk_end(request)
        cut = end < engine.fill_tokens(request)
        self.books.charged(request.rid, "chunk", page_overhead=engine.page_overhead(self.adder), cut=cut)
        self.on_admitted(request)
        self._decided(
            request,
            "truncated" if cut else "whole",
            start,
            end,
            prefix_tokens=hit,
            load_back=start - hit,
            newly_locked=newly_locked,
        )
        return answer

    def _decided(
        self,
        request: Any,
        kind: DecisionKind,
        start: int,
        end: int,
        *,
        prefix_tokens: int,
        load_back: int = 0,
        newly_locked: int = 0,
        reason: AddReqResult | None = None,
        forced: bool = False,
    ) -> None:
        figures = self.books.figures()
        decision = Decision(
            request=request.rid,
            kind=kind,
            prompt_tokens=self.world.engine.fill_tokens(request),
            prefix_tokens=prefix_tokens,
            start=start,
            end=end,
            load_back=load_back,
            newly_locked_tokens=newly_locked,
            reason=reason,
            forced=forced,
            baseline=figures.baseline,
            rem_total_tokens=figures.baseline - figures.total_offset,
            cur_rem_tokens=figures.baseline - figures.current_offset,
            rem_chunk_tokens=self.adder.rem_chunk_tokens,
            rem_input_tokens=self.rem_input_tokens(),
        )
        self.decisions.append(decision)
        self.watcher.after_decision(decision)

    def rem_input_tokens(self) -> int | None:
        return None if self.settings.max_prefill_tokens is None else self.adder.rem_input_tokens
