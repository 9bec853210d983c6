"""What a report to vLLM says beside the figures. Needs no vLLM."""

from __future__ import annotations

from kvledger.settings import NodeSettings
from kvledger.targets.about import About, command_line
from kvledger.trace import Trace

MAX_REQUESTS = 128
WHOSE_CODE = (
    "vLLM's own code, unchanged: the v1 Scheduler, KVCacheManager, BlockPool and Request. Not its own: the loop that "
    "calls schedule and update_from_output, which kvledger has written; the model, in whose place a new token is "
    "answered; and the KV connector, where there is one."
)
HYBRID = (
    "The model is a hybrid one: one group of attention layers and one of recurrent (Mamba) layers, with prefix caching "
    "and mamba_cache_mode align. Blocks for recurrent states come from the same pool: besides a block for each page of "
    "its prompt, a request holds one block of state after its first chunk and two from the second on. So less is free "
    "after a round than the chunks alone would leave."
)
PREEMPTION = (
    "This is by design in vLLM: its gate checks and reserves nothing, and where blocks run out it preempts a request, "
    "which later computes again what the prefix cache no longer has. What is asked here is the strict property that "
    "an admitted prefill is never preempted, which vLLM does not promise; it is no bug unless you want that property."
)
STRICT = (
    "an admitted prompt keeps its blocks until its prefill is done (the strict property; vLLM does not promise it and "
    "preempts by design)"
)
KNOWN = "The symptom, a prompt near the size of the pool that is prefilled again and again, is public: vllm#52520."


def about(trace: Trace, verdict: str, *, align: bool, startup_blocks: int | None = None) -> About:
    """`align`: of a hybrid model in align mode. `startup_blocks`: what vLLM's check at startup wants for the longest
    request of the trace, None if nobody asked it."""
    notes = [HYBRID] if align else []
    if startup_blocks is not None:
        notes.append(_startup(trace.node, startup_blocks))
    if align and verdict == "stuck":
        notes.append(KNOWN)
    strict = verdict == "admitted-finishes"
    if strict:
        notes.append(PREEMPTION)
    node = trace.node
    connector = node.mode == "prefill" or node.host_tokens is None or node.host_tokens >= node.page_size
    return About(
        WHOSE_CODE,
        flags(trace, align=align),
        "A KV connector is configured too; it is kvledger's own." if connector else None,
        tuple(notes),
        STRICT if strict else None,
    )


def _startup(node: NodeSettings, blocks: int) -> str:
    asked = (
        f"vLLM's check at startup wants {blocks} blocks for a context as long as the longest request here; the pool "
        f"has {node.pool_pages} besides the null block"
    )
    if blocks <= node.pool_pages:
        return f"{asked}, so a server starts with this configuration."
    return (
        f"{asked}, so this version refuses to start a server with it, and this run drives the scheduler without that "
        "check. A single prompt cannot meet this on a server, then; what can be met there is the same count by the "
        "gate with other requests in the pool."
    )


def flags(trace: Trace, *, align: bool) -> str:
    """The node's settings as vLLM's server takes them."""
    node = trace.node
    chunk = node.chunked_prefill_size
    return command_line(
        (
            ("--block-size", node.page_size),
            ("--num-gpu-blocks-override", node.pool_pages + 1),
            ("--max-model-len", node.pool_pages * node.page_size + 1),
            ("--max-num-batched-tokens", chunk),
            ("--max-num-seqs", min(MAX_REQUESTS, chunk or MAX_REQUESTS)),
            ("--no-enable-chunked-prefill", None if chunk else True),
            ("--enable-prefix-caching", True),
            ("--mamba-cache-mode", "align" if align else None),
            ("--scheduling-policy", "priority" if node.schedule_policy == "priority" else "fcfs"),
            ("--no-async-scheduling", True),
        )
    )
