"""vLLM's v1 scheduler as a target. It decides, allocates, caches and preempts; here it is driven and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from kvledger.adder import AddReqResult
from kvledger.events import Submit
from kvledger.invariants import Invariant
from kvledger.node import Watcher
from kvledger.pool import OutOfPages
from kvledger.record import Decision, DecisionKind, RoundRecord, Snapshot
from kvledger.request import Output, Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.targets.about import About
from kvledger.targets.vllm import about, checks, views, world
from kvledger.targets.vllm.connector import HostTier
from kvledger.targets.vllm.contents import Contents
from kvledger.targets.vllm.package import (
    KVConnectorOutput,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
    get_request_block_hasher,
    sha256,
)
from kvledger.targets.vllm.space import SPACE
from kvledger.targets.vllm.standalone import PACKAGES, world_text
from kvledger.targets.vllm.versions import release
from kvledger.trace import Trace

SEGMENT_BITS = 29
"""A token's number: which segment, then where in it. A segment has at most 2**28 tokens."""
FIRST_OUTPUT = 1 << 60
"""Numbers of tokens that were made, not given; none is made twice."""


class VllmTarget:
    """The installed vLLM, attention layers alone. Sizes in tokens; pages are its blocks without the null block.

    It checks a whole prompt against the pool but reserves nothing, and takes the blocks of whom it cannot serve: a
    prefill that is thrown away is told as `rolled_back`, and counted.
    """

    capabilities = frozenset({"batches", "counts", "pages", "optimistic", "may-preempt"})
    features = frozenset({"unified", "mixed_chunk", "priority"})
    foreign = True
    ignores = frozenset({"rules"})
    space = SPACE
    shrink_seconds = 30.0
    align = False
    packages = PACKAGES

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> None:
        world.check_expressible(settings, rules)
        self.settings = settings
        self.watcher = watcher
        self.version = release()
        self.scheduler = world.build(settings, align=self.align)
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.connector: HostTier | None = self.scheduler.connector
        self.rounds = 0
        self.rolled_back = 0
        self.prompt_tokens: dict[str, int] = {}
        self.held: dict[str, list[Any]] = {}
        self.held_tokens: dict[str, int] = {}
        self.pinned: list[Any] = []
        self.contents = Contents(settings.page_size)
        self._hasher = get_request_block_hasher(settings.page_size, sha256)
        self._segments: dict[str, int] = {}
        self._numbers = count()
        self._gate = world.scratch_manager(settings, align=self.align)
        self._prefilling: set[str] = set()
        self._decoding: set[str] = set()

    @classmethod
    def standalone(cls, trace: Trace) -> str:  # noqa: ARG003 - a trace of any kind is played on the same world
        """A script's `World`: see kvledger.replay.Target."""
        return world_text(align=cls.align)

    @classmethod
    def about(cls, trace: Trace, verdict: str) -> About:
        """What a report says beside the figures: see kvledger.targets.about."""
        blocks = None
        asked = [e.prompt.tokens + e.output.max_new_tokens - 1 for e in trace.events if isinstance(e, Submit)]
        if cls.align and asked:
            blocks = world.startup_pages(trace.node, max(asked), align=True)
        return about.about(trace, verdict, align=cls.align, startup_blocks=blocks)

    # --- what arrives from outside

    def submit(self, rid: str, prompt: Prompt, output: Output | None = None) -> str | None:
        """Queue a request, or say why it could never be admitted: vLLM's own gate is asked on an empty pool."""
        output = output or Output()
        tokens = prompt.tokens + output.max_new_tokens - 1
        if not self._passes_gate(tokens):
            return f"{tokens} tokens do not pass vLLM's gate on an empty pool of {self.settings.pool_pages} blocks"
        if not self._passes_startup(tokens):
            return f"vLLM would not start with a context of {tokens} tokens and {self.settings.pool_pages} blocks"
        request = self._request(rid, prompt, output)
        self.prompt_tokens[rid] = prompt.tokens
        self.scheduler.add_request(request)
        return None

    def transferred(self, rid: str) -> None:
        if self.connector is not None and rid in self.connector.sending:
            self._report(self.connector.sent(rid))

    def abort(self, rid: str) -> None:
        """End a request wherever it is. Blocks that a load is writing to stay until it is done; a transfer ends."""
        self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
        self._forget(rid)
        self.transferred(rid)

    def finish(self, rid: str) -> None:
        if rid in self._decoding:
            self.scheduler.finish_requests(rid, RequestStatus.FINISHED_STOPPED)
            self._forget(rid)

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        """Computed by somebody who has left, or who stays."""
        page_size = self.settings.page_size
        tokens = prompt.tokens // page_size * page_size
        if not tokens:
            return
        self.manager.new_step_starts()  # a state that was cached in this step would count as not there yet
        # a hit never has the last token, so one more than the pages makes all of them a hit
        visitor = self._request(f"visitor {next(self._numbers)}", prompt, Output(), more_tokens=1)
        visitor_blocks, hit_tokens = self.version.hit(self.manager, visitor)
        if hit_tokens < tokens:
            new = self.manager.allocate_slots(visitor, tokens - hit_tokens, hit_tokens, visitor_blocks)
            if new is None:
                raise OutOfPages(tokens - hit_tokens, self._free_tokens(cached=False), self._free_tokens(cached=True))
            self._wrote(visitor, hit_tokens, tokens)
            self.manager.free(visitor)
        if locked:
            blocks, _ = self.version.hit(self.manager, visitor)
            for group in blocks.blocks:
                self.pool.touch(group)
                self.pinned += [block for block in group if not block.is_null]

    def cache_on_host(self, prompt: Prompt) -> None:
        if self.connector is not None and self.connector.host_pages != 0:
            pages = prompt.tokens // self.settings.page_size
            visitor = self._request(f"visitor {next(self._numbers)}", prompt, Output())
            self.connector.keep(visitor.block_hashes[:pages])

    def hold(self, name: str, tokens: int) -> None:
        pages = -(-tokens // self.settings.page_size)
        if pages > self.pool.get_num_free_blocks():
            raise OutOfPages(tokens, self._free_tokens(cached=False), self._free_tokens(cached=True))
        self.held.setdefault(name, []).extend(self.pool.get_new_blocks(pages))
        self.held_tokens[name] = self.held_tokens.get(name, 0) + tokens

    def release(self, name: str, tokens: int | None = None) -> None:
        """Give held slots back: all of them, or `tokens`, keeping whole pages for the rest."""
        held = self.held.get(name, [])
        left = 0 if tokens is None else max(0, self.held_tokens.get(name, 0) - tokens)
        self.held_tokens[name] = left
        keep_pages = -(-left // self.settings.page_size)
        self.pool.free_blocks(held[keep_pages:])
        del held[keep_pages:]

    # --- one step

    def run_round(self) -> RoundRecord:
        return self._step(prefill=True)

    def run_decode(self) -> RoundRecord:
        """The step that vLLM calls throttled, if anybody decodes: nothing else may run in it."""
        return self._step(prefill=not self._decoding)

    def _step(self, *, prefill: bool) -> RoundRecord:
        self.rounds += 1
        free_before = self.pool.get_num_free_blocks() * self.settings.page_size
        plan = self.version.schedule(self.scheduler, prefill=prefill)
        retracted, rolled_back = self._preempted(plan)
        decisions, decoded, sampled = self._ran(plan)
        self._fill(plan)
        loading = tuple(self.connector.loading) if self.connector is not None else ()
        loads = self.connector.round_ends() if self.connector is not None else None
        self._fill_loaded(loads)
        self.scheduler.update_from_output(plan, self._sampled(plan, sampled, loads))
        finished = tuple(rid for rid in sampled if rid not in self.scheduler.requests)
        self._decoding.update(sampled)
        for rid in sampled:
            if rid not in self.scheduler.requests or self.scheduler.requests[rid].is_finished():
                self._forget(rid)
        for decision in decisions:
            self.watcher.before_decision()
            self.watcher.after_decision(decision)
        return self._record(
            free_before,
            plan,
            decisions=tuple(decisions),
            decoded=decoded,
            finished=finished if self.settings.mode == "unified" else (),
            retracted=retracted,
            rolled_back=rolled_back,
            loading=loading,
        )

    def _preempted(self, plan: SchedulerOutput) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Who lost their blocks in this step: those that decoded, and those whose prefill was half done."""
        lost = [rid for rid in self.prompt_tokens if rid in (plan.preempted_req_ids or ())]
        retracted = tuple(rid for rid in lost if rid in self._decoding)
        rolled_back = tuple(rid for rid in lost if rid not in self._decoding)
        self._prefilling -= set(lost)
        self._decoding -= set(lost)
        self.rolled_back += len(rolled_back)
        return retracted, rolled_back

    def _ran(self, plan: SchedulerOutput) -> tuple[list[Decision], tuple[str, ...], list[str]]:
        """Chunks of this step, who took a token by decoding, and all that a token is sampled for."""
        decisions: list[Decision] = []
        decoded: list[str] = []
        sampled: list[str] = []
        budget = self._budget()
        for rid, tokens in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[rid]
            budget -= tokens
            if request.num_computed_tokens == request.num_tokens:
                sampled.append(rid)
            if rid in self._decoding:
                decoded.append(rid)
            else:
                decisions.append(self._decision(request, tokens, budget))
        return decisions, tuple(decoded), sampled

    def _fill(self, plan: SchedulerOutput) -> None:
        """Blocks that were free before this step and taken in it hold nothing until its chunks are computed."""
        self.contents.gone(self.pool.free_block_queue.get_all_free_blocks())
        for rid, tokens in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[rid]
            self._wrote(request, request.num_computed_tokens - tokens, request.num_computed_tokens)

    def _fill_loaded(self, loads: KVConnectorOutput | None) -> None:
        for rid in (loads.finished_recving or ()) if loads is not None else ():
            request = self.scheduler.requests.get(rid)
            if request is not None and self.connector is not None:
                start = self.connector.load_starts[rid]
                self._wrote(request, start, start + self.connector.loaded_tokens[rid])

    def _wrote(self, request: Request, start: int, end: int) -> None:
        self.contents.wrote(request, self.manager.get_blocks(request.request_id).blocks[0], start, end)

    def _decision(self, request: Request, tokens: int, budget: int) -> Decision:
        """A chunk. A request that was sent back while it decoded computes its output again like a prompt."""
        rid, end = request.request_id, request.num_computed_tokens
        start = end - tokens
        loaded = 0
        kind: DecisionKind = "resumed"
        if rid not in self._prefilling:
            kind = "whole" if end == request.num_tokens else "truncated"
            loaded = self.connector.loaded_tokens.pop(rid, 0) if self.connector is not None else 0
        if end == request.num_tokens:
            self._prefilling.discard(rid)
        else:
            self._prefilling.add(rid)
        free = self.pool.get_num_free_blocks() * self.settings.page_size
        return Decision(
            request=rid,
            kind=kind,
            prompt_tokens=request.num_tokens,
            prefix_tokens=start - loaded,
            start=start,
            end=end,
            load_back=loaded,
            baseline=free,
            rem_total_tokens=free,
            cur_rem_tokens=free,
            rem_chunk_tokens=budget,
            rem_input_tokens=None,
        )

    def _sampled(self, plan: SchedulerOutput, sampled: list[str], loads: KVConnectorOutput | None) -> ModelRunnerOutput:
        """What a model would answer: a new token for each request that has computed all it has."""
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={rid: index for index, rid in enumerate(names)},
            sampled_token_ids=[[FIRST_OUTPUT + next(self._numbers)] if rid in sampled else [] for rid in names],
            kv_connector_output=loads,
        )

    def _record(self, free_before: int, plan: SchedulerOutput, **facts: Any) -> RoundRecord:
        free, evictable = self._free_tokens(cached=False), self._free_tokens(cached=True)
        return RoundRecord(
            round=self.rounds,
            baseline=free_before,
            rem_total_tokens=free_before,
            cur_rem_tokens=free_before,
            rem_chunk_tokens=self._budget() - plan.total_num_scheduled_tokens,
            budget_state=AddReqResult.CONTINUE,
            batch_is_full=False,
            promises=(),
            free=free,
            evictable=evictable,
            protected=self.settings.pool_pages * self.settings.page_size - free - evictable,
            **facts,
        )

    # --- what the outside may see

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def in_flight(self) -> tuple[str, ...]:
        return tuple(self.connector.sending) if self.connector is not None else ()

    def snapshot(self) -> Snapshot:
        return views.snapshot_of(self)

    @property
    def invariants(self) -> tuple[Invariant, ...]:
        return checks.invariants_of(self)

    def requests(self) -> Iterator[tuple[Request, list[Any]]]:
        """Every request that vLLM knows, and its blocks in all groups but the null one."""
        for rid, request in self.scheduler.requests.items():
            groups = self.manager.get_blocks(rid).blocks
            yield request, [block for group in groups for block in group if not block.is_null]

    def pins(self) -> Counter[int]:
        return Counter(block.block_id for block in self.pinned)

    # --- leaves

    def _passes_gate(self, tokens: int) -> bool:
        if tokens > world.longest_tokens(self.settings):
            return False
        probe = self._plain_request("probe", [0] * tokens, Output())
        fits = self._gate.allocate_slots(probe, min(tokens, self.settings.page_size), full_sequence_must_fit=True)
        self._gate.free(probe)
        return fits is not None

    def _passes_startup(self, tokens: int) -> bool:  # noqa: ARG002 - the gate is enough where there is one group
        return True

    def _request(self, rid: str, prompt: Prompt, output: Output, *, more_tokens: int = 0) -> Request:
        tokens: list[int] = []
        for segment, length in prompt.segments:
            first = self._segments.setdefault(segment, len(self._segments)) << SEGMENT_BITS
            tokens += range(first, first + length)
        tokens += [FIRST_OUTPUT + next(self._numbers) for _ in range(more_tokens)]
        return self._plain_request(rid, tokens, output, hasher=self._hasher)

    def _plain_request(self, rid: str, tokens: list[int], output: Output, hasher: Any = None) -> Request:
        """vLLM serves the lower priority first."""
        return Request(
            rid,
            tokens,
            SamplingParams(max_tokens=output.max_new_tokens, ignore_eos=output.ignore_eos),
            None,
            arrival_time=float(next(self._numbers)),
            priority=-output.priority,
            block_hasher=hasher,
        )

    def _report(self, transfers: KVConnectorOutput) -> None:
        """What workers report outside a step."""
        self.scheduler.update_from_output(
            SchedulerOutput.make_empty(), ModelRunnerOutput([], {}, kv_connector_output=transfers)
        )

    def _forget(self, rid: str) -> None:
        self._prefilling.discard(rid)
        self._decoding.discard(rid)

    def _budget(self) -> int:
        budget: int = self.scheduler.max_num_scheduled_tokens
        return budget

    def _free_tokens(self, *, cached: bool) -> int:
        free = self.pool.free_block_queue.get_all_free_blocks()
        return sum((block.block_hash is not None) is cached for block in free) * self.settings.page_size


class VllmStrictTarget(VllmTarget):
    """The same, held to the promise that vLLM does not make: an admitted prefill is never rolled back."""

    capabilities = VllmTarget.capabilities - {"may-preempt"}


class VllmAlignTarget(VllmTarget):
    """A hybrid model in align mode: recurrent states in blocks of the same pool, chunks that end at their ends."""

    capabilities = VllmTarget.capabilities | {"hybrid"}
    align = True


class VllmAlignServedTarget(VllmAlignTarget):
    """The same as a server runs it: vLLM refuses to start with a context that its groups do not hold in the pool."""

    def _passes_startup(self, tokens: int) -> bool:
        return world.startup_pages(self.settings, tokens, align=True) <= self.settings.pool_pages
