"""What a search draws for a node that computes: small nodes, pages of 4 and 16 tokens, and prompts with a past.

KDA saves states at multiples of 16, so the grid is 16 or 32 (`upstream` rules put it on the page: with pages of 4 the
executor cuts its passes). Most submissions go on from a prompt seen before, so that snapshots are restored
all the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvledger.events import Event, Submit
from kvledger.request import Prompt
from kvledger.settings import NodeSettings
from kvledger.testing.moves import MOVES, Domain, Move, Space, World, cache, cut_prompt

PAGES = ((4, 4), (4, 8), (16, 1), (16, 2), (16, 2))
"""Page size, and pages of the grid."""


def draw_small(
    page: int,
    chunk_grids: int,
    chunk_pages: int,
    odd: int,
    chunking: int,
    pool_chunks: int,
    pool_pages: int,
    limit: int,
    host: int,
    slots: int,
) -> NodeSettings:
    """A node of a few hundred tokens; sometimes a chunk that ends inside a page, and few state slots."""
    page_size, grid_pages = PAGES[page]
    chunk = max(page_size, (chunk_grids * grid_pages + chunk_pages) * page_size) + odd // 3 * (page_size // 2)
    pool_tokens = (pool_chunks * chunk // page_size + pool_pages) * page_size
    return NodeSettings(
        page_size=page_size,
        checkpoint_align=page_size * grid_pages,
        chunked_prefill_size=chunk if chunking < 5 else None,
        max_prefill_tokens=(None, None, chunk, page_size)[limit],
        pool_tokens=pool_tokens,
        host_tokens=(None, 0, 6 * page_size, pool_tokens)[host],
        state_slots=(None, None, 4, 8)[slots],
    )


def submit_known(world: World, pick: int, cut: int, tail: int) -> Event:
    """A prompt that goes on from a late one, ours or another's, cut on the grid or not at all: a state to restore.

    Where no prompt is longer than the grid yet, somebody else's prefix comes to the device instead.
    """
    grid = world.grid_tokens if world.grid_tokens % 16 == 0 else world.settings.checkpoint_align
    cached = [prompt for prompt in world.cached if prompt.tokens > grid]
    seen = cached if cached and pick > 1 else [p for p in (*cached, *world.documents) if p.tokens > grid]
    if not seen:
        return cache(world, 8, 0, 1, 4, 0)
    document = seen[-1 - pick % min(len(seen), 4)]
    on_grid = document.tokens // grid * grid
    prefix = cut_prompt(document, document.tokens if cut == 3 else on_grid)
    name = world.fresh_name()
    tokens = (1, 3, world.settings.page_size, world.settings.page_size + 1, grid, 2 * grid)[tail]
    prompt = Prompt((*prefix.segments, (name, max(1, min(tokens, world.largest_tokens() - prefix.tokens)))))
    world.documents.append(prompt)
    return Submit(name, prompt)


KNOWN = Move("submit_known", {"pick": (0, 3), "cut": (0, 3), "tail": (0, 5)}, submit_known)


def _moves() -> tuple[Move, ...]:
    """Known prefixes and rounds weigh as much as all the others: a third of the admitted must be hits."""
    run_round = next(move for move in MOVES if move.name == "round")
    return (*MOVES, *[KNOWN] * 5, *[run_round] * 3)


_DOMAINS: Mapping[str, Domain] = {
    "page": (0, len(PAGES) - 1),
    "chunk_grids": (0, 3),
    "chunk_pages": (0, 3),
    "odd": (0, 3),
    "chunking": (0, 5),
    "pool_chunks": (1, 4),
    "pool_pages": (2, 10),
    "limit": (0, 3),
    "host": (0, 3),
    "slots": (0, 3),
}
_TINY: Mapping[str, Domain] = {
    "page": (2, 3),
    "chunk_grids": (1, 2),
    "chunk_pages": (0, 1),
    "pool_chunks": (1, 2),
    "pool_pages": (2, 4),
}

SMALL_SPACE = Space(_DOMAINS, draw_small, _moves(), examples=60)
TINY_SPACE = Space({**_DOMAINS, **_TINY}, draw_small, _moves(), examples=5, thorough=False)
"""For an interpreter, where 16 tokens cost a hundred milliseconds."""
