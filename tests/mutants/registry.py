"""All mutants, and the ones that nothing sees yet."""

from __future__ import annotations

# importing a group registers its mutants
from tests.mutants import books, charge, chunk, gate, life, pages
from tests.mutants.mutant import MUTANTS

GROUPS = (charge, books, gate, chunk, pages, life)

BLIND: dict[str, str] = {
    "equality-passes-gate": "gate-covers-charge would have to ask the gate again, on books counted afresh",
    "whole-checked-raw": "batch-in-budget would have to count a whole prompt in pages",
    "too-long-joins-batch": "batch-in-budget asks whether the limit was spent before, not whether it holds after",
    "queue-goes-on-after-refusal": "nobody asks whether the queue ends at a refusal",
    "no-cut-beside-last-chunk": "nobody asks whether an OTHER was needed",
    "host-limit-ignored": "conserved does not count the host tier's pages",
    "entry-refuses-what-fits": "nobody asks whether a request rejected at submit would have fitted",
    "refused-leaves-queue": "nobody asks at rest whether every accepted request was served",
    "hit-off-grid": "on-grid looks at where a chunk ends, not at where it starts",
    "hit-takes-last-token": "nobody asks whether a chunk has a token, and no prompt is submitted twice",
    "page-for-exact-multiple": "nobody compares a page table with the tokens computed",
    "abort-overlooks-queue": "nobody asks whether an aborted request is gone",
    "transfer-ends-half-done": "the moves transfer only what is in flight, and the monitor forgets what is transferred",
}
"""Mutants that survive, and what would have to see them. An entry that is seen after all fails the suite."""

__all__ = ["BLIND", "GROUPS", "MUTANTS"]
