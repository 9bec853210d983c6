"""Worlds and moves that lead where vLLM's code paths are: sizes at the boundary of its gate, outputs, late loads.

What an undersized pool breaks shows only on the largest prompt, so a prompt is mostly as large as the free blocks, or
all blocks, allow: exactly, a token less or more, a block less or more.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvledger.events import Cached, Decode, Event, Finish, Hold, Round, Submit, Tier
from kvledger.policy import SchedulePolicy
from kvledger.request import Output, Prompt
from kvledger.settings import NodeSettings
from kvledger.testing.moves import PICK, Domain, Move, Scale, Space, World, cut_prompt, outside, run_round

PAGE_SIZES = (4, 1, 16)
POLICIES: tuple[SchedulePolicy, ...] = ("fcfs", "fcfs", "fcfs", "priority")
_HOST: tuple[Tier, bool] = ("host", False)
TIERS: tuple[tuple[Tier, bool], ...] = (*[_HOST] * 4, ("device", False), ("device", False), ("device", True))
"""Where somebody else's prefix is cached, and whether it is locked there."""
DOMAINS: Mapping[str, Domain] = {
    "page": (0, len(PAGE_SIZES) - 1),
    "chunk_pages": (1, 4),
    "chunk_tokens": (0, 2),
    "pool_pages": (2, 10),
    "mode": (0, 3),
    "host": (0, 3),
    "priority": (0, len(POLICIES) - 1),
}


def settings(
    page: int, chunk_pages: int, chunk_tokens: int, pool_pages: int, mode: int, host: int, priority: int
) -> NodeSettings:
    """A small pool, and a step's budget of a few blocks that need not end with one."""
    page_size = PAGE_SIZES[page]
    unified = mode > 0
    return NodeSettings(
        page_size=page_size,
        checkpoint_align=page_size,
        chunked_prefill_size=chunk_pages * page_size + chunk_tokens * (page_size // 2),
        max_prefill_tokens=None,
        pool_tokens=pool_pages * page_size,
        host_tokens=(0, None, 4 * page_size, None)[host],
        mode="unified" if unified else "prefill",
        schedule_policy=POLICIES[priority],
        mixed_chunk=unified,
    )


def _free(world: World) -> int:
    """Free slots, cached ones too."""
    return world.replay.target.snapshot().baseline_pages * world.settings.page_size


def _unpromised(world: World) -> int:
    """Free slots that no prompt in work still needs."""
    return world.spare_pages(world.replay.target.snapshot()) * world.settings.page_size


def _pool(world: World) -> int:
    return world.settings.pool_pages * world.settings.page_size


PROMPTS = Scale(
    (
        _free,
        _unpromised,
        _pool,
        lambda world: _free(world) // 2,
        lambda world: _pool(world) // 2,
        World.budget_tokens,
        lambda world: world.budget_tokens() + world.settings.page_size,
        lambda world: world.settings.page_size,
        lambda world: _unpromised(world) // 2,
    )
)
OUTPUTS: Mapping[str, Domain] = {"new": (0, 5), "priority": (0, 2)}


def _output(world: World, new: int, priority: int) -> Output:
    page_size = world.settings.page_size
    if world.settings.mode == "prefill":
        return Output(priority=priority if world.settings.schedule_policy == "priority" else 0)
    new_tokens = (1, 2, 3, page_size, page_size + 1, 2 * page_size)[new]
    return Output(new_tokens, priority=priority if world.settings.schedule_policy == "priority" else 0)


def submit(world: World, landmark: int, step: int, new: int, priority: int) -> Event:
    """A prompt nobody has seen. One block above the pool is a branch too."""
    name = world.fresh_name()
    tokens = PROMPTS.tokens(world, landmark, step, _pool(world) + world.settings.page_size)
    prompt = Prompt(((name, tokens),))
    world.documents.append(prompt)
    return Submit(name, prompt, _output(world, new, priority))


def submit_again(world: World, pick: int, cut: int, landmark: int, step: int, new: int, priority: int) -> Event:
    """A prompt that goes on from (a cut of) one seen before, or is that one."""
    if not world.documents:
        return submit(world, landmark, step, new, priority)
    document = world.documents[-1 - pick % len(world.documents)]
    page_size = world.settings.page_size
    kept = (document.tokens, document.tokens // page_size * page_size, document.tokens // 2, document.tokens - 1)[cut]
    prefix = cut_prompt(document, max(1, kept))
    name = world.fresh_name()
    more = PROMPTS.tokens(world, landmark, step, max(1, _pool(world) - prefix.tokens)) if cut else 0
    prompt = Prompt((*prefix.segments, (name, more))) if more else prefix
    return Submit(name, prompt, _output(world, new, priority))


def cache(world: World, tier: int, pick: int, fresh: int, landmark: int, step: int) -> Event:
    """Somebody else's prefix is cached, or one of ours; on the device a block is left for a hybrid model's state."""
    limit = min(_free(world), _unpromised(world)) - world.settings.page_size
    where, locked = TIERS[tier] if limit > 0 else TIERS[0]
    tokens = PROMPTS.tokens(world, landmark, step, _pool(world) if where == "host" else limit)
    if fresh or not world.documents:
        prompt = Prompt(((world.fresh_name(), tokens),))
        world.documents.append(prompt)
    else:
        prompt = cut_prompt(world.documents[-1 - pick % len(world.documents)], tokens)
    return Cached(where, prompt, locked)


def hold(world: World, landmark: int, step: int) -> Event:
    """Somebody outside takes slots that nobody's prompt needs."""
    limit = min(_free(world), _unpromised(world))
    if limit <= 0:
        return Round()
    name = f"hold {world.fresh_name()}"
    world.holds.append(name)
    return Hold(name, PROMPTS.tokens(world, landmark, step, limit))


def decode(world: World) -> Event:
    """A step without prefill, where requests decode."""
    return Decode() if world.settings.mode == "unified" else Round()


def finish(world: World, pick: int) -> Event:
    """An output ends early."""
    live = world.replay.target.snapshot().live
    if world.settings.mode == "prefill" or not live:
        return Round()
    return Finish(live[pick % len(live)].rid)


SPACE = Space(
    DOMAINS,
    settings,
    (
        Move("round", {}, run_round),
        *[Move("submit", {**PROMPTS.domains, **OUTPUTS}, submit)] * 4,
        Move("submit_again", {"pick": PICK, "cut": (0, 3), **PROMPTS.domains, **OUTPUTS}, submit_again),
        Move("cache", {"tier": (0, len(TIERS) - 1), "pick": PICK, "fresh": (0, 2), **PROMPTS.domains}, cache),
        Move("hold", PROMPTS.domains, hold),
        Move("decode", {}, decode),
        Move("finish", {"pick": PICK}, finish),
        Move("outside", {"kind": (0, 3), "pick": PICK, "landmark": (0, 0), "step": (0, 0)}, outside),
    ),
    thorough=False,
    rules_domains={},
    rules=lambda rules, _settings: rules,
)
