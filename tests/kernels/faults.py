"""Faults of a real pool, injected one at a time: each is a context in which nodes have it.

    $ python -m tests.kernels.faults

prints which invariants each fault turned red, and after how many examples
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from kvledger.kernels import device_node
from kvledger.kernels.device_node import DeviceNode, device_target
from kvledger.kernels.device_pool import DevicePool
from kvledger.kernels.executor import Executor, Work
from kvledger.kernels.real_memory import DeviceSlots, RealPages
from kvledger.pool import PagePool
from kvledger.request import CachedPage, Prompt
from kvledger.rules import PRESETS
from kvledger.testing.driver import example
from kvledger.testing.reached import SearchMonitor

MAX_EXAMPLES = 60


@contextmanager
def page_handed_out_twice() -> Iterator[None]:
    """The allocator forgets that it has given away the last page of each allocation of several."""
    whole = RealPages.alloc

    def alloc(self: RealPages, pages: int) -> list[int]:
        taken = whole(self, pages)
        if len(taken) > 1:
            PagePool.free(self, taken[-1:])
        return taken

    with patch.object(RealPages, "alloc", alloc):
        yield


@contextmanager
def slot_handed_out_twice() -> Iterator[None]:
    """A new request gets the live state slot of one that is still running."""
    whole = DeviceSlots.take_live

    def take_live(self: DeviceSlots, rid: str, path: Sequence[CachedPage]) -> int:
        running = [slot for other, slot in self.live.items() if other != rid]
        slot = whole(self, rid, path)
        if running:
            self.live[rid] = running[-1]
        return slot

    with patch.object(DeviceSlots, "take_live", take_live):
        yield


@contextmanager
def page_evicted_while_in_use() -> Iterator[None]:
    """A hit is not locked: its pages count as evictable, and go when others need room."""
    whole = DeviceNode._take_hit

    def take_hit(self: DeviceNode, request: Any) -> None:
        whole(self, request)
        self.tree.unlock(request.locked)

    with patch.object(DeviceNode, "_take_hit", take_hit):
        yield


@contextmanager
def checkpoint_two_tokens_late() -> Iterator[None]:
    """The state kept for a grid point is that of two tokens later, where the chunk goes on so far."""
    whole = Executor.run

    def run(self: Executor, batch: Sequence[Work], *, outputs: bool = True) -> list[torch.Tensor]:
        answers = []
        for work in batch:
            parts, start = [], work.start
            for point, slot in sorted(work.saves.items()):
                late = min(point + 2, work.end)
                if late > start:
                    parts += whole(self, [replace(work, start=start, end=late, saves={})], outputs=outputs)
                start = max(start, late)
                self.pool.restore(work.live, slot)
            if start < work.end:
                parts += whole(self, [replace(work, start=start, saves={})], outputs=outputs)
            answers.append(torch.cat(parts))
        return answers

    with patch.object(Executor, "run", run):
        yield


@contextmanager
def checkpoint_never_written() -> Iterator[None]:
    """The slot is given out and marked, and the kernel is not told of it."""
    whole = Executor.run

    def run(self: Executor, batch: Sequence[Work], *, outputs: bool = True) -> list[torch.Tensor]:
        answers = whole(self, [replace(work, saves={}) for work in batch], outputs=outputs)
        for work in batch:
            self.pool.device.stated.update(work.saves.values())
        return answers

    with patch.object(Executor, "run", run):
        yield


@contextmanager
def load_back_of_the_wrong_page() -> Iterator[None]:
    """Each page but the first gets what belongs in the one before it."""
    whole = DevicePool.load_back

    def load_back(self: DevicePool, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        whole(self, [*host_pages[:1], *host_pages[:-1]], pages)

    with patch.object(DevicePool, "load_back", load_back):
        yield


@contextmanager
def load_back_in_the_wrong_order() -> Iterator[None]:
    """Pages come up in the opposite order: all are there, and attention over them is what it was."""
    whole = DevicePool.load_back

    def load_back(self: DevicePool, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        whole(self, host_pages[::-1], pages)

    with patch.object(DevicePool, "load_back", load_back):
        yield


@contextmanager
def past_in_the_wrong_order() -> Iterator[None]:
    """The pages that a chunk finds full stand in its table in the opposite order."""
    whole = DeviceNode._compute

    def compute(self: DeviceNode, adder: Any) -> None:
        def work(rid: str, prompt: Prompt, start: int, end: int, pages: Sequence[int], *rest: Any) -> Work:
            full = start // self.page_size
            return Work(rid, prompt, start, end, [*pages[:full][::-1], *pages[full:]], *rest)

        with patch.object(device_node, "Work", work):
            whole(self, adder)

    with patch.object(DeviceNode, "_compute", compute):
        yield


@contextmanager
def neighbour_cleared_too() -> Iterator[None]:
    """Who clears a freed page clears the one before it as well; no book says so."""
    whole = DevicePool.poison_pages

    def poison_pages(self: DevicePool, pages: Sequence[int]) -> None:
        whole(self, pages)
        for page in pages:
            if page and self.device.rows[page - 1] == self.page_size:
                self.device.latents[page - 1] = 0

    with patch.object(DevicePool, "poison_pages", poison_pages):
        yield


def _without_window(name: str) -> Any:
    whole = getattr(DevicePool, name)

    def move(self: DevicePool, source: int, slot: int) -> None:
        whole(self, source, slot)
        self.device.windows[slot] = 0

    return patch.object(DevicePool, name, move)


@contextmanager
def restore_without_its_window() -> Iterator[None]:
    """The recurrent state comes back, the convolution starts as if the prompt did."""
    with _without_window("restore"), _without_window("load_state_back"):
        yield


@contextmanager
def stale_live_state() -> Iterator[None]:
    """A request's second chunk, and each after it, leaves the live state as it found it."""
    whole = Executor.run

    def run(self: Executor, batch: Sequence[Work], *, outputs: bool = True) -> list[torch.Tensor]:
        device = self.pool.device
        old = {work.live: device.states[work.live].clone() for work in batch if work.start}
        answers = whole(self, batch, outputs=outputs)
        for slot, states in old.items():
            device.states[slot] = states
        return answers

    with patch.object(Executor, "run", run):
        yield


