"""What a search draws for this target: nodes that sglang accepts, sizes around what its cuts leave over.

A cut leaves a gap in the chunk budget where `truncation_align` rounds it down, or where shortest prefill first holds
budget back. Newcomers are drawn around that gap, with and without a prefix on the host or on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvledger.arithmetic import ceil_tokens, floor_tokens
from kvledger.events import Decode, Event, Finish, Round, Submit
from kvledger.policy import SchedulePolicy
from kvledger.request import Output, Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.moves import (
    LONG,
    PICK,
    Domain,
    Move,
    Scale,
    Space,
    World,
    cache,
    cut_prompt,
    outside,
    run_round,
    submit_long,
)

PAGE_SIZES = (16, 64, 4, 1)
POLICIES: tuple[SchedulePolicy, ...] = ("fcfs", "shortest-prefill-first", "lpm")
ALIGN_PAGES = (0, 4, 8, 2, 16)
OUTPUT_TOKENS = (4, 1, 8, 16)

NODE_DOMAINS: Mapping[str, Domain] = {
    "page": (0, len(PAGE_SIZES) - 1),
    "chunk_pages": (3, 40),
    "pool_chunks": (1, 3),
    "pool_pages": (2, 24),
    "prefill_limit": (0, 3),
    "host": (0, 3),
    "policy": (0, len(POLICIES) - 1),
}
RULES_DOMAINS: Mapping[str, Domain] = {"align": (0, len(ALIGN_PAGES) - 1)}


def draw_settings(
    page: int, chunk_pages: int, pool_chunks: int, pool_pages: int, prefill_limit: int, host: int, policy: int
) -> NodeSettings:
    """A node whose pool is a few chunks and pages."""
    page_size = PAGE_SIZES[page]
    chunk = chunk_pages * page_size
    pool_tokens = pool_chunks * chunk + pool_pages * page_size
    return NodeSettings(
        page_size=page_size,
        checkpoint_align=page_size,
        chunked_prefill_size=chunk,
        max_prefill_tokens=(None, 2 * chunk, chunk, chunk // 2)[prefill_limit],
        pool_tokens=pool_tokens,
        host_tokens=(0, 4 * pool_tokens, None, pool_tokens)[host],
        schedule_policy=POLICIES[policy],
    )


def draw_rules(rules: AccountingRules, settings: NodeSettings, align: int) -> AccountingRules:
    """The rules under test with a split size for cuts, as deterministic inference has one."""
    align_tokens = ALIGN_PAGES[align] * settings.page_size
    if 0 < align_tokens <= (settings.chunked_prefill_size or 0):
        rules = replace(rules, truncation_align=align_tokens)
    return replace(rules, checkpoint_align="page_size")


def draw_unaligned(rules: AccountingRules, settings: NodeSettings) -> AccountingRules:
    """The rules under test as they are."""
    del settings
    return replace(rules, checkpoint_align="page_size")


def _gap_tokens(world: World) -> int:
    """Chunk budget that the next round's cut will leave, if prompts are cold."""
    page_size, budget = world.settings.page_size, world.budget_tokens()
    for start, tokens in _work(world):
        if ceil_tokens(tokens, page_size) <= budget:
            budget -= ceil_tokens(tokens, page_size)
            continue
        if start:  # a continuation takes all
            return page_size
        return budget - floor_tokens(budget, world.replay.rules.truncation_align or page_size)
    return budget


def _work(world: World) -> Iterator[tuple[int, int]]:
    """Where each prompt that is not done begins, and how much of it is left: the half-done one first."""
    snapshot = world.replay.target.snapshot()
    for request in snapshot.live:
        if not request.in_flight:
            start = len(request.pages) * snapshot.page_size
            yield start, max(1, request.prompt_tokens - start)
    for rid in snapshot.waiting:
        yield 0, world.replay.prompts[rid].tokens


def _tail_tokens(world: World) -> int:
    """What is left of the half-done prompt."""
    return next((tokens for start, tokens in _work(world) if start), world.settings.page_size)


GAP = Scale(
    (
        _gap_tokens,
        _gap_tokens,
        _gap_tokens,
        lambda world: world.settings.page_size,
        lambda world: _gap_tokens(world) // 2,
        lambda world: _tail_tokens(world) // 2,
        lambda world: world.budget_tokens() // 4,
        lambda world: world.budget_tokens() // 2,
    )
)


def submit_short(world: World, landmark: int, step: int) -> Event:
    """A prompt nobody has seen, of the order of what a cut leaves over."""
    name = world.fresh_name()
    prompt = Prompt(((name, GAP.tokens(world, landmark, step, world.largest_tokens())),))
    world.documents.append(prompt)
    return Submit(name, prompt)


def submit_hit(world: World, pick: int, landmark: int, step: int) -> Event:
    """A prompt that goes on from one that is cached or was seen: much to find, little to compute."""
    seen = world.cached or world.documents
    if not seen:
        return submit_long(world, landmark, step)
    document = seen[-1 - pick % len(seen)]
    room = world.largest_tokens() - world.settings.page_size
    prefix = cut_prompt(document, max(1, min(document.tokens, room)))
    name = world.fresh_name()
    tokens = GAP.tokens(world, landmark, step, max(1, world.largest_tokens() - prefix.tokens))
    return Submit(name, Prompt((*prefix.segments, (name, tokens))))


