"""A pipeline's ranks in words."""

from __future__ import annotations

from kvledger.events import Ranks
from kvledger.settings import NodeSettings, of_rank


def on_ranks(ranks: Ranks) -> str:
    """Which of a pipeline's ranks something reaches, where not all."""
    return "" if ranks is None else f" on rank {', '.join(map(str, ranks))}"


def ranks_words(node: NodeSettings) -> str:
    """The sizes of each pipeline rank that replays."""
    ranks = [of_rank(node, rank) for rank in range(1, len(node.ranks) + 1)]
    return "".join(
        f"; rank {number}: pool {rank.pool_tokens}, "
        f"host {'unlimited' if rank.host_tokens is None else rank.host_tokens}"
        for number, rank in enumerate(ranks, 1)
    )
