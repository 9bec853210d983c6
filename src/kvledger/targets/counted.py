"""A base for schedulers that can be counted but not looked into: how many slots are free, how many each request has.

Five methods make any scheduler a target. Its promises are checked against the prompts that it has begun; what needs
more (offsets, refusals, page identities) is skipped by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from kvledger.adder import AddReqResult
from kvledger.arithmetic import ceil_pages
from kvledger.node import NodeSettings, Watcher
from kvledger.pool import OutOfPages
from kvledger.record import AllocationFailure, Decision, LiveRequest, RoundRecord, Snapshot
from kvledger.request import Prompt
from kvledger.trace import Trace

Ran = tuple[str, int, int]
"""A chunk that a round ran: request, start and end in tokens of its prompt."""


class CountedTarget:
    """Provide `enqueue`, `step`, `finish`, `free_tokens` and `allocated_tokens`; sizes are tokens.

    Prefixes are not shared, and outsiders do nothing here.

    `step` raises MemoryError (or OutOfPages) where an admitted request's chunk finds no slots. A request whose prompt
    is done holds its slots until `finish`.
    """

    capabilities = frozenset({"batches", "counts"})
    foreign = True

    def __init__(self, settings: NodeSettings, watcher: Watcher) -> None:
        self.settings = settings
        self.watcher = watcher
        self.rounds = 0
        self._waiting: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        self._end: dict[str, int] = {}

    def enqueue(self, rid: str, prompt_tokens: int) -> None:
        """A request arrives."""
        raise NotImplementedError

    def step(self) -> Iterable[Ran]:
        """Run one round and say which chunks it ran."""
        raise NotImplementedError

    def finish(self, rid: str) -> None:
        """A begun request ends, done or given up: its slots are free."""
        raise NotImplementedError

    def free_tokens(self) -> int:
        """Free slots, and cached ones that could be evicted."""
        raise NotImplementedError

    def allocated_tokens(self) -> Mapping[str, int]:
        """Slots of each begun request, in whole pages."""
        raise NotImplementedError

    @classmethod
    def standalone(cls, trace: Trace) -> str:  # noqa: ARG003 - a trace of any kind is played on the same class
        """Its class as a script's `World`: see kvledger.replay.Target."""
        from kvledger.targets.excerpt import counted_world

        return counted_world(cls, CountedTarget)

    def cancel(self, rid: str) -> bool:  # noqa: ARG002 - for those who can
        """Take a waiting request out of the queue; False if this scheduler cannot."""
        return False

    # --- the target protocol

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or len(self.in_flight()) < len(self._begun)

    def submit(self, rid: str, prompt: Prompt) -> str | None:
        pool_tokens = self.settings.pool_pages * self.settings.page_size
        need = prompt.tokens + 1 + self.settings.page_size
        if not need < pool_tokens:
            return f"{need} tokens are not below the empty pool's {pool_tokens}"
        self._waiting[rid] = prompt.tokens
        self.enqueue(rid, prompt.tokens)
        return None

    def run_round(self) -> RoundRecord:
        self.rounds += 1
        baseline = self.free_tokens()
        failure: AllocationFailure | None = None
        decisions: list[Decision] = []
        try:
            for ran in self.step():
                self.watcher.before_decision()
                decisions.append(self._decision(ran))
                self.watcher.after_decision(decisions[-1])
        except (MemoryError, OutOfPages) as error:
            failure = self._failure(error)
        return RoundRecord(
            round=self.rounds,
            baseline=baseline,
            rem_total_tokens=baseline,
            cur_rem_tokens=baseline,
            rem_chunk_tokens=None,
            budget_state=AddReqResult.CONTINUE,
            batch_is_full=False,
            decisions=tuple(decisions),
            promises=(),
            free=self.free_tokens(),
            evictable=0,
            protected=sum(self.allocated_tokens().values()),
            failure=failure,
        )

    def _decision(self, ran: Ran) -> Decision:
        rid, start, end = ran
        resumed = rid in self._begun
        if not resumed:
            self._begun[rid] = self._waiting.pop(rid)
        prompt_tokens = self._begun[rid]
        self._end[rid] = end
        free_tokens = self.free_tokens()
        return Decision(
            request=rid,
            kind="resumed" if resumed else "whole" if end == prompt_tokens else "truncated",
            prompt_tokens=prompt_tokens,
            prefix_tokens=start,
            start=start,
            end=end,
            baseline=free_tokens,
            rem_total_tokens=free_tokens,
            cur_rem_tokens=free_tokens,
            rem_chunk_tokens=None,
            rem_input_tokens=None,
        )

    def _failure(self, error: Exception) -> AllocationFailure:
        """Whose chunk failed is not known from outside: the oldest unfinished request stands for it."""
        unfinished = [rid for rid, tokens in self._begun.items() if self._end[rid] < tokens]
        rid = unfinished[0] if unfinished else next(iter(self._waiting), "?")
        left = self._begun[rid] - self._end[rid] if rid in self._begun else self._waiting.get(rid, 0)
        return AllocationFailure(rid, left, self.free_tokens(), 0, f"out of memory: {error}")

    def transferred(self, rid: str) -> None:
        if rid in self.in_flight():
            self._forget(rid)

    def abort(self, rid: str) -> None:
        if rid in self._begun:
            self._forget(rid)
        elif rid in self._waiting and self.cancel(rid):
            del self._waiting[rid]

    def _forget(self, rid: str) -> None:
        self.finish(rid)
        del self._begun[rid]
        del self._end[rid]

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        """Nothing: no prefix is shared here."""

    def cache_on_host(self, prompt: Prompt) -> None:
        """Nothing: no prefix is shared here."""

    def hold(self, name: str, tokens: int) -> None:
        """Nothing: outsiders cannot take this scheduler's slots."""

    def release(self, name: str, tokens: int | None = None) -> None:
        """Nothing was held."""

    def in_flight(self) -> tuple[str, ...]:
        return tuple(rid for rid, tokens in self._begun.items() if self._end[rid] == tokens)

    def snapshot(self) -> Snapshot:
        """Counts as pages: numbers stand for pages that nobody has looked at.

        While a round's chunks are told one by one, what later ones took counts as free, so that the chunk after which
        a promise is no longer covered is the one that is named.
        """
        page_size, pool_pages = self.settings.page_size, self.settings.pool_pages
        allocated = self.allocated_tokens()
        untold_tokens = sum(tokens for rid, tokens in allocated.items() if rid not in self._begun)
        in_flight = self.in_flight()
        numbers = iter(range(sum(allocated.values())))
        return Snapshot(
            page_size=page_size,
            pool_pages=pool_pages,
            released=(),
            never_used=range(pool_pages - (self.free_tokens() + untold_tokens) // page_size, pool_pages),
            cached=(),
            live=tuple(
                LiveRequest(
                    rid,
                    tokens,
                    tuple(islice(numbers, ceil_pages(allocated.get(rid, 0), page_size))),
                    0,
                    rid in in_flight,
                )
                for rid, tokens in self._begun.items()
            ),
            waiting=tuple(self._waiting),
        )
