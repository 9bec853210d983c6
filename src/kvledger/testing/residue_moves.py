"""What leaves chunk budget behind a cut, as a dimension of the search: a limit on the half-done request, and a
kernel's grid for the length of every cut. (The split size of fresh cuts is drawn for every node, see moves.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvledger.arithmetic import floor_tokens
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.dimensions import Dimension, swarm
from kvledger.testing.moves import NODE_SPACE, Domain
from kvledger.testing.reached_residue import BRANCHES

RESIDUE_RULES: Mapping[str, Domain] = {"limit": (0, 5), "cell": (0, 7)}


def draw_residue(rules: AccountingRules, settings: NodeSettings, limit: int, cell: int) -> AccountingRules:
    """The rules with such causes drawn, where the tail is safe whatever a cut leaves over.

    A grid that no fresh cut can reach is left out: that would be a node on which a long prompt waits for ever (#36344).
    """
    chunk, page_size = settings.chunked_prefill_size, settings.page_size
    if chunk is None or not (rules.reserve_tail or rules.spend_gap):
        return rules
    whole = floor_tokens(chunk, page_size)
    half = max(page_size, floor_tokens(chunk // 2, page_size))
    most = (None, None, page_size, half, max(page_size, whole - page_size), whole)[limit]
    limited = replace(rules, continuation_limit=most)
    gridded = replace(limited, chunk_grid=(cell - 1) * page_size if cell > 1 else None)
    return gridded if (gridded.cut_unit or 0) <= whole else limited


RESIDUE = Dimension(
    name="residue",
    domains={},
    extend=lambda settings: settings,
    branches=BRANCHES,
    rules_domains=RESIDUE_RULES,
    rules=draw_residue,
)

RESIDUE_SPACE = swarm(NODE_SPACE, [RESIDUE], name="+ residue", examples=300, always=True)
"""Prefill nodes under rules whose cuts leave a residue for more than one reason."""
