"""The kill matrix as text: mutant by invariant, the example in which each first broke."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvledger.invariants import INVARIANTS
from tests.mutants.hunt import Hunt

WIDTH = 5


def matrix_lines(hunts: Sequence[Hunt]) -> Iterable[str]:
    """`*` marks an expected killer, `base` what breaks without the mutant too."""
    names = [invariant.name for invariant in INVARIANTS]
    first_width = max(len(hunt.mutant) for hunt in hunts)
    for number, name in enumerate(names, 1):
        yield f"{number:>{first_width}} {name}"
    heads = [*map(str, range(1, len(names) + 1)), "ran", "crash"]
    yield f"{'mutant':{first_width}} " + " ".join(f"{head:>{WIDTH}}" for head in heads)
    for hunt in hunts:
        cells = [*(_cell(hunt, name) for name in names), str(hunt.examples), str(hunt.crashes or "")]
        yield f"{hunt.mutant:{first_width}} " + " ".join(f"{cell:>{WIDTH}}" for cell in cells).rstrip()
    yield from _summary_lines(hunts, names)


def _cell(hunt: Hunt, invariant: str) -> str:
    if invariant in hunt.excused:
        return "base"
    if invariant not in hunt.first_broken:
        return "."
    return f"{hunt.first_broken[invariant]}{'*' if invariant in hunt.killers else ''}"


def _summary_lines(hunts: Sequence[Hunt], names: Sequence[str]) -> Iterable[str]:
    yield ""
    for name in names:
        kills = [hunt for hunt in hunts if name in hunt.killed_by]
        alone = [hunt.mutant for hunt in kills if len(hunt.killed_by) == 1]
        yield f"{name} kills {len(kills)}" + (f", alone: {', '.join(alone)}" if alone else "")
    survivors = [hunt.mutant for hunt in hunts if not hunt.killed_by]
    examples = sum(hunt.examples for hunt in hunts)
    yield f"{len(hunts)} mutants, {len(hunts) - len(survivors)} killed, {examples} examples" + (
        f"; survivors: {', '.join(survivors)}" if survivors else ""
    )
