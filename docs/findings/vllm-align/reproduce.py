# The gate counts 10 attention blocks and one state of the 11 there are; from the second chunk on a request h...
# Made by kvledger 0.1.0, of which it needs nothing. Recorded with vllm 0.33.0, torch 2.13.0+cpu.
# Run it: python reproduce.py
# Exit status: 1, it fails as reported; 0, it does not; 2, it could not run, or cannot show what is reported.

from __future__ import annotations

# --- A script that cannot start ends with status 2.

import sys
import traceback
from typing import Any

COULD_NOT_RUN = 2


def could_not_run(kind: Any, error: Any, where: Any) -> None:
    """Whatever nobody catches ends in status 2: nothing was shown, one way or the other."""
    sys.stdout.flush()
    traceback.print_exception(kind, error, where)
    print(f"COULD NOT RUN: {kind.__name__}: {error}", file=sys.stderr)
    sys.exit(COULD_NOT_RUN)


sys.excepthook = could_not_run


NODE = {'page_size': 4, 'checkpoint_align': 4, 'chunked_prefill_size': 16, 'max_prefill_tokens': None, 'pool_tokens': 44, 'host_tokens': 0, 'state_slots': None, 'mode': 'prefill', 'schedule_policy': 'fcfs', 'mixed_chunk': False, 'max_running_requests': None, 'pp_size': 1, 'preemption_threshold': None, 'new_token_ratio_percent': 70, 'prefix_cache': True, 'ranks': (), 'tracking_slots': 0, 'copy_on_write': False, 'window_tokens': None, 'window_pool_tokens': None, 'shared_bytes': None, 'page_bytes': None, 'state_slot_bytes': None, 'window_page_bytes': None}
RULES = {'checkpoint_align': 'page_size', 'reserve_tail': False, 'spend_gap': False, 'truncation_align': None, 'continuation_limit': None, 'chunk_grid': None, 'on_shortage': 'force', 'decode_yields': True, 'rank_view': 'least', 'replay_gate': 'follow', 'promise_pools': True}
EVENTS = [
    {'event': 'submit', 'request': 'A', 'prompt': [['a', 40]]},
    {'event': 'drain'},
]
RECORDED = [
    [['A', 0, 16]],
    [['A', 16, 32]],
    [['A', 32, 36]],
    [],
    [],
]
VERDICT = 'stuck'
LOOKED_FOR = ['stuck']
RAISES = None

# --- The scheduler under test, driven through its own interface.

# --- vLLM, quiet and without a GPU.

import logging
import os
import tempfile
import warnings
from pathlib import Path

