"""What the examples of one test added up to, as properties of its report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis.internal.observability import add_observability_callback, remove_observability_callback

from kvledger.testing.fixtures import target_name
from kvledger.testing.machine import AdmissionMachine


@dataclass(slots=True)
class Tally:
    """Examples, rounds and branches of the machines that ran; `observed` counts Hypothesis's own records."""

    examples: int = 0
    rounds: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    observed: Counter[str] = field(default_factory=Counter)
    skipped: set[str] = field(default_factory=set)
    target: str = ""

    def add(self, machine: AdmissionMachine) -> None:
        self.examples += 1
        self.rounds += machine.monitor.rounds
        self.reached.update(machine.monitor.reached)
        self.skipped.update(machine.monitor.skipped)
        self.target = target_name(machine.under_test.target)

    @contextmanager
    def observations(self, wanted: bool) -> Iterator[None]:
        """While open, count the events in Hypothesis's records of its test cases."""
        if not wanted:
            yield
            return
        add_observability_callback(self._observed)
        try:
            yield
        finally:
            remove_observability_callback(self._observed)

    def _observed(self, observation: Any) -> None:
        if observation.type != "test_case":
            return
        self.observed[f"test cases {observation.status}"] += 1
        self.observed.update({str(name): 1 for name in observation.features if str(name).startswith(("move ", "met "))})

    def properties(self) -> list[tuple[str, object]]:
        """For the report: one property that the summary reads, and plain ones for JUnit."""
        tally = {
            "examples": self.examples,
            "rounds": self.rounds,
            "reached": dict(self.reached),
            "observed": dict(self.observed),
            "skipped": sorted(self.skipped),
            "target": self.target,
        }
        return [
            ("kvledger", json.dumps(tally)),
            ("kvledger_examples", self.examples),
            ("kvledger_rounds", self.rounds),
            ("kvledger_branches", len([branch for branch, count in self.reached.items() if count])),
        ]
