"""The search's dimension of pipeline ranks: pools and hosts unlike rank 0's, and events that reach ranks apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvledger.arithmetic import ceil_pages
from kvledger.events import Abort, Cached, Event, Hold, Release, Round, Transferred
from kvledger.policy import SchedulePolicy
from kvledger.settings import NodeSettings, RankSettings
from kvledger.testing.dimensions import Dimension, swarm
from kvledger.testing.moves import LONG, NODE_SPACE, PICK, Domain, Move, World, cache, spare_pages
from kvledger.testing.reached_ranks import BRANCHES

DOMAINS: Mapping[str, Domain] = {
    "count": (0, 3),
    "pool": (0, 7),
    "host": (0, 5),
    "other_pool": (0, 7),
    "other_host": (0, 5),
    "slots": (0, 7),
    "policy": (0, 5),
}
POLICIES: tuple[SchedulePolicy, ...] = ("fcfs", "fcfs", "fcfs", "lpm", "lpm", "shortest-prefill-first")
REACHED: Mapping[str, Domain] = {"reached": (0, 7)}


def with_ranks(
    node: NodeSettings, count: int, pool: int, host: int, other_pool: int, other_host: int, slots: int, policy: int
) -> NodeSettings:
    """One or two replaying ranks, request slots that the stages share, and a schedule policy."""
    if node.mode != "prefill" or node.state_slots is not None:
        return node
    ranks = (_rank(node, pool, host), _rank(node, other_pool, other_host))[: 1 + count // 3]
    limit = (None, None, None, None, 1, 2, 3, 4)[slots]
    return replace(
        node,
        ranks=ranks,
        max_running_requests=limit,
        pp_size=1 if limit is None else len(ranks) + 1,
        schedule_policy=POLICIES[policy],
    )


def _rank(node: NodeSettings, pool: int, host: int) -> RankSettings:
    """Sizes relative to rank 0's: the same, a little or much smaller, or larger."""
    page, pages = node.page_size, node.pool_pages
    pool_pages = (None, pages - 1, pages - 2, pages * 3 // 4, pages // 2, pages + 1, pages + 3, pages * 2)[pool]
    host_tokens = ("same", 0, None, 2 * page, 6 * page, node.checkpoint_align)[host]
    return RankSettings(
        pool_tokens="same" if pool_pages is None else max(3, pool_pages) * page,
        host_tokens=host_tokens,  # type: ignore[arg-type]  # a literal among numbers
    )


def apart(world: World, kind: int, pick: int, landmark: int, step: int, reached: int) -> Event:
    """Something outside the scheduler that only some ranks see: a transfer, an abort, slots taken or given back."""
    if kind <= 2:
        return _transferred(world, pick, reached)
    if kind == 5:
        return _held(world, landmark, step, reached)
    return _aborted(world, pick, reached)


def _transferred(world: World, pick: int, reached: int) -> Event:
    """On a rank that has still to send it, where there is one."""
    snapshot = world.replay.target.snapshot()
    sending = [
        (request.rid, rank)
        for rank, each in enumerate((snapshot, *snapshot.ranks))
        for request in each.live
        if request.in_flight
    ]
    if not sending:
        return Round()
    rid, rank = sending[pick % len(sending)]
    return Transferred(rid, (rank,) if reached % 3 else _some(world, reached))


def _aborted(world: World, pick: int, reached: int) -> Event:
    """Of a request that is anywhere, were it on one rank alone."""
    snapshot = world.replay.target.snapshot()
    names = [*snapshot.waiting, *(request.rid for each in (snapshot, *snapshot.ranks) for request in each.live)]
    return Abort(names[-1 - pick % len(names)], _some(world, reached)) if names else Round()


def _held(world: World, landmark: int, step: int, reached: int) -> Event:
    snapshot = world.replay.target.snapshot()
    ranks = _some(world, reached)
    if world.holds and landmark % 2:
        return Release(world.holds.pop())
    spare = min(spare_pages((snapshot, *snapshot.ranks)[rank]) for rank in ranks)
    if spare <= 0:
        return Round()
    name = f"hold {world.fresh_name()}"
    world.holds.append(name)
    return Hold(name, LONG.tokens(world, landmark, step, spare * world.settings.page_size), ranks)


def cache_apart(world: World, reached: int, **arguments: int) -> Event:
    """Somebody else's prefix, cached on some ranks alone."""
    event = cache(world, **arguments)
    return replace(event, ranks=_some(world, reached)) if isinstance(event, Cached) else event


def cache_elsewhere(world: World, pick: int, reached: int, **arguments: int) -> Event:
    """What was cached on some ranks, in the other tier of the others: a hit of one length, in different places."""
    apart = [event for event in world.events if isinstance(event, Cached) and event.ranks is not None]
    if not apart:
        return cache_apart(world, pick=pick, reached=reached, **arguments)
    event = apart[-1 - pick % len(apart)]
    others = tuple(rank for rank in range(len(world.settings.ranks) + 1) if rank not in (event.ranks or ()))
    snapshot = world.replay.target.snapshot()
    room = min((spare_pages((snapshot, *snapshot.ranks)[rank]) for rank in others), default=0)
    fits = ceil_pages(event.prompt.tokens, world.settings.page_size) <= room
    world.cached.append(event.prompt)
    return Cached("device" if event.tier == "host" and fits else "host", event.prompt, ranks=others or None)


def _some(world: World, reached: int) -> tuple[int, ...]:
    """A subset of the ranks that is not empty."""
    count = len(world.settings.ranks) + 1
    bits = 1 + reached % (2**count - 1)
    return tuple(rank for rank in range(count) if bits >> rank & 1)


APART: Mapping[str, Domain] = {"kind": (0, 5), "pick": PICK, **LONG.domains, **REACHED}
CACHE_APART: Mapping[str, Domain] = {"tier": (0, 9), "pick": PICK, "fresh": (0, 2), **LONG.domains, **REACHED}

RANKS = Dimension(
    "ranks",
    DOMAINS,
    with_ranks,
    BRANCHES,
    (
        Move("apart", APART, apart),
        Move("apart", APART, apart),
        Move("cache_apart", CACHE_APART, cache_apart),
        Move("cache_elsewhere", CACHE_APART, cache_elsewhere),
    ),
    has=lambda node: bool(node.ranks),
)
"""Pipelines of two or three ranks."""

RANK_SPACE = swarm(NODE_SPACE, [RANKS], name="+ ranks", examples=300, always=True)
"""Prefill nodes that are rank 0 of a pipeline."""
