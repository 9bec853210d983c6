"""The running batch of unified mode: sglang's own code decodes it, checks its memory and retracts from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvledger.record import AllocationFailure
from kvledger.targets.sglang.rounds import Queue
from kvledger.targets.sglang.views import failure_of, is_out_of_memory
from kvledger.targets.sglang.world import World


@dataclass(slots=True)
class Step:
    """What became of running requests in a round. `left` are the finished ones themselves, `back` the retracted.

    `preempted` ones went before that, for a request of higher priority, whether it was then admitted or not.
    """

    decoded: list[str] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    back: list[Any] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)
    failure: AllocationFailure | None = None

    @property
    def finished(self) -> tuple[str, ...]:
        return tuple(request.rid for request in self.left)

    @property
    def retracted(self) -> tuple[str, ...]:
        return tuple(request.rid for request in self.back)


class Decoder:
    """Owns what happens to `queue.running` between its requests' prefill and the end of their output."""

    def __init__(self, world: World, queue: Queue) -> None:
        self.world = world
        self.queue = queue
        self.ratio = world.engine.ratio_tracker()

    def drop_finished(self) -> None:
        """Every round begins so: who has left makes room for others to be looked at."""
        running = self.queue.running
        before = running.batch_size()
        running.filter_batch()
        if running.batch_size() < before:
            running.batch_is_full = False

    def step(self) -> Step:
        """One decode round: what does not fit is sent back first, then each request takes a token."""
        step = Step()
        running = self.queue.running
        if running.is_empty():
            return step
        before = running.batch_size()
        if running.check_decode_mem():
            self.ratio.decay_step()
        else:
            step.back, self.ratio.current, aborted = running.retract_decode()
            step.left += aborted
        if running.batch_size() < before:
            running.batch_is_full = False
        if not running.is_empty():
            self._decode(running, step)
        return step

    def _decode(self, running: Any, step: Step) -> None:
        try:
            running.prepare_for_decode()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            step.failure = failure_of(self.world, running.reqs, error)
            return
        self.take_tokens(running.reqs, step)

    def take_tokens(self, requests: list[Any], step: Step) -> None:
        """Each of these, whose slot for it is there, takes its next token, and leaves with its last."""
        for request in requests:
            request.output_ids.append(self.world.ids.output(request.rid, len(request.output_ids)))
            request.update_finish_state()
            step.decoded.append(request.rid)
            if request.finished():
                step.left.append(request)

    def mix_into(self, prefill: Any) -> list[Any]:
        """Decodes join a prefill batch if their next tokens fit; who they are."""
        running = self.queue.running
        if running.is_empty() or not running.check_decode_mem():
            return []
        running.prepare_for_decode()
        requests = list(running.reqs)
        prefill.mix_with_running(running)
        self.queue.running = self.world.engine.empty_batch(running.batch_is_full)
        return requests

    def join(self, batch: Any) -> None:
        """Requests of a batch that has run go on in the running one, except the half-done and the finished."""
        exclude = [] if self.queue.chunked is None else [self.queue.chunked]
        before = batch.batch_size()
        self.world.engine.drop_from(batch, exclude)
        running = self.queue.running
        if batch.batch_size() < before:
            running.batch_is_full = False
        if batch.is_empty():
            return
        if running.is_empty():
            batch.batch_is_full = running.batch_is_full
            self.queue.running = batch
        else:
            running.merge_batch(batch)

    def leave(self, request: Any) -> None:
        """A request that has just been marked as finished is taken out of the batch."""
        assert request.finished(), f"{request.rid} goes on"
        self.drop_finished()
