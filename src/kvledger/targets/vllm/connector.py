"""The connector of a vLLM world: a host tier that loads asynchronously, and transfers that hold a finished prompt.

vLLM decides; this is only the outside. A load takes its blocks at once and is done a round later; with `sends`, as on
a prefill node, the blocks of a finished prompt stay until the outside says that they have been sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from kvledger.targets.vllm.package import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    Request,
    RequestStatus,
    SupportsHMA,
)

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
