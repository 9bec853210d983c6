"""The swarm over all dimensions: each example draws whether its node decodes, and which further parts it has.

Not every part goes with every other: a pipeline neither decodes nor has second pools or faults.
"""

from __future__ import annotations

from dataclasses import replace

from kvledger.testing.dimensions import swarm
from kvledger.testing.faults_moves import FAULTS
from kvledger.testing.pools_moves import POOLS
from kvledger.testing.rank_moves import RANKS
from kvledger.testing.residue_moves import RESIDUE
from kvledger.testing.unified_moves import EITHER_SPACE

DIMENSIONS = (RESIDUE, RANKS, POOLS, FAULTS)

RARE = frozenset(
    {
        "loaded one waits for a place in the batch",
        "short of shared_bytes",
        "hit in other tiers on another rank",
    }
)
"""Met in less than one of a hundred examples here; the space of their own dimension asks for them."""

_EVERYTHING = swarm(replace(EITHER_SPACE, asks=()), DIMENSIONS, name="+ parts", examples=350)

SWARM_SPACE = replace(_EVERYTHING, asks=tuple(branch for branch in _EVERYTHING.asks or () if branch not in RARE))
"""Nodes of every kind, with any subset of the parts. Decode has a space of its own that asks for its branches."""
