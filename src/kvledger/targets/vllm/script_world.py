"""vLLM's own scheduler, driven by hand: the `World` of a stand-alone script. Sizes are tokens.

Nothing of kvledger is needed here; what is imported of it are modules whose text goes before this one.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from kvledger.targets.vllm.connector import HostTier
from kvledger.targets.vllm.package import (
    CacheConfig,
    DeviceConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVTransferConfig,
    MambaSpec,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StructuredOutputManager,
    VllmConfig,
    get_request_block_hasher,
    sha256,
)

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
