"""What the search does to a scheduler: moves with small arguments, each of which makes one event that is valid now.

Sizes are never drawn as such. A move draws a *landmark* (a page, the grid, the chunk budget's residue, exactly what the
pool can still promise...), a scale and a small step off it, and the size is clamped to what the state allows. So every
draw is an event, boundaries are met on purpose, and shrinking a draw shrinks the trace. Hypothesis and the plain
driver draw from the same domains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvledger.arithmetic import align_chunk_end, ceil_tokens, floor_or_keep
from kvledger.checks_pools import spare_pages_beside
from kvledger.events import (
    Abort,
    Cached,
    Event,
    Hold,
    Release,
    Round,
    Submit,
    Tier,
    Transferred,
)
from kvledger.evidence import needed_pages_of
from kvledger.monitor import InvariantMonitor
from kvledger.record import Snapshot
from kvledger.replay import Replay
from kvledger.request import Prompt
from kvledger.rules import SOUND_PRESETS, AccountingRules
from kvledger.settings import FIRST_TOKEN, NodeSettings

Domain = tuple[int, int]
"""Bounds of a drawn integer, both included. 0 is the simplest."""

PAGE_SIZES = (1, 4, 16, 64)
GRID_PAGES = (8, 4, 8, 2)

NODE_DOMAINS: Mapping[str, Domain] = {
    "page": (0, len(PAGE_SIZES) - 1),
    "grid": (0, len(GRID_PAGES) - 1),
    "chunk_grids": (0, 3),
    "chunk_pages": (0, 7),
    "chunk_tokens": (0, 3),
    "chunking": (0, 7),
    "pool_chunks": (1, 4),
    "pool_pages": (2, 20),
    "prefill_limit": (0, 5),
    "host": (0, 3),
}


def draw_settings(
    page: int,
    grid: int,
    chunk_grids: int,
    chunk_pages: int,
    chunk_tokens: int,
    chunking: int,
    pool_chunks: int,
    pool_pages: int,
    prefill_limit: int,
    host: int,
) -> NodeSettings:
    """A node with sizes relative to each other: the chunk around multiples of the grid, the pool around the chunk."""
    page_size = PAGE_SIZES[page]
    grid_tokens = GRID_PAGES[grid] * page_size
    chunk = max(page_size, chunk_grids * grid_tokens + chunk_pages * page_size) + chunk_tokens // 3 * (page_size // 2)
    pool_tokens = (pool_chunks * chunk // page_size + pool_pages) * page_size
    return NodeSettings(
        page_size=page_size,
        checkpoint_align=grid_tokens,
        chunked_prefill_size=chunk if chunking < 7 else None,
        max_prefill_tokens=(None, None, chunk, 2 * chunk, page_size, chunk // 2)[prefill_limit],
        pool_tokens=pool_tokens,
        host_tokens=(None, 0, 6 * page_size, pool_tokens)[host],
    )


RULES_DOMAINS: Mapping[str, Domain] = {"shortage": (0, 1), "truncation": (0, 5)}


def draw_rules(rules: AccountingRules, settings: NodeSettings, shortage: int, truncation: int) -> AccountingRules:
    """The rules under test with what they leave open drawn: the answer to a shortage, and, where the tail is safe
    whatever a cut leaves over, a split size for cuts."""
    if shortage:
        rules = replace(rules, on_shortage="force" if rules.on_shortage == "defer" else "defer")
    tail_is_safe = rules.reserve_tail or rules.spend_gap
    split_tokens = (truncation - 2) * settings.page_size
    if tail_is_safe and split_tokens > 0 and split_tokens <= (settings.chunked_prefill_size or 0):
        rules = replace(rules, truncation_align=split_tokens)
    return rules


@dataclass(frozen=True, eq=False)
class Space:
    """The nodes, and the moves, that a search draws: domains of integers, and the settings they stand for.

    `examples`: how many a search without a number tries. Not `thorough`: too few to meet every branch. `rules` draws
    what the rules under test leave open, from `rules_domains`. `name` goes with a preset's where the space is not the
    usual one; nothing may break under the `sound` presets. `before_drain` is for what a drain would take too long over.
    `parts` names what a drawn example has beyond a plain node, in a space that draws that too (see dimensions). `asks`
    are the branches that a search must reach here; None: those of a plain node, whichever its rules lead to.
    """

    domains: Mapping[str, Domain]
    settings: Callable[..., NodeSettings]
    moves: tuple[Move, ...]
    examples: int = 700
    thorough: bool = True
    rules_domains: Mapping[str, Domain] = field(default_factory=lambda: RULES_DOMAINS)
    rules: Callable[..., AccountingRules] = draw_rules
    name: str = ""
    sound: frozenset[str] = SOUND_PRESETS
    before_drain: Callable[[World], None] = lambda _world: None
    world: Callable[[Replay], World] | None = None
    parts: Callable[..., frozenset[str]] = lambda _node, **_drawn: frozenset()
    asks: tuple[str, ...] | None = None

    def opened(self, replay: Replay, drawn: Mapping[str, int]) -> World:
        """A world around a new replay; `drawn` are the values of all domains, which say what parts it has."""
        world = (self.world or World)(replay)
        world.parts = self.parts(replay.settings, **drawn)
        return world


class World:
    """A replay and the few names a move may refer to: prompts seen so far, live requests, holds."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.events: list[Event] = []
        self.documents: list[Prompt] = []
        self.cached: list[Prompt] = []
        self.holds: list[str] = []
        self.parts: frozenset[str] = frozenset()
        self._names = 0
        self.grid_tokens = replay.rules.grid_tokens(
            page_size=replay.settings.page_size, node_align=replay.settings.checkpoint_align
        )

    @property
    def settings(self) -> NodeSettings:
        return self.replay.settings

    def apply(self, event: Event) -> None:
        """Let the event happen and keep it for the trace."""
        self.events.append(event)
        self.replay.apply(event)

    def ignores(self, what: str) -> bool:
        """The target does nothing with what is `cached` or `held` from outside."""
        return what in getattr(self.replay.target, "ignores", ())

    def fresh_name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def spare_pages(self, snapshot: Snapshot) -> int:
        """Pages that nobody admitted needs: what an outsider may take, on any rank, without breaking a promise."""
        spare = min(spare_pages(rank) for rank in (snapshot, *snapshot.ranks))
        monitor = self.replay.monitor
        if not snapshot.pools or not isinstance(monitor, InvariantMonitor):
            return spare
        return min(spare, spare_pages_beside(monitor.evidence))

    def room_tokens(self) -> int:
        """The largest cold prompt that the gate would let in behind those who wait already, in tokens."""
        snapshot = self.replay.target.snapshot()
        spare_tokens = self.spare_pages(snapshot) * self.settings.page_size
        waiting_tokens = sum(self._charge_tokens(self.replay.prompts[rid].tokens) for rid in snapshot.waiting)
        spare_tokens -= self._running_tokens(snapshot)
        room_tokens = spare_tokens - waiting_tokens if waiting_tokens < spare_tokens else spare_tokens
        return room_tokens - self._gate_slack() - 1

    def largest_tokens(self) -> int:
        """The largest prompt that the entry accepts, in tokens."""
        return self.settings.least_pool_pages * self.settings.page_size - self._gate_slack() - 1

    def gap_tokens(self) -> int:
        """Chunk budget that the next round will have left once those before have run, cut where the grid cuts them."""
        snapshot = self.replay.target.snapshot()
        page_size, grid_tokens = self.settings.page_size, self.grid_tokens
        rules, budget = self.replay.rules, self.budget_tokens()
        for start, end in self._work(snapshot):
            if budget < page_size:
                break
            tokens = min(end - start, budget // page_size * page_size)
            if start and rules.continuation_limit is not None:
                tokens = min(tokens, rules.continuation_limit)
            if start + tokens < end:
                tokens = floor_or_keep(tokens, rules.chunk_grid)
                return budget - ceil_tokens(align_chunk_end(start, tokens, grid_tokens), page_size)
            budget -= ceil_tokens(tokens, page_size)
        return budget

    def _work(self, snapshot: Snapshot) -> Iterable[tuple[int, int]]:
        """[start, end) in tokens of what is left of the half-done prompt, then of the waiting ones, taken as cold."""
        for request in snapshot.live:
            if not request.in_flight:
                yield len(request.pages) * snapshot.page_size, request.prompt_tokens
        for rid in snapshot.waiting:
            yield 0, self.replay.prompts[rid].tokens

    def _charge_tokens(self, tokens: int) -> int:
        return ceil_tokens(tokens, self.settings.page_size) + self._gate_slack()

    def _gate_slack(self) -> int:
        return FIRST_TOKEN + self.settings.page_size

    def _running_tokens(self, snapshot: Snapshot) -> int:  # noqa: ARG002 - for worlds in which somebody runs
        """What the books reserve for running requests."""
        return 0

    def budget_tokens(self) -> int:
        """The chunk budget of a round, or with chunking off half the pool."""
        return self.settings.chunked_prefill_size or self.settings.pool_tokens // 2


def spare_pages(snapshot: Snapshot) -> int:
    """Pages of one rank that nobody admitted needs."""
    return snapshot.baseline_pages - sum(needed_pages_of(request, snapshot.page_size) for request in snapshot.live)


@dataclass(frozen=True, slots=True)
class Scale:
    """Landmarks of one order of size; repeated where it pays to meet them more often."""

    landmarks: tuple[Callable[[World], int], ...]

    @property
    def domains(self) -> Mapping[str, Domain]:
        return {"landmark": (0, len(self.landmarks) - 1), "step": (0, len(STEPS) - 1)}

    def tokens(self, world: World, landmark: int, step: int, limit: int) -> int:
        """A size at or near a landmark, clamped to 1..limit."""
        tokens = self.landmarks[landmark % len(self.landmarks)](world) + STEPS[step](world.settings.page_size)
        return max(1, min(tokens, limit))


STEPS: tuple[Callable[[int], int], ...] = (
    lambda _: 0,
    lambda _: 0,
    lambda _: 0,
    lambda _: 0,
    lambda _: -1,
    lambda _: 1,
    lambda page_size: -page_size,
    lambda page_size: page_size,
)


def _page(world: World) -> int:
    return world.settings.page_size


def _grid(world: World) -> int:
    return world.settings.checkpoint_align


def _residue(world: World) -> int:
    """What a cut from the start of a fresh chunk budget would leave of it."""
    return world.budget_tokens() % _grid(world)


SHORT = Scale(
    (
        World.gap_tokens,
        World.gap_tokens,
        World.gap_tokens,
        World.gap_tokens,
        _page,
        _residue,
        lambda world: _grid(world) - _page(world),
        lambda world: world.gap_tokens() // 2,
        _grid,
        lambda world: world.budget_tokens() // 2,
    )
)
LONG = Scale(
    (
        World.room_tokens,
        World.room_tokens,
        World.room_tokens,
        lambda world: world.room_tokens() - _grid(world),
        lambda world: world.room_tokens() // 2,
        lambda world: world.budget_tokens() + _page(world),
        lambda world: 2 * world.budget_tokens() + _residue(world),
        World.largest_tokens,
        World.budget_tokens,
    )
)
PICK: Domain = (0, 11)


@dataclass(frozen=True, eq=False)
class Move:
    """One rule of the search: argument domains, and the event they make in a world; `part`: what that must have."""

    name: str
    domains: Mapping[str, Domain]
    make: Callable[..., Event]
    part: str = ""


def submit_long(world: World, landmark: int, step: int) -> Event:
    """A prompt nobody has seen, of the order of the pool. One page above the entry's limit is a branch too."""
    name = world.fresh_name()
    limit = world.largest_tokens() + world.settings.page_size
    return _submit(world, name, Prompt(((name, LONG.tokens(world, landmark, step, limit)),)))


def submit_short(world: World, landmark: int, step: int) -> Event:
    """A prompt nobody has seen, of the order of what a cut leaves over."""
    name = world.fresh_name()
    return _submit(world, name, Prompt(((name, SHORT.tokens(world, landmark, step, world.largest_tokens())),)))


def submit_shared(world: World, pick: int, cut: int, again: int, landmark: int, step: int) -> Event:
    """A prompt that goes on from (a cut of) one seen before: much to find in the cache, little to compute."""
    seen = world.cached if world.cached and pick % 4 else world.documents
    if not seen:
        return submit_long(world, landmark, step)
    document = seen[-1 - pick // 4 % len(seen)]
    prefix = cut_prompt(document, _cut_tokens(world, document.tokens, cut))
    name = world.fresh_name()
    if again == 3:
        return _submit(world, name, prefix)
    tokens = SHORT.tokens(world, landmark, step, max(1, world.largest_tokens() - prefix.tokens))
    return Submit(name, Prompt((*prefix.segments, (name, tokens))))


def _submit(world: World, name: str, prompt: Prompt) -> Event:
    world.documents.append(prompt)
    return Submit(name, prompt)


def _cut_tokens(world: World, tokens: int, cut: int) -> int:
    """How much of a document of `tokens` is shared: down to the grid, all, half, all but one token."""
    grid = world.settings.checkpoint_align
    on_grid = tokens // grid * grid
    return max(1, (on_grid, on_grid, tokens, tokens // 2, tokens - 1)[cut])


def cut_prompt(prompt: Prompt, tokens: int) -> Prompt:
    """The first `tokens` tokens of a prompt."""
    segments: list[tuple[str, int]] = []
    for segment, length in prompt.segments:
        if tokens <= 0:
            break
        segments.append((segment, min(length, tokens)))
        tokens -= length
    return Prompt(segments)


def cache(world: World, tier: int, pick: int, fresh: int, landmark: int, step: int) -> Event:
    """Somebody else's prefix is cached, or one of ours again. What a lock takes is clamped to what is spare.

    A target that does nothing with it runs once more instead.
    """
    if world.ignores("cached"):
        return Round()
    snapshot = world.replay.target.snapshot()
    kind: Tier = "host" if tier < 6 else "device"
    locked = tier == 9
    spare_pages = world.spare_pages(snapshot)
    limit_pages = spare_pages if locked else min(spare_pages, snapshot.least_baseline_pages)
    limit = max(0, limit_pages) * world.settings.page_size if kind == "device" else world.settings.pool_tokens
    tokens = LONG.tokens(world, landmark, step, max(1, limit))
    if fresh or not world.documents:
        name = world.fresh_name()
        prompt = Prompt(((name, tokens),))
        world.documents.append(prompt)
    else:
        prompt = cut_prompt(world.documents[-1 - pick % len(world.documents)], tokens)
    world.cached.append(prompt)
    if limit == 0:
        return Cached("host", prompt)
    return Cached(kind, prompt, locked)


def run_round(_world: World) -> Event:
    """The scheduler runs once."""
    return Round()


def outside(world: World, kind: int, pick: int, landmark: int, step: int) -> Event:
    """Something outside the scheduler: a transfer ends, a user gives up, plain slots are taken or given back.

    Where the drawn one cannot happen now, a short request arrives instead, which can.
    """
    event = (_transferred, _transferred, _released, _aborted, _held)[kind](world, pick, landmark, step)
    return event or submit_short(world, landmark, step)


def _transferred(world: World, pick: int, _landmark: int, _step: int) -> Event | None:
    in_flight = world.replay.target.in_flight()
    names = [*in_flight, *(r.rid for r in world.replay.target.snapshot().live if not r.in_flight)]
    return Transferred(names[pick % len(names)]) if names else None


def _aborted(world: World, pick: int, _landmark: int, _step: int) -> Event | None:
    snapshot = world.replay.target.snapshot()
    names = [*(request.rid for request in snapshot.live), *snapshot.waiting]
    return Abort(names[-1 - pick % len(names)]) if names else None


def _held(world: World, _pick: int, landmark: int, step: int) -> Event | None:
    limit = world.spare_pages(world.replay.target.snapshot()) * world.settings.page_size
    if limit <= 0 or world.ignores("held"):
        return None
    name = f"hold {world.fresh_name()}"
    world.holds.append(name)
    return Hold(name, LONG.tokens(world, landmark, step, limit))


def _released(world: World, _pick: int, _landmark: int, _step: int) -> Event | None:
    return Release(world.holds.pop()) if world.holds else None


MOVES: tuple[Move, ...] = (
    Move("round", {}, run_round),
    Move("submit_long", LONG.domains, submit_long),
    Move("submit_short", SHORT.domains, submit_short),
    Move("submit_shared", {"pick": PICK, "cut": (0, 4), "again": (0, 3), **SHORT.domains}, submit_shared),
    Move("cache", {"tier": (0, 9), "pick": PICK, "fresh": (0, 2), **LONG.domains}, cache),
    Move("outside", {"kind": (0, 4), "pick": PICK, **LONG.domains}, outside),
)

NODE_SPACE = Space(NODE_DOMAINS, draw_settings, MOVES)
"""Nodes of every kind: memory costs nothing where nothing is in it."""
