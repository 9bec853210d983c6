from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import pytest

from kvledger.adder import AddReqResult
from kvledger.events import (
    Abort,
    Drain,
    Event,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.evidence import Evidence, PutBack
from kvledger.invariants import INVARIANTS, Invariant
from kvledger.ledger import Due, Promise
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import PrefillNode, Watcher
from kvledger.record import AllocationFailure, Decision, LiveRequest, RankRound, RoundRecord, Snapshot
from kvledger.replay import EventError, Replay, Stuck
from kvledger.request import USUAL_OUTPUT, Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings, RankSettings
from kvledger.trace import Trace, TraceError
from kvledger.unified import UnifiedNode
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

NAMES = [invariant.name for invariant in INVARIANTS]
BY_NAME = {invariant.name: invariant for invariant in INVARIANTS}
SETTINGS = node_settings(chunked_prefill_size=512, max_prefill_tokens=1024)
RULES = PRESETS["tail-reserved"]

# Ten pages of 64. A has computed 256 of 600 tokens; six pages are free, and six are what it still needs.
A = LiveRequest("A", 600, pages=(0, 1, 2, 3), shared_pages=4, in_flight=False)
CALM = Snapshot(
    page_size=64,
    pool_pages=10,
    released=(),
    never_used=range(4, 10),
    cached=tuple((page, 1, 0, 1) for page in range(4)),
    live=(A,),
    waiting=(),
)
# B's three computed pages: two cached, one partly filled. In flight; A's pages are as in CALM.
B = LiveRequest("B", 150, pages=(4, 5, 6), shared_pages=2, in_flight=True)
BUSY = replace(
    CALM, cached=(*CALM.cached, (4, 1, 0, 2), (5, 1, 0, 2)), live=(A, B), never_used=range(8, 10), released=(7,)
)
# Nothing is in use but the cache: page 0 evictable, page 1 pinned from outside.
REST = replace(CALM, cached=((0, 0, 0, 1), (1, 1, 1, 1)), live=(), never_used=range(2, 10))

# C, 100 tokens, admitted whole into CALM's free pages: 128 + 64 now, 1 later.
WHOLE = Decision(
    request="C",
    kind="whole",
    prompt_tokens=100,
    prefix_tokens=0,
    start=0,
    end=100,
    baseline=384,
    cur_rem_tokens=384 - 192,
    rem_total_tokens=384 - 193,
    rem_chunk_tokens=512 - 128,
    rem_input_tokens=1024 - 128,
)
# D, 600 tokens, cut at 256: 256 + 64 now, 384 + 1 later.
CUT = replace(
    WHOLE, request="D", kind="truncated", prompt_tokens=600, end=256, cur_rem_tokens=64, rem_total_tokens=-321
)
# 300 tokens are more than the 384 - 1 - 64 that CALM's free pages let in.
REFUSED = replace(
    WHOLE,
    request="E",
    kind="refused",
    prompt_tokens=319,
    end=0,
    reason=AddReqResult.NO_TOKEN,
    cur_rem_tokens=384,
    rem_total_tokens=384,
)
CELLS = AccountingRules(checkpoint_align="page_size", chunk_grid=192)
LIMITED = AccountingRules(continuation_limit=256)
# 318 tokens are the most that CALM's free pages let in.
ADMITTED = replace(WHOLE, request="E", prompt_tokens=318, end=318)
SMALL = replace(ADMITTED, prompt_tokens=190, end=190)
OTHER = replace(REFUSED, prompt_tokens=600, reason=AddReqResult.OTHER)
# A's second chunk, as far as its pages go in CALM.
COMPUTED = replace(WHOLE, request="A", kind="resumed", prompt_tokens=600, start=128, end=256)
RECORD = RoundRecord(
    round=3,
    baseline=384,
    rem_total_tokens=191,
    cur_rem_tokens=192,
    rem_chunk_tokens=384,
    budget_state=AddReqResult.CONTINUE,
    batch_is_full=False,
    decisions=(WHOLE,),
    promises=(),
    free=384,
    evictable=0,
    protected=256,
)
# C with 64 of its tokens loaded: 64 + 1 later; then its chunk and a page now, and 1 later.
LOADING = replace(
    WHOLE, kind="loading", prefix_tokens=64, start=64, end=64, cur_rem_tokens=384, rem_total_tokens=384 - 65
)
LOADED = replace(
    WHOLE, kind="resumed", prefix_tokens=64, start=64, cur_rem_tokens=384 - 128, rem_total_tokens=384 - 129
)
STUCK = Stuck(3, "A", 344, 384, 0, "a round admitted nothing and nothing is in flight")
FAILURE = AllocationFailure("A", 344, 64, 0, "Prefill out of memory: A")


def evidence(
    after: Snapshot = CALM,
    *,
    before: Snapshot | None = None,
    settings: NodeSettings = SETTINGS,
    rules: AccountingRules = RULES,
    earlier: Sequence[Decision] = (),
    computed: dict[str, int] | None = None,
    unserved: set[str] | None = None,
    ended: set[str] | None = None,
) -> Evidence:
    return Evidence(
        settings, rules, before or after, after, list(earlier), computed or {}, unserved or set(), ended or set()
    )


C_ON_9 = LiveRequest("C", 64, pages=(9,), shared_pages=0, in_flight=False)


def replayed(
    ran: tuple[tuple[str, int, int], ...] = (("C", 0, 100),),
    deferred: tuple[str, ...] = (),
    failure: AllocationFailure | None = None,
) -> RoundRecord:
    """RECORD with one rank that replayed it so."""
    rank = RankRound(rank=1, ran=ran, deferred=deferred, free=384, evictable=0, protected=256)
    return replace(RECORD, ranks=(rank,), failure=failure)


def on_rank_1(after: Snapshot) -> Evidence:
    """Rank 0 is as it should be; B has ended on rank 1, and A has computed 256 tokens."""
    settings = replace(SETTINGS, ranks=(RankSettings(),), max_running_requests=1)
    healthy = replace(REST, cached=(), never_used=range(10), live=(A,) if after.live == () else ())
    e = evidence(replace(healthy, ranks=(after,)), settings=settings)
    return replace(e, ranks_ended=[{"B"}], computed={"A": 256} if after.live == () else {})


def resumed(**changes: Any) -> Decision:
    return replace(WHOLE, request="A", kind="resumed", prompt_tokens=600, start=256, end=512, **changes)


def paused(e: Evidence) -> Evidence:
    return replace(e, paused=True)


def loads(*, arrives: int | None = None, late: int | None = None) -> Evidence:
    """In round 3, C's load arrives in a round, or one is armed that takes so many."""
    loading = {} if arrives is None else {"C": arrives}
    return replace(evidence(), round=3, arrives=loading, late={} if late is None else {"C": [late]})


@dataclass(frozen=True)
class Case:
    """One look at one invariant. `blames` is the request a finding must name; HEALTHY: there must be none."""

    invariant: str
    what: str
    evidence: Evidence
    facts: tuple[object, ...] = ()
    blames: object = None
    says: str = ""


HEALTHY = object()

# --- beside decode: A is half done and needs six pages more; R, 100 tokens and some of its 9, holds two pages
UNIFIED: dict[str, Any] = {"chunked_prefill_size": 512, "mode": "unified"}
R = LiveRequest("R", 100, pages=(4, 5), shared_pages=1, in_flight=True, decoding=True)
DECODED = replace(RECORD, decisions=(), decoded=("R",))
FULL = replace(DECODED, batch_is_full=True)
MORE = replace(RECORD, decisions=(REFUSED,))
MIXED = replace(RECORD, decoded=("R",))
WENT_BACK = replace(RECORD, retracted=("R",))
GIVEN_UP = replace(DECODED, decoded=(), aborted=(("R", "no page"),))


def beside(
    after: Snapshot | None = None,
    *,
    free: int = 6,
    generated: int = 4,
    most: int = 9,
    taken: int = 0,
    settings: NodeSettings | None = None,
    **node: Any,
) -> Evidence:
    pages = range(6, 6 + free)
    running = replace(CALM, pool_pages=12, cached=(*CALM.cached, (4, 1, 0, 2)), live=(A, R), never_used=pages)
    after = after or running
    seen = evidence(after, settings=settings or node_settings(**UNIFIED, **node))
    return replace(
        seen,
        prompts={"A": 600, "R": 100},
        outputs={"A": Output(), "R": Output(most)},
        generated={"R": generated},
        taken={"R": taken},
        decided=after,
    )


def again(tokens: int) -> Decision:
    return replace(WHOLE, request="R", prompt_tokens=tokens, end=tokens)


def queued(policy: str) -> Evidence:
    seen = evidence(settings=node_settings(schedule_policy=policy))
    outputs = {"Q1": Output(priority=1), "Q2": Output(priority=2)}
    return replace(seen, queue=("Q1", "Q2"), prompts={"Q1": 9, "Q2": 9}, outputs=outputs)


def by_length(policy: str) -> Evidence:
    """Q1 computes 100 tokens, Q2 the last 9 of 100; beside A, which goes on."""
    seen = evidence(settings=node_settings(mode="unified", schedule_policy=policy, chunked_prefill_size=128))
    asked = {rid: Prompt([(rid, 100)]) for rid in ("Q1", "Q2")}
    return replace(seen, queue=("Q1", "Q2"), prompts={"Q1": 100, "Q2": 100}, asked=asked, matched={"Q1": 0, "Q2": 91})


def continued(tokens: int) -> Decision:
    return replace(WHOLE, request="A", kind="resumed", prompt_tokens=600, start=128, end=128 + tokens)


def made_way(*went: str) -> Evidence:
    """V1 to V3, more and more important, run with 64 tokens to go each; of 384 tokens 192 are left for E."""
    settings = node_settings(
        mode="unified", schedule_policy="priority", preemption_threshold=0, new_token_ratio_percent=100
    )
    live = tuple(LiveRequest(rid, 64, (), 0, in_flight=True, decoding=True) for rid in ("V1", "V2", "V3"))
    before = replace(CALM, live=live)
    outputs = {f"V{number}": Output(64, priority=number) for number in (1, 2, 3)}
    seen = replace(
        evidence(before, settings=settings),
        outputs=outputs | {"E": Output(priority=3)},
        prompts=dict.fromkeys(("V1", "V2", "V3", "E"), 64),
        ratio=Fraction(1),
    )
    return replace(seen, put_back=[PutBack(before, went, 0)] if went else [])


def queue_behind(*queue: str) -> Evidence:
    """Such a queue before the round (the first admitted, if it is C); what follows C is the one after it."""
    seen = beside(max_running_requests=2)
    waiting = queue[1:] if queue[:1] == ("C",) else queue
    found = ("C", "Q") if queue else ()
    return replace(seen, queue=found, after=replace(seen.after, waiting=waiting))


CASES = [
    Case("promises-covered", "exactly covered", evidence(), (WHOLE,), HEALTHY),
    Case(
        "promises-covered",
        "evictable pages count",
        evidence(replace(CALM, cached=(*CALM.cached, (4, 0, 0, 1)), never_used=range(5, 10))),
        (WHOLE,),
        HEALTHY,
    ),
    Case("promises-covered", "released pages count", evidence(BUSY), (WHOLE,), "C", "384 tokens.* 192"),
    Case(
        "promises-covered",
        "one page short: somebody locked one",
        evidence(replace(CALM, cached=(*CALM.cached, (4, 1, 0, 1)), never_used=range(5, 10))),
        (WHOLE,),
        "C",
        "384 tokens.* 320",
    ),
    Case(
        "promises-covered",
        "one page short: a request in flight took it",
        evidence(replace(CALM, live=(A, LiveRequest("B", 10, (4,), 0, True)), never_used=range(5, 10))),
        (WHOLE,),
        "C",
        "384 tokens.* 320",
    ),
    Case(
        "promises-covered",
        "only a write-back locks it",
        evidence(replace(CALM, cached=(*CALM.cached, (4, 1, 1, 1)), never_used=range(5, 10), written_back=(4,))),
        (WHOLE,),
        HEALTHY,
    ),
    Case("never-forced", "a chunk of what remains", evidence(), (resumed(),), HEALTHY),
    Case("never-forced", "a forced chunk", evidence(), (resumed(forced=True),), "A", "256 tokens"),
    Case("order", "equal", evidence(), (replace(WHOLE, cur_rem_tokens=191),), HEALTHY),
    Case("order", "one below", evidence(), (replace(WHOLE, cur_rem_tokens=190),), "C", "190 .* 191"),
    Case("ledger-exact", "a whole request", evidence(), (WHOLE,), HEALTHY),
    Case("ledger-exact", "a cut with its tail reserved", evidence(), (CUT,), HEALTHY),
    Case(
        "ledger-exact",
        "a cut without a reservation",
        evidence(rules=PRESETS["aligned"]),
        (replace(CUT, rem_total_tokens=64),),
        HEALTHY,
    ),
    Case(
        "ledger-exact",
        "a deferred request reserves under any rule",
        evidence(rules=PRESETS["aligned"]),
        (replace(CUT, kind="deferred", start=256, cur_rem_tokens=384, rem_total_tokens=-1),),
        HEALTHY,
    ),
    Case(
        "ledger-exact",
        "a refusal owes nothing, and the ones before it still do",
        evidence(earlier=[WHOLE]),
        (replace(REFUSED, cur_rem_tokens=192, rem_total_tokens=191),),
        HEALTHY,
    ),
    Case("ledger-exact", "an offset one short", evidence(), (replace(WHOLE, rem_total_tokens=192),), "C", "192"),
    Case("ledger-exact", "a due-now offset one page short", evidence(), (replace(WHOLE, cur_rem_tokens=256),), "C"),
    Case("ledger-exact", "a tail that was forgotten", evidence(), (replace(CUT, rem_total_tokens=64),), "D", "-321"),
    Case(
        "ledger-exact",
        "a tail that the rules do not reserve",
        evidence(rules=PRESETS["aligned"]),
        (CUT,),
        "D",
    ),
    Case(
        "ledger-exact",
        "a baseline that the pages do not come to",
        evidence(replace(CALM, held=(4,), never_used=range(5, 10))),
        (WHOLE,),
        "C",
        "320",
    ),
    Case("gate-covers-charge", "need is one below what is left", evidence(), (ADMITTED,), HEALTHY),
    Case("gate-covers-charge", "a resumed chunk has no gate", evidence(earlier=[CUT]), (resumed(),), HEALTHY),
    Case(
        "gate-covers-charge",
        "need equals what is left",
        evidence(),
        (replace(ADMITTED, prompt_tokens=319, end=319),),
        "E",
        "its 384 tokens are not below the 384",
    ),
    Case(
        "gate-covers-charge",
        "the tail before it leaves nothing",
        evidence(earlier=[CUT]),
        (WHOLE,),
        "C",
        "its 165 tokens are not below the -321",
    ),
    Case(
        "gate-covers-charge",
        "its own lock takes what it needs",
        evidence(),
        (replace(WHOLE, newly_locked_tokens=256),),
        "C",
        "165 tokens .* 128",
    ),
    Case("other-is-minimal", "an admission is no refusal", evidence(), (WHOLE,), HEALTHY),
    Case(
        "other-is-minimal",
        "no cell fits the budget",
        evidence(rules=AccountingRules(chunk_grid=576)),
        (OTHER,),
        HEALTHY,
    ),
    Case("other-is-minimal", "one cell fits", evidence(rules=CELLS), (OTHER,), "E", "512 of the chunk"),
    Case("other-is-minimal", "a NO_TOKEN is not asked", evidence(), (REFUSED,), HEALTHY),
    Case(
        "other-is-minimal",
        "a request is half done and the rest is too short",
        evidence(earlier=[CUT]),
        (replace(OTHER, prompt_tokens=257),),
        HEALTHY,
    ),
    Case(
        "other-is-minimal",
        "it fits what the half-done one leaves",
        evidence(earlier=[CUT]),
        (replace(OTHER, prompt_tokens=256),),
        "E",
        "256 of the chunk budget",
    ),
    Case("other-is-minimal", "nobody is half done: it could be cut", evidence(), (OTHER,), "E", "512 of the chunk"),
    Case(
        "other-is-minimal",
        "chunking off, too long for the batch",
        evidence(settings=node_settings(chunked_prefill_size=None, max_prefill_tokens=512), earlier=[WHOLE]),
        (replace(OTHER, prompt_tokens=321),),
        HEALTHY,
    ),
    Case(
        "other-is-minimal",
        "chunking off, an empty batch takes any",
        evidence(settings=node_settings(chunked_prefill_size=None, max_prefill_tokens=512)),
        (OTHER,),
        "E",
        "512 of max_prefill_tokens",
    ),
    Case("table-fits", "four pages for 256 tokens", evidence(), (replace(RECORD, decisions=(COMPUTED,)),), HEALTHY),
    Case("table-fits", "a failed round is not asked", evidence(), (replace(RECORD, failure=FAILURE),), HEALTHY),
    Case(
        "table-fits",
        "a page too few",
        evidence(),
        (replace(RECORD, decisions=(replace(COMPUTED, end=257),)),),
        "A",
        "257 tokens and holds 4 pages",
    ),
    Case(
        "table-fits",
        "a page too many",
        evidence(),
        (replace(RECORD, decisions=(replace(COMPUTED, end=192),)),),
        "A",
        "192 tokens and holds 4 pages",
    ),
    Case("kept-until-ended", "there still", replace(evidence(), alive=frozenset("A")), (), HEALTHY),
    Case("kept-until-ended", "gone before its end", replace(evidence(), alive=frozenset("AX")), (), "X", "has let go"),
    Case("kept-until-ended", "it has ended", replace(evidence(ended={"X"}), alive=frozenset("AX")), (), HEALTHY),
    Case(
        "kept-until-ended",
        "it has gone back",
        replace(evidence(), alive=frozenset("AX"), left=frozenset("X")),
        (),
        HEALTHY,
    ),
    Case("ended-is-gone", "others have ended", evidence(ended={"Z"}), (), HEALTHY),
    Case("ended-is-gone", "alive after its end", evidence(ended={"A"}), (), "A", "has ended"),
    Case(
        "ended-is-gone",
        "waiting after its end",
        evidence(replace(CALM, waiting=("Q",)), ended={"Q"}),
        (),
        "Q",
        "goes on with it",
    ),
    Case("everyone-served", "all are", evidence(REST), (), HEALTHY),
    Case("everyone-served", "one was lost", evidence(REST, unserved={"Q"}), (), "Q", "neither finished nor"),
    Case("batch-in-budget", "the first chunk", evidence(), (WHOLE,), HEALTHY),
    Case("batch-in-budget", "exactly the rest", evidence(earlier=[CUT]), (resumed(),), HEALTHY),
    Case(
        "batch-in-budget",
        "no limits at all",
        evidence(settings=node_settings(chunked_prefill_size=None), earlier=[CUT] * 9),
        (resumed(),),
        HEALTHY,
    ),
    Case(
        "batch-in-budget",
        "the first may exceed the prefill limit",
        evidence(settings=node_settings(chunked_prefill_size=None, max_prefill_tokens=64)),
        (WHOLE,),
        HEALTHY,
    ),
    Case("batch-in-budget", "all that its limit allows", evidence(rules=LIMITED), (resumed(),), HEALTHY),
    Case("batch-in-budget", "a limit is no newcomer's", evidence(rules=LIMITED), (replace(CUT, end=512),), HEALTHY),
    Case(
        "batch-in-budget",
        "beyond its limit",
        evidence(rules=LIMITED),
        (replace(resumed(), end=576),),
        "A",
        "320 tokens.* 256",
    ),
    Case("batch-in-budget", "a refusal spends nothing", evidence(earlier=[CUT, CUT]), (REFUSED,), HEALTHY),
    Case("batch-in-budget", "more than the budget", evidence(), (replace(CUT, end=576),), "D", "576 tokens .* 512"),
    Case(
        "batch-in-budget",
        "one page more than what is left",
        evidence(earlier=[CUT, replace(WHOLE, end=1)]),
        (resumed(),),
        "A",
        "256 tokens .* 192",
    ),
    Case(
        "batch-in-budget",
        "there is no gap behind what finished",
        evidence(rules=AccountingRules(spend_gap=True), earlier=[WHOLE]),
        (replace(WHOLE, request="F"),),
        HEALTHY,
    ),
    Case(
        "batch-in-budget",
        "a spent gap admits nobody",
        evidence(rules=AccountingRules(spend_gap=True), earlier=[CUT]),
        (WHOLE,),
        "C",
        "128 tokens .* 0",
    ),
    Case(
        "batch-in-budget",
        "behind a full prefill limit",
        evidence(settings=node_settings(max_prefill_tokens=256), earlier=[CUT]),
        (WHOLE,),
        "C",
        "with 0 of max_prefill_tokens",
    ),
    Case("fix-is-minimal", "need equals what is left", evidence(), (REFUSED,), HEALTHY),
    Case(
        "fix-is-minimal",
        "OTHER is no matter of memory",
        evidence(),
        (replace(REFUSED, prompt_tokens=1, reason=AddReqResult.OTHER),),
        HEALTHY,
    ),
    Case(
        "fix-is-minimal",
        "the tail before it does not leave enough",
        evidence(earlier=[replace(CUT, prompt_tokens=256 + 1)]),
        # 384 - 320 - 65 = -1
        (replace(REFUSED, prompt_tokens=1),),
        HEALTHY,
    ),
    Case(
        "fix-is-minimal",
        "its own lock takes the slots away",
        evidence(replace(CALM, cached=(*CALM.cached, (4, 0, 0, 1)), never_used=range(5, 10))),
        (replace(REFUSED, prompt_tokens=64 + 255, prefix_tokens=64, newly_locked_tokens=64),),
        HEALTHY,
    ),
    Case(
        "fix-is-minimal",
        "one token below",
        evidence(),
        (replace(REFUSED, prompt_tokens=318),),
        "E",
        "383 tokens .* 384",
    ),
    Case(
        "fix-is-minimal",
        "a tail that the rules do not reserve",
        evidence(rules=PRESETS["aligned"], earlier=[CUT]),
        # 384 - 320 = 64; a newcomer of no new tokens
        (replace(REFUSED, prompt_tokens=64, prefix_tokens=66),),
        "E",
        "63 tokens .* 64",
    ),
    Case("refusal-is-free", "nothing changed", evidence(before=CALM, after=replace(CALM)), (REFUSED,), HEALTHY),
    Case("refusal-is-free", "an admission may cost", evidence(before=CALM, after=BUSY), (WHOLE,), HEALTHY),
    Case(
        "refusal-is-free",
        "a lock was kept",
        evidence(before=CALM, after=replace(CALM, cached=((0, 2, 0, 1), *CALM.cached[1:]))),
        (REFUSED,),
        "E",
        "cached",
    ),
    Case(
        "refusal-is-free",
        "recency was touched",
        evidence(before=CALM, after=replace(CALM, cached=((0, 1, 0, 9), *CALM.cached[1:]))),
        (REFUSED,),
        "E",
        "cached",
    ),
    Case(
        "refusal-is-free",
        "a load-back took pages",
        evidence(before=CALM, after=replace(CALM, never_used=range(5, 10))),
        (REFUSED,),
        "E",
        "never_used",
    ),
    Case(
        "refusal-is-free",
        "a fault brought a page, and nobody locks it",
        evidence(before=CALM, after=replace(CALM, cached=(*CALM.cached, (4, 0, 0, 1)), never_used=range(5, 10))),
        (replace(REFUSED, faults=("load-short",)),),
        HEALTHY,
    ),
    Case(
        "refusal-is-free",
        "a fault brought a page, and it stays locked",
        evidence(before=CALM, after=replace(CALM, cached=(*CALM.cached, (4, 1, 0, 1)), never_used=range(5, 10))),
        (replace(REFUSED, faults=("load-short",)),),
        "E",
        "cached",
    ),
    Case("ledger-exact", "a load's tail", evidence(), (LOADING,), HEALTHY),
    Case("ledger-exact", "the load is there and runs", evidence(earlier=[LOADING]), (LOADED,), HEALTHY),
    Case("ledger-exact", "a load without its tail", evidence(), (replace(LOADING, rem_total_tokens=384),), "C"),
    Case("one-half-done", "one cut, one whole", evidence(earlier=[WHOLE]), (CUT,), HEALTHY),
    Case("one-half-done", "a refused one is not half done", evidence(earlier=[CUT]), (REFUSED,), HEALTHY),
    Case("one-half-done", "the resumed one finished", evidence(earlier=[replace(resumed(), end=600)]), (CUT,), HEALTHY),
    Case("one-half-done", "still cut, and a second cut", evidence(earlier=[resumed()]), (CUT,), "D", "2 .*A, D"),
    Case(
        "one-half-done",
        "deferred, and another cut",
        evidence(earlier=[replace(resumed(), kind="deferred", end=256)]),
        (CUT,),
        "D",
        "2 .*A, D",
    ),
    Case("on-grid", "a cut on the grid", evidence(), (CUT,), HEALTHY),
    Case("on-grid", "the last chunk ends where it ends", evidence(), (replace(CUT, end=600),), HEALTHY),
    Case("on-grid", "the grid is out of reach", evidence(), (replace(CUT, start=256, end=320),), HEALTHY),
    Case(
        "on-grid",
        "a page is on the grid of the rules",
        evidence(rules=PRESETS["upstream"]),
        (replace(CUT, end=320),),
        HEALTHY,
    ),
    Case("on-grid", "past a grid point", evidence(), (replace(CUT, end=320),), "D", "320.* 256"),
    Case("on-grid", "whole cells", evidence(rules=CELLS), (replace(CUT, end=384),), HEALTHY),
    Case("on-grid", "from its start on", evidence(rules=CELLS), (replace(resumed(), start=64, end=448),), HEALTHY),
    Case("on-grid", "less than a cell was left", evidence(rules=CELLS), (replace(resumed(), end=384),), HEALTHY),
    Case("on-grid", "a last chunk has no cells", evidence(rules=CELLS), (WHOLE,), HEALTHY),
    Case(
        "on-grid",
        "two cells, back to the checkpoint grid",
        evidence(rules=AccountingRules(chunk_grid=192)),
        (CUT,),
        HEALTHY,
    ),
    Case("on-grid", "a cell and a bit", evidence(rules=CELLS), (CUT,), "D", "256 tokens .* 192"),
    Case("on-grid", "resumed for more", evidence(rules=CELLS), (resumed(),), "A", "256 tokens .* 192"),
    Case("on-grid", "fresh below a cell", evidence(rules=CELLS), (replace(CUT, end=128),), "D", "128 tokens .* 192"),
    Case("on-grid", "past a later one", evidence(), (replace(CUT, start=256, end=576),), "D", "576.* 512"),
    Case("admitted-finishes", "a new request", evidence(), (RECORD,), HEALTHY),
    Case(
        "admitted-finishes",
        "it goes on where it was",
        evidence(computed={"A": 256}),
        (replace(RECORD, decisions=(resumed(),)),),
        HEALTHY,
    ),
    Case(
        "admitted-finishes",
        "an allocation failed",
        evidence(),
        (replace(RECORD, failure=FAILURE),),
        "A",
        "out of memory",
    ),
    Case(
        "admitted-finishes",
        "the same chunk is computed again",
        evidence(computed={"A": 512}),
        (replace(RECORD, decisions=(resumed(),)),),
        "A",
        "512 .* 256",
    ),
    Case("admitted-finishes", "a request is gone half done", evidence(computed={"Z": 64}), (RECORD,), "Z"),
    Case("conserved", "cached, private and released pages", evidence(BUSY), (), HEALTHY),
    Case("conserved", "held pages", evidence(replace(CALM, held=(4,), never_used=range(5, 10))), (), HEALTHY),
    Case("conserved", "all at rest", evidence(REST), (), HEALTHY),
    Case("conserved", "a page is lost", evidence(replace(BUSY, released=())), (), None, "^1 of .* belongs to nobody$"),
    Case("conserved", "a double free", evidence(replace(BUSY, released=(7, 7))), (), None, r"^1 .* to two: \[7\]"),
    Case("conserved", "cached and free", evidence(replace(BUSY, released=(4, 7))), (), None, r"\[4\]"),
    Case("conserved", "private and held", evidence(replace(BUSY, held=(6,))), (), None, r"\[6\]"),
    Case(
        "conserved",
        "the sum is right and one page is two",
        evidence(replace(BUSY, released=(6,))),
        (),
        None,
        r"1 of the 8 pages in use belongs to nobody and 1 belongs to two: \[6\]",
    ),
    Case("conserved", "a page that was never handed out", evidence(replace(BUSY, released=(8,))), (), None),
    Case("no-use-after-free", "owners apart", evidence(BUSY), (), HEALTHY),
    Case(
        "no-use-after-free",
        "two share locked pages",
        evidence(replace(CALM, live=(A, replace(A, rid="twin")))),
        (),
        HEALTHY,
    ),
    Case(
        "no-use-after-free",
        "a cached page without a lock",
        evidence(replace(CALM, cached=((0, 0, 0, 1), *CALM.cached[1:]))),
        (),
        "A",
        r"\[0\]",
    ),
    Case(
        "no-use-after-free",
        "a shared page that is not cached",
        evidence(replace(CALM, cached=CALM.cached[1:])),
        (),
        "A",
        r"\[0\]",
    ),
    Case("no-use-after-free", "a private page is free", evidence(replace(BUSY, released=(6,))), (), "B", r"\[6\]"),
    Case("no-use-after-free", "a private page is held", evidence(replace(BUSY, held=(6,))), (), "B", r"\[6\]"),
    Case(
        "no-use-after-free",
        "a private page is cached",
        evidence(replace(BUSY, cached=(*BUSY.cached, (6, 1, 0, 1)))),
        (),
        "B",
        r"\[6\]",
    ),
    Case(
        "no-use-after-free",
        "a private page is another's",
        evidence(replace(BUSY, live=(A, B, LiveRequest("C", 10, (6,), 0, False)))),
        (),
        "C",
        r"\[6\]",
    ),
    Case(
        "no-use-after-free",
        "a page twice in one table",
        evidence(replace(BUSY, live=(A, replace(B, pages=(4, 5, 5))))),
        (),
        "B",
        "twice",
    ),
    Case("quiescent", "free, cached, pinned", evidence(REST), (), HEALTHY),
    Case("quiescent", "slots held outside", evidence(replace(REST, held=(2,), never_used=range(3, 10))), (), HEALTHY),
    Case(
        "quiescent",
        "a lock is left",
        evidence(replace(REST, cached=((0, 1, 0, 1), (1, 1, 1, 1)))),
        (),
        None,
        "1 pages are locked",
    ),
    Case(
        "quiescent",
        "a lock is left on a pinned page",
        evidence(replace(REST, cached=((0, 0, 0, 1), (1, 2, 1, 1)))),
        (),
        None,
        "1 pages are locked",
    ),
    Case("quiescent", "a page is leaked", evidence(replace(REST, never_used=range(3, 10))), (), None, "1 leaked"),
    Case(
        "quiescent",
        "a request is left",
        evidence(replace(REST, live=(LiveRequest("Z", 64, (), 0, True),))),
        (),
        "Z",
        "1 requests alive",
    ),
    Case(
        "quiescent",
        "a promise is open",
        evidence(replace(REST, open_promises=(Promise("A", "chunk", 64, Due.NOW),))),
        (),
        None,
        "1 promises open",
    ),
    Case("progress", "somebody holds slots", evidence(replace(CALM, held=(9,))), (STUCK,), HEALTHY),
    Case("progress", "somebody pins pages", evidence(REST), (STUCK,), HEALTHY),
    Case("progress", "stuck with a pool of its own", evidence(CALM), (STUCK,), "A", "admitted nothing"),
    # --- beside decode
    Case("tail-spared", "five pages for five", beside(), (DECODED,), HEALTHY),
    Case(
        "tail-spared", "nothing decoded, another invariant's", beside(free=4), (replace(DECODED, decoded=()),), HEALTHY
    ),
    Case("tail-spared", "a page of the tail is gone", beside(free=4), (DECODED,), "A", "need 384 .* is 256"),
    Case("comes-back-whole", "prompt and output", beside(), (again(104),), HEALTHY),
    Case("comes-back-whole", "its output is forgotten", beside(), (again(100),), "R", "100 tokens.* 104"),
    Case("comes-back-whole", "a prefill node keeps no output", beside(settings=SETTINGS), (again(100),), HEALTHY),
    Case("in-order", "the first in the queue", queued("fcfs"), (replace(WHOLE, request="Q1"),), HEALTHY),
    Case("in-order", "the second in the queue", queued("fcfs"), (replace(WHOLE, request="Q2"),), "Q2", "before Q1"),
    Case("in-order", "the more important", queued("priority"), (replace(WHOLE, request="Q2"),), HEALTHY),
    Case("in-order", "the less important", queued("priority"), (replace(WHOLE, request="Q1"),), "Q1", "before Q2"),
    Case(
        "in-order",
        "by match, which the target does not tell",
        queued("lpm"),
        (replace(WHOLE, request="Q2"),),
        HEALTHY,
    ),
    *(
        Case("in-order", f"{first} of two by {policy}", by_length(policy), (replace(WHOLE, request=first),), *blames)
        for policy, first, *blames in (
            ("lpm", "Q2", HEALTHY),
            ("lpm", "Q1", "Q1", "before Q2"),
            ("shortest-prefill-first", "Q2", HEALTHY),
            ("shortest-prefill-first", "Q1", "Q1", "before Q2"),
        )
    ),
    Case("in-order", "64 of 128 are kept for Q2", by_length("shortest-prefill-first"), (continued(64),), HEALTHY),
    Case(
        "in-order", "what is kept for Q2 is used", by_length("shortest-prefill-first"), (continued(128),), "A", "it 64"
    ),
    Case("preemption-fair", "nobody made way", made_way(), (ADMITTED,), HEALTHY),
    Case("preemption-fair", "the least important", made_way("V1"), (ADMITTED,), HEALTHY),
    Case("preemption-fair", "one as important", made_way("V3"), (ADMITTED,), "V3", "not more important"),
    Case("preemption-fair", "another is less important", made_way("V2"), (ADMITTED,), "V2", "V1 is less"),
    Case("preemption-fair", "the first would do", made_way("V1", "V2"), (SMALL,), "V2", "V1 would do"),
    Case("preemption-fair", "it takes two", made_way("V1", "V2"), (ADMITTED,), HEALTHY),
    Case("queue-kept", "one was admitted, one went back", queue_behind("C", "Q", "R"), (WENT_BACK,), HEALTHY),
    Case("queue-kept", "before its turn", queue_behind("C", "R", "Q"), (WENT_BACK,), "R", "is R, Q .* Q, R"),
    Case("queue-kept", "it is lost", queue_behind("C", "Q"), (WENT_BACK,), None, "should be Q, R"),
    Case("slots-kept", "two of two slots", beside(max_running_requests=2), (DECODED,), HEALTHY),
    Case("slots-kept", "two of one slot", beside(max_running_requests=1), (DECODED,), "R", "2 requests .* 1 request"),
    Case("slots-kept", "two of a stage's one slot", beside(max_running_requests=3, pp_size=2), (DECODED,), "R"),
    Case("full-is-true", "somebody lacks memory", beside(), (replace(FULL, decisions=(REFUSED,)),), HEALTHY),
    Case("full-is-true", "somebody lacks a slot", beside(max_running_requests=2), (FULL,), HEALTHY),
    Case("full-is-true", "nobody lacks anything", beside(), (FULL,), None, "neither memory nor"),
    Case("full-is-true", "it lacks memory, and is not called so", beside(), (MORE,), None, "not called full"),
    Case("full-is-true", "nothing is lacked", beside(), (RECORD,), HEALTHY),
    Case("full-is-true", "a slot is lacked", queue_behind("Q"), (RECORD,), None, "not called full"),
    Case("full-is-true", "nobody waits for a slot", queue_behind(), (RECORD,), HEALTHY),
    Case("each-decodes-once", "beside a batch", beside(), (replace(RECORD, decoded=("R",)),), "R", "beside a batch"),
    Case("each-decodes-once", "in a mixed batch", beside(mixed_chunk=True), (MIXED,), HEALTHY),
    Case(
        "each-decodes-once",
        "passed over by a mixed batch",
        beside(mixed_chunk=True),
        (replace(MIXED, decoded=()),),
        "R",
        "passed it over",
    ),
    Case("each-decodes-once", "one token each", beside(), (DECODED,), HEALTHY),
    Case("each-decodes-once", "it went back", beside(), (replace(DECODED, decoded=(), retracted=("R",)),), HEALTHY),
    Case("each-decodes-once", "passed over", beside(), (replace(DECODED, decoded=()),), "R", "passed it over"),
    Case("each-decodes-once", "twice", beside(), (replace(DECODED, decoded=("R", "R")),), "R"),
    Case("each-decodes-once", "nobody in a paused round", paused(beside()), (replace(DECODED, decoded=()),), HEALTHY),
    Case("paused-is-still", "nothing is decided", paused(beside()), (replace(DECODED, decoded=()),), HEALTHY),
    Case("paused-is-still", "it is not paused", beside(), (RECORD,), HEALTHY),
    Case("paused-is-still", "somebody is let in", paused(beside()), (RECORD,), "C", "paused, and in round 3"),
    Case("paused-is-still", "somebody decodes", paused(beside()), (DECODED,), "R", "went on with R"),
    Case("loaded-before-used", "it is there", loads(arrives=3), (LOADED,), HEALTHY),
    Case("loaded-before-used", "it goes on loading", loads(arrives=4), (LOADING,), HEALTHY),
    Case("loaded-before-used", "a round early", loads(arrives=4), (LOADED,), "C", "in round 3.* in round 4"),
    Case("loaded-before-used", "at once", loads(late=2), (replace(WHOLE, load_back=64),), "C", "64 tokens .* 2 rounds"),
    Case(
        "loaded-before-used",
        "it was the part that came of a short load",
        loads(late=2),
        (replace(WHOLE, load_back=64, faults=("load-short",)),),
        HEALTHY,
    ),
    Case(
        "batch-in-budget",
        "who was loading goes on with nothing",
        evidence(rules=replace(RULES, continuation_limit=16), earlier=[LOADING]),
        (LOADED,),
        HEALTHY,
    ),
    Case("output-exact", "four of nine tokens", beside(), (DECODED,), HEALTHY),
    Case("output-exact", "nine of nine", beside(generated=9), (replace(DECODED, finished=("R",)),), HEALTHY),
    Case("output-exact", "ended early", beside(), (replace(DECODED, finished=("R",)),), "R", "4 of 9"),
    Case("output-exact", "goes on", beside(generated=9), (DECODED,), "R", "has its 9 tokens"),
    Case("output-exact", "a page too few", beside(generated=40, most=90), (DECODED,), "R", "2 pages.* 3"),
    Case("retraction-exact", "nobody had to go", beside(), (DECODED,), HEALTHY),
    Case(
        "retraction-exact",
        "nobody had to go, and one did",
        beside(),
        (replace(DECODED, decoded=(), retracted=("R",)),),
        "R",
        "asked for nobody",
    ),
    Case("retraction-exact", "a page is not there", beside(free=5, generated=30, taken=1), (DECODED,), "R", "for R"),
    Case(
        "retraction-exact",
        "a page is not there, and it went",
        beside(free=5, generated=29),
        (replace(DECODED, decoded=(), retracted=("R",)),),
        HEALTHY,
    ),
    Case("abort-is-last", "alone", beside(replace(CALM, live=())), (GIVEN_UP,), HEALTHY),
    Case("abort-is-last", "A still holds pages", beside(), (GIVEN_UP,), "R", "A could still"),
    Case("abort-is-last", "it has outgrown the pool", beside(generated=480, most=900), (GIVEN_UP,), HEALTHY),
    Case("same-batches", "the chunks that were decided", evidence(), (replayed(),), HEALTHY),
    Case("same-batches", "no ranks", evidence(), (RECORD,), HEALTHY),
    Case(
        "same-batches", "nothing", evidence(), (replayed(()),), "C", "rank 1 ran nothing, and rank 0 decided C 0..100"
    ),
    Case("same-batches", "another chunk", evidence(), (replayed((("C", 0, 64),)),), "C", "ran C 0..64"),
    Case(
        "same-batches", "one more", evidence(), (replayed((("C", 0, 100), ("B", 0, 9))),), "B", "C 0..100, B 0..9, and"
    ),
    Case("same-batches", "a failed round is not asked", evidence(), (replayed((), failure=FAILURE),), HEALTHY),
    Case("same-batches", "put off alone", evidence(), (replayed(deferred=("A",)),), "A", "about putting A off"),
    *(
        Case(name, f"on rank 1: {what}", on_rank_1(after), facts, blames, f"^rank 1: {says}")
        for name, what, after, facts, blames, says in (
            ("conserved", "a page is lost", replace(CALM, never_used=range(5, 10)), (), None, "1 of the 5 pages"),
            ("no-use-after-free", "a free page", replace(CALM, released=(9,), live=(C_ON_9,)), (), "C", "C uses pages"),
            ("promises-covered", "too little", replace(CALM, never_used=range(9, 10)), (WHOLE,), "C", "after C"),
            ("quiescent", "a lock", CALM, (), "A", "at rest 4 pages"),
            ("ended-is-gone", "there still", replace(CALM, waiting=("B",)), (), "B", "B has ended"),
            ("slots-kept", "one too many", BUSY, (RECORD,), "B", "2 requests"),
            ("queue-kept", "another queue", replace(CALM, waiting=("Q",)), (RECORD,), None, "the queue is Q"),
            ("admitted-finishes", "it has gone", replace(CALM, live=()), (RECORD,), "A", "A was admitted"),
            (
                "table-fits",
                "a page too few",
                CALM,
                (replace(RECORD, decisions=(replace(COMPUTED, end=257),)),),
                "A",
                "A",
            ),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.invariant}: {case.what}")
def test_an_invariant_finds_what_is_broken_and_nothing_else(case: Case) -> None:
    finding = BY_NAME[case.invariant].check(case.evidence, *case.facts)
    if case.blames is HEALTHY:
        assert finding is None
    else:
        assert finding is not None
        assert finding.request == case.blames
        assert re.search(case.says, finding.message)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "never-raises"])  # asked only when it is broken
def test_every_invariant_is_tried_both_ways(name: str) -> None:
    assert {case.blames is HEALTHY for case in CASES if case.invariant == name} == {True, False}


def test_the_designs_invariants_are_all_there_and_each_has_a_reason() -> None:
    in_the_design = {
        "admitted-finishes",
        "never-forced",
        "promises-covered",
        "order",
        "conserved",
        "no-use-after-free",
        "one-half-done",
        "on-grid",
        "refusal-is-free",
        "progress",
        "quiescent",
        "fix-is-minimal",
    }
    assert in_the_design <= set(NAMES)
    assert len(NAMES) == len(set(NAMES))
    for invariant in INVARIANTS:
        assert invariant.reason
        assert "\n" not in invariant.reason


# --- the monitor at its moments


def play(
    events: Sequence[Event],
    target: Any = PrefillNode,
    rules: AccountingRules = RULES,
    settings: NodeSettings = SETTINGS,
) -> InvariantMonitor:
    monitor = InvariantMonitor()
    run = Replay(settings, rules, target=target, monitor=monitor)
    for event in events:
        run.apply(event)
    return monitor


def broken(monitor: InvariantMonitor) -> list[tuple[str, int, str | None]]:
    return [(entry.invariant, entry.round, entry.request) for entry in monitor.broken]


def submit(rid: str, tokens: int) -> Submit:
    return Submit(rid, prompt((rid, tokens)))


def test_a_healthy_replay_breaks_nothing() -> None:
    events: list[Event] = [
        submit("A", 500),
        submit("B", 300),
        Round(),
        Hold("x", 64),
        Abort("B"),
        Release("x"),
        submit("C", 574),
        Drain(),
        submit("D", 100),
        Drain(),
    ]
    monitor = play(events)
    assert (broken(monitor), monitor.skipped) == ([], [])


def test_the_incident_breaks_promises_covered_first() -> None:
    trace = Trace(INCIDENT_NODE, "aligned", INCIDENT)
    outcome = checked_replay(trace)
    assert [(b.invariant, b.round, b.request) for b in outcome.broken] == [
        ("promises-covered", 1, "xpkq"),
        ("never-forced", 4, "1keim"),
        ("admitted-finishes", 4, "1keim"),
    ]
    assert outcome.verdict == "oom"
    # 13888 of v9uj, 7240 of 1keim and 185 of xpkq, each in whole pages, against what xpkq's load-back left
    assert "still need 21376 tokens, and free + evictable is 19264" in outcome.broken[0].message


def test_the_incident_after_the_fix_breaks_nothing() -> None:
    outcome = checked_replay(Trace(INCIDENT_NODE, "aligned", INCIDENT), PRESETS["tail-reserved"])
    assert (outcome.verdict, outcome.broken) == ("ok", [])


def test_checked_replay_names_an_event_that_cannot_happen() -> None:
    with pytest.raises(TraceError, match=r"^x\.json: events\[0\]\.tokens: "):
        checked_replay(Trace(SETTINGS, "aligned", (Hold("x", 641),)), source="x.json")


class Tampered(PrefillNode):
    """The node, with what it shows altered on its way out."""

    def run_round(self) -> RoundRecord:
        return self.alter_record(super().run_round())

    def snapshot(self) -> Snapshot:
        return self.alter_snapshot(super().snapshot())

    def alter_record(self, record: RoundRecord) -> RoundRecord:
        return record

    def alter_snapshot(self, snapshot: Snapshot) -> Snapshot:
        return snapshot


class Misquoted(Watcher):
    """Passes every decision on with cur_rem_tokens far below rem_total_tokens."""

    def __init__(self, told: Watcher) -> None:
        self.told = told

    def before_decision(self) -> None:
        self.told.before_decision()

    def after_decision(self, decision: Decision) -> None:
        self.told.after_decision(replace(decision, cur_rem_tokens=-1))


class Overdrawn(PrefillNode):
    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> None:
        super().__init__(settings, rules, Misquoted(watcher))


def test_a_finding_after_a_decision_is_kept_once_with_its_round_and_request() -> None:
    monitor = play([Round(), submit("A", 100), submit("B", 100), Round(), submit("C", 100), Round()], Overdrawn)
    assert broken(monitor) == [("order", 2, "A"), ("ledger-exact", 2, "A")]
    assert "-1" in monitor.broken[0].message


def test_a_finding_after_a_round() -> None:
    class Redone(Tampered):
        def alter_record(self, record: RoundRecord) -> RoundRecord:
            return replace(record, decisions=tuple(replace(d, start=0) for d in record.decisions))

    settings = replace(SETTINGS, chunked_prefill_size=256)
    monitor = play([submit("A", 560), Round(), Round(), Round()], Redone, settings=settings)
    assert broken(monitor) == [("admitted-finishes", 2, "A")]
    assert "256" in monitor.broken[0].message


def test_a_page_lost_in_a_round_is_found_after_it() -> None:
    class Leaky(PrefillNode):
        def run_round(self) -> RoundRecord:
            self.pool.alloc(1)
            return super().run_round()

    found = broken(play([submit("A", 100), Round()], Leaky))
    assert ("conserved", 1, None) in found


def test_a_request_that_is_half_done_is_not_forgotten_by_a_transfer_that_does_nothing() -> None:
    class Redone(Tampered):
        def alter_record(self, record: RoundRecord) -> RoundRecord:
            return replace(record, decisions=tuple(replace(d, start=0) for d in record.decisions))

    settings = replace(SETTINGS, chunked_prefill_size=256)
    monitor = play([submit("A", 560), Round(), Transferred("A"), Round()], Redone, settings=settings)
    assert broken(monitor) == [("admitted-finishes", 2, "A")]


def test_a_request_that_lives_on_after_its_end_is_found_and_one_before_its_end_is_not() -> None:
    class Deaf(PrefillNode):
        def transferred(self, rid: str) -> None: ...
        def abort(self, rid: str) -> None: ...

    in_flight: list[Event] = [submit("A", 100), Round()]
    waiting: list[Event] = [submit("A", 100)]
    assert broken(play([*in_flight, Transferred("A")], Deaf)) == [("ended-is-gone", 1, "A")]
    assert broken(play([*in_flight, Abort("A")], Deaf)) == [("ended-is-gone", 1, "A")]
    assert broken(play([*waiting, Transferred("A")], Deaf)) == [], "a transfer of what waits does nothing"
    assert broken(play([*waiting, Abort("A")], Deaf)) == [("ended-is-gone", 0, "A")]
    both: list[Event] = [submit("A", 100), Round(), submit("B", 100), Transferred("B")]
    assert broken(play(both)) == [], "another one is in flight"


def test_a_request_that_is_never_served_is_found_at_rest() -> None:
    class Forgetful(PrefillNode):
        def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
            return None if rid == "lost" else super().submit(rid, prompt)

    events: list[Event] = [submit("lost", 100), submit("A", 100), Drain()]
    assert broken(play(events, Forgetful)) == [("everyone-served", 1, "lost")]
    assert broken(play([submit("too long", 575), submit("lost", 100), Abort("lost"), Drain()], Forgetful)) == []


def test_what_somebody_elses_scheduler_raises_is_a_finding_and_ends_the_replay() -> None:
    class Fragile(PrefillNode):
        foreign = True

        def run_round(self) -> RoundRecord:
            if self.rounds == 1:
                raise RuntimeError(f"no row at {hex(id(self))}\nsecond line")
            return super().run_round()

    monitor = play([submit("A", 100), Round(), Round(), Round(), Drain()], Fragile)
    assert broken(monitor) == [("never-raises", 2, None)]
    assert monitor.broken[0].message == ("RuntimeError in run_round (test_monitor.py): no row at 0x…")
    assert isinstance(monitor.crash, RuntimeError)


def test_what_our_own_node_raises_is_our_fault_and_no_finding() -> None:
    class Fragile(PrefillNode):
        def run_round(self) -> RoundRecord:
            raise KeyError("row")

    with pytest.raises(KeyError, match="row"):
        play([Round()], Fragile)


@pytest.mark.parametrize("when", ["decision", "round", "event", "rest"])
def test_what_the_monitor_raises_is_never_the_target_s(when: str) -> None:
    def divides(*_: object) -> None:
        raise ZeroDivisionError("ours")

    class Foreign(PrefillNode):
        foreign = True

    monitor = InvariantMonitor([Invariant("divides", "", when, divides), *INVARIANTS])
    replay = Replay(SETTINGS, RULES, target=Foreign, monitor=monitor)
    raised = []
    for event in (submit("A", 100), Round(), Drain()):
        try:
            replay.apply(event)
        except ZeroDivisionError as error:
            raised.append(str(error))
    assert set(raised) == {"ours"}
    assert monitor.crash is None and "never-raises" not in [name for name, _, _ in broken(monitor)]


def test_what_a_target_raises_when_it_is_looked_at_is_a_finding() -> None:
    class Blurred(PrefillNode):
        foreign = True

        def snapshot(self) -> Snapshot:
            if self.rounds:
                raise RuntimeError("a table that is not there")
            return super().snapshot()

    monitor = play([submit("A", 100), Round(), Drain()], Blurred)
    assert [name for name, _, _ in broken(monitor)] == ["never-raises"]


def test_a_target_that_does_not_show_decode_is_not_counted_a_ratio() -> None:
    """The one that stays has more of its output than the pool ever held: nothing to divide by."""

    class Silent(UnifiedNode):
        foreign = True
        capabilities = frozenset({"batches", "counts", "pages"})

        def run_round(self) -> RoundRecord:
            return replace(super().run_round(), decoded=("A",), retracted=("B",))

    settings = replace(SETTINGS, mode="unified")
    whole_pool = settings.pool_pages * settings.page_size
    monitor = InvariantMonitor([])
    replay = Replay(settings, RULES, target=Silent, monitor=monitor)
    replay.apply(submit("B", 10))
    monitor.after_event(submit("A", whole_pool))
    assert settings.most_new_tokens(whole_pool) < 0
    before = monitor.evidence.ratio
    replay.apply(Round())
    assert monitor.evidence.ratio == before and monitor.crash is None


@pytest.mark.parametrize("mode", ["prefill", "unified"])
def test_only_a_prefill_node_hands_a_request_over(mode: Literal["prefill", "unified"]) -> None:
    """A target that does not say who decodes shows a running request as one that is done."""

    class Silent(PrefillNode):
        def snapshot(self) -> Snapshot:
            shown = super().snapshot()
            return replace(shown, live=tuple(replace(request, decoding=False) for request in shown.live))

    class SilentUnified(Silent, UnifiedNode):
        pass

    monitor = InvariantMonitor()
    target = SilentUnified if mode == "unified" else Silent
    replay = Replay(replace(SETTINGS, mode=mode), RULES, target=target, monitor=monitor)
    output = Output(8) if mode == "unified" else USUAL_OUTPUT
    for event in (Submit("A", prompt(("A", 100)), output), Round(), Transferred("A")):
        replay.apply(event)
    assert ("A" in monitor.evidence.ended) is (mode == "prefill")
    assert "ended-is-gone" not in [name for name, _, _ in broken(monitor)]


def test_an_event_that_cannot_happen_is_bad_input_whoever_says_so() -> None:
    class Foreign(PrefillNode):
        foreign = True

    with pytest.raises(EventError):
        play([Hold("x", 640_000)], Foreign)


def test_a_request_that_disappears_is_found_and_one_that_ends_is_not() -> None:
    class Forgetful(Tampered):
        def alter_snapshot(self, snapshot: Snapshot) -> Snapshot:
            return replace(snapshot, live=()) if self.rounds == 2 else snapshot

    settings = replace(SETTINGS, chunked_prefill_size=256)
    lost = play([submit("A", 560), Round(), Round()], Forgetful, settings=settings)
    assert ("admitted-finishes", 2, "A") in broken(lost)
    ends: tuple[Event, ...] = (Abort("A"), Transferred("A"))
    for end in ends:
        events: list[Event] = [submit("A", 560), Round(), Round(), Round(), end, submit("B", 100), Round(), Drain()]
        assert broken(play(events, settings=settings)) == []
    assert broken(play([submit("A", 560), Round(), Abort("A"), Round(), Drain()], settings=settings)) == []


def test_a_finding_after_an_event_names_the_round_before_it() -> None:
    class Leaky(PrefillNode):
        def release(self, name: str, tokens: int | None = None) -> None:
            self.held[name].pages.clear()
            super().release(name, tokens)

    monitor = play([Hold("x", 64), submit("A", 10), Round(), Release("x"), Round()], Leaky)
    assert broken(monitor) == [("conserved", 1, None)]


def test_a_finding_at_rest() -> None:
    class Grudging(PrefillNode):
        """Keeps a finished request's locks."""

        def transferred(self, rid: str) -> None:
            request = self.live[rid]
            self.tree.lock(request.locked)
            super().transferred(rid)

    monitor = play([submit("A", 100), Drain()], Grudging)
    assert broken(monitor) == [("quiescent", 1, None)]
    assert "1 pages are locked" in monitor.broken[0].message


def test_rest_is_only_asked_when_a_drain_has_ended() -> None:
    assert broken(play([submit("A", 100), Round()])) == []


def test_a_stuck_drain_breaks_progress_unless_the_outside_holds_slots() -> None:
    class Shy(PrefillNode):
        """Never looks at its queue."""

        def _admit(self, adder: Any, decisions: Any) -> bool:
            return False

    assert broken(play([submit("A", 100), Drain()], Shy)) == [("progress", 1, "A")]
    assert broken(play([Hold("x", 64), submit("A", 100), Drain()], Shy)) == []


def test_a_round_that_failed_is_not_asked_about_its_pages() -> None:
    """A process that died half way through an allocation owes nobody a tidy pool."""

    class Messy(Tampered):
        def alter_record(self, record: RoundRecord) -> RoundRecord:
            return replace(record, failure=FAILURE)

        def alter_snapshot(self, snapshot: Snapshot) -> Snapshot:
            return replace(snapshot, released=(0, 0)) if self.rounds else snapshot

    names = [name for name, _, _ in broken(play([submit("A", 100), Round()], Messy))]
    assert "admitted-finishes" in names
    assert "conserved" not in names


def test_broken_is_in_time_order() -> None:
    rounds = [entry.round for entry in checked_replay(Trace(INCIDENT_NODE, "aligned", INCIDENT)).broken]
    assert rounds == sorted(rounds)


def test_only_the_invariants_that_were_asked_for_are_asked() -> None:
    monitor = InvariantMonitor([BY_NAME["never-forced"]])
    run = Replay(INCIDENT_NODE, PRESETS["aligned"], monitor=monitor)
    for event in INCIDENT:
        run.apply(event)
    assert broken(monitor) == [("never-forced", 4, "1keim")]


def test_one_list_of_invariants_serves_many_monitors() -> None:
    for _ in range(2):
        assert broken(play(INCIDENT, rules=PRESETS["aligned"], settings=INCIDENT_NODE))[0][0] == "promises-covered"


# --- what a target cannot show


@pytest.mark.parametrize(
    "capabilities", [{"offsets", "decisions", "pages"}, {"decisions", "pages"}, {"pages"}, {"decisions"}, set()]
)
def test_what_a_target_cannot_show_is_skipped_by_name(capabilities: set[str]) -> None:
    class Limited(Overdrawn):
        pass

    Limited.capabilities = frozenset(capabilities)
    monitor = play([submit("A", 100), Drain()], Limited)
    unable = [invariant.name for invariant in INVARIANTS if invariant.needs - capabilities]
    assert sorted(monitor.skipped) == sorted(unable)
    assert len(monitor.skipped) == len(set(monitor.skipped))
    found = [name for name, _, _ in broken(monitor)]
    assert found == [name for name in ("order", "ledger-exact") if name not in unable]


@pytest.mark.parametrize(
    ("word", "skipped"),
    [
        ("optimistic", {"promises-covered"}),
        ("may-preempt", {"admitted-finishes", "kept-until-ended"}),
        ("hybrid", {"one-half-done", "table-fits", "everyone-served"}),
    ],
)
def test_what_a_target_does_not_promise_is_skipped_by_name(word: str, skipped: set[str]) -> None:
    class Modest(Overdrawn):
        capabilities = Overdrawn.capabilities | {word}

    assert set(play([submit("A", 100), Drain()], Modest).skipped) == skipped


def test_one_half_done_is_asked_of_whom_says_so() -> None:
    """It is a design rule, not a matter of memory: others let two prompts be half done."""

    class Two(Overdrawn):
        capabilities = Overdrawn.capabilities - {"one-cut"}

    assert "one-cut" in Overdrawn.capabilities
    assert play([submit("A", 100), Drain()], Two).skipped == ["one-half-done"]


def test_what_is_named_is_not_asked() -> None:
    monitor = InvariantMonitor(without={"order"})
    run = Replay(node_settings(), RULES, target=Overdrawn, monitor=monitor)
    for event in (submit("A", 100), Drain()):
        run.apply(event)
    assert [name for name, _, _ in broken(monitor)] == ["ledger-exact"]


def test_a_target_without_offsets_skips_what_judges_them() -> None:
    needing = {invariant.name for invariant in INVARIANTS if "offsets" in invariant.needs}
    assert {"order", "fix-is-minimal"} <= needing
    assert needing.isdisjoint({"admitted-finishes", "conserved", "no-use-after-free", "progress", "quiescent"})


def test_invariants_are_values() -> None:
    assert all(isinstance(invariant, Invariant) for invariant in INVARIANTS)
    assert {invariant.when for invariant in INVARIANTS} == {"decision", "round", "event", "rest", "stuck", "crash"}
