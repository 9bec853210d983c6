"""What a report to sglang says beside the figures. Needs no sglang."""

from __future__ import annotations

from kvledger.targets.about import About, command_line
from kvledger.trace import Trace

WHOSE_CODE = (
    "sglang's own code, unchanged: PrefillAdder (gate, cut, charge, resumption), SchedulePolicy, ScheduleBatch "
    "(prepare, mix, decode check, retraction), the token allocator and the prefix cache. Not its own: the loop that "
    "asks the adder, round for round, which kvledger has written from its documented behaviour, and the model, in "
    "whose place each chunk counts as computed. A chunk is put into the prefix cache at the end of its round, and "
    "batches do not overlap."
)
OUTPUTS = (
    "Decodes cost memory in whole pages too: a running request is charged the tokens that it may still make, times an "
    "estimate, and takes a page whenever it goes beyond its last one."
)

ALIGN = "the scheduler's truncation_align_size, which follows from the attention backend and its environment variable"


def about(trace: Trace, verdict: str) -> About:
    """For any verdict the same, so far: nothing that sglang does not promise is asked of it."""
    del verdict
    unified = trace.node.mode == "unified"
    align = trace.accounting_rules.truncation_align
    beside = f"The truncation alignment of {align} tokens is {ALIGN}." if align is not None else None
    return About(WHOSE_CODE, flags(trace), beside, (OUTPUTS,) if unified else ())


def flags(trace: Trace) -> str:
    """The node's settings as sglang's server takes them; it aligns cuts only where inference is deterministic."""
    node, align = trace.node, trace.accounting_rules.truncation_align
    page_size, pool_tokens = node.page_size, node.pool_pages * node.page_size
    policy = "fcfs" if node.schedule_policy == "priority" else node.schedule_policy
    host = node.host_tokens is None or node.host_tokens >= page_size
    ratio = None if not host or node.host_tokens is None else f"{node.host_tokens / pool_tokens:.3g}"
    return command_line(
        (
            ("--page-size", page_size),
            ("--chunked-prefill-size", node.chunked_prefill_size or -1),
            ("--max-prefill-tokens", node.max_prefill_tokens),
            ("--max-total-tokens", pool_tokens),
            ("--schedule-policy", policy),
            ("--enable-priority-scheduling", True if node.schedule_policy == "priority" else None),
            ("--enable-mixed-chunk", True if node.mixed_chunk else None),
            ("--disaggregation-mode", "prefill" if node.mode == "prefill" else None),
            ("--enable-hierarchical-cache", True if host else None),
            ("--hicache-ratio", ratio),
            ("--enable-deterministic-inference", True if align is not None else None),
            ("--disable-overlap-schedule", True),
        )
    )
