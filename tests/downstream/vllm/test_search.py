"""The search on the released scheduler: it finds what is known by itself, and nothing where nothing is known.

`--kvledger-profile nightly` tries 5,000 examples of the property that must hold; else it is 500.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvledger.testing.failure import explain_failure
from kvledger.testing.search import search
from kvledger.testing.session import SESSION
from tests.downstream.known import load_known
from tests.downstream.vllm.test_known import VERSION

FOUND = Path(__file__).parent.parent / "found"
HYPOTHESIS_EXAMPLES = 100


def test_finds_a_prefill_that_is_rolled_back(vllm: Any) -> None:
    found = _found(vllm.VllmStrictTarget, 1000)
    assert found.invariant == "admitted-finishes"
    assert len(found.trace.events) <= 4, found.trace


def test_finds_the_gate_that_counts_one_block_too_few(vllm: Any) -> None:
    smallest = load_known(f"vllm-align-{VERSION}", "stuck-smallest")
    found = _found(vllm.VllmAlignTarget, 300)
    assert found.invariant == "progress"
    assert (found.trace.node, found.trace.events) == (smallest.node, smallest.events)


def test_everything_that_fits_alone_finishes(vllm: Any) -> None:
    _nothing_new(vllm.VllmTarget, examples=5000 if SESSION.profile == "nightly" else 500)


def test_so_it_does_in_align_mode_as_a_server_runs_it(vllm: Any) -> None:
    _nothing_new(vllm.VllmAlignServedTarget, examples=5000 if SESSION.profile == "nightly" else 300)


def _found(target: Any, examples: int) -> Any:
    result = search("upstream", examples=examples, target=target, space=target.space, driven_per_example=0)
    assert result.found is not None, f"nothing found in {result.examples} examples: is the hole mended?"
    return result.found


def _nothing_new(target: Any, *, examples: int) -> None:
    """A hundred of Hypothesis's examples, which steer, and plain ones for the rest."""
    driven = examples // HYPOTHESIS_EXAMPLES - 1
    result = search(
        "upstream",
        examples=HYPOTHESIS_EXAMPLES,
        target=target,
        space=target.space,
        driven_per_example=driven,
    )
    if result.found is not None:
        failure = explain_failure(result.found.trace, FOUND / target.__name__, target, invariant=result.found.invariant)
        pytest.fail("\n".join(failure.lines))
    assert result.examples >= examples, f"{result.examples} examples, not {examples}"
