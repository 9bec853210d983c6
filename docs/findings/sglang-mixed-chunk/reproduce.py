# A and B each go beyond their page as they decode, and their new pages are what C's tail, which nobody wrote...
# Made by kvledger 0.1.0, of which it needs nothing. Recorded with sglang 0.5.23, torch 2.13.0+cpu.
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


NODE = {'page_size': 64, 'checkpoint_align': 64, 'chunked_prefill_size': 192, 'max_prefill_tokens': None, 'pool_tokens': 384, 'host_tokens': 0, 'state_slots': None, 'mode': 'unified', 'schedule_policy': 'fcfs', 'mixed_chunk': True, 'max_running_requests': None, 'pp_size': 1, 'preemption_threshold': None, 'new_token_ratio_percent': 70, 'prefix_cache': True, 'ranks': (), 'tracking_slots': 0, 'copy_on_write': False, 'window_tokens': None, 'window_pool_tokens': None, 'shared_bytes': None, 'page_bytes': None, 'state_slot_bytes': None, 'window_page_bytes': None}
RULES = {'checkpoint_align': 'page_size', 'reserve_tail': False, 'spend_gap': False, 'truncation_align': None, 'continuation_limit': None, 'chunk_grid': None, 'on_shortage': 'force', 'decode_yields': True, 'rank_view': 'least', 'replay_gate': 'follow', 'promise_pools': True}
EVENTS = [
    {'event': 'submit', 'request': 'A', 'prompt': [['a', 64]], 'max_new_tokens': 4},
    {'event': 'submit', 'request': 'B', 'prompt': [['b', 64]], 'max_new_tokens': 4},
    {'event': 'round'},
    {'event': 'submit', 'request': 'C', 'prompt': [['c', 182]]},
    {'event': 'drain'},
]
RECORDED = [
    [['A', 0, 64], ['B', 0, 64]],
    [['C', 0, 128]],
]
VERDICT = 'oom'
LOOKED_FOR = ['oom']
RAISES = None

# --- The scheduler under test, driven through its own interface.

# --- What sglang asks of a machine without a GPU.

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Stub:
    """`before`: it must be in place before sglang is imported. `install` does nothing where the real thing is there."""

    name: str
    reason: str
    before: bool
    install: Callable[[], None]


