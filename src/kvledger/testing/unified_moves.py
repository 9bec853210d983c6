"""The search's space beside decode: nodes that decode too, outputs for what is submitted, and two events more.

The moves are those of a prefill node, so that every hole there can be met here as well. Outputs are short, because a
drain decodes them token by token; the few that are longer than any promise counts on are given up before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvledger.decode import promised_output
from kvledger.events import Abort, Decode, Event, Finish, Round, Submit
from kvledger.evidence import decode_tokens
from kvledger.monitor import InvariantMonitor
from kvledger.policy import SchedulePolicy
from kvledger.record import Snapshot
from kvledger.replay import Replay
from kvledger.request import Output, Prompt
from kvledger.rules import SOUND_BESIDE_DECODE
from kvledger.settings import USUAL_RATIO_PERCENT, NodeSettings
from kvledger.testing.moves import (
    MOVES,
    NODE_DOMAINS,
    PICK,
    Domain,
    Move,
    Space,
    World,
    draw_settings,
    submit_short,
)
from kvledger.testing.reached import ASKED_OF_DECODE

BEYOND_CLIP = 4200
MOST_IMPORTANT = 4
MOST_DRAINED_TOKENS = 24
WIDE_TOKENS = 8192
"""Outputs that are longer are given up before a drain."""

PAGES = (0, 0, 0, 0, 1, 1, 2, 3)
"""Fine pages more often: on coarse ones decode takes long to need anything."""

UNIFIED_DOMAINS: Mapping[str, Domain] = {
    **NODE_DOMAINS,
    "page": (0, len(PAGES) - 1),
    "chunk_grids": (0, 1),
    "pool_chunks": (1, 6),
    "policy": (0, 8),
    "mixed": (0, 2),
    "slots": (0, 9),
    "stages": (0, 3),
    "threshold": (0, 3),
    "ratio": (0, 4),
    "cache": (0, 5),
    "width": (0, 9),
}

POLICIES: tuple[SchedulePolicy, ...] = (
    *("fcfs", "fcfs", "fcfs", "priority", "priority", "priority"),
    *("lpm", "shortest-prefill-first", "shortest-prefill-first"),
)


def draw_unified(
    page: int,
    policy: int,
    mixed: int,
    slots: int,
    stages: int,
    threshold: int,
    ratio: int,
    cache: int,
    width: int,
    **sizes: int,
) -> NodeSettings:
    """A node of the prefill space that decodes too."""
    schedule_policy = POLICIES[policy]
    limit = (None, None, None, None, 1, 2, 2, 3, 4, 8)[slots]
    settings = draw_settings(PAGES[page], **sizes)
    if width > 5 and settings.page_size >= 16 and settings.chunked_prefill_size is not None:
        pool_tokens = settings.pool_tokens + WIDE_TOKENS
        settings = replace(settings, pool_tokens=pool_tokens, chunked_prefill_size=WIDE_TOKENS // 4)
    preempts = schedule_policy == "priority" and threshold > 0
    return replace(
        settings,
        mode="unified",
        schedule_policy=schedule_policy,
        mixed_chunk=bool(mixed),
        max_running_requests=limit,
        pp_size=2 if limit is not None and limit >= 2 and stages == 3 else 1,
        preemption_threshold=(None, 0, 0, 1)[threshold] if preempts else None,
        new_token_ratio_percent=(70, 100, 100, 30, 100)[ratio] if preempts else (70, 1, 1, 30, 100)[ratio],
        prefix_cache=cache != 5,
    )


def draw_either(decodes: int, **drawn: int) -> NodeSettings:
    """Such a node, or one of the same sizes and policy that prefills alone."""
    node = draw_unified(**drawn)
    if decodes:
        return node
    return replace(
        node,
        mode="prefill",
        mixed_chunk=False,
        preemption_threshold=None,
        new_token_ratio_percent=USUAL_RATIO_PERCENT,
        prefix_cache=True,
    )


OUTPUT: Mapping[str, Domain] = {"length": (0, 8), "ignore": (0, 4), "priority": (0, 3)}

Landmark = Callable[["UnifiedWorld"], int]


def _page(world: World) -> int:
    return world.settings.page_size


LITTLE: tuple[Landmark, ...] = (
    lambda _: 1,
    lambda _: 1,
    lambda _: 1,
    lambda _: 2,
    lambda _: 3,
    _page,
    lambda world: _page(world) + 1,
    lambda world: world.room_tokens() // 4,
    lambda world: 2 * _page(world),
)
"""Outputs of long prompts: what matters is the prompt."""
PLENTY: tuple[Landmark, ...] = (
    lambda world: world.room_tokens() - _page(world),
    lambda world: world.room_tokens() - _page(world),
    lambda world: world.room_tokens() - 2 * _page(world),
    lambda world: world.room_tokens() // 2,
    lambda world: 3 * _page(world) + 1,
    lambda world: _page(world) + 1,
    lambda _: 10,
    lambda _: 2,
    lambda world: BEYOND_CLIP if world.largest_tokens() > BEYOND_CLIP else 3,
)
"""Outputs of short prompts: they run beside what is long."""


class UnifiedWorld(World):
    """A world whose gate also asks for outputs. `output` is the one of the request that is being made."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self.output = Output()

    def _gate_slack(self) -> int:
        return promised_output(self.output.max_new_tokens, 0) + self.settings.page_size

    def _running_tokens(self, snapshot: Snapshot) -> int:
        monitor = self.replay.monitor
        if not isinstance(monitor, InvariantMonitor):
            return 0
        _, shares = decode_tokens(monitor.evidence, snapshot)
        mixed = sum(request.decoding for request in snapshot.live) if self.settings.mixed_chunk else 0
        return math.ceil(shares) + mixed


