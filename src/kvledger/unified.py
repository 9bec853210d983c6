"""The unified node: requests that have prefilled go on to decode on the same pool.

The prefill half is `PrefillNode`, step for step. Here is what comes beside it: who is running, one token a round for
each of them, and who goes back to the queue when the pool cannot give what the round needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from kvledger.adder import PrefillAdder
from kvledger.arithmetic import ceil_pages
from kvledger.decode import NewTokenRatio, retraction_order
from kvledger.node import PrefillNode, Watcher
from kvledger.pool import OutOfPages, PrefillOutOfMemory
from kvledger.record import RoundRecord
from kvledger.request import USUAL_OUTPUT, Output, OutputOf, Prompt, Request, RequestState
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.unified_adder import UnifiedAdder
from kvledger.views import ledger_facts


@dataclass(slots=True)
class RoundFacts:
    """What decode did in a round, by names of requests."""

    decoded: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    retracted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """In the words of a round's record."""
        return {
            "decoded": tuple(self.decoded),
            "finished": tuple(self.finished),
            "retracted": tuple(self.retracted),
            "preempted": tuple(self.preempted),
            "aborted": tuple(self.aborted),
        }


class UnifiedNode(PrefillNode):
    """A node that prefills and decodes. `running` are those who decode, in the order in which they joined."""

    features = PrefillNode.features | {"unified", "mixed_chunk"}
    adder_type: ClassVar[type[UnifiedAdder]] = UnifiedAdder

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self.tree.disable = not settings.prefix_cache
        self.running: dict[str, Request] = {}
        self.ratio = NewTokenRatio(Fraction(settings.new_token_ratio_percent, 100))
        self.retractions = 0
        self._told = RoundFacts()

    # --- what arrives from outside

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        """The entry asks what gate and cut will ask."""
        if not self.settings.some_batch_holds(prompt.tokens, self.rules):
            return f"prompt {prompt.tokens} {self._uncut()}"
        return super().submit(rid, prompt, output)

    def _uncut(self) -> str:
        return (
            f"tokens are more than the chunk of {self.settings.chunked_prefill_size}, and a cut is a multiple of "
            f"{self.rules.cut_unit}"
        )

    def finish(self, rid: str) -> None:
        """A running request's output ends now; nothing happens to any other."""
        if rid in self.running:
            self._end(self.running[rid])

    def transferred(self, rid: str) -> None:
        """Nothing: KV stays where it is."""

    def in_flight(self) -> tuple[str, ...]:
        """Nobody: KV stays where it is."""
        return ()

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self.running)

    # --- a round

    def run_round(self) -> RoundRecord:
        """A prefill batch if there can be one, with decode in it if it is mixed; else one decode round."""
        self._told = RoundFacts()
        return super().run_round()

    def run_decode(self) -> RoundRecord:
        """One decode round; nobody is admitted."""
        self._told = RoundFacts()
        self._begin_round()
        counters = self._counters()
        adder = self._unsettled = self._books(0)
        facts = ledger_facts(adder)
        if self.paused:
            return self._record(facts, counters)
        failure = self._beside(adder)
        return self._record(facts, counters, (), False, failure)

    def _open_books(self) -> PrefillAdder:
        return self._books(len(self.running) if self.settings.mixed_chunk else 0)

    def _books(self, mixed_tokens: int) -> UnifiedAdder:
        return self.adder_type(
            self.page_size,
            self.tree,
            self.pool,
            list(self.running.values()),
            self.ratio.current,
            self.settings.max_prefill_tokens,
            self.settings.chunked_prefill_size,
            mixed_tokens,
            self.settings.preemption_threshold or 0,
            rules=self.rules,
            checkpoint_align=self.settings.checkpoint_align,
            release=self._preempt,
        )

    def _prompt_done(self, request: Request) -> None:
        """Its next token is made. It joins the running ones when the round ends, so that it is not in this decode."""
        request.state = RequestState.RUNNING
        request.generated_tokens += 1

    def _beside(self, adder: PrefillAdder) -> PrefillOutOfMemory | None:
        """Decode: in a mixed batch, or alone where there is no batch. Then those whose prompt is done join it."""
        self.watcher.before_decode()
        try:
            if not adder.can_run_list:
                self._decode_alone()
            elif self.settings.mixed_chunk and self.running:
                self._make_room()
                self._decode()
        except PrefillOutOfMemory as error:
            return error
        for chunk in adder.can_run_list:
            request = self.live.get(chunk.request.rid)
            if request is not None and request.state is RequestState.RUNNING:
                self._join(request)
        return None

    def _join(self, request: Request) -> None:
        if request.generated_tokens >= request.output.max_new_tokens:
            self._told.finished.append(request.rid)
            self._end(request)
        else:
            self.running[request.rid] = request

    def _record(self, facts: dict[str, Any], *round_facts: Any) -> RoundRecord:
        return super()._record(facts | self._told.document(), *round_facts)

    # --- decode

    def _decode_alone(self) -> None:
        if not self.running:
            return
        if not self._make_room():
            self.ratio.decay()
        self._decode()

    def _decode(self) -> None:
        """One token for each running request, and a page for the one whose last page is full."""
        for request in list(self.running.values()):
            self._grow(request)
            request.generated_tokens += 1
            self._told.decoded.append(request.rid)
            if request.generated_tokens >= request.output.max_new_tokens:
                self._told.finished.append(request.rid)
                self._end(request)

    def _grow(self, request: Request) -> None:
        """A slot for the token that it has generated last."""
        pages = ceil_pages(request.prefix_tokens + 1, self.page_size) - len(request.pages)
        try:
            if pages:
                request.pages += self.tree.allocate(pages)
        except OutOfPages as error:
            raise PrefillOutOfMemory(request.rid, 1, error.free_tokens, error.evictable_tokens) from error
        request.prefix_tokens += 1

    def _end(self, request: Request) -> None:
        """What it computed of its prompt stays cached; its output is freed, for no later prompt can name it."""
        super()._end(request)
        self.running.pop(request.rid, None)

    # --- when the pool is short

    def _make_room(self) -> bool:
        """Send running requests back until the round's pages are there; says whether any had to go.

        The last one that cannot go on while no other request holds anything is aborted: none of them could help it.
        It is sent back too where pages are pinned, because those can be had again.
        Slots that are held from outside could, if anybody knew when they come back: the reason names them.
        """
        went = 0
        for victim in retraction_order(self.running.values()):
            if not self._short_pages():
                break
            went += 1
            if len(self.live) == 1 and not self.written_back():
                self._abort(
                    victim, f"alone on the node{self._outsiders()}, and the pool has no page for its next token"
                )
            else:
                self._told.retracted.append(victim.rid)
                self._send_back(victim)
        if went:
            self.ratio.retracted(list(self.running.values()))
        return went > 0

    def _outsiders(self) -> str:
        names = ", ".join(name for name, held in self.held.items() if held.pages)
        return f" but for {names}, who holds slots from outside" if names else ""

    def _short_pages(self) -> int:
        """Pages that the next tokens need beyond what decode may take."""
        wanted = sum(request.prefix_tokens % self.page_size == 0 for request in self.running.values())
        return max(0, wanted - (self.pool.free_pages + self.tree.evictable_pages - self._kept_pages()))

    def _kept_pages(self) -> int:
        """What decode leaves alone: the pages promised to the half-done request and to those that are loading."""
        if not self.rules.tail_first:
            return 0
        promised = [request for request, _ in self.loading.values()]
        if self.chunked_req is not None:
            promised.append(self.chunked_req)
        return sum(ceil_pages(each.prompt_tokens, self.page_size) - len(each.pages) for each in promised)

    def _send_back(self, request: Request) -> None:
        """It gives back all it holds, and waits at the end of the queue with what it has generated."""
        self._end(request)
        self.retractions += 1
        generated = request.generated_tokens
        origin = request.origin or request.prompt
        prompt = Prompt((*origin.segments, (OutputOf(request.rid), generated)))
        if prompt.tokens + self.page_size >= self.settings.pool_pages * self.page_size:
            self._told.aborted.append(
                (request.rid, f"with its output of {generated} tokens it no longer fits the pool")
            )
            return
        if not self.settings.some_batch_holds(prompt.tokens, self.rules):
            self._told.aborted.append((request.rid, f"with its output its {prompt.tokens} {self._uncut()}"))
            return
        self.waiting[request.rid] = replace(
            request, prompt=prompt, origin=origin, state=RequestState.WAITING, prefix_tokens=0, pages=[], locked=[]
        )

    def _abort(self, request: Request, reason: str) -> None:
        self._told.aborted.append((request.rid, reason))
        self._end(request)

    # --- priority

    def _make_way(self, adder: PrefillAdder, request: Request) -> bool:
        """Put less important running requests back for this one, if that makes room for it."""
        if self.settings.preemption_threshold is None or not isinstance(adder, UnifiedAdder):
            return False
        self._match(request)  # without a slot nobody has looked at it yet, and what is cached may have changed
        if not adder.preempt_to_schedule(request):
            return False
        self.watcher.preempted()
        return True

    def _preempt(self, request: Request) -> None:
        self._told.preempted.append(request.rid)
        self._send_back(request)


PrefillNode.modes["unified"] = UnifiedNode
