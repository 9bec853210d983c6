"""The installed sglang, imported once a process, behind the few names and calls that a world needs of it.

An `Engine` speaks one range of releases; what another range calls differently is a subclass in `versions.py`.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from kvledger.request import Output
from kvledger.settings import NodeSettings

UNLIMITED_TOKENS = 2**40
"""Stands for "no limit" where sglang wants a number."""
VOCABULARY = 2**62
"""Above every token id that a prompt is given here."""


def name_of(path: str) -> Any:
    """`package.module:attribute` as the object."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Figures(NamedTuple):
    """A prefill budget's own figures, in tokens."""

    baseline: int
    total_offset: int
    current_offset: int


class Engine:
    """sglang 0.5.22 and 0.5.23."""

    environment: Mapping[str, str] = MappingProxyType({})
    """What must be in the environment before sglang is imported."""
    features = frozenset({"unified", "mixed_chunk", "lpm", "shortest-prefill-first", "priority"})

    def __init__(self, version: str) -> None:
        self.version = version
        self.torch: Any = importlib.import_module("torch")
        srt = "sglang.srt"
        self.server_args_class = name_of(f"{srt}.server_args:ServerArgs")
        self.adder_class = name_of(f"{srt}.managers.schedule_policy:PrefillAdder")
        self.results = name_of(f"{srt}.managers.schedule_policy:AddReqResult")
        self.policy_class = name_of(f"{srt}.managers.schedule_policy:SchedulePolicy")
        self.batches = importlib.import_module(f"{srt}.managers.schedule_batch")
        self.cache_class = name_of(f"{srt}.mem_cache.unified_radix_cache:UnifiedRadixCache")
        self.cache_params = name_of(f"{srt}.mem_cache.cache_init_params:CacheInitParams")
        self.pools = importlib.import_module(f"{srt}.mem_cache.memory_pool")
        self.allocators = importlib.import_module(f"{srt}.mem_cache.allocator")
        self.common = importlib.import_module(f"{srt}.mem_cache.common")
        self.prefix = importlib.import_module(f"{srt}.mem_cache.base_prefix_cache")
        self.key_class = name_of(f"{srt}.mem_cache.radix_cache:RadixKey")
        self.full_component = self._full_component()
        self.sampling_class = name_of(f"{srt}.sampling.sampling_params:SamplingParams")
        self.no_speculation = name_of(f"{srt}.speculative.spec_info:SpeculativeAlgorithm").NONE
        self.model = SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False)
        self._configured: dict[str, Any] = {}
        self.server_args = self._publish()

    # --- configuration

    def _full_component(self) -> Any:
        return name_of("sglang.srt.mem_cache.unified_cache.components:ComponentType").FULL

    def _publish(self) -> Any:
        args = self.server_args_class(
            model_path="dummy", device="cpu", attention_backend="torch_native", disable_overlap_schedule=True
        )
        name_of("sglang.srt.server_args:set_global_server_args_for_scheduler")(args)
        return args

    def configure(self, settings: NodeSettings, host_ratio: float) -> None:
        """Publish what this node's settings are in server arguments, as far as they are read from there."""
        policy = "fcfs" if settings.schedule_policy == "priority" else settings.schedule_policy
        wanted = {
            "page_size": settings.page_size,
            "schedule_policy": policy,
            "enable_priority_scheduling": settings.schedule_policy == "priority",
            "disaggregation_mode": "prefill" if settings.mode == "prefill" else "null",
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
            "hicache_write_policy": "write_through",
            "hicache_ratio": host_ratio,
        }
        changed = {name: value for name, value in wanted.items() if self._configured.get(name) != value}
        if changed:
            self._override(changed)
            self._configured |= changed

    def _override(self, fields: dict[str, Any]) -> None:
        name_of("sglang.srt.runtime_context:get_context")().override("kvledger", **fields)

    def ratio_tracker(self) -> Any:
        """What sglang expects a running request's output to come to, as a share of its limit."""
        path = "sglang.srt.managers.scheduler_components.new_token_ratio_tracker:NewTokenRatioTracker"
        return name_of(path).from_config()

    # --- requests and batches

    def request(self, rid: str, ids: array[int], output: Output) -> Any:
        sampling = self.sampling_class(max_new_tokens=output.max_new_tokens, ignore_eos=output.ignore_eos)
        sampling.normalize(None)
        return self.batches.Req(rid, "", ids, sampling, priority=output.priority)

    def batch(self, world: Any, requests: list[Any], chunked: Any) -> Any:
        return self.batches.ScheduleBatch.init_new(
            requests, world.rows, world.allocator, world.tree, self.model, False, self.no_speculation,
            chunked_req=chunked,
        )  # fmt: skip

    def drop_from(self, batch: Any, requests: list[Any]) -> None:
        """Take these out of a batch, and those that are finished."""
        batch.filter_batch(reqs_to_exclude=requests)

    def empty_batch(self, is_full: bool = False) -> Any:
        return self.batches.ScheduleBatch(reqs=[], batch_is_full=is_full)

    def policy(self, tree: Any, settings: NodeSettings, *, host: bool) -> Any:
        """The order of the queue; `priority` is first come, first served among equals."""
        by_priority = settings.schedule_policy == "priority"
        name = "fcfs" if by_priority else settings.schedule_policy
        return self.policy_class(name, tree, host, by_priority, False)

    def match(self, tree: Any, request: Any) -> None:
        """Find the request's prefix, as the scheduler does right before it asks for admission."""
        request.init_next_round_input(tree)

    def fill_tokens(self, request: Any) -> int:
        """What a prefill of the request computes or finds: its prompt, and after a retraction its output too."""
        return max(len(request.full_untruncated_fill_ids), len(request.origin_input_ids))

    def prefix_tokens(self, request: Any) -> int:
        """What of a request is on the device: its hit, what was loaded back, what it has computed."""
        return int(request.prefix_len)

    def chunk_end(self, request: Any) -> int:
        """Where the chunk that was just granted ends, in tokens of the prompt."""
        return int(request.extend_end)

    def limit_continuation(self, adder: Any, policy: Any, chunked: Any, waiting: list[Any], page_size: int) -> None:
        """Shortest prefill first keeps budget back from the half-done request for shorter ones."""
        adder.chunked_req_limit = policy.shortest_prefill_chunk_limit(
            chunked, waiting, adder.rem_chunk_tokens or 0, page_size
        )

    def ask(self, adder: Any, request: Any, has_chunked: bool, truncation_align: int | None) -> Any:
        """The adder's answer about a waiting request."""
        return adder.add_one_req(request, has_chunked_req=has_chunked, truncation_align_size=truncation_align)

    def page_overhead(self, adder: Any) -> int:
        """What the adder charges each request beyond its pages."""
        return int(adder.per_req_token_overhead)

    def figures(self, adder: Any) -> Figures:
        budget = adder.memory_budget
        return Figures(
            int(budget.remaining_total + budget.total_offset), int(budget.total_offset), int(budget.current_offset)
        )

    def charge_later(self, adder: Any, tokens: int) -> None:
        """Promise tokens of later rounds: only the openly named variant of the adder does."""
        adder.memory_budget.total_offset += tokens

    def checkpoint(self, tree: Any, request: Any) -> None:
        """Publish what a running request has computed in the prefix cache."""
        self.common.checkpoint_kv_cache(request, tree)

    def release(self, tree: Any, request: Any, *, publish: bool) -> None:
        self.common.release_kv_cache(request, tree, checkpoint=publish)

    def finished_by_length(self, request: Any) -> None:
        request.finished_reason = self.batches.FINISH_LENGTH(length=0)

    def finished_by_abort(self, request: Any) -> None:
        request.finished_reason = self.batches.FINISH_ABORT("aborted")

    # --- the prefix cache

    def guarded(self, allocator: Any) -> Any:
        """A paged allocator that does not read beyond its free list when that is too short."""
        return allocator

    def cache(self, rows: Any, allocator: Any, settings: NodeSettings, *, host: bool) -> Any:
        params = self.cache_params(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=settings.page_size,
            chunked_prefill_size=settings.chunked_prefill_size,
        )
        params.tree_components = (self.full_component,)
        cache = self.cache_class(params)
        if host:
            cache.init_hicache(self.server_args, params)
            self._forget_at_exit(cache)
        return cache

    def _forget_at_exit(self, cache: Any) -> None:
        """A world is gone when its example is; its cache must not wait for the end of the process."""
        atexit = importlib.import_module("atexit")
        atexit.unregister(cache.shutdown)

    def lock(self, tree: Any, node: Any) -> Any:
        return tree.lock(node)

    def unlock(self, tree: Any, lock: Any) -> None:
        tree.unlock(lock)

    def locked_nodes(self, tree: Any, requests: list[Any]) -> list[Any]:
        """Nodes down to which somebody inside holds a lock: requests, and copies from and to the host under way."""
        nodes = [request.lock.node for request in requests if request.lock is not None]
        for pending in (*tree.ongoing_write_through.values(), *tree.ongoing_load_back.values()):
            nodes.append(pending[0])
        return nodes

    def node_slots(self, tree: Any, node: Any) -> Any:
        """Device slots from the root down to a node, as a tensor."""
        return tree.path_device_indices(node)

    def cached_slots(self, tree: Any) -> Any:
        return tree.all_values_flatten()

    def prefix_slots(self, tree: Any, request: Any) -> Any:
        return tree.prefix_device_indices(request)

    def hit_of(self, tree: Any, ids: array[int]) -> tuple[int, Any]:
        """What of a token run that no request stands for is on the device, and the node that it ends in."""
        match = tree.match_prefix(self.prefix.MatchPrefixParams(key=self.key_class(ids)))
        return int(match.device_prefix_len), match.last_device_node

    def insert(self, tree: Any, ids: array[int], slots: Any, prefix_tokens: int) -> Any:
        result = tree.insert(
            self.prefix.InsertParams(key=self.key_class(ids), value=slots, prev_prefix_len=prefix_tokens)
        )
        return result.last_device_node

    def insert_on_host(self, tree: Any, ids: array[int], host_slots: Any, hashes: list[str]) -> int:
        """The way of a prefetch from storage. Says how many of the host slots were there already or not wanted."""
        result = tree.tree_core.insert_host(tree.root_node_handle(), self.key_class(ids), host_slots, hashes)
        tree._apply_cache_actions(result.cache_actions)
        return len(ids) if result.host_insert_dropped else int(result.prefix_len)

    def host_pool(self, tree: Any) -> Any:
        return tree.cache_controller.mem_pool_host

    def settle(self, tree: Any) -> None:
        """What an idle scheduler does between rounds: copies that are done let go of their locks."""
        if tree.cache_controller is not None:
            tree.check_hicache_events()

    def start_loads(self, tree: Any) -> None:
        if tree.cache_controller is not None:
            tree.ready_to_load_host_cache()

    def evict_for(self, tree: Any, tokens: int) -> None:
        self.common.evict_from_tree_cache(tree, tokens)

    def finish_in_cache(self, tree: Any, request: Any, *, aborted: bool) -> None:
        outcome = self.prefix.CacheRequestOutcome
        with suppress(AttributeError):  # named so from 0.5.20 on
            tree.finish(request.cache_request_handle, outcome.ABORT if aborted else outcome.SUCCESS)
