"""A base for schedulers that can be counted but not looked into: how many slots are free, how many each request has.

Five methods make any scheduler a target. Its promises are checked against the prompts that it has begun; what needs
more (offsets, refusals, page identities) is skipped by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from operator import index
from typing import Any, NoReturn

from kvledger.adder import AddReqResult
from kvledger.arithmetic import ceil_pages
from kvledger.node import Watcher
from kvledger.pool import OutOfPages
from kvledger.record import AllocationFailure, Decision, LiveRequest, RoundRecord, Snapshot
from kvledger.replay import TargetError
from kvledger.request import Prompt
from kvledger.settings import NodeSettings
from kvledger.trace import Trace

Ran = tuple[str, int, int]
"""A chunk that a round ran: request, start and end in tokens of its prompt."""

CANDIDATES_SHOWN = 5


class CountedTarget:
    """Provide `enqueue`, `step`, `finish`, `free_tokens` and `allocated_tokens`; sizes are tokens.

    Prefixes are not shared, and outsiders do nothing here. A request whose prompt is done holds its slots until
    `finish`. An answer that is none (no chunks, an unknown request, slots that are no number) is a TargetError.
    """

    capabilities = frozenset({"batches", "counts"})
    foreign = True
    ignores = frozenset({"rules", "cached", "held"})

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
        """Run one round and yield each chunk when it has run; a list will do, but is lost if a later chunk fails.

        MemoryError (or OutOfPages) where an admitted request's chunk finds no slots. Its attribute `request`, where
        it has one, says whose; without it a name is only given if nobody else comes into question.
        """
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

    def cancel(self, rid: str) -> bool | None:  # noqa: ARG002 - for those who can
        """Take a waiting request out of the queue. True or None: it is out; False: this scheduler cannot."""
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
        self._ask("enqueue", rid, prompt.tokens)
        return None

    def run_round(self) -> RoundRecord:
        self.rounds += 1
        baseline = self._free_tokens()
        failure: AllocationFailure | None = None
        decisions: list[Decision] = []
        try:
            for ran in self._ran():
                self.watcher.before_decision()
                decisions.append(self._decision(ran))
                self.watcher.after_decision(decisions[-1])
        except (MemoryError, OutOfPages) as error:
            failure = self._failure(error, {decision.request for decision in decisions})
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
            free=self._free_tokens(),
            evictable=0,
            protected=sum(self._allocated_tokens().values()),
            failure=failure,
        )

    def _decision(self, ran: Ran) -> Decision:
        rid, start, end = ran
        resumed = rid in self._begun
        if not resumed:
            self._begun[rid] = self._waiting.pop(rid)
        prompt_tokens = self._begun[rid]
        self._end[rid] = end
        free_tokens = self._free_tokens()
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

    def _failure(self, error: Exception, told: Collection[str]) -> AllocationFailure:
        """`told` requests have had their chunk in this round; `wanted` is the most that a chunk can have asked for."""
        left = {rid: tokens - self._end[rid] for rid, tokens in self._begun.items() if self._end[rid] < tokens}
        left |= self._waiting
        able = [rid for rid in left if rid not in told]
        rid = getattr(error, "request", None)
        if rid is not None:
            if rid not in left:
                self._is_no_answer(
                    f"step raised {type(error).__name__} for request {rid!r:.60}, which waits for no chunk"
                )
            able = [rid]
        chunk_tokens = self.settings.chunked_prefill_size or self.settings.pool_tokens
        wanted = max((min(left[rid], chunk_tokens) for rid in able), default=0)
        message = f"out of memory: {error}"
        if len(able) == 1:
            return AllocationFailure(able[0], wanted, self._free_tokens(), 0, message)
        more = f" and {len(able) - CANDIDATES_SHOWN} more" if len(able) > CANDIDATES_SHOWN else ""
        who = f"one of {', '.join(able[:CANDIDATES_SHOWN])}{more}" if able else "nobody that waits for a chunk"
        message += f" (whose chunk it was is not told: {who})"
        return AllocationFailure(who, wanted, self._free_tokens(), 0, message, known=False)

    def transferred(self, rid: str) -> None:
        if rid in self.in_flight():
            self._forget(rid)

    def abort(self, rid: str) -> None:
        if rid in self._begun:
            self._forget(rid)
        elif rid in self._waiting and self._ask("cancel", rid) is not False:
            del self._waiting[rid]

    def _forget(self, rid: str) -> None:
        self._ask("finish", rid)
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
        allocated = self._allocated_tokens()
        untold_tokens = sum(tokens for rid, tokens in allocated.items() if rid not in self._begun)
        in_flight = self.in_flight()
        numbers = iter(range(sum(allocated.values())))
        return Snapshot(
            page_size=page_size,
            pool_pages=pool_pages,
            released=(),
            never_used=range(pool_pages - (self._free_tokens() + untold_tokens) // page_size, pool_pages),
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

    # --- what the five methods answer

    def _ask(self, name: str, *arguments: object) -> Any:
        """TargetError if the method is missing, or is not one that can be called so; what it raises itself goes on."""
        try:
            return getattr(self, name)(*arguments)
        except (TypeError, NotImplementedError) as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            if trace is not None and trace.tb_frame.f_code.co_filename != __file__:
                raise
            reason = str(error) or "it is not provided"
            raise TargetError(self._said(f"{name}: {reason}")) from error

    def _ran(self) -> Iterator[Ran]:
        chunks = self._ask("step")
        if not isinstance(chunks, Iterable):
            self._is_no_answer(f"step returned {chunks!r:.60}, not the chunks that it ran (an empty list: none)")
        for chunk in chunks:
            yield self._checked(chunk)

    def _checked(self, chunk: Any) -> Ran:
        try:
            rid, start, end = chunk
            start, end = index(start), index(end)
            tokens = self._begun.get(rid, self._waiting.get(rid))
        except (TypeError, ValueError):
            self._is_no_answer(f"step told of {chunk!r:.60}, not of (request, start, end)")
        if tokens is None:
            self._is_no_answer(f"step told of request {rid!r:.60}, which is unknown or has ended")
        if not 0 <= start <= end <= tokens:
            self._is_no_answer(f"step told of {start}..{end} of {rid!r:.60}, whose prompt has {tokens} tokens")
        return rid, start, end

    def _free_tokens(self) -> int:
        return self._number("free_tokens", self._ask("free_tokens"))

    def _allocated_tokens(self) -> dict[str, int]:
        answer = self._ask("allocated_tokens")
        if not isinstance(answer, Mapping):
            self._is_no_answer(f"allocated_tokens returned {answer!r:.60}, not tokens by request")
        return {rid: self._number("allocated_tokens", tokens) for rid, tokens in answer.items()}

    def _number(self, name: str, answer: Any) -> int:
        try:
            return index(answer)
        except TypeError:
            self._is_no_answer(f"{name} answered {answer!r:.60}, not a whole number of tokens")

    def _is_no_answer(self, reason: str) -> NoReturn:
        raise TargetError(self._said(reason))

    def _said(self, reason: str) -> str:
        return f"target {type(self).__module__}:{type(self).__qualname__}: {reason}"
