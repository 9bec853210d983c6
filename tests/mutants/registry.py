"""All mutants, and the ones that nothing sees yet."""

from __future__ import annotations

# importing a group registers its mutants
from tests.mutants import books, charge, chunk, decode, faults, gate, life, outputs, pages, pools, ranks, residue, turns
from tests.mutants.mutant import MUTANTS

GROUPS = (charge, books, gate, chunk, residue, pages, life, outputs, decode, turns, pools, faults, ranks)

BLIND: dict[str, str] = {}
"""Mutants that survive, and what would have to see them. An entry that is seen after all fails the suite."""

__all__ = ["BLIND", "GROUPS", "MUTANTS"]