@contextmanager
def state_left_on_the_host() -> Iterator[None]:
    """A prefix that comes up from the host gets its pages, and the live state of whoever had the slot before."""

    def load_state_back(self: DevicePool, _host_page: int, slot: int) -> None:
        self.device.states[slot] = 0
        self.device.windows[slot] = 0
        self.device.stated.add(slot)

    with patch.object(DevicePool, "load_state_back", load_state_back):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        page_handed_out_twice,
        slot_handed_out_twice,
        page_evicted_while_in_use,
        checkpoint_two_tokens_late,
        checkpoint_never_written,
        load_back_of_the_wrong_page,
        load_back_in_the_wrong_order,
        past_in_the_wrong_order,
        restore_without_its_window,
        stale_live_state,
        state_left_on_the_host,
        neighbour_cleared_too,
    )
}


def without_bits() -> Any:
    """Nothing is compared with the prompt in one piece, as on a GPU and of long prompts: float64 is alone."""
    return patch.object(DeviceNode, "_one_piece", lambda _self, _work: None)


def hunt(
    fault: Callable[[], Any], *, check_tables: bool, bits: bool = True, seed: int = 0
) -> tuple[int, tuple[str, ...]]:
    """Examples until an invariant broke, and all that broke in that one; (MAX_EXAMPLES, ()) if none did."""
    target = device_target("cpu", check_tables=check_tables)
    rng = random.Random(seed)
    with fault(), nullcontext() if bits else without_bits():
        for number in range(1, MAX_EXAMPLES + 1):
            monitor = SearchMonitor()
            watch = partial(_given, monitor)
            try:
                example(rng, PRESETS["tail-reserved"], target=target, space=target.space, monitor=watch)
            except Exception:  # what follows from a broken promise may be anything; before one, it is our own fault
                if not monitor.broken:
                    raise
            if monitor.broken:
                return number, tuple(broken.invariant for broken in monitor.broken)
    return MAX_EXAMPLES, ()


def _given(monitor: SearchMonitor) -> SearchMonitor:
    return monitor


WATCHES: dict[str, dict[str, bool]] = {
    "tables checked": {"check_tables": True},
    "tables taken as they are": {"check_tables": False},
    "tables taken, float64 alone": {"check_tables": False, "bits": False},
}


def main() -> None:
    torch.set_num_threads(1)
    for name, fault in FAULTS.items():
        for words, options in WATCHES.items():
            examples, broken = hunt(fault, **options)
            print(f"{name:30} {words:35} example {examples:3}: {', '.join(broken) or 'SURVIVED'}", flush=True)


if __name__ == "__main__":
    main()