MOVES: tuple[Move, ...] = (
    Move("round", {}, run_round),
    Move("submit_long", LONG.domains, submit_long),
    Move("submit_short", GAP.domains, submit_short),
    Move("submit_hit", {"pick": PICK, **GAP.domains}, submit_hit),
    Move("cache", {"tier": (0, 9), "pick": PICK, "fresh": (0, 2), **LONG.domains}, cache),
    Move("outside", {"kind": (0, 4), "pick": PICK, **LONG.domains}, outside),
)

SGLANG_SPACE = Space(
    NODE_DOMAINS, draw_settings, MOVES, examples=400, thorough=False, rules_domains=RULES_DOMAINS, rules=draw_rules
)
"""Everything that sglang offers a prefill node: its holes are in here."""


def draw_shared_settings(**drawn: int) -> NodeSettings:
    """First come, first served: what our own node knows too."""
    return replace(draw_settings(**drawn), schedule_policy="fcfs")


def modelled_by(features: frozenset[str], space: Space) -> Space:
    """The space with first come, first served in the place of policies that a release does not have."""

    def settings(**drawn: int) -> NodeSettings:
        node = space.settings(**drawn)
        return node if node.schedule_policy in features else replace(node, schedule_policy="fcfs")

    return replace(space, settings=settings)


SHARED_SPACE = replace(SGLANG_SPACE, settings=draw_shared_settings)
"""Nodes and rules that our own node and sglang both model."""


def draw_plain_settings(**drawn: int) -> NodeSettings:
    """First come, first served: a continuation is never held back."""
    return replace(draw_settings(**drawn), schedule_policy=("fcfs", "lpm")[drawn["policy"] % 2])


def draw_unified_settings(**drawn: int) -> NodeSettings:
    """Decode beside prefill, mixed into its batches or not, in a pool of few pages, each of many tokens."""
    small = {
        "page": drawn["page"] % 2,
        "chunk_pages": 2 + drawn["chunk_pages"] % 6,
        "pool_pages": drawn["pool_pages"] % 8,
    }
    return replace(draw_plain_settings(**drawn | small), mode="unified", mixed_chunk=drawn["host"] > 0)


def _with_output(move: Move) -> Move:
    """The same move, where a request that arrives asks for more than one token."""

    def make(world: World, output: int, ignore_eos: int, **arguments: int) -> Event:
        event = move.make(world, **arguments)
        if not isinstance(event, Submit):
            return event
        return replace(event, output=Output(OUTPUT_TOKENS[output], ignore_eos=bool(ignore_eos)))

    return Move(move.name, {**move.domains, "output": (0, len(OUTPUT_TOKENS) - 1), "ignore_eos": (0, 1)}, make)


def _room_beside_decode(world: World) -> int:
    """The largest cold prompt that the gate lets in, if running requests are charged their whole outputs."""
    running = [request.rid for request in world.replay.target.snapshot().live if request.in_flight]
    outputs = world.replay.outputs
    return world.room_tokens() - sum(outputs[rid].max_new_tokens + 1 for rid in running)


ROOM = Scale((_room_beside_decode, lambda world: world.settings.page_size))


def submit_beside(world: World, landmark: int, step: int) -> Event:
    """A prompt nobody has seen, of all that decodes leave, or of the very pages that a decode goes beyond next."""
    name = world.fresh_name()
    return Submit(name, Prompt(((name, ROOM.tokens(world, landmark, step, world.largest_tokens())),)))


def run_decode(_world: World) -> Event:
    """Every running request takes a token."""
    return Decode()


def finish_early(world: World, pick: int) -> Event:
    """A running request meets the end of its sequence; where none runs, there is a round instead."""
    running = [request.rid for request in world.replay.target.snapshot().live if request.in_flight]
    return Finish(running[pick % len(running)]) if running else Round()


BESIDE = Move("submit_beside", ROOM.domains, submit_beside)
ENDED_BY_OTHERS = Move("outside", {"kind": (0, 3), "pick": PICK, **LONG.domains}, outside)
"""As on a prefill node, but nobody takes plain slots: what decodes will need is promised to nobody."""
UNIFIED_MOVES: tuple[Move, ...] = (
    *(move for move in MOVES if move.name == "round"),
    *(_with_output(move) for move in (BESIDE, BESIDE, *MOVES) if move.name in ("submit_beside", "submit_short")),
    ENDED_BY_OTHERS,
    Move("decode", {}, run_decode),
    Move("finish", {"pick": PICK}, finish_early),
)

PLAIN_SPACE = replace(SGLANG_SPACE, settings=draw_plain_settings, rules_domains={}, rules=draw_unaligned)
"""Without alignment and without holding back: nothing is known to break here."""

UNIFIED_SPACE = replace(
    PLAIN_SPACE,
    domains=NODE_DOMAINS,
    settings=draw_unified_settings,
    moves=UNIFIED_MOVES,
)
"""Decode beside prefill, without alignment and without holding back. Mixed chunks have a hole of their own."""


def draw_unmixed_settings(**drawn: int) -> NodeSettings:
    """Decode rounds between prefill batches, never in them."""
    return replace(draw_unified_settings(**drawn), mixed_chunk=False)


UNMIXED_SPACE = replace(
    UNIFIED_SPACE, settings=draw_unmixed_settings, moves=tuple(move for move in UNIFIED_MOVES if move.name != "decode")
)
"""As the scheduler does by default: nobody decodes while a prompt is half done. Nothing is known to break here."""
