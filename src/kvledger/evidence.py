"""What an invariant may look at, and what it counts from that: needs, debts and budgets, afresh each time.

It is the ledger that is on trial, so what is needed is counted from the requests, and what is there from the pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from kvledger.arithmetic import ceil_pages, ceil_tokens
from kvledger.decode import Tokens, all_can_end, promised_output
from kvledger.record import Decision, LiveRequest, Snapshot
from kvledger.request import USUAL_OUTPUT, Output, OutputOf, Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import FIRST_TOKEN, NodeSettings


class Finding(NamedTuple):
    """Why an invariant does not hold, and the request it shows on."""

    request: str | None
    message: str


@dataclass(frozen=True, slots=True)
class PutBack:
    """Running requests that made way for the next candidate: what the node looked like before, and who went."""

    before: Snapshot
    went: tuple[str, ...]
    mixed_tokens: int


@dataclass(slots=True)
class Evidence:
    """What a check may look at. `before` and `after` surround the decision; `earlier` are this round's decisions
    before it. `computed` is how far each admitted, unfinished request had come when the last round ended, in tokens.
    `unserved` requests fit an empty pool and have neither finished their prefill nor been aborted; `ended` ones were
    aborted, or transferred after their prefill; `departed` says who was by the last event, in words.

    Beside decode also: `prompts` as submitted, in tokens (`asked`: as they are), `outputs`, how much of each has been
    `generated`, and `taken` of that in this round; the `ratio` of what is left of an output that the books should count
    on by now; `mixed_tokens` of decode in this round's batch; the `queue` as it was when the round began, how much of
    each prompt in it was cached then (`matched`, where the order asks and the target tells) and who was `put_back` for
    the next candidate; `decided`, what the node looked like before it decoded. `joins` numbers those who began to.

    On a pipeline all of it is the deciding rank's; `ranks_ended` says who has ended on each replaying one. `alive` (and
    `ranks_alive`) had been let in when the event began; `left` are those who gave their slots up in it by the record.
    Of faults: `late` loads that were armed, each request's in rounds, the round before which what was loaded must not
    be used (`arrives`), and whether the node is `paused`. `round` is the one that is being run, or was last.
    """

    settings: NodeSettings
    rules: AccountingRules
    before: Snapshot
    after: Snapshot
    earlier: list[Decision] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)
    unserved: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    departed: str = ""
    prompts: dict[str, int] = field(default_factory=dict)
    asked: dict[str, Prompt] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    generated: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    ratio: Fraction = Fraction(0)
    mixed_tokens: int = 0
    queue: tuple[str, ...] = ()
    matched: dict[str, int] = field(default_factory=dict)
    put_back: list[PutBack] = field(default_factory=list)
    joins: dict[str, int] = field(default_factory=dict)
    decided: Snapshot | None = None
    ranks_ended: list[set[str]] = field(default_factory=list)
    alive: frozenset[str] = frozenset()
    ranks_alive: list[frozenset[str]] = field(default_factory=list)
    left: frozenset[str] = frozenset()
    late: dict[str, list[int]] = field(default_factory=dict)
    arrives: dict[str, int] = field(default_factory=dict)
    paused: bool = False
    round: int = 0

    @property
    def page_size(self) -> int:
        return self.settings.page_size

    @property
    def grid_tokens(self) -> int:
        return self.rules.grid_tokens(page_size=self.page_size, node_align=self.settings.checkpoint_align)


def counted_pages(e: Evidence, snapshot: Snapshot) -> int:
    """The baseline that the books should count with: free and evictable, on a pipeline the least of all ranks."""
    return snapshot.least_baseline_pages if e.rules.rank_view == "least" else snapshot.baseline_pages


def most_live(e: Evidence, snapshot: Snapshot) -> int:
    """Requests that have a slot, on a pipeline where most have: a stage where a transfer is late has it taken still."""
    counted = (snapshot, *snapshot.ranks) if e.rules.rank_view == "least" else (snapshot,)
    return max(len(each.live) for each in counted)


def needed_pages_of(request: LiveRequest, page_size: int) -> int:
    """Pages that an admitted request has yet to allocate to finish its prefill; one that decodes may have more."""
    return 0 if request.decoding else max(0, ceil_pages(request.prompt_tokens, page_size) - len(request.pages))


def coming_pages(s: Snapshot) -> int:
    """What can be given to those who were admitted: a page that only a write-back locks comes back, and they can wait
    for it."""
    return s.baseline_pages + len(s.written_back)


def was_loading(e: Evidence, decision: Decision) -> bool:
    """It runs for the first time, its load having been late: it goes on with nothing."""
    return any(d.kind == "loading" and d.request == decision.request for d in e.earlier)


def standing(decisions: Iterable[Decision]) -> list[Decision]:
    """Those that promise something now: a request whose load is there and that runs was promised a load before."""
    decisions = list(decisions)
    run = {d.request for d in decisions if d.joined}
    return [d for d in decisions if d.kind != "loading" or d.request not in run]


def output_tokens(e: Evidence, rid: str) -> int:
    """What a promise counts on of a candidate's output: one token where nothing decodes, and never more than the pool
    could hold of it."""
    if e.settings.mode == "prefill":
        return FIRST_TOKEN
    most = min(_most_new_tokens(e, rid), e.settings.most_new_tokens(e.prompts.get(rid, 0)))
    return promised_output(most, e.generated.get(rid, 0))


def _most_new_tokens(e: Evidence, rid: str) -> int:
    return e.outputs.get(rid, USUAL_OUTPUT).max_new_tokens


def owed_tokens(e: Evidence, decision: Decision) -> tuple[int, int]:
    """Tokens a decision promises under the rules: due in this batch, and due later."""
    if decision.kind == "refused":
        return 0, 0
    output = output_tokens(e, decision.request)
    if decision.kind == "deferred":
        return 0, ceil_tokens(decision.tail_tokens, e.page_size) + output
    if decision.kind == "loading":
        return 0, ceil_tokens(decision.tail_tokens, e.page_size) + output if e.rules.reserve_tail else 0
    now = ceil_tokens(decision.tokens, e.page_size) + e.page_size
    if not decision.tail_tokens:
        return now, output
    return now, ceil_tokens(decision.tail_tokens, e.page_size) + output if e.rules.reserve_tail else 0


def asked_prompt(e: Evidence, rid: str) -> Prompt:
    """What is computed for a waiting request: its prompt, and its own output where it was sent back."""
    generated = e.generated.get(rid, 0)
    return Prompt((*e.asked[rid].segments, (OutputOf(rid), generated))) if generated else e.asked[rid]


def decode_tokens(e: Evidence, snapshot: Snapshot, *, only: str | None = None) -> tuple[int, Tokens]:
    """What the running requests, or `only` one of them, are promised: a token each of this batch if it is mixed, and
    their share later."""
    running = [request.rid for request in snapshot.live if request.decoding and only in (None, request.rid)]
    fixed = estimated = 0
    for rid in running:
        left = promised_output(_most_new_tokens(e, rid), e.generated.get(rid, 0))
        if e.outputs.get(rid, USUAL_OUTPUT).ignore_eos:
            fixed += left
        else:
            estimated += left
    return len(running) if e.mixed_tokens else 0, fixed + estimated * e.ratio


def gate_tokens(e: Evidence, decision: Decision) -> tuple[int, Tokens]:
    """What the gate asks for a candidate, and what remains for it, both counted from the batch and the pages; on a
    pipeline, of the rank on which it is nearest to a refusal."""
    owed = sum(sum(owed_tokens(e, d)) for d in standing(e.earlier)) + sum(decode_tokens(e, e.before))
    hits = ((decision.prefix_tokens, decision.newly_locked_tokens), *decision.rank_hits)
    asked = [
        (
            decision.prompt_tokens - prefix_tokens + output_tokens(e, decision.request) + e.page_size,
            rank.baseline_pages * e.page_size - newly_locked_tokens - owed,
        )
        for (prefix_tokens, newly_locked_tokens), rank in zip(hits, (e.before, *e.before.ranks), strict=False)
    ]
    return max(asked, key=lambda need_and_left: need_and_left[0] - need_and_left[1])


def is_simulated(e: Evidence, decision: Decision) -> bool:
    """The candidate will generate all it may, nothing is cached: its gate asks whether everybody can end."""
    return e.settings.simulates(e.outputs.get(decision.request, USUAL_OUTPUT))


def simulation_passes(e: Evidence, decision: Decision) -> bool:
    """That gate, counted from the batch and the pages."""
    mixed, shares = decode_tokens(e, e.before)
    now = sum(owed_tokens(e, d)[0] for d in e.earlier) + mixed
    later = sum(owed_tokens(e, d)[1] for d in e.earlier) + shares
    tails = [d for d in e.earlier if d.kind == "deferred" or (d.joined and d.tail_tokens and e.rules.reserve_tail)]
    current = e.before.baseline_pages * e.page_size - now
    need = ceil_tokens(decision.prompt_tokens, e.page_size) + e.page_size
    if need > min(current, current - later):
        return False
    free = current - need - sum(ceil_tokens(d.tail_tokens, e.page_size) for d in tails)
    running = [request.rid for request in e.before.live if request.decoding]
    batch = [d.request for d in e.earlier if d.joined or d.kind == "deferred"]
    return all_can_end(free, [_ending(e, rid) for rid in (decision.request, *running, *batch)])


def _ending(e: Evidence, rid: str) -> tuple[Tokens, int]:
    """(tokens left of its output, slots held when it runs)."""
    most, generated = _most_new_tokens(e, rid), e.generated.get(rid, 0)
    running = any(request.rid == rid and request.decoding for request in e.before.live)
    ratio = 1 if e.outputs.get(rid, USUAL_OUTPUT).ignore_eos else e.ratio
    return most * ratio - generated, e.prompts.get(rid, 0) + generated - running


def compute_left(e: Evidence) -> tuple[int | None, int | None]:
    """What the batch has left of the chunk budget and of max_prefill_tokens."""
    batch = [d for d in e.earlier if d.joined]
    spent_tokens = e.mixed_tokens + sum(ceil_tokens(d.tokens, e.page_size) for d in batch)
    chunk_limit, input_limit = e.settings.chunked_prefill_size, e.settings.max_prefill_tokens
    gap_spent = e.rules.spend_gap and any(d.tail_tokens > 0 for d in batch)
    chunk_left = None if chunk_limit is None else 0 if gap_spent else chunk_limit - spent_tokens
    return chunk_left, None if input_limit is None else input_limit - spent_tokens