def _with_output(make: Callable[..., Event], landmarks: tuple[Landmark, ...]) -> Callable[..., Event]:
    """A move whose requests, if it makes one, come with an output at a landmark."""

    def move(world: UnifiedWorld, length: int, ignore: int, priority: int, **arguments: int) -> Event:
        world.output = Output()
        tokens = landmarks[length](world)
        tokens = tokens if tokens == BEYOND_CLIP else max(1, min(tokens, MOST_DRAINED_TOKENS))
        world.output = _output(world.settings, tokens, ignore == 4, (0, 1, 2, -1)[priority])
        event = make(world, **arguments)
        return replace(event, output=world.output) if isinstance(event, Submit) else event

    return move


def _output(node: NodeSettings, tokens: int, ignore_eos: bool, priority: int) -> Output:
    """An output as far as such a node knows of any: a prefill node makes one token, and not each has priorities."""
    priority = priority if node.schedule_policy == "priority" else 0
    return Output(tokens, ignore_eos, priority) if node.mode == "unified" else Output(priority=priority)


def submit_growing(world: UnifiedWorld, length: int, ignore: int, priority: int) -> Event:
    """A short prompt with an output that could fill what is left: a few of them, and not all can go on."""
    return _with_output(_submit_page, PLENTY)(world, length, ignore, priority)


def submit_important(world: UnifiedWorld, beyond: int, **output: int) -> Event:
    """A prompt a little too long for the gate, more important than all that run; a short one where nobody makes way."""
    running = any(request.decoding for request in world.replay.target.snapshot().live)
    if world.settings.preemption_threshold is None or not running:
        return submit_growing(world, **output)
    world.output = Output(priority=MOST_IMPORTANT)
    tokens = world.room_tokens() + (1, 2, _page(world), _page(world) + 2)[beyond]
    name = world.fresh_name()
    return Submit(name, Prompt(((name, max(1, min(tokens, world.largest_tokens()))),)), world.output)


def _submit_page(world: World) -> Event:
    return submit_short(world, landmark=4, step=0)


def decode(world: World) -> Event:
    """A decode round on its own; a round where nothing decodes."""
    return Decode() if world.settings.mode == "unified" else Round()


def finish(world: World, pick: int) -> Event:
    """A running request's output ends early; where nobody runs, a decode round."""
    running = [request.rid for request in world.replay.target.snapshot().live if request.decoding]
    return Finish(running[pick % len(running)]) if running else decode(world)


def before_drain(world: World) -> None:
    """Give up the outputs that a drain would take too long over."""
    snapshot = world.replay.target.snapshot()
    for rid in (*(request.rid for request in snapshot.live), *snapshot.waiting):
        if world.replay.outputs[rid].max_new_tokens > MOST_DRAINED_TOKENS:
            world.apply(Abort(rid))


UNIFIED_MOVES: tuple[Move, ...] = (
    Move("round", {}, MOVES[0].make),
    *(
        Move(
            move.name,
            {**move.domains, **OUTPUT},
            _with_output(move.make, LITTLE if move.name == "submit_long" else PLENTY),
        )
        if move.name.startswith("submit")
        else move
        for move in MOVES[1:]
    ),
    Move("decode", {}, decode),
    Move("submit_growing", OUTPUT, submit_growing),
    Move("submit_growing", OUTPUT, submit_growing),
    Move("submit_important", {"beyond": (0, 3), **OUTPUT}, submit_important),
    Move("submit_important", {"beyond": (0, 3), **OUTPUT}, submit_important),
    Move("finish", {"pick": PICK}, finish),
)

UNIFIED_SPACE = Space(
    UNIFIED_DOMAINS,
    draw_unified,
    UNIFIED_MOVES,
    examples=240,
    name="+ decode",
    sound=SOUND_BESIDE_DECODE,
    before_drain=before_drain,
    world=UnifiedWorld,
    asks=ASKED_OF_DECODE,
)
"""Nodes that decode beside their prefill, under every schedule policy."""

EITHER_SPACE = replace(
    UNIFIED_SPACE, domains={**UNIFIED_DOMAINS, "decodes": (0, 1)}, settings=draw_either, name="either"
)
"""Half of them decode: the ground on which a search lays further parts of a node."""
