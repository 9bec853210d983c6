"""The public reports (`#N` is sgl-project/sglang): which mutant restates which, and why the others have none."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REPORTS: tuple[str, ...] = (
    "#5081",
    "#7353",
    "#7397",
    "#22495",
    "FreeToken#367",
    "#28530",
    "#36344",
    "#30743",
    "#22984",
    "#27391",
    "bytedance-iaas#741",
    "#36855",
    "#23174",
    "#31205",
    "#16067",
    "#7434",
    "#4602",
    "#13108",
    "#23006",
    "#34572",
    "sglang-jax#982",
    "sglang-jax#1355",
    "vllm#45388",
    "mini-sglang#52",
    "#20182",
    "#26912",
    "#30476",
    "#34441",
    "#36458",
    "FreeToken#202",
    "vllm#57841",
)

NO_MUTANT: dict[str, str] = {"FreeToken#202": "a switch of the rules is the fault, `promise_pools: false`"}


def restated(mutant: Mutant) -> list[str]:
    """The reports that a mutant restates."""
    return mutant.report.split(", ") if mutant.report else []
