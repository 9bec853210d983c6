"""The search's space beside decode: nodes that decode too, outputs for what is submitted, and two events more.

The moves are those of a prefill node, so that every hole there can be met here as well. Outputs are short, because a
drain decodes them token by token; the few that are longer than any promise counts on are given up before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvledger.events import Abort, Decode, Event, Finish, Submit
from kvledger.node import NodeSettings
from kvledger.policy import SchedulePolicy
from kvledger.request import Output
from kvledger.testing.moves import MOVES, NODE_DOMAINS, PICK, Domain, Move, Space, World, draw_settings

MOST_DRAINED_TOKENS = 48
"""Outputs that are longer are given up before a drain."""

UNIFIED_DOMAINS: Mapping[str, Domain] = {
    **NODE_DOMAINS,
    "policy": (0, 7),
    "mixed": (0, 1),
    "slots": (0, 9),
    "stages": (0, 3),
    "threshold": (0, 3),
    "ratio": (0, 4),
    "cache": (0, 5),
}

POLICIES: tuple[SchedulePolicy, ...] = (
    *("fcfs", "fcfs", "fcfs", "priority", "priority", "priority"),
    *("lpm", "shortest-prefill-first"),
)


def draw_unified(
    policy: int, mixed: int, slots: int, stages: int, threshold: int, ratio: int, cache: int, **sizes: int
) -> NodeSettings:
    """A node of the prefill space that decodes too."""
    schedule_policy = POLICIES[policy]
    limit = (None, None, None, None, 1, 2, 2, 3, 4, 8)[slots]
    settings = draw_settings(**sizes)
    return replace(
        settings,
        mode="unified",
        schedule_policy=schedule_policy,
        mixed_chunk=bool(mixed),
        max_running_requests=limit,
        pp_size=2 if limit is not None and limit >= 2 and stages == 3 else 1,
        preemption_threshold=(None, 0, 0, 1)[threshold] if schedule_policy == "priority" else None,
        new_token_ratio_percent=(70, 70, 1, 30, 100)[ratio],
        prefix_cache=cache != 5,
    )


OUTPUT: Mapping[str, Domain] = {"length": (0, 13), "ignore": (0, 3), "priority": (0, 3)}


def output_of(world: World, length: int, ignore: int, priority: int) -> Output:
    """An output at or near a landmark: a token, a page, what is left of the pool, more than any promise counts on."""
    page = world.settings.page_size
    room = world.room_tokens()
    tokens = (1, 2, 2, 3, page, page + 1, 2 * page, 3 * page + 1, room // 4, room // 2, room, 10, 40, 4200)[length]
    tokens = max(1, tokens if length == len(OUTPUT_LENGTHS) - 1 else min(tokens, MOST_DRAINED_TOKENS))
    by_priority = world.settings.schedule_policy == "priority"
    return Output(tokens, ignore == 3, (0, 1, 2, -1)[priority] if by_priority else 0)


OUTPUT_LENGTHS = range(OUTPUT["length"][1] + 1)


def _with_output(make: Callable[..., Event]) -> Callable[..., Event]:
    """A move whose requests, if it makes one, come with an output."""

    def move(world: World, length: int, ignore: int, priority: int, **arguments: int) -> Event:
        event = make(world, **arguments)
        return replace(event, output=output_of(world, length, ignore, priority)) if _is_submit(event) else event

    return move


def _is_submit(event: Any) -> bool:
    return isinstance(event, Submit)


def decode(_world: World) -> Event:
    """A decode round on its own."""
    return Decode()


def finish(world: World, pick: int) -> Event:
    """A running request's output ends early; where nobody runs, a decode round."""
    running = [request.rid for request in world.replay.target.snapshot().live if request.decoding]
    return Finish(running[pick % len(running)]) if running else Decode()


def before_drain(world: World) -> None:
    """Give up the outputs that a drain would take too long over."""
    snapshot = world.replay.target.snapshot()
    for rid in (*(request.rid for request in snapshot.live), *snapshot.waiting):
        if world.replay.outputs[rid].max_new_tokens > MOST_DRAINED_TOKENS:
            world.apply(Abort(rid))


UNIFIED_MOVES: tuple[Move, ...] = (
    Move("round", {}, MOVES[0].make),
    *(
        Move(move.name, {**move.domains, **OUTPUT}, _with_output(move.make)) if move.name.startswith("submit") else move
        for move in MOVES[1:]
    ),
    Move("decode", {}, decode),
    Move("finish", {"pick": PICK}, finish),
)

UNIFIED_SPACE = Space(UNIFIED_DOMAINS, draw_unified, UNIFIED_MOVES, name="unified", before_drain=before_drain)
"""Nodes that decode beside their prefill, under every schedule policy."""
