"""A vLLM of one's own: the real scheduler and its block manager, built from a node's settings."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any

import torch

from kvledger.replay import UnmodelledError
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.targets.vllm import connector, stubs
from kvledger.targets.vllm.package import (
    CacheConfig,
    DeviceConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVTransferConfig,
    MambaSpec,
    Scheduler,
    SchedulerConfig,
    StructuredOutputManager,
    VllmConfig,
)

MAX_REQUESTS = 128
"""vLLM's own default for how many may run at once; never more than the tokens of a step."""


def check_expressible(settings: NodeSettings, rules: AccountingRules) -> None:
    """UnmodelledError names the setting that vLLM has no word for."""
    page_size, chunk = settings.page_size, settings.chunked_prefill_size
    grid = rules.grid_tokens(page_size=page_size, node_align=settings.checkpoint_align)
    if grid != page_size:
        raise UnmodelledError(
            "node.checkpoint_align",
            f"{grid} is not modelled: vLLM saves states at the ends of blocks of {page_size}; use --rules upstream",
        )
    if settings.state_slots is not None:
        raise UnmodelledError("node.state_slots", f"{settings.state_slots} is not modelled: states live in blocks")
    limit = settings.max_prefill_tokens
    if limit is not None and limit < (settings.pool_tokens if chunk is None else chunk):
        raise UnmodelledError("node.max_prefill_tokens", f"{limit} is not modelled: a step has the chunk budget alone")
    if settings.mode == "unified" and not settings.mixed_chunk:
        raise UnmodelledError("node.mixed_chunk", "false is not modelled: each step of vLLM mixes prefill and decode")


def longest_tokens(settings: NodeSettings) -> int:
    """The context length of a world: the pool, and the last token of an output, which needs no slot."""
    return settings.pool_pages * settings.page_size + 1


def block_layout(settings: NodeSettings, *, align: bool) -> KVCacheConfig:
    """Attention blocks alone or, in align mode, states in the same pool. One block is vLLM's own: the null block."""
    attention = FullAttentionSpec(block_size=settings.page_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["attention"], attention)]
    if align:
        state = MambaSpec(
            block_size=settings.page_size,
            shapes=((2 * settings.page_size,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        groups.append(KVCacheGroupSpec(["state"], state))
    return KVCacheConfig(num_blocks=settings.pool_pages + 1, kv_cache_tensors=[], kv_cache_groups=groups)


def build(settings: NodeSettings, *, align: bool) -> Scheduler:
    """A scheduler with an empty pool."""
    config = _config(settings, align=align)
    return Scheduler(
        config, block_layout(settings, align=align), StructuredOutputManager(config), block_size=settings.page_size
    )


def scratch_manager(settings: NodeSettings, *, align: bool) -> KVCacheManager:
    """A block manager with an empty pool, to ask its gate."""
    return KVCacheManager(
        block_layout(settings, align=align),
        max_model_len=longest_tokens(settings),
        scheduler_block_size=settings.page_size,
        hash_block_size=settings.page_size,
        enable_caching=False,
    )


def startup_pages(settings: NodeSettings, tokens: int, *, align: bool) -> int:
    """Blocks that vLLM's check at startup wants for one request of so many tokens: its groups say how many."""
    config = copy(_config(settings, align=align))
    stubs.MODEL.install(config, tokens)
    specs = [group.kv_cache_spec for group in block_layout(settings, align=align).kv_cache_groups]
    return sum(spec.max_memory_usage_bytes(config) // spec.page_size_bytes for spec in specs)


@lru_cache(maxsize=64)
def _config(settings: NodeSettings, *, align: bool) -> VllmConfig:
    """Kept, because it takes longer than all else and nothing changes it."""
    chunk = settings.chunked_prefill_size
    budget = longest_tokens(settings) * MAX_REQUESTS if chunk is None else chunk
    config = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(
            block_size=settings.page_size,
            enable_prefix_caching=True,
            mamba_cache_mode="align" if align else "none",
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=longest_tokens(settings),
            is_encoder_decoder=False,
            max_num_batched_tokens=budget,
            max_num_seqs=min(MAX_REQUESTS, budget),
            enable_chunked_prefill=chunk is not None,
            policy="priority" if settings.schedule_policy == "priority" else "fcfs",
            async_scheduling=False,
        ),
        kv_transfer_config=_transfers(settings),
    )
    config.cache_config.num_gpu_blocks = settings.pool_pages + 1
    stubs.MODEL.install(config, longest_tokens(settings))
    return config


def _transfers(settings: NodeSettings) -> KVTransferConfig | None:
    """A connector where there is a host tier, or a decode node somewhere else."""
    sends = settings.mode == "prefill"
    if not sends and settings.host_pages == 0:
        return None
    extra: dict[str, Any] = {"page_size": settings.page_size, "host_pages": settings.host_pages, "sends": sends}
    return KVTransferConfig(
        kv_connector=connector.HostTier.__name__,
        kv_connector_module_path=connector.__name__,
        kv_role="kv_both" if sends else "kv_consumer",
        kv_connector_extra_config=extra,
    )
