"""Where released versions of vLLM differ in what a world needs of them: one small adapter for each interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvledger.targets.vllm.package import VERSION, KVCacheManager, Request, Scheduler, SchedulerOutput


class Release(Protocol):
    """What a world asks of a version of vLLM besides what all of them share."""

    def hit(self, manager: KVCacheManager, request: Request) -> tuple[Any, int]:
        """The request's cached blocks, and how many tokens they hold."""
        ...

    def queues(self, scheduler: Scheduler) -> dict[str, list[Request]]:
        """Every request that is not done, by the one queue that it should be in."""
        ...

    def schedule(self, scheduler: Scheduler, *, prefill: bool) -> SchedulerOutput:
        """One step; without `prefill`, the step that vLLM calls throttled."""
        ...


class KvHoldingQueue:
    """From 0.32 on: waiting requests that hold blocks have a queue of their own, and a hit has a shared boundary."""

    def hit(self, manager: KVCacheManager, request: Request) -> tuple[Any, int]:
        blocks, tokens, _ = manager.get_computed_blocks(request)
        return blocks, tokens

    def queues(self, scheduler: Scheduler) -> dict[str, list[Request]]:
        return _listed(
            running=scheduler.running, waiting=scheduler.waiting, kv_holding_waiting=scheduler.kv_holding_waiting
        )

    def schedule(self, scheduler: Scheduler, *, prefill: bool) -> SchedulerOutput:
        return scheduler.schedule(throttle_prefills=not prefill)


class SkippedQueue:
    """0.24: whoever was skipped waits in a queue of its own, holding blocks or not."""

    def hit(self, manager: KVCacheManager, request: Request) -> tuple[Any, int]:
        blocks, tokens = manager.get_computed_blocks(request)
        return blocks, tokens

    def queues(self, scheduler: Scheduler) -> dict[str, list[Request]]:
        return _listed(running=scheduler.running, waiting=scheduler.waiting, skipped_waiting=scheduler.skipped_waiting)

    def schedule(self, scheduler: Scheduler, *, prefill: bool) -> SchedulerOutput:
        return scheduler.schedule(throttle_prefills=not prefill)


def _listed(**queues: Iterable[Request]) -> dict[str, list[Request]]:
    return {name: list(queue) for name, queue in queues.items()}


RELEASES: dict[str, type[Release]] = {"0.33": KvHoldingQueue, "0.32": KvHoldingQueue, "0.24": SkippedQueue}


def release() -> Release:
    """The adapter for the installed version. ImportError, one line, for a version that nobody has looked at."""
    series = ".".join(VERSION.split(".")[:2])
    if series not in RELEASES:
        raise ImportError(f"vllm {VERSION} is none of the versions that are adapted: {', '.join(RELEASES)}")
    return RELEASES[series]()
