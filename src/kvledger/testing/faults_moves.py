"""The part of the search's space in which something goes wrong: armed faults, pins of write-backs, pauses.

Where the drawn event cannot happen now, something happens that makes it possible.
"""

from __future__ import annotations

from kvledger.arithmetic import floor_tokens
from kvledger.events import Cached, Event, Fault, Pause, Pin, Resume, Round, Unpin
from kvledger.faults import FAULT_AMOUNTS, FaultKind
from kvledger.request import Prompt
from kvledger.testing.dimensions import Dimension, swarm
from kvledger.testing.moves import NODE_SPACE, PICK, STEPS, Domain, Move, World, cut_prompt, submit_long
from kvledger.testing.reached_faults import BRANCHES
from kvledger.testing.unified_moves import UNIFIED_SPACE

KINDS: tuple[FaultKind, ...] = (
    *("load-late", "load-short", "load-late", "load-short"),
    *("stale-match", "evicted-match", "skip-insert", "abort-decided"),
)
"""What needs a host hit more often: not every request has one."""


def fault(world: World, kind: int, pick: int, amount: int) -> Event:
    """A fault is armed for one that waits, or for any other that is on the node; where nobody is, a round."""
    snapshot = world.replay.target.snapshot()
    names = list(snapshot.waiting) if pick % 4 and snapshot.waiting else []
    names = names or [*snapshot.waiting, *(r.rid for r in snapshot.live if not r.in_flight)]
    if not names:
        return Round()
    return _armed(world, KINDS[kind], names[-1 - pick // 4 % len(names)], amount)


def _armed(world: World, kind: FaultKind, rid: str, amount: int) -> Fault:
    tokens = world.replay.prompts[rid].tokens
    grid, page = world.settings.checkpoint_align, world.settings.page_size
    sizes = {
        "rounds": (1, 2, 1, 3, 1, 6)[amount],
        "tokens": (0, floor_tokens(tokens // 2, grid), page, tokens // 2, max(0, tokens - page), grid)[amount],
    }
    unit = FAULT_AMOUNTS.get(kind)
    return Fault(kind, rid, None if unit is None else sizes[unit])


def spoil_a_load(world: World, kind: int, pick: int, amount: int, share: int) -> Event:
    """The next step towards a load-back that goes wrong: one that waits, what it asks for on the host, a fault, a
    round."""
    snapshot = world.replay.target.snapshot()
    waiting = snapshot.waiting
    if not waiting:
        unfinished = any(not each.in_flight for each in snapshot.live)
        # a second one that is cut stands in the way of the first when that has its load
        return submit_long(world, landmark=(4, 5, 5, 6)[pick % 4] if unfinished else (6, 6, 4, 7)[pick % 4], step=0)
    rid = waiting[pick % len(waiting)]
    prompt = world.replay.prompts[rid]
    first = prompt.segments[0][0]
    if not any(isinstance(each, Cached) and each.prompt.segments[0][0] == first for each in world.events):
        grid = world.settings.checkpoint_align
        tokens = (prompt.tokens, prompt.tokens // 2, prompt.tokens // 4, min(grid, prompt.tokens))[share]
        part = cut_prompt(prompt, max(1, tokens))
        world.cached.append(part)
        return Cached("host", part)
    if any(isinstance(each, Fault) and each.request == rid for each in world.events):
        return Round()
    return _armed(world, KINDS[kind], rid, amount)


def pin(world: World, pick: int, share: int) -> Event:
    """What is cached of a prompt is pinned, or a pin is taken away.

    What was promised may be pinned only where a request can wait for it; else no more than is spare.
    """
    if world.replay.pins and pick % 3 == 0:
        return Unpin(world.replay.pins[pick % len(world.replay.pins)])
    seen = world.cached if world.cached and pick % 4 else world.documents
    if not seen:
        return Round()
    prompt = seen[-1 - pick % len(seen)]
    tokens = (prompt.tokens, prompt.tokens, prompt.tokens // 2)[share]
    if world.replay.rules.on_shortage == "force":
        tokens = min(tokens, world.spare_pages(world.replay.target.snapshot()) * world.settings.page_size)
    return Pin(f"write-back {world.fresh_name()}", cut_prompt(prompt, tokens)) if tokens > 0 else Round()


def pin_what_was_promised(world: World, pick: int, step: int) -> Event:
    """The next step towards a request that must wait for pages: what is cached takes part of the pool, a prompt that
    counts on it, a round, and a pin; where nobody waits for pinned pages, any pin."""
    if world.replay.rules.on_shortage == "force":
        return pin(world, pick, share=0)
    snapshot = world.replay.target.snapshot()
    on_device = [each.prompt for each in world.events if isinstance(each, Cached) and each.tier == "device"]
    if not on_device or not snapshot.evictable_pages:
        tokens = max(0, world.spare_pages(snapshot)) * 2 // 3 * world.settings.page_size
        if not tokens:
            return Round()
        name = world.fresh_name()
        world.cached.append(Prompt(((name, tokens),)))
        return Cached("device", world.cached[-1])
    if any(not each.in_flight for each in snapshot.live) and not world.replay.pins:
        return Pin(f"write-back {world.fresh_name()}", on_device[-1])
    return Round() if snapshot.waiting or snapshot.live else submit_long(world, landmark=pick % 3, step=step)


def pause(world: World, go_on: int) -> Event:
    """The node stands still for a while; mostly it goes on soon."""
    if world.replay.paused:
        return Resume() if go_on < 3 else Round()
    return Pause()


_FAULT: dict[str, Domain] = {"kind": (0, len(KINDS) - 1), "pick": PICK, "amount": (0, 5)}

FAULTS = Dimension(
    "faults",
    domains={},
    extend=lambda settings: settings,
    branches=BRANCHES,
    has=lambda node: not node.ranks,
    moves=(
        Move("fault", _FAULT, fault),
        Move("spoil_a_load", {**_FAULT, "share": (0, 3)}, spoil_a_load),
        Move("spoil_a_load", {**_FAULT, "share": (0, 3)}, spoil_a_load),
        Move("spoil_a_load", {**_FAULT, "share": (0, 3)}, spoil_a_load),
        Move("pin", {"pick": PICK, "share": (0, 2)}, pin),
        Move("pin_what_was_promised", {"pick": PICK, "step": (0, len(STEPS) - 1)}, pin_what_was_promised),
        Move("pin_what_was_promised", {"pick": PICK, "step": (0, len(STEPS) - 1)}, pin_what_was_promised),
        Move("spoil_a_load", {**_FAULT, "share": (0, 3)}, spoil_a_load),
        Move("pause", {"go_on": (0, 3)}, pause),
    ),
)
"""Any node of one rank may meet any of them."""

FAULTS_SPACE = swarm(NODE_SPACE, (FAULTS,), name="+ faults", examples=500, always=True)
"""Prefill nodes on which things go wrong."""

FAULTS_UNIFIED_SPACE = swarm(UNIFIED_SPACE, (FAULTS,), name="+ decode + faults", examples=300, always=True)
"""Nodes that decode too, and on which things go wrong."""
