"""The search on the released scheduler: it finds the hole by itself, and nothing where none is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvledger.targets.sglang.space import PLAIN_SPACE, SGLANG_SPACE, UNMIXED_SPACE, modelled_by
from kvledger.testing.failure import explain_failure
from kvledger.testing.moves import Space
from kvledger.testing.search import search

FOUND = Path(__file__).parent.parent / "found" / "sglang"


def test_finds_the_hole_by_itself(sglang: Any) -> None:
    result = search(
        "upstream", examples=400, target=sglang, space=modelled_by(sglang.features, SGLANG_SPACE), driven_per_example=0
    )
    assert result.found is not None, f"nothing found in {result.examples} examples: is the hole mended?"
    ending = f"{result.found.invariant}: {result.found.message}; do its books count otherwise: is the hole mended?"
    assert result.found.invariant == "promises-covered", ending
    assert len(result.found.trace.events) <= 6, result.found.trace


@pytest.mark.parametrize(
    ("rules", "space"),
    [
        pytest.param("upstream", PLAIN_SPACE, id="nothing-held-back"),
        pytest.param("tail-reserved", SGLANG_SPACE, id="tail-reserved"),
        pytest.param("upstream", UNMIXED_SPACE, id="decode-beside-prefill"),
    ],
)
def test_nothing_new(sglang: Any, rules: str, space: Space) -> None:
    result = search(rules, examples=120, target=sglang, space=modelled_by(sglang.features, space), driven_per_example=0)
    if result.found is not None:
        failure = explain_failure(result.found.trace, FOUND, sglang, invariant=result.found.invariant)
        pytest.fail("\n".join(failure.lines))
