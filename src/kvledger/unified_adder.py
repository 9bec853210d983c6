"""The adder where requests also decode: it answers for a candidate's output and for what the running ones may grow.

All of decode's part in the books is here; `PrefillAdder` is the same adder with nobody running and one token each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, cast

from kvledger.adder import Allocator, PrefillAdder, PrefillRequest
from kvledger.arithmetic import ceil_tokens, floor_tokens, whole_number
from kvledger.decode import Tokens, all_can_end, exact, promised_output, running_share
from kvledger.ledger import Due
from kvledger.policy import victims
from kvledger.rules import AccountingRules

RUNNING = "running"


class UnifiedAdder(PrefillAdder):
    """One round's admission beside `running_batch`: the running requests, or an object that has them as `reqs`.

    Requests, running or not, offer `max_new_tokens`, and may offer `generated_tokens`, `ignore_eos` and `priority`;
    or they have them where SGLang's do, in `sampling_params` and as the length of `output_ids`. A request that was
    sent back counts what it had generated in `prompt_tokens` too. A token each of `num_mixed_decode_tokens` running
    requests joins this batch. Sizes are tokens; `new_token_ratio` is what is expected of the rest of an output, as a
    fraction (a float is read as the decimal it was written as). `release(req)` gives a preempted request's slots back.
    """

    output_kind = "output"

    def __init__(  # noqa: PLR0913 - what a scheduler has at hand
        self,
        page_size: int,
        tree_cache: Any,
        token_to_kv_pool_allocator: Allocator,
        running_batch: Any = (),
        new_token_ratio: float | Fraction = 1,
        rem_input_tokens: int | None = None,
        rem_chunk_tokens: int | None = None,
        num_mixed_decode_tokens: int = 0,
        priority_scheduling_preemption_threshold: int = 0,
        *,
        rules: AccountingRules | str = "tail-reserved",
        checkpoint_align: int | None = None,
        deciding_rank: bool = True,
        schedule_low_priority_values_first: bool = False,
        release: Callable[[Any], object] = lambda _req: None,
    ) -> None:
        super().__init__(
            page_size,
            tree_cache,
            token_to_kv_pool_allocator,
            rem_input_tokens=rem_input_tokens,
            rem_chunk_tokens=rem_chunk_tokens,
            rules=rules,
            checkpoint_align=page_size if checkpoint_align is None else checkpoint_align,
            deciding_rank=deciding_rank,
        )
        running = () if running_batch is None else getattr(running_batch, "reqs", running_batch)
        self.running: list[Any] = list(running)
        self.new_token_ratio = exact(new_token_ratio)
        self.threshold = whole_number(
            "priority_scheduling_preemption_threshold", priority_scheduling_preemption_threshold, 0
        )
        self.low_values_first = schedule_low_priority_values_first
        self.preempt_list: list[Any] = []
        self._tree_disabled: bool = getattr(tree_cache, "disable", False) is True
        if not callable(release):
            raise ValueError(f"release: {release!r} cannot be called with a request")
        self._release = release
        self._reserve_running()
        whole_number("num_mixed_decode_tokens", num_mixed_decode_tokens, 0)
        if num_mixed_decode_tokens > len(self.running):
            raise ValueError(
                f"num_mixed_decode_tokens: {num_mixed_decode_tokens} is more than the {len(self.running)} running "
                f"requests"
            )
        self._mix(num_mixed_decode_tokens)

    def _reserve_running(self) -> None:
        """Each running request's share, due later. Equal ones are worked out, and added up, once."""
        shares: dict[tuple[int, bool], Tokens] = {}
        count: Counter[tuple[int, bool]] = Counter()
        entries = []
        for request in self.running:
            output = _Output(request)
            key = (output.max_new_tokens - output.generated_tokens, output.ignore_eos)
            if key not in shares:
                shares[key] = self._share(request)
            count[key] += 1
            entries.append((request.rid, cast(int, shares[key])))
        total = sum(shares[key] * times for key, times in count.items())
        # exact fractions: the ledger adds them up as they are
        self.memory.promise_each("running", entries, cast(int, total), Due.LATER)
        self._taken.update(dict.fromkeys((rid for rid, _ in entries), RUNNING))

    def _mix(self, decode_tokens: int) -> None:
        """A token each of so many running requests joins the batch: it is in every budget."""
        for request in self.running[:decode_tokens]:
            self.memory.promise(request.rid, "decode", 1, Due.NOW)
        self.compute.spend(decode_tokens)

    @property
    def cur_rem_token_offset(self) -> int:
        return self.memory.cur_rem_token_offset

    @property
    def rem_total_token_offset(self) -> int:
        return self.memory.rem_total_token_offset

    # --- what is expected of outputs

    def _share(self, request: Any) -> Tokens:
        """What a running request may still grow, as far as it is expected to."""
        return running_share(_Output(request), self.new_token_ratio)

    def _output_tokens(self, req: PrefillRequest) -> int:
        """A candidate's: no more than the pool could hold of it, if it says so (`most_new_tokens`), or it would wait
        for ever."""
        output = _Output(req)
        most: int | None = getattr(req, "most_new_tokens", None)
        most = output.max_new_tokens if most is None else min(output.max_new_tokens, most)
        return promised_output(most, output.generated_tokens)

    def _room_of_half_done(self) -> int:
        """Its tail comes before decode: what running requests may grow, and a token each of them, is not in its way."""
        if not self.rules.tail_first:
            return super()._room_of_half_done()
        own = sum(entry.tokens for entry in self.memory.entries() if entry.kind in ("running", "decode"))
        return math.floor(self.rem_total_tokens + own)

    # --- the gate of a request that will generate all it may, where nothing is cached

    def _passes_gate(self, req: PrefillRequest) -> bool:
        """Without a prefix tree, a request that ignores the end of sequence is let in if everybody can come to an end.

        How long each one runs is known then, so that what the shorter ones give back counts.
        """
        if not (self._tree_disabled and _Output(req).ignore_eos):
            return super()._passes_gate(req)
        prompt_tokens = ceil_tokens(req.prompt_tokens - req.prefix_tokens, self.page_size) + self.page_size
        if prompt_tokens > min(self.cur_rem_tokens, self.rem_total_tokens):
            return False
        free_tokens = self.cur_rem_tokens - prompt_tokens - self._tail_tokens()
        half_done = [] if self.chunked_req is None or not self.deferred else [self.chunked_req]
        beside = [*self.running, *(chunk.request for chunk in self.can_run_list), *half_done]
        return all_can_end(free_tokens, [self._ending(each) for each in (req, *beside)])

    def _tail_tokens(self) -> int:
        """Promised tails are no room for anybody's output."""
        return sum(entry.tokens for entry in self.memory.entries() if entry.kind == "tail")

    def _ending(self, request: Any) -> tuple[Tokens, int]:
        """(tokens left, slots held) of a request that runs, or will."""
        output = _Output(request)
        ratio = 1 if output.ignore_eos else self.new_token_ratio
        held = getattr(request, "held_tokens", None)
        return output.max_new_tokens * ratio - output.generated_tokens, request.prompt_tokens if held is None else held

    # --- preemption by priority

    def preempt_to_schedule(self, req: PrefillRequest) -> bool:
        """Put running requests of lower priority back until what they give back comes to what `req` lacks; False, and
        nobody is, if it cannot. The gate asks for more than that, if only by a fraction: it may refuse `req` still.

        Each gives back its own share of the offset, not the newcomer's. For the decision a share counts in whole
        pages, rounded down, because that is what a newcomer can use; the ledger gives back all of it. What a victim
        holds already is not counted: one whose share is below a page makes no room, however much it holds.
        """
        self._check(req)
        needed = self._needed_tokens(req) - self.rem_total_tokens
        chosen: list[Any] = []
        for victim in self._victims(_Output(req).priority):
            chosen.append(victim)
            needed -= floor_tokens(math.floor(self._share(victim)), self.page_size)
            if needed <= 0:
                break
        if not chosen or needed > 0:
            return False
        self._put_back(chosen)
        return True

    def _victims(self, priority: int) -> list[Any]:
        return victims(self.running, priority, self.threshold, low_values_first=self.low_values_first)

    def _put_back(self, chosen: Sequence[Any]) -> None:
        for victim in chosen:
            self.memory.take_back(victim.rid, "running", cast(int, self._share(victim)))
            if self.memory.take_back(victim.rid, "decode"):
                self.compute.spend(-1)  # it takes no token in this batch
            self._release(victim)
        self.running = [each for each in self.running if not _among(each, chosen)]
        self.preempt_list += chosen
        # a victim may ask again in this round; another of its name still runs, if there is one
        taken = {rid: where for rid, where in self._taken.items() if where != RUNNING}
        self._taken = taken | dict.fromkeys((each.rid for each in self.running), RUNNING)


