"""What sglang 0.5.20 calls differently: prefixes as tensors, lock receipts on the request, offsets on the adder itself.

It has no shortest prefill first, and so no continuation that is held back.
"""

from __future__ import annotations

from array import array
from types import MappingProxyType
from typing import Any

from kvledger.targets.sglang.engine import Engine, Figures, name_of


class Engine0520(Engine):
    """sglang 0.5.20 and 0.5.21."""

    # its paged allocator always launches a Triton kernel; Triton's own interpreter runs that on a CPU
    environment = MappingProxyType({"TRITON_INTERPRET": "1"})
    features = Engine.features - {"shortest-prefill-first"}

    def prefix_tokens(self, request: Any) -> int:
        return len(request.prefix_indices)

    def chunk_end(self, request: Any) -> int:
        return 0 if request.extend_range is None else int(request.extend_range.end)

    def drop_from(self, batch: Any, requests: list[Any]) -> None:
        batch.filter_batch(chunked_req_to_exclude=requests)

    def limit_continuation(self, adder: Any, policy: Any, chunked: Any, waiting: list[Any], page_size: int) -> None:
        """Nothing is held back."""

    def page_overhead(self, adder: Any) -> int:
        return int(adder.page_size)

    def figures(self, adder: Any) -> Figures:
        total, current = adder.rem_total_token_offset, adder.cur_rem_token_offset
        return Figures(int(adder.rem_total_tokens + total), int(total), int(current))

    def charge_later(self, adder: Any, tokens: int) -> None:
        adder.rem_total_token_offset += tokens

    def guarded(self, allocator: Any) -> Any:
        """Its kernel runs before pages are counted: too few, and it reads past their list, which ends a CPU process.

        The same count, taken first, gives the same answer.
        """
        count = name_of("sglang.srt.utils:get_num_new_pages")
        allocate = allocator.alloc_extend

        def alloc_extend(prefix: Any, prefix_cpu: Any, seq: Any, seq_cpu: Any, *more: Any, **named: Any) -> Any:
            allocator.merge_and_sort_free()
            needed_pages = count(seq_lens=seq_cpu, page_size=allocator.page_size, prefix_lens=prefix_cpu)
            if needed_pages > len(allocator.free_pages):
                return None
            return allocate(prefix, prefix_cpu, seq, seq_cpu, *more, **named)

        allocator.alloc_extend = alloc_extend
        return allocator

    def checkpoint(self, tree: Any, request: Any) -> None:
        self.common.maybe_cache_unfinished_req(
            request, tree, chunked=self.chunk_end(request) < self.fill_tokens(request)
        )

    def release(self, tree: Any, request: Any, *, publish: bool) -> None:
        self.common.release_kv_cache(request, tree, is_insert=publish)

    def lock(self, tree: Any, node: Any) -> Any:
        return node, tree.inc_lock_ref(node).to_dec_params()

    def unlock(self, tree: Any, lock: Any) -> None:
        node, receipt = lock
        tree.dec_lock_ref(node, receipt)

    def locked_nodes(self, tree: Any, requests: list[Any]) -> list[Any]:
        nodes = [request.last_node for request in requests if request.lock_receipt is not None]
        for pending in (*tree.ongoing_write_through.values(), *tree.ongoing_load_back.values()):
            nodes.append(pending[0])
        return nodes

    def node_slots(self, tree: Any, node: Any) -> Any:
        return tree.tree_core.collect_full_device_indices(node, tree.root_node_handle())

    def prefix_slots(self, tree: Any, request: Any) -> Any:  # noqa: ARG002 - the request has them itself
        return request.prefix_indices

    def hit_of(self, tree: Any, ids: array[int]) -> tuple[int, Any]:
        match = tree.match_prefix(self.prefix.MatchPrefixParams(key=self.key_class(ids)))
        return len(match.device_indices), match.last_device_node

    def insert(self, tree: Any, ids: array[int], slots: Any, prefix_tokens: int) -> Any:
        """Its insert says nothing of where it ended: a match does."""
        tree.insert(self.prefix.InsertParams(key=self.key_class(ids), value=slots, prev_prefix_len=prefix_tokens))
        return self.hit_of(tree, ids)[1]