class _Anything:
    """Stands for any class, constant or function of a picture library: processors of pictures read them on import."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> _Anything:
        return self


class _PictureFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision, and whatever module below it somebody asks for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        anything: Any = _Anything()
        module.__getattr__ = lambda name: getattr(anything, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _stub_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return
    # transformers keeps its answer, and would otherwise believe the stub
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    sys.meta_path.append(_PictureFinder())


def _stub_host_register() -> None:
    """Without CUDA there is no device for which memory could be page-locked."""
    if importlib.import_module("torch").cuda.is_available():
        return
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_, **__: None


def _stub_transfer() -> None:
    """The copy between device and host pools, whose own form is a CUDA extension: the same slots, moved by torch."""
    pool: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    if not hasattr(pool, "transfer_kv_direct"):
        pool.transfer_kv_direct = _transfer


def _transfer(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    del page_size
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


STUBS: tuple[Stub, ...] = (
    Stub(
        "torchvision",
        "configurations of picture models import it, and its wheel does not go with a CPU torch",
        True,
        _stub_torchvision,
    ),
    Stub(
        "cuda-host-register",
        "a host pool page-locks its memory through CUDA, whatever the device is",
        False,
        _stub_host_register,
    ),
    Stub(
        "transfer-kv-direct",
        "host pools copy through an extension that is only built for devices",
        False,
        _stub_transfer,
    ),
)


# --- sglang's scheduler, pool and prefix cache.

import logging
import warnings
from array import array
from types import SimpleNamespace
from typing import Any


for stub in STUBS:
    if stub.before:
        stub.install()
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

import torch
from sglang.srt import server_args
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

for stub in STUBS:
    if not stub.before:
        stub.install()

NO_LIMIT = 2**40
SEGMENT_TOKENS = 2**28


class World:
    """One scheduler with its pool and prefix cache, on a CPU, without a model: what is computed is not looked at."""

    def __init__(self, node: dict[str, Any], rules: dict[str, Any]) -> None:
        self.node = node
        self.page: int = node["page_size"]
        page = self.page
        self.truncation_align = rules["truncation_align"]
        self.unified = node["mode"] == "unified"
        slots = node["pool_tokens"] // page * page
        args = server_args.ServerArgs(
            model_path="dummy", device="cpu", attention_backend="torch_native", disable_overlap_schedule=True
        )
        server_args.set_global_server_args_for_scheduler(args)
        get_context().override(
            "script",
            page_size=page,
            schedule_policy=node["schedule_policy"],
            disaggregation_mode="null" if self.unified else "prefill",
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_write_policy="write_through",
            hicache_ratio=self._host_ratio(slots),
        )
        self.rows = ReqToTokenPool(128, slots + page, "cpu", False)
        store = MHATokenToKVPool(slots, page, torch.float16, 1, 1, 1, "cpu", False)
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(slots, torch.float16, "cpu", store, not self.unified)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page, torch.float16, "cpu", store, not self.unified)
        self.tree = self._tree(args)
        self.tree.pretty_print = lambda: None  # a failed allocation prints the whole tree
        self.policy = SchedulePolicy(
            node["schedule_policy"], self.tree, self.tree.cache_controller is not None, False, False
        )
        self.waiting: list[Any] = []
        self.chunked: Any = None
        self.running = ScheduleBatch(reqs=[], batch_is_full=False)
        self.ratio = NewTokenRatioTracker.from_config()
        self.admitted: dict[str, Any] = {}
        self.prefilled: dict[str, Any] = {}
        self.moved = False
        self.segments: dict[str, int] = {}
        self.held: dict[str, list[Any]] = {}
        self.held_tokens: dict[str, int] = {}

    def _host_ratio(self, slots: int) -> float:
        host_tokens: int | None = self.node["host_tokens"]
        if host_tokens is None:
            return 16 + 2**20 / slots
        return max(0.0, (host_tokens // self.page - 0.5) * self.page / slots)

    def _tree(self, args: Any) -> Any:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            chunked_prefill_size=self.node["chunked_prefill_size"],
        )
        params.tree_components = (ComponentType.FULL,)
        tree = UnifiedRadixCache(params)
        if self.node["host_tokens"] is None or self.node["host_tokens"] >= self.page:
            tree.init_hicache(args, params)
        return tree

    # --- requests

    def _ids(self, prompt: Any) -> array[int]:
        """A number of its own for each position of each segment: equal runs are equal prefixes."""
        ids = array("q")
        for segment, tokens in prompt:
            first = self.segments.setdefault(segment, len(self.segments)) * SEGMENT_TOKENS
            ids.extend(range(first, first + tokens))
        return ids

    def submit(self, name: str, prompt: Any, output: dict[str, Any]) -> str | None:
        most = output.get("max_new_tokens", 1)
        ids = self._ids(prompt)
        if not len(ids) + most + self.page < self.node["pool_tokens"] // self.page * self.page:
            return "it does not fit the empty pool"
        sampling = SamplingParams(max_new_tokens=most, ignore_eos=output.get("ignore_eos", False))
        sampling.normalize(None)
        self.waiting.append(Req(name, "", ids, sampling))
        return None

    def transferred(self, name: str) -> None:
        if name in self.in_flight():
            self.finish(name)

    def finish(self, name: str) -> None:
        request = self.prefilled.get(name)
        if request is not None:
            request.finished_reason = FINISH_LENGTH(length=0)
            self._leave(request, keep=True)

    def abort(self, name: str) -> None:
        self.waiting = [request for request in self.waiting if request.rid != name]
        request = self.admitted.get(name)
        if request is not None:
            request.finished_reason = FINISH_ABORT("aborted")
            self.chunked = None if self.chunked is request else self.chunked
            self._leave(request, keep=False)

    def _leave(self, request: Any, *, keep: bool) -> None:
        """`keep`: what it computed stays in the prefix cache."""
        self._drop_finished()
        if request.kv.holds_kv:
            release_kv_cache(request, self.tree, checkpoint=keep)
        del self.admitted[request.rid]
        self.prefilled.pop(request.rid, None)
        self._settle()

    # --- one round

    def round(self) -> list[tuple[str, int, int]]:
        """A prefill batch, allocated and run; in unified mode a decode round if none can be formed."""
        self._settle()
        self._drop_finished()
        self.moved = False
        batch = self._decide()
        if not batch:
            if self.unified:
                self.decode()
            return []
        self._run(batch, self._allocate(batch))
        return [(request.rid, request.extend_end - tokens, request.extend_end) for request, tokens in batch]

    def _decide(self) -> list[tuple[Any, int]]:
        """Who joins, each with the tokens of its chunk."""
        if not self.unified or self.running.is_empty():
            self.running.batch_is_full = False
        if self.chunked is None and (self.running.batch_is_full or not self.waiting):
            return []
        self.policy.calc_priority(self.waiting, self.running)
        adder = PrefillAdder(
            self.page,
            self.tree,
            self.allocator,
            self.running,
            self.ratio.current,
            self.node["max_prefill_tokens"] or NO_LIMIT,
            self.node["chunked_prefill_size"],
            self.running.batch_size() if self.node["mixed_chunk"] else 0,
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            adder.chunked_req_limit = self.policy.shortest_prefill_chunk_limit(
                self.chunked, self.waiting, adder.rem_chunk_tokens or 0, self.page
            )
            self.chunked = adder.add_chunked_req(self.chunked)
        for request in list(self.waiting):
            if adder.budget_state() == AddReqResult.OTHER or self.running.batch_is_full:
                break
            request.init_next_round_input(self.tree)
            answer = adder.add_one_req(
                request, has_chunked_req=self.chunked is not None, truncation_align_size=self.truncation_align
            )
            if answer != AddReqResult.CONTINUE:
                no_token = answer == AddReqResult.NO_TOKEN
                self.running.batch_is_full = no_token and bool(adder.can_run_list or not self.running.is_empty())
                break
        joined = list(adder.can_run_list)
        self.waiting = [request for request in self.waiting if all(request is not other for other in joined)]
        self.chunked = adder.new_chunked_req or self.chunked
        if self.chunked is not None and joined:
            self.chunked.inflight_middle_chunks += 1
        self.admitted |= {request.rid: request for request in joined}
        return [(request, request.extend_end - request.prefix_len) for request in joined]

    def _allocate(self, batch: list[tuple[Any, int]]) -> Any:
        model = SimpleNamespace(vocab_size=2**62, is_encoder_decoder=False)
        schedule = ScheduleBatch.init_new(
            [request for request, _ in batch],
            self.rows,
            self.allocator,
            self.tree,
            model,
            False,
            SpeculativeAlgorithm.NONE,
            chunked_req=self.chunked,
        )
        if self.tree.cache_controller is not None:
            self.tree.ready_to_load_host_cache()
        self._or_out_of_memory(schedule.prepare_for_extend)
        return schedule

    def _or_out_of_memory(self, step: Any) -> None:
        try:
            step()
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            raise MemoryError(str(error).splitlines()[0]) from error

    def _run(self, batch: list[tuple[Any, int]], schedule: Any) -> None:
        left = []
        mixed = self._mix_into(schedule) if self.node["mixed_chunk"] else []
        for request, _ in batch:
            if request.inflight_middle_chunks > 0:
                request.inflight_middle_chunks -= 1
                checkpoint_kv_cache(request, self.tree)
                continue
            self.prefilled[request.rid] = request
            self._take_token(request)
            if request.finished():
                left.append(request)
            else:
                checkpoint_kv_cache(request, self.tree)
        for request in mixed:
            self._take_token(request)
        if self.unified:
            self._join(schedule)
        for request in left + [request for request in mixed if request.finished()]:
            self._leave(request, keep=True)
        self._settle()

    def _mix_into(self, schedule: Any) -> list[Any]:
        """Decodes join a prefill batch if their next tokens fit."""
        if self.running.is_empty() or not self.running.check_decode_mem():
            return []
        self.running.prepare_for_decode()
        requests = list(self.running.reqs)
        schedule.mix_with_running(self.running)
        self.running = ScheduleBatch(reqs=[], batch_is_full=self.running.batch_is_full)
        return requests

    def _join(self, schedule: Any) -> None:
        """Those whose prompt is done decode from now on."""
        before = schedule.batch_size()
        schedule.filter_batch(reqs_to_exclude=[] if self.chunked is None else [self.chunked])
        if schedule.batch_size() < before:
            self.running.batch_is_full = False
        if schedule.is_empty():
            return
        if self.running.is_empty():
            schedule.batch_is_full = self.running.batch_is_full
            self.running = schedule
        else:
            self.running.merge_batch(schedule)

    def _drop_finished(self) -> None:
        before = self.running.batch_size()
        self.running.filter_batch()
        if self.running.batch_size() < before:
            self.running.batch_is_full = False

    def decode(self) -> list[tuple[str, int, int]]:
        """Each running request takes a token; whoever has no room for one goes back to the queue."""
        self.moved = not self.running.is_empty()
        if not self.moved:
            return []
        gone: list[Any] = []
        before = self.running.batch_size()
        if self.running.check_decode_mem():
            self.ratio.decay_step()
        else:
            back, self.ratio.current, gone = self.running.retract_decode()
            if self.running.batch_size() < before:
                self.running.batch_is_full = False
            self.waiting += back
            for request in back:
                del self.admitted[request.rid], self.prefilled[request.rid]
        if not self.running.is_empty():
            self._or_out_of_memory(self.running.prepare_for_decode)
            for request in self.running.reqs:
                self._take_token(request)
            gone += [request for request in self.running.reqs if request.finished()]
        for request in gone:
            self._leave(request, keep=True)
        return []

    def _take_token(self, request: Any) -> None:
        first = self.segments.setdefault(f"output of {request.rid}", len(self.segments)) * SEGMENT_TOKENS
        request.output_ids.append(first + len(request.output_ids))
        if self.unified:
            request.update_finish_state()

    def _settle(self) -> None:
        """Copies to and from the host that are done let go of their locks."""
        if self.tree.cache_controller is not None:
            self.tree.check_hicache_events()

    # --- outsiders

    def _take(self, tokens: int) -> Any:
        evict_from_tree_cache(self.tree, tokens)
        return self.allocator.alloc(tokens)

    def cached(self, tier: str, prompt: Any, locked: bool) -> None:
        """Somebody who has gone computed this prompt; `locked`: he has not gone."""
        ids = self._ids(prompt)
        ids = ids[: len(ids) // self.page * self.page]
        if not ids:
            return
        if tier == "device":
            self._cached_on_device(ids, locked)
        elif self.tree.cache_controller is not None:
            self._cached_on_host(ids)
        self._settle()

    def _cached_on_device(self, ids: array[int], locked: bool) -> None:
        hit = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        have = int(hit.device_prefix_len)
        lock = self.tree.lock(hit.last_device_node)
        slots = self._take(len(ids) - have)
        self.tree.unlock(lock)
        if have:
            slots = torch.cat([self.tree.path_device_indices(hit.last_device_node)[:have], slots])
        found = self.tree.insert(InsertParams(key=RadixKey(ids), value=slots, prev_prefix_len=have))
        if locked:
            self.tree.lock(found.last_device_node)

    def _cached_on_host(self, ids: array[int]) -> None:
        """The way of a prefetch from storage."""
        pool = self.tree.cache_controller.mem_pool_host
        if pool.available_size() < len(ids):
            self.tree.evict_host(len(ids) - pool.available_size())
        ids = ids[: min(len(ids), int(pool.available_size()) // self.page * self.page)]
        slots = pool.alloc(len(ids))
        hashes = [str(number) for number in range(len(ids) // self.page)]
        root = self.tree.root_node_handle()
        result = self.tree.tree_core.insert_host(root, RadixKey(ids), slots, hashes)
        self.tree._apply_cache_actions(result.cache_actions)
        pool.free(slots[: len(ids) if result.host_insert_dropped else int(result.prefix_len)])

    def hold(self, name: str, tokens: int) -> None:
        self.held.setdefault(name, []).extend(self._take(-(-tokens // self.page) * self.page).split(self.page))
        self.held_tokens[name] = self.held_tokens.get(name, 0) + tokens

    def release(self, name: str, tokens: int | None) -> None:
        held = self.held.get(name, [])
        left = self.held_tokens[name] = 0 if tokens is None else max(0, self.held_tokens.get(name, 0) - tokens)
        keep = -(-left // self.page)
        for slots in held[keep:]:
            self.allocator.free(slots)
        del held[keep:]

    # --- what can be seen

    def in_flight(self) -> list[str]:
        """On a prefill node a finished prompt keeps its slots until it is transferred."""
        return [] if self.unified else [name for name in self.admitted if name in self.prefilled]

    def has_work(self) -> bool:
        return bool(self.waiting) or self.chunked is not None or (self.unified and bool(self.prefilled))

    def moves(self) -> bool:
        return self.moved

    def pool(self) -> tuple[int, int]:
        return int(self.allocator.available_size()), int(self.tree.evictable_size())

    def needs(self) -> dict[str, int]:
        """Slots, in whole pages, that each half-done prompt has yet to get."""
        return {
            name: -(-len(request.origin_input_ids) // self.page) * self.page - int(request.kv.kv_allocated_len)
            for name, request in self.admitted.items()
            if name not in self.prefilled
        }

    def thrown_away(self) -> list[str]:
        return []

    def lost(self) -> int:
        """What is neither free, nor in the tree, nor a request's, nor taken from outside."""
        page, held = self.page, sum(map(len, self.held.values()))
        private = sum(
            -(-int(request.kv.kv_allocated_len) // page) - int(request.kv.cache_protected_len) // page
            for request in self.admitted.values()
            if request.kv.holds_kv
        )
        slots: int = self.node["pool_tokens"] // page * page
        return slots - sum(self.pool()) - int(self.tree.protected_size()) - (private + held) * page


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
