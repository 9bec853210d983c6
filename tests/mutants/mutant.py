"""What a mutant is: the node with one small change of our own accounting, built afresh for every example."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from kvledger.adder import PrefillAdder
from kvledger.follower import ReplayingRank
from kvledger.ledger import MemoryLedger
from kvledger.node import PrefillNode, Watcher
from kvledger.pipeline import LeastMemory, PipelineNode
from kvledger.pool import PagePool
from kvledger.pools import SecondPool
from kvledger.radix import PrefixTree
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import FIRST_TOKEN, NodeSettings
from kvledger.testing.moves import NODE_SPACE, Space
from kvledger.testing.pools_moves import POOLS_SPACE
from kvledger.testing.rank_moves import RANK_SPACE
from kvledger.testing.unified_moves import UNIFIED_SPACE
from kvledger.unified import UnifiedNode
from kvledger.unified_adder import UnifiedAdder

TAIL_RESERVED = PRESETS["tail-reserved"]
ALIGNED = PRESETS["aligned"]


class AssembledNode(PrefillNode):
    """The node, put together from parts that a mutant may replace."""

    adder_type: ClassVar[type[PrefillAdder]] = PrefillAdder
    ledger_type: ClassVar[type[MemoryLedger]] = MemoryLedger
    pool_type: ClassVar[type[PagePool]] = PagePool
    tree_type: ClassVar[type[PrefixTree]] = PrefixTree

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, rules, watcher)
        self.pool = self.pool_type(settings.pool_pages, settings.page_size)
        self.tree = self.tree_type(self.pool, settings.host_pages)

    def _open_books(self) -> PrefillAdder:
        adder = self.adder_type(
            self.page_size,
            self.tree,
            self.pool,
            rem_input_tokens=self.settings.max_prefill_tokens,
            rem_chunk_tokens=self.settings.chunked_prefill_size,
            rules=self.rules,
            checkpoint_align=self.settings.checkpoint_align,
            first_token=FIRST_TOKEN,
        )
        adder.memory = self.ledger_type(adder.memory._read_baseline)
        return adder


def long_beside_decode(settings: NodeSettings) -> bool:
    """Decode takes part in each of the many rounds that a long prompt needs, on pages that a few tokens fill."""
    chunk = settings.chunked_prefill_size
    return settings.mixed_chunk and settings.page_size <= 4 and chunk is not None and chunk <= 4 * settings.page_size


class DeferringNode(AssembledNode):
    """The node under rules that defer on a shortage, whatever was drawn."""

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        super().__init__(settings, replace(rules, on_shortage="defer"), watcher)


PARTS: tuple[tuple[type, str], ...] = (
    (PrefillAdder, "adder_type"),
    (MemoryLedger, "ledger_type"),
    (PagePool, "pool_type"),
    (PrefixTree, "tree_type"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of the accounting. `killers` are the invariants that must break, and do not without it.

    `base` is the same node without the change, where that is not `PrefillNode`. `narrow` says which drawn nodes are
    worth an example; `most` is how many examples it may take. `report` is the public report that it restates; `space`
    is where it is hunted.
    """

    name: str
    wrong: str
    killers: frozenset[str]
    build: TargetFactory
    base: TargetFactory = PrefillNode
    rules: AccountingRules = TAIL_RESERVED
    report: str | None = None
    narrow: Callable[[NodeSettings], bool] | None = None
    most: int = 1500
    space: Space = NODE_SPACE


MUTANTS: dict[str, Mutant] = {}

Part = TypeVar("Part", bound=type)


def mutant(*killers: str, **traits: Any) -> Callable[[Part], Part]:
    """Registers a changed part, or a changed node, under its class's name; its docstring says what is wrong."""

    def register(part: Part) -> Part:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", part.__name__).lower()
        assert part.__doc__ is not None, f"{name} does not say what is wrong"
        assert name not in MUTANTS, f"two mutants are called {name}"
        wrong = " ".join(part.__doc__.split())
        if issubclass(part, (UnifiedNode, UnifiedAdder)):
            traits.setdefault("space", UNIFIED_SPACE)
        if issubclass(part, (PipelineNode, ReplayingRank, LeastMemory)):
            traits.setdefault("space", RANK_SPACE)
        if issubclass(part, SecondPool):
            traits.setdefault("space", POOLS_SPACE)
        MUTANTS[name] = Mutant(name=name, wrong=wrong, killers=frozenset(killers), build=node_of(part), **traits)
        return part

    return register


def _with_pool(part: type, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> PrefillNode:
    """The node whose second pool of this kind is the changed one."""
    node = PrefillNode(settings, rules, watcher)
    for pool in node.pools:
        if isinstance(pool, part.__bases__):
            pool.__class__ = part
    return node


def node_of(part: type) -> TargetFactory:
    """A node with this part in its place."""
    if issubclass(part, ReplayingRank):
        return type(f"PipelineWith{part.__name__}", (PipelineNode,), {"rank_type": part})
    if issubclass(part, LeastMemory):
        return type(f"PipelineWith{part.__name__}", (PipelineNode,), {"view_type": part})
    if issubclass(part, PrefillNode):
        return part
    if issubclass(part, UnifiedAdder):
        return type(f"NodeWith{part.__name__}", (UnifiedNode,), {"adder_type": part})
    if issubclass(part, SecondPool):
        return partial(_with_pool, part)
    attribute = next(attribute for kind, attribute in PARTS if issubclass(part, kind))
    return type(f"NodeWith{part.__name__}", (AssembledNode,), {attribute: part})
