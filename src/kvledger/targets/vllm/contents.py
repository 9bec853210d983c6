"""What each attention block of a vLLM world really holds: recounted from what was computed and loaded, never asked.

A block's content is told by where it stands: the hash of a full page (which stands for all before it too), or whose it
is, which page, and how many tokens of it are there. States of a hybrid model are not followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """The first `tokens` of one request's page that is not full yet."""

    request: str
    page: int
    tokens: int


Content = bytes | Part


class Contents:
    """By block number; a block that is not there holds nothing that anybody may read."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._written: dict[int, Content] = {}

    def wrote(self, request: Any, blocks: Sequence[Any], start: int, end: int) -> None:
        """Tokens [start, end) of a request were computed or loaded into its blocks; what lies before them was not."""
        for page in range(start // self._page_size, -(-end // self._page_size)):
            first = page * self._page_size
            block = blocks[page].block_id
            whole = start <= first or self._reaches(request, block, page, start - first)
            self._written.pop(block, None)
            if whole:
                self._written[block] = self._content(request, page, end - first)

    def gone(self, free: Iterable[Any]) -> None:
        """Free blocks that nobody could find by a hash hold nothing."""
        for block in free:
            if block.block_hash is None:
                self._written.pop(block.block_id, None)

    def first_missing(self, request: Any, blocks: Sequence[Any], tokens: int) -> int | None:
        """The first page of a request's first `tokens` that its block does not hold."""
        for page in range(-(-tokens // self._page_size)):
            left = tokens - page * self._page_size
            if page >= len(blocks) or not self._reaches(request, blocks[page].block_id, page, left):
                return page
        return None

    def holds(self, block: Any, page_hash: bytes) -> bool:
        """The block is full with the page that the hash stands for."""
        return self._written.get(block.block_id) == page_hash

    def _content(self, request: Any, page: int, tokens: int) -> Content:
        if tokens >= self._page_size:
            return bytes(request.block_hashes[page])
        return Part(request.request_id, page, tokens)

    def _reaches(self, request: Any, block: int, page: int, tokens: int) -> bool:
        """A full page serves everybody who has the same; a part, its own request."""
        written = self._written.get(block)
        if isinstance(written, Part):
            return (written.request, written.page) == (request.request_id, page) and written.tokens >= tokens
        return written is not None and page < len(request.block_hashes) and written == request.block_hashes[page]