def _among(request: Any, chosen: Iterable[Any]) -> bool:
    return any(each is request for each in chosen)


class _Output:
    """What a request says of its output. ValueError, one line, where that cannot be."""

    __slots__ = ("generated_tokens", "ignore_eos", "max_new_tokens", "priority")

    def __init__(self, request: Any) -> None:
        most: Any = getattr(request, "max_new_tokens", None)
        generated: Any = getattr(request, "generated_tokens", None)
        self.ignore_eos: bool = getattr(request, "ignore_eos", False)
        priority: Any = getattr(request, "priority", 0)
        if not (type(most) is type(generated) is type(priority) is int and 0 <= generated <= most):
            # what is not said under our names may be under SGLang's
            sampling = getattr(request, "sampling_params", None)
            self.ignore_eos = self.ignore_eos or getattr(sampling, "ignore_eos", False)
            most = getattr(sampling, "max_new_tokens", None) if most is None else most
            generated = len(getattr(request, "output_ids", ())) if generated is None else generated
            rid = getattr(request, "rid", None)
            whole_number("max_new_tokens", most, 0, of=rid)
            whole_number("generated_tokens", generated, 0, of=rid)
            if generated > most:
                raise ValueError(f"generated_tokens of {rid!r}: {generated} is above its max_new_tokens, {most}")
            if priority is None:  # SGLang's, where nobody sets it
                priority = 0
            whole_number("priority", priority, None, of=rid)
        self.max_new_tokens: int = most
        self.generated_tokens: int = generated
        self.priority: int = priority