_ENVIRONMENT = {
    "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "kvledger-vllm"),
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# each scheduler that is built would tell of its budget and its connector
logging.getLogger("vllm").setLevel(logging.ERROR)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

init_none_hash(sha256)

VERSION: str = vllm.__version__

__all__ = [
    "VERSION",
    "CacheConfig",
    "DeviceConfig",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVTransferConfig",
    "MambaSpec",
    "ModelRunnerOutput",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "StructuredOutputManager",
    "SupportsHMA",
    "VllmConfig",
    "get_block_hash",
    "get_group_id",
    "get_request_block_hasher",
    "init_none_hash",
    "sha256",
]


# --- A host tier, and transfers to a decode node.

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any


LOAD_ROUNDS = 1
"""Whole rounds that a load takes after the one that started it."""


class HostTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm has no types where we lint
    """The scheduler's half of a connector; there is no worker. Sizes are pages."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.page_size: int = extra["page_size"]
        self.host_pages: int | None = extra["host_pages"]
        self.sends: bool = extra["sends"]
        self.host: OrderedDict[bytes, None] = OrderedDict()
        self.loading: dict[str, int] = {}
        self.loaded_tokens: dict[str, int] = {}
        self.load_starts: dict[str, int] = {}
        self.sending: dict[str, None] = {}

    # --- the outside

    def keep(self, hashes: Iterable[bytes]) -> int:
        """Pages of a prefix are on the host from now on. Says how many that have been there longest make room."""
        for page in hashes:
            self.host[page] = None
            self.host.move_to_end(page)
        dropped_pages = 0
        while self.host_pages is not None and len(self.host) > self.host_pages:
            self.host.popitem(last=False)
            dropped_pages += 1
        return dropped_pages

    def round_ends(self) -> KVConnectorOutput:
        """What the workers report after a round: the loads that are done."""
        done = {rid for rid, rounds_left in self.loading.items() if rounds_left == 0}
        self.loading = {rid: rounds_left - 1 for rid, rounds_left in self.loading.items() if rid not in done}
        return KVConnectorOutput(finished_recving=done)

    def sent(self, rid: str) -> KVConnectorOutput:
        """What the workers report once a finished prompt's blocks have been read."""
        del self.sending[rid]
        return KVConnectorOutput(finished_sending={rid})

    # --- what the scheduler asks

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Host pages that go on from the device hit, never with the prompt's last token; loaded asynchronously."""
        first, end = num_computed_tokens // self.page_size, (request.num_prompt_tokens - 1) // self.page_size
        page = first
        while page < end and request.block_hashes[page] in self.host:
            page += 1
        tokens = (page - first) * self.page_size
        self.load_starts[request.request_id] = num_computed_tokens
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        del blocks
        if num_external_tokens:
            self.loading[request.request_id] = LOAD_ROUNDS
            self.loaded_tokens[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        done = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not (self.sends and done):
            return False, None
        self.sending[request.request_id] = None
        return True, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # --- what only a worker does, and the base class wants to be there

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a connector of the scheduler runs no forward pass")

    def wait_for_layer_load(self, *_: Any) -> None:
        raise AssertionError("a connector of the scheduler runs no forward pass")

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a connector of the scheduler runs no forward pass")

    def wait_for_save(self) -> None:
        raise AssertionError("a connector of the scheduler runs no forward pass")


# --- vLLM's scheduler.

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch


MOST_REQUESTS = 128
SEGMENT_BITS = 29
FIRST_OUTPUT = 1 << 60
MODEL = {
    "runner_type": "generate",
    "is_diffusion": False,
    "is_encoder_decoder": False,
    "uses_mrope": False,
    "supports_multimodal_inputs": False,
    "is_multimodal_model": False,
    "multimodal_config": None,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "skip_tokenizer_init": True,
}
"""What a scheduler of any release asks of a model; a real configuration would be read from a model's files."""


class World:
    """One scheduler and its block manager, on a CPU, without a model. `align`: a hybrid model in align mode."""

    align = False

    def __init__(self, node: dict[str, Any], rules: dict[str, Any]) -> None:
        del rules
        self.page: int = node["page_size"]
        self.pages: int = node["pool_tokens"] // self.page
        self.sends = node["mode"] == "prefill"
        self.has_host = node["host_tokens"] is None or node["host_tokens"] >= self.page
        self.longest = self.pages * self.page + 1
        config = self._config(node)
        self.scheduler = Scheduler(config, self._layout(), StructuredOutputManager(config), block_size=self.page)
        self.manager = self.scheduler.kv_cache_manager
        self.blocks = self.manager.block_pool
        self.connector: Any = self.scheduler.connector
        # an empty pool of the same size, to ask the gate whether a prompt fits it
        self.empty = KVCacheManager(
            self._layout(),
            max_model_len=self.longest,
            scheduler_block_size=self.page,
            hash_block_size=self.page,
            enable_caching=False,
        )
        self.hasher = get_request_block_hasher(self.page, sha256)
        self.numbers = count()
        self.segments: dict[str, int] = {}
        self.held: dict[str, list[Any]] = {}
        self.held_tokens: dict[str, int] = {}
        self.pinned: list[Any] = []
        self.prompt_tokens: dict[str, int] = {}
        self.decoding: set[str] = set()
        self.thrown: list[str] = []
        self.moved = False

    def _layout(self) -> Any:
        """One block more than the node's pages: the null block."""
        attention = FullAttentionSpec(block_size=self.page, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["attention"], attention)]
        if self.align:
            shapes, dtypes = ((2 * self.page,),), (torch.float32,)
            state = MambaSpec(block_size=self.page, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
            groups.append(KVCacheGroupSpec(["state"], state))
        return KVCacheConfig(num_blocks=self.pages + 1, kv_cache_tensors=[], kv_cache_groups=groups)

    def _config(self, node: dict[str, Any]) -> Any:
        chunk = node["chunked_prefill_size"]
        budget = chunk or self.longest * MOST_REQUESTS
        transfers = None
        if self.sends or node["host_tokens"] is None or node["host_tokens"] >= self.page:
            host_pages = None if node["host_tokens"] is None else node["host_tokens"] // self.page
            transfers = KVTransferConfig(
                kv_connector=HostTier.__name__,
                kv_connector_module_path=__name__,
                kv_role="kv_both" if self.sends else "kv_consumer",
                kv_connector_extra_config={"page_size": self.page, "host_pages": host_pages, "sends": self.sends},
            )
        config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            cache_config=CacheConfig(
                block_size=self.page,
                enable_prefix_caching=True,
                mamba_cache_mode="align" if self.align else "none",
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=self.longest,
                is_encoder_decoder=False,
                max_num_batched_tokens=budget,
                max_num_seqs=min(MOST_REQUESTS, budget),
                enable_chunked_prefill=chunk is not None,
                policy="priority" if node["schedule_policy"] == "priority" else "fcfs",
                async_scheduling=False,
            ),
            kv_transfer_config=transfers,
        )
        config.cache_config.num_gpu_blocks = self.pages + 1
        config.model_config = SimpleNamespace(max_model_len=self.longest, **MODEL)
        return config

    # --- requests

    def _request(self, name: str, prompt: Any, output: dict[str, Any], more_tokens: int = 0) -> Any:
        """Token numbers say which segment and where in it: equal runs are equal prefixes."""
        tokens: list[int] = []
        for segment, length in prompt:
            first = self.segments.setdefault(segment, len(self.segments)) << SEGMENT_BITS
            tokens += range(first, first + length)
        tokens += [FIRST_OUTPUT + next(self.numbers) for _ in range(more_tokens)]
        sampling = SamplingParams(
            max_tokens=output.get("max_new_tokens", 1), ignore_eos=output.get("ignore_eos", False)
        )
        return Request(
            name,
            tokens,
            sampling,
            None,
            arrival_time=float(next(self.numbers)),
            priority=-output.get("priority", 0),
            block_hasher=self.hasher,
        )

    def submit(self, name: str, prompt: Any, output: dict[str, Any]) -> str | None:
        tokens = sum(length for _, length in prompt)
        if not self._fits_alone(tokens + output.get("max_new_tokens", 1) - 1):
            return "it does not pass the gate of an empty pool"
        self.prompt_tokens[name] = tokens
        self.scheduler.add_request(self._request(name, prompt, output))
        return None

    def _fits_alone(self, tokens: int) -> bool:
        if tokens > self.longest:
            return False
        probe = Request("probe", [0] * tokens, SamplingParams(max_tokens=1), None)
        fits = self.empty.allocate_slots(probe, min(tokens, self.page), full_sequence_must_fit=True)
        self.empty.free(probe)
        return fits is not None

    def transferred(self, name: str) -> None:
        if self.connector is not None and name in self.connector.sending:
            sent = ModelRunnerOutput([], {}, kv_connector_output=self.connector.sent(name))
            self.scheduler.update_from_output(SchedulerOutput.make_empty(), sent)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.decoding.discard(name)
        self.transferred(name)

    def finish(self, name: str) -> None:
        if name in self.decoding:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_STOPPED)
            self.decoding.discard(name)

    # --- one step

    def round(self) -> list[tuple[str, int, int]]:
        return self._step(throttled=False)

    def decode(self) -> list[tuple[str, int, int]]:
        return self._step(throttled=bool(self.decoding))

    def _step(self, *, throttled: bool) -> list[tuple[str, int, int]]:
        """Schedule, pretend that the model ran, and tell the scheduler."""
        plan = self.scheduler.schedule(throttle_prefills=throttled)
        preempted = set(plan.preempted_req_ids or ())
        retracted = preempted & self.decoding
        self.thrown = [name for name in self.prompt_tokens if name in preempted - retracted]
        self.decoding -= retracted
        chunks, sampled = [], []
        for name, tokens in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            if end == request.num_tokens:
                sampled.append(name)
            if name not in self.decoding:
                chunks.append((name, end - tokens, end))
        loading = self.connector is not None and bool(self.connector.loading)
        self.moved = bool(plan.num_scheduled_tokens or retracted) or loading
        self.scheduler.update_from_output(plan, self._output(plan, sampled))
        self.decoding.update(sampled)
        self.decoding = {name for name in self.decoding if self._goes_on(name)}
        return chunks

    def _goes_on(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and not request.is_finished()

    def _output(self, plan: Any, sampled: list[str]) -> Any:
        """A new token for each request that has computed all it has; loads that are done."""
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[FIRST_OUTPUT + next(self.numbers)] if name in sampled else [] for name in names],
            kv_connector_output=None if self.connector is None else self.connector.round_ends(),
        )

    # --- outsiders

    def cached(self, tier: str, prompt: Any, locked: bool) -> None:
        tokens = sum(length for _, length in prompt) // self.page * self.page
        # a hit never has the last token, so one more than the pages makes all of them a hit
        visitor = self._request(f"visitor {next(self.numbers)}", prompt, {}, more_tokens=tier == "device")
        if tier == "host":
            if self.connector is not None and self.has_host:
                self.connector.keep(visitor.block_hashes[: tokens // self.page])
            return
        blocks, hit_tokens = self.manager.get_computed_blocks(visitor)[:2]
        if hit_tokens < tokens:
            self.manager.allocate_slots(visitor, tokens - hit_tokens, hit_tokens, blocks)
            self.manager.free(visitor)
        if locked:
            for group in self.manager.get_computed_blocks(visitor)[0].blocks:
                self.blocks.touch(group)
                self.pinned += group

    def hold(self, name: str, tokens: int) -> None:
        self.held.setdefault(name, []).extend(self.blocks.get_new_blocks(-(-tokens // self.page)))
        self.held_tokens[name] = self.held_tokens.get(name, 0) + tokens

    def release(self, name: str, tokens: int | None) -> None:
        held = self.held.get(name, [])
        left = self.held_tokens[name] = 0 if tokens is None else max(0, self.held_tokens.get(name, 0) - tokens)
        keep = -(-left // self.page)
        self.blocks.free_blocks(held[keep:])
        del held[keep:]

    # --- what can be seen

    def in_flight(self) -> list[str]:
        return [] if self.connector is None else list(self.connector.sending)

    def has_work(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def moves(self) -> bool:
        return self.moved

    def pool(self) -> tuple[int, int]:
        free = self.blocks.free_block_queue.get_all_free_blocks()
        cached = sum(block.block_hash is not None for block in free)
        return (len(free) - cached) * self.page, cached * self.page

    def needs(self) -> dict[str, int]:
        """Slots, in whole blocks, that each prompt that has begun has yet to get."""
        needs = {}
        for name, tokens in self.prompt_tokens.items():
            request = self.scheduler.requests.get(name)
            if request is None or name in self.decoding or request.is_finished():
                continue
            blocks = self.manager.get_blocks(name).blocks[0]
            if blocks:
                needs[name] = max(0, -(-tokens // self.page) - len(blocks)) * self.page
        return needs

    def thrown_away(self) -> list[str]:
        return self.thrown

    def lost(self) -> int:
        """Blocks that are in nobody's table and not in the free list."""
        tables = [group for name in self.scheduler.requests for group in self.manager.get_blocks(name).blocks]
        owned = {block.block_id for table in (*tables, *self.held.values(), self.pinned) for block in table}
        owned -= {block.block_id for block in self.blocks.blocks if block.is_null}
        return self.pages * self.page - sum(self.pool()) - len(owned) * self.page


World.align = True


# --- What plays the events.

import sys
import traceback
from collections.abc import Sequence
from typing import Any

AS_REPORTED, MENDED, NOT_SHOWN = 1, 0, 2


def shown(value: Any) -> str:
    """A value from a trace in one line that steers no terminal."""
    text = str(value)
    return text if text.isascii() and text.isprintable() else ascii(text)


class Runner:
    """Plays events, prints each round, and notes what went wrong and where rounds are not the recorded ones."""

    def __init__(
        self, world: Any, page_size: int, recorded: Sequence[Sequence[Any]], raises: str | None = None
    ) -> None:
        self.world = world
        self.page_size = page_size
        self.recorded = recorded
        self.raises = raises
        self.rounds = 0
        self.pages = self.output_tokens = self.requests = 0
        self.found: dict[str, str] = {}
        self.blind: set[str] = set()
        self.changed: int | None = None
        self.prompts: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.at_rest_tokens = sum(world.pool())

    @property
    def dead(self) -> bool:
        return not self.found.keys().isdisjoint(("oom", "raised", "raised something else"))

    def play(self, event: dict[str, Any]) -> None:
        """One event of the trace; after a failed allocation or an exception nothing happens any more."""
        kind = event["event"]
        if self.dead:
            return
        try:
            if kind == "round":
                self._ran(self.world.round)
            elif kind == "decode":
                self._ran(self.world.decode)
            elif kind == "drain":
                self._drain()
            else:
                self._outside(kind, event)
        except Exception as error:
            self._note("raised" if type(error).__name__ == self.raises else "raised something else")
            traceback.print_exc(file=sys.stdout)

    def _outside(self, kind: str, event: dict[str, Any]) -> None:
        world = self.world
        if kind == "submit":
            output = {key: event[key] for key in ("max_new_tokens", "ignore_eos", "priority") if key in event}
            tokens = sum(length for _, length in event["prompt"])
            reason = world.submit(event["request"], event["prompt"], output)
            refused = "" if reason is None else f", refused: {shown(reason)}"
            print(f"submit {shown(event['request'])}: {tokens} tokens{refused}")
            if reason is None:
                self.requests += 1
                self.pages += -(-tokens // self.page_size)
                self.output_tokens += output.get("max_new_tokens", 1)
                self.prompts[event["request"]] = tokens
            return
        before = sum(world.pool())
        if kind == "cached":
            world.cached(event["tier"], event["prompt"], event.get("locked", False))
        elif kind in ("hold", "release"):
            getattr(world, kind)(event["name"], event.get("tokens"))
        else:
            getattr(world, kind)(event["request"])
        keys = ("event", "tier", "request", "name", "prompt", "tokens")
        words = " ".join(shown(event[key]) for key in keys if key in event)
        print(words)
        if kind in ("cached", "hold", "release"):
            self.at_rest_tokens += sum(world.pool()) - before
        if event.get("locked"):
            self.blind.add("not given back")
        if kind == "abort":
            self.prompts.pop(event["request"], None)
            self.ends.pop(event["request"], None)
        self._count(f"after {words}")

    def _ran(self, step: Any) -> bool:
        """One round; whether anything moved in it."""
        self.rounds += 1
        try:
            chunks = [list(chunk) for chunk in step()]
        except MemoryError as error:
            self._note("oom")
            print(f"round {self.rounds}: OUT OF MEMORY: {shown(error)}")
            return False
        words = ", ".join(f"{shown(name)} {start}..{end}" for name, start, end in chunks) or "no chunk"
        print(f"round {self.rounds}: {words}; {self._left()}")
        self._follow(chunks)
        self._count(f"in round {self.rounds}")
        known = self.recorded[self.rounds - 1] if self.rounds <= len(self.recorded) else None
        if self.changed is None and chunks != known:
            self.changed = self.rounds
        return bool(chunks) or bool(self.world.moves())

    def _follow(self, chunks: Sequence[Any]) -> None:
        """How far each prompt has come, and whether that was ever taken back."""
        for name, start, end in chunks:
            before = self.ends.get(name, start)
            if start != before < self.prompts.get(name, 0):
                self._note("begun again")
                print(f"  BEGUN AGAIN: {shown(name)} had computed {before} tokens and goes on from {start}")
            self.ends[name] = end
        for name in self.world.thrown_away():
            self._note("preempted")
            had = self.ends.pop(name, 0)
            print(f"  PREEMPTED: {shown(name)} was admitted, and loses its slots with {had} tokens computed")
        half_done = [name for name, end in self.ends.items() if end < self.prompts.get(name, 0)]
        if len(half_done) > 1:
            self._note("two half done")
            print(f"  HALF DONE: {', '.join(map(shown, half_done))}")

    def _count(self, where: str) -> None:
        """Whether each slot has one owner."""
        lost = self.world.lost()
        if lost is None:
            self.blind.add("lost")
        elif lost and "lost" not in self.found:
            self._note("lost", where)
            print(f"  LOST: {lost} tokens belong to nobody" if lost > 0 else f"  COUNTED TWICE: {-lost} tokens")

    def _left(self) -> str:
        free, evictable = self.world.pool()
        needed = sum(self.world.needs().values())
        words = f"free {free}, evictable {evictable}, admitted prompts still need {needed}"
        if needed > free + evictable:
            self._note("short")
            words += f": SHORT BY {needed - free - evictable}"
        return words

    def _note(self, what: str, where: str | None = None) -> None:
        self.found.setdefault(what, where or f"in round {self.rounds}")

    def _drain(self) -> None:
        """Rounds until nothing waits or is half done; what is in flight is transferred only when nothing else moves."""
        most = (2 * self.pages + 3 * self.requests + 1 + self.output_tokens) * (self.requests + 1)
        for _ in range(most):
            if not self.world.has_work():
                break
            moved = self._ran(self.world.round)
            if self.dead:
                return
            stands_still = not moved and not self._transfer_all() and not self.world.thrown_away()
            if stands_still and self.world.has_work():
                self._note("stuck")
                print("  STUCK: nothing runs, and nothing is in flight")
                return
        else:
            if self.world.has_work():
                self._note("stuck")
                print(f"  STUCK: work is left after {most} rounds")
        self._transfer_all()
        self._at_rest()

    def _at_rest(self) -> None:
        """Nothing is left to do: who was never served, and what was not given back."""
        missing = self.at_rest_tokens - sum(self.world.pool())
        if missing:
            self._note("not given back", "at rest")
            print(f"  NOT GIVEN BACK: at rest {missing} tokens are neither free nor evictable")
        unserved = [name for name, tokens in self.prompts.items() if self.ends.get(name, 0) < tokens]
        if unserved:
            self._note("never served", "at rest")
            print(f"  NEVER SERVED: {', '.join(map(shown, unserved))}")

    def _transfer_all(self) -> bool:
        names = list(self.world.in_flight())
        for name in names:
            self.world.transferred(name)
            self._count(f"after {shown(name)} was transferred")
        return bool(names)


def main(
    world: Any,
    page_size: int,
    events: Sequence[dict[str, Any]],
    recorded: Any,
    verdict: str,
    looked_for: Sequence[str],
    raises: str | None = None,
) -> int:
    """Play all events and say how it ended: 1, it fails as reported; 0, it does not; 2, this run shows neither."""
    runner = Runner(world, page_size, recorded, raises)
    for event in events:
        runner.play(event)
    if runner.changed is None:
        print("every chunk is the recorded one")
    else:
        print(f"round {runner.changed} ran other chunks than recorded: {recorded[runner.changed - 1 : runner.changed]}")
    status, words = ending(runner, set(looked_for))
    print(f"{words[0]} ({verdict}): {words[1]}")
    sys.stdout.flush()
    return status


def ending(runner: Runner, looked_for: set[str]) -> tuple[int, tuple[str, str]]:
    """The exit status and its words. What cannot be seen, or was not reached, is neither as reported nor mended."""
    shown_words = [f"{what} {where}" for what, where in runner.found.items() if what in looked_for]
    if shown_words:
        return AS_REPORTED, ("AS REPORTED", ", ".join(shown_words))
    if looked_for <= runner.blind:
        return NOT_SHOWN, ("NOT SHOWN", "this script cannot see that, whether it is there or not")
    if runner.dead and "oom" not in runner.found:
        return NOT_SHOWN, ("COULD NOT RUN", "an exception that was not recorded, above, ended it")
    return MENDED, ("NOT AS REPORTED", "it was looked for and not found")


if __name__ == "__main__":
    sys.exit(main(World(NODE, RULES), NODE["page_size"], EVENTS, RECORDED, VERDICT, LOOKED_FOR, RAISES))
