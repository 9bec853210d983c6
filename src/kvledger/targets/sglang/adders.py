"""sglang's PrefillAdder as it is, one openly named variant of it, and what is read off either after each answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from kvledger.arithmetic import ceil_tokens
from kvledger.ledger import Due, Promise
from kvledger.rules import AccountingRules
from kvledger.targets.sglang.engine import Engine, Figures


@cache
def tail_reserving(engine: Engine) -> Any:
    """A subclass of their adder which promises what a cut leaves, its output included: the fix, not their code."""
    base: Any = engine.adder_class

    class TailReservingPrefillAdder(base):  # type: ignore[misc]
        """Charges the tail of a cut request, in whole pages, and its output, as due in later rounds."""

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            admitted = len(self.can_run_list)
            answer = super().add_one_req(req, *args, **kwargs)
            if len(self.can_run_list) == admitted:
                return answer
            self._reserve_tail(req)
            return self.budget_state()

        def add_chunked_req(self, req: Any) -> Any:
            half_done = super().add_chunked_req(req)
            if half_done is not None:
                self._reserve_tail(req)
            return half_done

        def _reserve_tail(self, req: Any) -> None:
            tail_tokens = engine.fill_tokens(req) - engine.chunk_end(req)
            if tail_tokens > 0:
                output_tokens = req.sampling_params.max_new_tokens - len(req.output_ids)
                engine.charge_later(self, ceil_tokens(tail_tokens, self.page_size) + output_tokens)

    return TailReservingPrefillAdder


def adder_class(engine: Engine, rules: AccountingRules) -> Any:
    """Their adder, or the variant where the rules ask for it."""
    return tail_reserving(engine) if rules.reserve_tail else engine.adder_class


@dataclass(slots=True)
class Books:
    """An adder's figures, and whose each of its promises is: an answer's charge is what it moved the offsets by."""

    engine: Engine
    adder: Any
    promises: list[Promise]
    _seen: Figures

    @classmethod
    def open(cls, engine: Engine, adder: Any) -> Books:
        """What a fresh adder has charged already is for requests that decode."""
        books = cls(engine, adder, [], Figures(0, 0, 0))
        books.charged("the running batch", "decode", page_overhead=0)
        return books

    def figures(self) -> Figures:
        return self.engine.figures(self.adder)

    def charged(self, rid: str, kind: str, *, page_overhead: int, cut: bool = False) -> None:
        """The offsets have moved for `rid`: note by how much, and when it is due. `cut`: due later is a tail."""
        now = self.figures()
        current = now.current_offset - self._seen.current_offset
        later = now.total_offset - self._seen.total_offset - current
        due_now = {kind: current - page_overhead, "page_overhead": page_overhead}
        self.promises += [Promise(rid, name, tokens, Due.NOW) for name, tokens in due_now.items() if tokens]
        if later:
            self.promises.append(Promise(rid, "tail" if cut else "first_token", later, Due.LATER))
        self._seen = now
