"""The promises a scheduler makes, each a named object with its reason, its moment and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvledger import checks_decision as decided
from kvledger import checks_decode as decode
from kvledger import checks_queue as queue
from kvledger import checks_ranks as ranks
from kvledger import checks_state as state
from kvledger.evidence import Finding


@dataclass(frozen=True, slots=True)
class Invariant:
    """`when` it is asked: after a decision, after a round, after any event, at rest, when stuck or on a crash.

    `needs` are the capabilities of a target without which it is skipped, by name; `unless`, those that a target
    declares to say that it makes no such promise.
    """

    name: str
    reason: str
    when: str
    check: Callable[..., Finding | None]
    needs: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()

    def fits(self, capabilities: frozenset[str]) -> bool:
        """A target with these capabilities can be held to it."""
        return self.needs <= capabilities and not self.unless & capabilities


_OFFSETS = frozenset({"offsets", "decisions"})
_DECISIONS = frozenset({"decisions"})
_BATCHES = frozenset({"batches"})
_ONE_CUT = frozenset({"batches", "one-cut"})
_GRID = frozenset({"batches", "grid"})
_PAGES = frozenset({"pages"})
_COUNTS = frozenset({"counts"})
_DECODE = frozenset({"decode", "offsets", "decisions", "pages"})

INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "promises-covered",
        "the pool can still give all that was admitted",
        "decision",
        ranks.on_every_rank(decided.promises_covered),
        _BATCHES,
        unless=frozenset({"optimistic"}),
    ),
    Invariant(
        "never-forced",
        "a forced chunk is an allocation nobody counted",
        "decision",
        decided.never_forced,
        _DECISIONS,
    ),
    Invariant("order", "what is due now is part of what is due at all", "decision", decided.order, _OFFSETS),
    Invariant(
        "ledger-exact",
        "an offset is the sum of what was promised, no more, no less",
        "decision",
        decided.ledger_exact,
        _OFFSETS,
    ),
    Invariant(
        "gate-covers-charge",
        "an admission is charged no more than its gate asked for",
        "decision",
        decided.gate_covers_charge,
        _OFFSETS,
    ),
    Invariant(
        "batch-in-budget", "a spent compute budget admits nobody", "decision", decided.batch_in_budget, _DECISIONS
    ),
    Invariant(
        "fix-is-minimal",
        "a refusal for memory is never more than safety needs",
        "decision",
        decided.fix_is_minimal,
        _OFFSETS,
    ),
    Invariant(
        "refusal-is-free",
        "a refused candidate must not cost the others anything",
        "decision",
        decided.refusal_is_free,
        _DECISIONS,
    ),
    Invariant(
        "one-half-done",
        "there is one place for a half-done request",
        "decision",
        decided.one_half_done,
        _ONE_CUT,
        unless=frozenset({"hybrid"}),
    ),
    Invariant("on-grid", "KDA state is only saved on the checkpoint grid", "decision", decided.on_grid, _GRID),
    Invariant(
        "same-batches",
        "stages that run different batches hand each other the wrong rows",
        "round",
        ranks.same_batches,
        _DECISIONS,
    ),
    Invariant(
        "admitted-finishes",
        "a failed allocation ends the process, and every request with it",
        "round",
        ranks.on_every_rank(state.admitted_finishes),
        unless=frozenset({"may-preempt"}),
    ),
    Invariant(
        "other-is-minimal",
        "a refusal for compute is never more than the budgets need",
        "decision",
        decided.other_is_minimal,
        _DECISIONS,
    ),
    Invariant(
        "table-fits",
        "a page too few is a wrong address, a page too many a promise nobody made",
        "round",
        ranks.on_every_rank(state.table_fits),
        _BATCHES | _PAGES,
        unless=frozenset({"hybrid"}),
    ),
    Invariant(
        "ended-is-gone",
        "who has gone away must not be served",
        "event",
        ranks.on_every_rank(state.ended_is_gone),
        _PAGES,
    ),
    Invariant(
        "kept-until-ended",
        "KV that is let go while its request needs it is somebody else's by the next round",
        "event",
        ranks.on_every_rank(state.kept_until_ended),
        _OFFSETS | _BATCHES | frozenset({"pages"}),
        unless=frozenset({"may-preempt"}),
    ),
    Invariant(
        "everyone-served",
        "a request that is lost was not refused, it was lost",
        "rest",
        state.everyone_served,
        _BATCHES,
        unless=frozenset({"hybrid"}),
    ),
    Invariant(
        "never-raises",
        "an exception in a scheduler ends every request on it",
        "crash",
        state.never_raises,
    ),
    Invariant(
        "conserved", "a page has one owner, and none is lost", "event", ranks.on_every_rank(state.conserved), _COUNTS
    ),
    Invariant(
        "no-use-after-free",
        "a page in use must not be given away",
        "event",
        ranks.on_every_rank(state.no_use_after_free),
        _PAGES,
    ),
    Invariant("quiescent", "what is left at rest is a leak", "rest", ranks.on_every_rank(state.quiescent), _COUNTS),
    Invariant(
        "tail-spared",
        "a page that decode takes from a tail is missed when the next chunk runs",
        "round",
        decode.tail_spared,
        _DECODE,
    ),
    Invariant(
        "comes-back-whole",
        "what a retracted request had generated is computed and held again",
        "decision",
        decode.comes_back_whole,
        _DECODE,
    ),
    Invariant(
        "loaded-before-used",
        "a chunk that goes on from what has not arrived reads whatever lies there",
        "decision",
        decided.loaded_before_used,
        _DECISIONS,
    ),
    Invariant(
        "paused-is-still",
        "who paused a scheduler is changing what it works on",
        "round",
        decode.paused_is_still,
        _DECISIONS,
    ),
    Invariant("in-order", "whose turn it is must not be passed over", "decision", queue.in_order, _DECODE),
    Invariant(
        "preemption-fair",
        "work is only thrown away for somebody who matters more, and needs it",
        "decision",
        queue.preemption_fair,
        _DECODE,
    ),
    Invariant(
        "queue-kept", "who waits must not lose its place", "round", ranks.on_every_rank(queue.queue_kept), _DECODE
    ),
    Invariant(
        "slots-kept",
        "a request without a slot has no row to write its pages in",
        "round",
        ranks.on_every_rank(decode.slots_kept),
        _DECODE,
    ),
    Invariant("full-is-true", "a batch called full turns everybody away", "round", decode.full_is_true, _DECODE),
    Invariant(
        "each-decodes-once", "a round owes each running request one token", "round", decode.each_decodes_once, _DECODE
    ),
    Invariant("output-exact", "an output is as long as was asked for", "round", decode.output_exact, _DECODE),
    Invariant(
        "retraction-exact",
        "work is only thrown away for pages that are needed",
        "round",
        decode.retraction_exact,
        _DECODE,
    ),
    Invariant(
        "abort-is-last", "a request that could have waited must not be given up", "round", decode.abort_is_last, _DECODE
    ),
    Invariant("progress", "a safe scheduler that starves is no scheduler", "stuck", state.progress),
)
