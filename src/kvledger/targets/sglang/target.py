"""The target: sglang's admission, allocation and prefix cache behind kvledger's protocol. The round loop is ours.

On a prefill node a finished prompt keeps its slots and its lock until `transferred`, as in a disaggregated deployment;
in unified mode it joins the running batch, which sglang's own code decodes, checks and retracts (`decode.py`).
"""

from __future__ import annotations

from typing import Any

from kvledger.invariants import Invariant
from kvledger.node import Watcher
from kvledger.record import RoundRecord, Snapshot
from kvledger.replay import UnmodelledError
from kvledger.request import Output, Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.targets.sglang import checks
from kvledger.targets.sglang.about import about
from kvledger.targets.sglang.decode import Decoder, Step
from kvledger.targets.sglang.rounds import PrefillPass, Queue
from kvledger.targets.sglang.standalone import PACKAGES, standalone
from kvledger.targets.sglang.versions import installed_engine
from kvledger.targets.sglang.views import snapshot_of
from kvledger.targets.sglang.world import World

USUAL_OUTPUT = Output()
ENGINE = installed_engine()


class SglangTarget:
    """The installed release on a CPU. UnmodelledError names a setting or a switch that it cannot express."""

    features = ENGINE.features
    foreign = True
    version: str = ENGINE.version
    packages = PACKAGES
    standalone = staticmethod(standalone)
    about = staticmethod(about)

    def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None) -> None:
        check_expressible(settings, rules)
        self.settings = settings
        self.rules = rules
        self.watcher = watcher or Watcher()
        self.engine = ENGINE
        self.world = World(self.engine, settings)
        self.queue = Queue(self.engine.empty_batch())
        self.live: dict[str, Any] = {}
        self.done: dict[str, Any] = {}
        self.rounds = 0
        self._arrivals = 0
        self.policy = self.engine.policy(self.world.tree, settings, host=self.world.has_host)
        self.decoder = Decoder(self.world, self.queue)

    @property
    def capabilities(self) -> frozenset[str]:
        """In unified mode its offsets hold estimates of output too, and memory may cut a chunk inside a page."""
        both = frozenset({"batches", "counts", "decisions", "pages", "one-cut"})
        return both if self.settings.mode == "unified" else both | {"grid", "offsets"}

    # --- what arrives from outside

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        """Queue a request, or say why it could never be admitted: the entry asks what the gate will ask."""
        need = prompt.tokens + output.max_new_tokens + self.settings.page_size
        pool_tokens = self.settings.pool_pages * self.settings.page_size
        if not need < pool_tokens:
            return (
                f"prompt {prompt.tokens} + output {output.max_new_tokens} + page {self.settings.page_size} = {need} "
                f"tokens is not below the empty pool's {pool_tokens}"
            )
        request = self.engine.request(rid, self.world.ids.of(prompt), output)
        self._arrivals += 1
        request.time_stats.wait_queue_entry_time = float(self._arrivals)
        self.queue.waiting.append(request)
        return None

    def transferred(self, rid: str) -> None:
        """The decode node has the KV: an in-flight request ends. For any other nothing happens."""
        request = self.done.get(rid)
        if request is not None and self.settings.mode == "prefill":
            self.engine.finished_by_length(request)
            self._end(request, publish=True)

    def abort(self, rid: str) -> None:
        """End a request wherever it is; nothing happens if it has ended already."""
        for request in self.queue.waiting:
            if request.rid == rid:
                self.queue.waiting.remove(request)
                self.engine.finish_in_cache(self.world.tree, request, aborted=True)
                return
        request = self.live.get(rid)
        if request is None:
            return
        self.engine.finished_by_abort(request)
        if self.queue.chunked is request:
            self.queue.chunked = None
        self.decoder.leave(request)
        self._end(request, publish=False)

    def _end(self, request: Any, *, publish: bool) -> None:
        self.engine.release(self.world.tree, request, publish=publish)
        self.engine.finish_in_cache(self.world.tree, request, aborted=not publish)
        del self.live[request.rid]
        self.done.pop(request.rid, None)
        self.world.settle()

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        self.world.cache_on_device(prompt, locked=locked)

    def cache_on_host(self, prompt: Prompt) -> None:
        self.world.cache_on_host(prompt)

    def hold(self, name: str, tokens: int) -> None:
        self.world.hold(name, tokens)

    def release(self, name: str, tokens: int | None = None) -> None:
        self.world.release(name, tokens)

    def finish(self, rid: str) -> None:
        """A running request's output ends now: it leaves, and what it computed stays cached."""
        request = self.done.get(rid)
        if request is not None and self.settings.mode == "unified":
            self.engine.finished_by_length(request)
            self.decoder.leave(request)
            self._end(request, publish=True)

    # --- one round

    def run_round(self) -> RoundRecord:
        """A prefill batch if one can be formed; in unified mode a decode round otherwise, or decodes mixed in."""
        prefill, evicted_before = self._begin()
        batch = prefill.decide()
        preempted = [request for request in prefill.adder.preempt_list if request not in batch]
        # theirs come out of a set, in an order that differs from time to time
        preempted.sort(key=lambda request: request.time_stats.wait_queue_entry_time)
        step = Step()
        if batch:
            schedule, step.failure = prefill.allocate(batch)
            if step.failure is None:
                self._run(batch, schedule, step)
        elif self.settings.mode == "unified":
            step = self.decoder.step()
        step.preempted = preempted
        return self._record(prefill, evicted_before, step)

    def run_decode(self) -> RoundRecord:
        """Each running request takes a token, nobody is admitted."""
        prefill, evicted_before = self._begin()
        return self._record(prefill, evicted_before, self.decoder.step())

    def _begin(self) -> tuple[PrefillPass, int]:
        self.rounds += 1
        self.world.settle()
        self.decoder.drop_finished()
        prefill = PrefillPass(
            self.world,
            self.settings,
            self.rules,
            self.watcher,
            self.queue,
            self.policy,
            self.decoder.ratio.current,
            on_admitted=lambda request: self.live.__setitem__(request.rid, request),
        )
        return prefill, self.world.evicted_tokens

    def _run(self, batch: list[Any], schedule: Any, step: Step) -> None:
        """The batch has run: a half-done request's chunk is cached, a finished prompt is in flight or decodes."""
        mixed = self.decoder.mix_into(schedule) if self.settings.mixed_chunk else []
        for request in batch:
            if request.inflight_middle_chunks > 0:
                request.inflight_middle_chunks -= 1
                self.engine.checkpoint(self.world.tree, request)
                continue
            self.done[request.rid] = request
            request.output_ids.append(self.world.ids.output(request.rid, len(request.output_ids)))
            if self.settings.mode == "unified":
                request.update_finish_state()
            if request.finished():
                step.left.append(request)
            else:
                self.engine.checkpoint(self.world.tree, request)
        self.decoder.take_tokens(mixed, step)
        if self.settings.mode == "unified":
            self.decoder.join(schedule)

    def _send_back(self, requests: list[Any]) -> None:
        """Retracted or preempted: their slots are gone already, and they queue again."""
        for request in requests:
            self._arrivals += 1
            request.time_stats.wait_queue_entry_time = float(self._arrivals)
            self.queue.waiting.append(request)
            self.live.pop(request.rid, None)
            self.done.pop(request.rid, None)

    def _settle(self, step: Step) -> None:
        """Who is finished leaves; who was retracted queues again."""
        for request in step.left:
            if request.kv.holds_kv:
                self._end(request, publish=True)
            else:  # given up by the scheduler for lack of memory
                del self.live[request.rid]
                self.done.pop(request.rid, None)
        self._send_back([*step.preempted, *step.back])
        self.world.settle()

    def _record(self, prefill: PrefillPass, evicted_before: int, step: Step) -> RoundRecord:
        figures = prefill.figures_at_end
        if step.failure is None:
            self._settle(step)
        return RoundRecord(
            round=self.rounds,
            baseline=figures.baseline,
            rem_total_tokens=figures.baseline - figures.total_offset,
            cur_rem_tokens=figures.baseline - figures.current_offset,
            rem_chunk_tokens=prefill.adder.rem_chunk_tokens,
            budget_state=prefill.state_at_end,
            batch_is_full=prefill.no_token,
            decisions=tuple(prefill.decisions),
            promises=tuple(prefill.books.promises),
            free=self.world.free_tokens(),
            evictable=self.world.evictable_tokens(),
            protected=self.world.protected_tokens(),
            evicted_pages=(self.world.evicted_tokens - evicted_before) // self.settings.page_size,
            failure=step.failure,
            decoded=tuple(step.decoded),
            finished=step.finished,
            retracted=step.retracted,
            preempted=tuple(request.rid for request in step.preempted),
        )

    # --- what the outside may see

    @property
    def has_work(self) -> bool:
        """Something is waiting, half done or decoding."""
        decoding = self.settings.mode == "unified" and bool(self.done)
        return bool(self.queue.waiting) or self.queue.chunked is not None or decoding

    def in_flight(self) -> tuple[str, ...]:
        """Names of requests whose KV is being sent, in admission order."""
        return tuple(rid for rid in self.live if rid in self.done) if self.settings.mode == "prefill" else ()

    @property
    def invariants(self) -> tuple[Invariant, ...]:
        return checks.invariants_of(self)

    def snapshot(self) -> Snapshot:
        """Those who wait are in the order of their arrival: a policy sorts the queue, which is no decision."""
        waiting = [request for request in self.queue.waiting if request.rid not in self.live]
        waiting.sort(key=lambda request: request.time_stats.wait_queue_entry_time)
        return snapshot_of(
            self.world,
            ((request, rid in self.done) for rid, request in self.live.items()),
            (request.rid for request in waiting),
        )


