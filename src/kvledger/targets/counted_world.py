"""What a counted scheduler's stand-alone script has in the place of kvledger's own CountedTarget.

Nothing of kvledger is imported here: the text of this file goes into the script, before the target's own class.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Node(SimpleNamespace):
    """The node's settings, sizes in tokens."""

    page_size: int
    pool_tokens: int
    host_tokens: int | None

    @property
    def pool_pages(self) -> int:
        return self.pool_tokens // self.page_size

    @property
    def host_pages(self) -> int | None:
        return None if self.host_tokens is None else self.host_tokens // self.page_size


class Watcher:
    """Nobody watches here."""

    def before_decision(self) -> None: ...
    def after_decision(self, decision: object) -> None: ...


class CountedTarget:
    """Keeps who waits and how far each has come; a subclass says how its scheduler is driven and counted."""

    def __init__(self, settings: Any, watcher: Any = None) -> None:
        self.settings = settings
        self.watcher = watcher
        self.waiting_tokens: dict[str, int] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.computed_tokens: dict[str, int] = {}

    def cancel(self, rid: str) -> bool:
        del rid
        return False


class CountedWorld:
    """Drives a counted target. Prefixes are not shared, and outsiders do nothing here."""

    def __init__(self, target_class: Any, node: dict[str, Any], rules: dict[str, Any]) -> None:
        self.node = Node(**node)
        self.target = target_class(self.node, SimpleNamespace(**rules), Watcher())

    def submit(self, name: str, prompt: Any, output: dict[str, Any]) -> str | None:
        del output
        tokens = sum(length for _, length in prompt)
        need, pool_tokens = tokens + 1 + self.node.page_size, self.node.pool_pages * self.node.page_size
        if not need < pool_tokens:
            return f"{need} tokens are not below the empty pool's {pool_tokens}"
        self.target.waiting_tokens[name] = tokens
        self.target.enqueue(name, tokens)
        return None

    def round(self) -> list[tuple[str, int, int]]:
        target, chunks = self.target, []
        for name, start, end in target.step():
            if name in target.waiting_tokens:
                target.prompt_tokens[name] = target.waiting_tokens.pop(name)
            target.computed_tokens[name] = end
            chunks.append((name, start, end))
        return chunks

    def transferred(self, name: str) -> None:
        if name in self.in_flight():
            self._end(name)

    def abort(self, name: str) -> None:
        if name in self.target.prompt_tokens:
            self._end(name)
        elif name in self.target.waiting_tokens and self.target.cancel(name) is not False:
            del self.target.waiting_tokens[name]

    def _end(self, name: str) -> None:
        self.target.finish(name)
        del self.target.prompt_tokens[name], self.target.computed_tokens[name]

    def cached(self, *_: Any) -> None: ...
    def hold(self, *_: Any) -> None: ...
    def release(self, *_: Any) -> None: ...

    def in_flight(self) -> list[str]:
        target = self.target
        return [name for name, tokens in target.prompt_tokens.items() if target.computed_tokens[name] == tokens]

    def has_work(self) -> bool:
        return bool(self.target.waiting_tokens) or len(self.in_flight()) < len(self.target.prompt_tokens)

    def moves(self) -> bool:
        return False

    def pool(self) -> tuple[int, int]:
        return self.target.free_tokens(), 0

    def needs(self) -> dict[str, int]:
        page_size, allocated = self.node.page_size, self.target.allocated_tokens()
        return {
            name: -(-tokens // page_size) * page_size - allocated.get(name, 0)
            for name, tokens in self.target.prompt_tokens.items()
            if self.target.computed_tokens[name] < tokens
        }

    def thrown_away(self) -> list[str]:
        return []

    def lost(self) -> int:
        pool_tokens = self.node.pool_pages * self.node.page_size
        owned_tokens: int = self.target.free_tokens() + sum(self.target.allocated_tokens().values())
        return pool_tokens - owned_tokens
