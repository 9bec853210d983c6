"""What the ledger's allocators mean on a real pool: pages that are poisoned when freed, slots whose states move along.

Numbers are the ledger's. These classes follow each move of a number with the bits behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvledger.kernels.device_pool import DevicePool
from kvledger.kernels.judge import Judge
from kvledger.kernels.tables import TableError
from kvledger.pool import OutOfPages, PagePool
from kvledger.request import CachedPage
from kvledger.slots import StateSlots


@dataclass(slots=True)
class Counts:
    """What nodes on one device did in this process."""

    nodes: int = 0
    rounds: int = 0
    tokens: int = 0
    bitwise: int = 0
    requests: int = 0
    hits: int = 0
    restored_from_host: int = 0
    loaded_back_pages: int = 0
    written_back_pages: int = 0

    def line(self) -> str:
        share = self.hits / self.requests if self.requests else 0.0
        from_host = f"{self.restored_from_host:,} up from the host"
        return (
            f"{self.nodes:,} nodes, {self.rounds:,} rounds, {self.tokens:,} tokens computed, every one compared with "
            f"float64, {self.bitwise:,} of them bit by bit with the prompt in one piece; {self.requests:,} requests "
            f"admitted, {self.hits:,} of them ({share:.0%}) from a snapshot ({from_host}); "
            f"pages: {self.written_back_pages:,} written back, {self.loaded_back_pages:,} loaded back"
        )


class Host(Protocol):
    """The node whose memory this is."""

    device: DevicePool
    judge: Judge
    counts: Counts

    def bring_state(self, cached: CachedPage, slot: int) -> None:
        """Put the state at `cached`'s end, computed by somebody else, into `slot`."""
        ...


class RealPages(PagePool):
    """The ledger's page allocator over a real pool: the memory must be there, and what is freed is poisoned."""

    def __init__(self, device: DevicePool, pool_pages: int) -> None:
        super().__init__(pool_pages, device.page_size)
        self._device = device

    def alloc(self, pages: int) -> list[int]:
        taken = super().alloc(pages)
        beyond = [page for page in taken if page >= self._device.pages]
        if beyond:
            super().free(taken)
            raise OutOfPages(pages * self.page_size, (pages - len(beyond)) * self.page_size, 0)
        return taken

    def free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().free(pages)
        self._device.poison_pages(pages)


class DeviceSlots(StateSlots):
    """The ledger's state slots over a real pool; host pages get their numbers here, from the ledger's allocator."""

    def __init__(self, host: Host, limit: int | None, page_size: int, grid_tokens: int, **traits: Any) -> None:
        super().__init__(limit, page_size, grid_tokens, **traits)
        self._node = host
        self._device = host.device
        self._host_numbers = PagePool(1 << 30, page_size)
        self.host_page: dict[int, int] = {}
        self._leaving: list[int] = []
        self.unfilled: list[CachedPage] = []

    # --- pages

    def host_number(self, cached: CachedPage) -> int:
        """A place on the host for a page that has none yet."""
        number = self.host_page[cached.serial] = self._host_numbers.alloc(1)[0]
        self._device.grow_host(number + 1)
        return number

    def _leave_host(self, numbers: list[int]) -> None:
        self._host_numbers.free(numbers)
        self._device.poison_host(numbers)

    def evicted(self, cached: CachedPage, page: int) -> None:
        number = self.host_number(cached)
        self._device.write_back(page, number)
        self._node.counts.written_back_pages += 1
        if cached.serial in self.saved:
            self._device.write_state_back(self.saved[cached.serial], number)
        super().evicted(cached, page)

    def dropped(self, cached: CachedPage) -> None:
        super().dropped(cached)
        number = self.host_page.pop(cached.serial, None)
        if number is not None:
            self._leave_host([number])

    def filled(self, cached: CachedPage, page: int) -> None:
        super().filled(cached, page)
        self.unfilled.append(cached)
        number = self.host_page.pop(cached.serial, None)
        if number is not None:
            self._leave_host([number])

    def loaded_back(self, path: Sequence[CachedPage]) -> None:
        super().loaded_back(path)
        pages = [cached.page for cached in path if cached.page is not None]
        try:
            self._device.load_back([self.host_page[cached.serial] for cached in path], pages)
        except TableError as error:
            self._node.judge.refuse(None, str(error))
        self._node.counts.loaded_back_pages += len(pages)
        self._leaving += [self.host_page[cached.serial] for cached in path]

    def take_live(self, rid: str, path: Sequence[CachedPage]) -> int:
        slot = super().take_live(rid, path)
        for cached in path:
            if self.host_page.get(cached.serial) in self._leaving:
                del self.host_page[cached.serial]
        self._leave_host(self._leaving)
        self._leaving = []
        return slot

    # --- states

    def _restored(self, slot: int, cached: CachedPage) -> None:
        if cached.serial in self.on_host:
            self._device.load_state_back(self.host_page[cached.serial], slot)
            self._node.counts.restored_from_host += 1
        elif cached.serial in self.saved:
            self._device.restore(self.saved[cached.serial], slot)

    def _raised(self, cached: CachedPage, slot: int) -> None:
        self._device.load_state_back(self.host_page[cached.serial], slot)

    def _brought(self, cached: CachedPage, slot: int) -> None:
        self._node.bring_state(cached, slot)

    def _free(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        super()._free(slots)
        self._device.poison_slots(slots)

    def _take(self) -> int | None:
        slot = super()._take()
        if slot is not None:
            self._device.grow_slots(slot + 1)
        return slot

    def free_host_places(self) -> list[int]:
        """Places on the host that no page has; all of them poison."""
        unused = self._host_numbers.never_used()
        return [*self._host_numbers.released(), *range(unused.start, len(self._device.host.rows))]

    def free_numbers(self) -> list[int]:
        """Slots that nobody owns; all of them poison."""
        unused = self._numbers.never_used()
        return [*self._numbers.released(), *range(unused.start, min(unused.stop, self._device.slots))]