def check_expressible(settings: NodeSettings, rules: AccountingRules) -> None:
    """UnmodelledError for what sglang has not: a grid for the ends of chunks, and answers to a shortage."""
    grid_tokens = rules.grid_tokens(page_size=settings.page_size, node_align=settings.checkpoint_align)
    if grid_tokens != settings.page_size:
        of_node = rules.checkpoint_align == "node"
        raise UnmodelledError(
            "node.checkpoint_align" if of_node else "rules.checkpoint_align",
            f"sglang ends chunks on pages of {settings.page_size} tokens, not on a grid of {grid_tokens}: "
            f'use --rules upstream, or in the trace the rules "upstream" or "checkpoint_align": "page_size"',
        )
    if rules.spend_gap:
        raise UnmodelledError("rules.spend_gap", "sglang keeps what a cut leaves of the chunk budget")
    if rules.continuation_limit is not None:
        raise UnmodelledError("rules.continuation_limit", "sglang has such a limit from its schedule policy alone")
    if rules.chunk_grid is not None:
        raise UnmodelledError("rules.chunk_grid", "sglang's mamba_chunk_grid needs context parallelism")
    if rules.on_shortage != "force":
        raise UnmodelledError("rules.on_shortage", '"defer" is not modelled: sglang forces the chunk')
    if settings.schedule_policy not in {"fcfs", *ENGINE.features}:
        raise UnmodelledError("node.schedule_policy", f"sglang {ENGINE.version} has no {settings.schedule_policy}")
    if settings.state_slots is not None:
        raise UnmodelledError("node.state_slots", "recurrent states are not modelled by this target")
    _check_chunk(settings, rules)


def _check_chunk(settings: NodeSettings, rules: AccountingRules) -> None:
    """What sglang refuses at its start."""
    chunk = settings.chunked_prefill_size
    if chunk is None:
        return
    if chunk % settings.page_size:
        raise UnmodelledError(
            "node.chunked_prefill_size", f"{chunk} is not a multiple of page_size {settings.page_size}"
        )
    if rules.truncation_align is not None and chunk < rules.truncation_align:
        raise UnmodelledError(
            "node.chunked_prefill_size", f"{chunk} is below truncation_align {rules.truncation_align}"
        )
