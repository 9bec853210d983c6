"""Known holes of released schedulers: one that is mended is called that, and not another hole."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.node import PrefillNode, Watcher
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from tests.downstream.known import BOOKS, KnownHole, check_known

HOLE = Path(__file__).parents[1] / "regressions" / "worked-example.json"


class Mended(PrefillNode):
    """Charges the tail, whatever rules it is measured by."""

    def __init__(self, settings: NodeSettings, _rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, PRESETS["tail-reserved"], watcher)


class Aligned(PrefillNode):
    def __init__(self, settings: NodeSettings, _rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, PRESETS["aligned"], watcher)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """The trace under a name of its own, and under the rules that crash."""
    path = tmp_path / "oom-tail.json"
    path.write_text(HOLE.read_text().replace('"rules": "tail-reserved"', '"rules": "aligned"'))
    return path


def test_a_hole_that_is_there_is_known(named: Path) -> None:
    with pytest.raises(KnownHole, match=r"oom-tail\.json: oom"):
        check_known(named, Aligned)


def test_a_hole_that_is_mended_ends_ok(named: Path) -> None:
    """So that its expected failure says which file to remove, and not that the books are inexact."""
    check_known(named, Mended)


def test_another_ending_is_a_plain_failure(named: Path) -> None:
    other = named.rename(named.parent / "stuck-tail.json")
    with pytest.raises(AssertionError, match=r"stuck-tail\.json ends as oom: ") as raised:
        check_known(other, Aligned)
    assert not isinstance(raised.value, KnownHole)


def test_a_safe_neighbour_is_asked_everything_and_says_what_it_may_be(named: Path) -> None:
    neighbour = named.rename(named.parent / "ok-tail.json")
    with pytest.raises(AssertionError, match="is a hole mended") as raised:
        check_known(neighbour, Mended)
    assert any(name in str(raised.value) for name in BOOKS)
