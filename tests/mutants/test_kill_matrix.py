"""Every mutant is killed by the invariants that are to kill it, and no invariant is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from kvledger.invariants import INVARIANTS
from tests.mutants.hunt import hunt
from tests.mutants.mutant import ALIGNED, Mutant
from tests.mutants.registry import BLIND, MUTANTS
from tests.mutants.reports import NO_MUTANT, REPORTS, restated

BLIND_EXAMPLES = 300
"""So many say that a mutant survives; more would only cost time."""

CASES = [
    pytest.param(
        mutant,
        id=mutant.name,
        marks=[pytest.mark.xfail(reason=BLIND[mutant.name], strict=True)] if mutant.name in BLIND else [],
    )
    for mutant in MUTANTS.values()
]


@pytest.mark.parametrize("mutant", CASES)
def test_mutant_is_killed(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    found = hunt(mutant, most=BLIND_EXAMPLES if mutant.name in BLIND else mutant.most)
    record_property("hunt", asdict(found))
    assert mutant.rules == ALIGNED or not found.excused, f"{found.excused} break without the mutant"
    assert mutant.killers, f"nobody is expected to kill {mutant.name}"
    missing = mutant.killers - found.killed_by
    assert not missing, f"{sorted(missing)} held for {found.examples} examples while {mutant.wrong}"


def test_every_invariant_is_expected_to_kill_a_mutant() -> None:
    killers = {killer for mutant in MUTANTS.values() if mutant.name not in BLIND for killer in mutant.killers}
    assert killers == {invariant.name for invariant in INVARIANTS}


def test_every_report_has_a_mutant_or_a_reason() -> None:
    with_mutant = {report for mutant in MUTANTS.values() for report in restated(mutant)}
    assert with_mutant.isdisjoint(NO_MUTANT)
    assert with_mutant | set(NO_MUTANT) == set(REPORTS)


def test_blind_spots_are_mutants() -> None:
    assert set(MUTANTS) >= set(BLIND)
