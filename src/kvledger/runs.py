"""One target's run of a trace, and what of it may be held against another's."""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.invariants import INVARIANTS
from kvledger.monitor import InvariantMonitor
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Outcome, Target, TargetFactory, replay
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace

LEDGER_FIGURES = ("baseline", "cur_rem_tokens", "rem_total_tokens", "rem_chunk_tokens")

SHOWS_FIGURES = frozenset({"decisions", "offsets"})
"""Capabilities of a target that shows the ledger's figures beside each decision."""


@dataclass(frozen=True, slots=True)
class Run:
    """One target's replay of the trace. `asked` are the invariants that it could be asked, `skipped` the others."""

    target: str
    capabilities: frozenset[str]
    outcome: Outcome
    asked: frozenset[str]
    skipped: tuple[str, ...]

    @property
    def tells_decisions(self) -> bool:
        return "decisions" in self.capabilities

    @property
    def shows_figures(self) -> bool:
        """The ledger's figures stand beside each decision."""
        return self.capabilities >= SHOWS_FIGURES

    def figures(self, decision: Decision | None, record: RoundRecord | None) -> dict[str, int | None] | None:
        """The figures right after a decision, or where there is none, when the round's decisions ended.

        None: there are none, or the target does not show them.
        """
        shown = decision or record
        if shown is None or not self.shows_figures:
            return None
        return {name: getattr(shown, name) for name in LEDGER_FIGURES}

    def promises(self, record: RoundRecord | None) -> dict[str, dict[str, int]] | None:
        """Tokens promised in a round, of each request and due when; None: not shown."""
        if not self.shows_figures:
            return None
        promised: dict[str, dict[str, int]] = {}
        for each in record.promises if record is not None else ():
            due = promised.setdefault(each.request, {})
            due[str(each.due)] = due.get(str(each.due), 0) + each.tokens
        return promised

    @property
    def crash(self) -> str | None:
        """What the target raised, if that ended the run."""
        return next((each.message for each in self.outcome.broken if each.invariant == "never-raises"), None)

    def verdict_among(self, asked: frozenset[str]) -> str:
        """The verdict if only these invariants had been asked."""
        verdict = self.outcome.verdict
        if verdict in ("ok", "oom", "stuck"):
            return verdict
        return next((each.invariant for each in self.outcome.broken if each.invariant in asked), "ok")


class _Listener(InvariantMonitor):
    """An invariant monitor that keeps what the target said of itself."""

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None:
        super().attach(target, settings, rules)
        names = {invariant.name for invariant in (*INVARIANTS, *getattr(target, "invariants", ()))}
        self.asked = frozenset(names) - frozenset(self.skipped)


def run_on(name: str, target: TargetFactory, trace: Trace, rules: AccountingRules, source: str) -> Run:
    """Replay a trace with every invariant asked. TraceError, naming the source, as a replay does."""
    listener = _Listener()
    outcome = replay(trace, rules, target=target, monitor=listener, source=source)
    return Run(name, listener.capabilities, outcome, listener.asked, tuple(listener.skipped))
