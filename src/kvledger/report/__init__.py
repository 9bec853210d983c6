"""Reports of replays. Every report is made from a `Replayed`, and from nothing that a scheduler still owns."""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.replay import Outcome
from kvledger.rules import PRESETS, AccountingRules
from kvledger.trace import Trace


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace that was replayed: where it came from, the rules in force, and how it ended.

    `skipped` are the invariants that could not be asked of the target, which may not show a ledger's figures either.
    """

    source: str
    trace: Trace
    rules: AccountingRules
    outcome: Outcome
    skipped: tuple[str, ...] = ()
    shows_figures: bool = True

    @property
    def preset(self) -> str | None:
        """The name of the rules in force; None for switches that no preset has."""
        return next((name for name, rules in PRESETS.items() if rules == self.rules), None)

    @property
    def expected(self) -> str | None:
        """The verdict that the trace expects under these rules, if it says so."""
        return self.trace.expect.get(self.preset) if self.preset is not None else None

    @property
    def passed(self) -> bool:
        """It ended as expected; without an expectation: nothing was violated."""
        return self.outcome.verdict == (self.expected or "ok")


__all__ = ["Replayed"]
