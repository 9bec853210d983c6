"""A hunt can fail: it neither kills the unchanged node nor takes an exception for a kill."""

from __future__ import annotations

from kvledger.node import PrefillNode
from kvledger.record import RoundRecord
from tests.mutants.hunt import hunt
from tests.mutants.matrix import matrix_lines
from tests.mutants.mutant import ALIGNED, AssembledNode, Mutant


class CrashingNode(PrefillNode):
    def run_round(self) -> RoundRecord:
        raise IndexError("no such page")


def test_the_unchanged_node_survives() -> None:
    unchanged = Mutant(name="unchanged", wrong="nothing", killers=frozenset({"order"}), build=AssembledNode)
    found = hunt(unchanged, most=100)
    assert (found.examples, found.first_broken, found.crashes) == (100, {}, 0)


def test_a_crash_is_no_kill() -> None:
    crashing = Mutant(name="crashing", wrong="everything", killers=frozenset({"order"}), build=CrashingNode)
    found = hunt(crashing, most=10)
    assert not found.killed_by
    assert (found.crashes, found.first_crash) == (10, "IndexError: no such page")


def test_what_the_base_breaks_is_no_kill() -> None:
    """The fork's own hole, as a mutant of itself."""
    same = Mutant(
        name="same", wrong="the base's fault", killers=frozenset({"order"}), build=AssembledNode, rules=ALIGNED
    )
    found = hunt(same, most=200)
    assert "promises-covered" in found.first_broken
    assert not found.killed_by
    assert any("base" in line.split() for line in matrix_lines([found]))
