"""All mutants, and the ones that nothing sees yet."""

from __future__ import annotations

# importing a group registers its mutants
from tests.mutants import books, charge, chunk, decode, gate, life, outputs, pages, pools, turns
from tests.mutants.mutant import MUTANTS

GROUPS = (charge, books, gate, chunk, pages, life, outputs, decode, turns, pools)

BLIND: dict[str, str] = {}
"""Mutants that survive, and what would have to see them. An entry that is seen after all fails the suite."""

__all__ = ["BLIND", "GROUPS", "MUTANTS"]
