"""The memory behind a node: latent pages, state slots and convolution windows of all layers, and a host tier of each.

    latents [pages, MLA layers, page_size, rank + rope]     host.latents [host pages, ...]
    states  [slots, KDA layers, H, V, K] float32             host.states  [host pages, ...]
    windows [slots, KDA layers, 3, C]                        host.windows [host pages, ...]

Page-major: a page, a slot and a window move as one unit for all layers. It keeps no accounts: numbers come from the
ledger's allocators. What it does keep is what every row *holds*, so that a table can be checked on the host before a
launch: in range, its requester's own, and nothing in it that was freed or never written. What is free is poison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvledger.kernels.canary import CanaryFault, canary_check, canary_fill
from kvledger.kernels.conv import WINDOW
from kvledger.kernels.launch import Backend
from kvledger.kernels.model import ModelSpec
from kvledger.kernels.pages import page_copy
from kvledger.kernels.tables import TableError


@dataclass(frozen=True, slots=True)
class PageTable:
    """A request's pages as the ledger has them; the first `shared` lie in the prefix tree, locked by the request."""

    rid: str
    pages: tuple[int, ...]
    shared: int


@dataclass(eq=False)
class Tier:
    """One tier's tensors, by unit. `rows[page]` tokens of a page are written; `stated` slots hold a state."""

    latents: torch.Tensor
    states: torch.Tensor
    windows: torch.Tensor
    rows: list[int]
    stated: set[int]

    @classmethod
    def empty(cls, spec: ModelSpec, pages: int, slots: int, page_size: int, like: torch.Tensor, pin: bool) -> Tier:
        """All poison. `like` gives dtype and device of latents and windows; states are float32."""

        def make(units: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            made = torch.empty(units, *shape, dtype=dtype, device=like.device, pin_memory=pin)
            canary_fill(made, pages=torch.arange(units))
            return made

        heads = (spec.kda_layers, spec.heads, spec.v_size, spec.k_size)
        return cls(
            make(pages, spec.mla_layers, page_size, spec.latent, dtype=like.dtype),
            make(slots, *heads, dtype=torch.float32),
            make(slots, spec.kda_layers, WINDOW, spec.channels, dtype=like.dtype),
            [0] * pages,
            set(),
        )


class DevicePool:
    """`pages` latent pages and `slots` state slots on a device; the host tier starts at `host_pages` and can grow."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        pages: int,
        slots: int,
        page_size: int,
        host_pages: int = 0,
        backend: Backend = "torch",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.backend = backend
        like = torch.empty(0, dtype=dtype, device=device)
        self.device = Tier.empty(spec, pages, slots, page_size, like, pin=False)
        self._host_like = torch.empty(0, dtype=dtype)
        self.host = self._new_host(host_pages)

    @property
    def pages(self) -> int:
        return len(self.device.rows)

    @property
    def slots(self) -> int:
        return len(self.device.states)

    @staticmethod
    def bytes_of(spec: ModelSpec, *, pages: int, slots: int, page_size: int, dtype: torch.dtype) -> tuple[int, int]:
        """What so many latent pages and so many slots, states and windows, take in one tier."""
        windows = spec.kda_layers * WINDOW * spec.channels * dtype.itemsize
        states = spec.kda_layers * spec.heads * spec.v_size * spec.k_size * torch.float32.itemsize
        return pages * page_size * spec.mla_layers * spec.latent * dtype.itemsize, slots * (states + windows)

    def _new_host(self, pages: int) -> Tier:
        pin = self.device.latents.device.type == "cuda" and pages > 0
        return Tier.empty(self.spec, pages, pages, self.page_size, self._host_like, pin)

    def layer_latents(self, layer: int) -> torch.Tensor:
        """Pages of the `layer`-th MLA layer, [pages, page_size, latent]."""
        return self.device.latents[:, layer]

    def layer_states(self, layer: int) -> torch.Tensor:
        """Slots of the `layer`-th KDA layer, [slots, H, V, K]."""
        return self.device.states[:, layer]

    def layer_windows(self, layer: int) -> torch.Tensor:
        return self.device.windows[:, layer]

    def rows_of(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        """The latents of the first `tokens` positions of a table, [tokens, MLA layers, latent] on the host."""
        table = torch.tensor(pages[: -(-tokens // self.page_size)], dtype=torch.int64)
        units = self.device.latents[table.to(self.device.latents.device)]
        return units.transpose(1, 2).flatten(0, 1)[:tokens].cpu()

    # --- what must hold before a launch

    def check_tables(self, tables: Iterable[PageTable], starts: Mapping[str, int], free: Iterable[int]) -> None:
        """TableError unless every table of live requests is in range, its own, and written up to its chunk's start.

        `starts`: tokens that each request of the batch has behind it. `free`: the allocator's free list.
        """
        owner: dict[int, str] = dict.fromkeys(free, "nobody: it is free")
        shared: set[int] = set()
        for table in tables:
            for number, page in enumerate(table.pages):
                self._check_page(table, number, page, owner, shared)
            if table.rid in starts:
                self._check_rows(table, starts[table.rid])

    def _check_page(self, table: PageTable, number: int, page: int, owner: dict[int, str], shared: set[int]) -> None:
        if not 0 <= page < self.pages:
            raise TableError(f"{table.rid}: page {page} of its table is outside [0, {self.pages})")
        holder = owner.get(page)
        if number < table.shared and page not in owner:
            shared.add(page)
        elif holder is not None or page in shared:
            raise TableError(f"{table.rid}: page {page} of its table belongs to {holder or 'the prefix tree'}")
        else:
            owner[page] = table.rid

    def _check_rows(self, table: PageTable, start: int) -> None:
        for number in range(-(-start // self.page_size)):
            wanted = min(self.page_size, start - number * self.page_size)
            written = self.device.rows[table.pages[number]]
            if written < wanted:
                raise TableError(
                    f"{table.rid}: page {table.pages[number]} of its table has {written} rows written, {wanted} needed"
                )

    def check_slots(self, owners: Iterable[tuple[str, Iterable[int]]], free: Iterable[int]) -> None:
        """TableError unless each state slot is in range, not free, and of one owner alone."""
        owned = dict.fromkeys(free, "nobody: it is free")
        for name, slots in owners:
            for slot in slots:
                if not 0 <= slot < self.slots:
                    raise TableError(f"{name}: state slot {slot} is outside [0, {self.slots})")
                if slot in owned:
                    raise TableError(f"{name}: state slot {slot} belongs to {owned[slot]}")
                owned[slot] = name

    def check_state(self, rid: str, slot: int) -> None:
        """TableError unless `slot` holds a state."""
        if slot not in self.device.stated:
            raise TableError(f"{rid}: state slot {slot} is poison")

    def wrote(self, pages: Sequence[int], start: int, end: int) -> None:
        """A launch has written the rows of positions [start, end) of a table."""
        for number in range(start // self.page_size, -(-end // self.page_size)):
            self.device.rows[pages[number]] = min(self.page_size, end - number * self.page_size)

    # --- moves between tiers

    def write_back(self, page: int, host_page: int) -> None:
        """Copy a latent page to the host, which grows if it must."""
        self.grow_host(host_page + 1)
        self._copy(self.device.latents, self.host.latents, page, host_page)
        self.host.rows[host_page] = self.device.rows[page]

    def load_back(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy latent pages up from the host."""
        page_copy(self.host.latents, self.device.latents, host_pages, pages, backend=self.backend).wait()
        for host_page, page in zip(host_pages, pages, strict=True):
            self.device.rows[page] = self.host.rows[host_page]

    def write_state_back(self, slot: int, host_page: int) -> None:
        """Copy a slot's states and windows to the host place of the page they belong to."""
        self.grow_host(host_page + 1)
        self._copy(self.device.states, self.host.states, slot, host_page)
        self._copy(self.device.windows, self.host.windows, slot, host_page)
        _mark(self.host.stated, host_page, slot in self.device.stated)

    def load_state_back(self, host_page: int, slot: int) -> None:
        self._copy(self.host.states, self.device.states, host_page, slot)
        self._copy(self.host.windows, self.device.windows, host_page, slot)
        _mark(self.device.stated, slot, host_page in self.host.stated)

    def restore(self, source: int, slot: int) -> None:
        """Copy a checkpoint, states and windows, into a live slot."""
        self._copy(self.device.states, self.device.states, source, slot)
        self._copy(self.device.windows, self.device.windows, source, slot)
        _mark(self.device.stated, slot, source in self.device.stated)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, unit: int, place: int) -> None:
        page_copy(source, target, [unit], [place], backend=self.backend).wait()

    def grow_host(self, pages: int) -> None:
        """Double the host tier until it has `pages` pages: only a tier without a limit grows."""
        have = len(self.host.rows)
        if pages <= have:
            return
        old, self.host = self.host, self._new_host(max(pages, 2 * have, 16))
        for name in ("latents", "states", "windows"):
            getattr(self.host, name)[:have] = getattr(old, name)
        self.host.rows[:have] = old.rows
        self.host.stated |= old.stated

    def grow_slots(self, slots: int) -> None:
        """Double the device's slots until there are `slots`: only where nobody has set a limit."""
        have = self.slots
        if slots <= have:
            return
        old, like = self.device, self.device.latents.new_empty(0)
        more = Tier.empty(self.spec, 0, max(slots, 2 * have), self.page_size, like, pin=False)
        for name in ("states", "windows"):
            getattr(more, name)[:have] = getattr(old, name)
            setattr(old, name, getattr(more, name))

    # --- poison

    def poison_pages(self, pages: Sequence[int]) -> None:
        """These are free: whoever reads them reads NaN."""
        inside = [page for page in pages if page < self.pages]
        canary_fill(self.device.latents, pages=inside)
        for page in inside:
            self.device.rows[page] = 0

    def poison_slots(self, slots: Sequence[int]) -> None:
        canary_fill(self.device.states, pages=slots)
        canary_fill(self.device.windows, pages=slots)
        self.device.stated.difference_update(slots)

    def poison_host(self, host_pages: Sequence[int]) -> None:
        canary_fill(self.host.latents, pages=host_pages)
        canary_fill(self.host.states, pages=host_pages)
        canary_fill(self.host.windows, pages=host_pages)
        self.host.stated.difference_update(host_pages)
        for page in host_pages:
            self.host.rows[page] = 0

    def faults(
        self, free_pages: Iterable[int], free_slots: Iterable[int], free_host_pages: Iterable[int] = ()
    ) -> list[CanaryFault]:
        """Poison that has vanished from free pages and slots, and NaN in what holds data."""
        rows = self.device.rows
        full = [page for page, written in enumerate(rows) if written == self.page_size]
        stated = sorted(self.device.stated)
        pages, slots = list(free_pages), list(free_slots)
        found = canary_check(self.device.latents, poisoned_pages=pages, live_pages=full)
        found += canary_check(self.device.states, poisoned_pages=slots, live_pages=stated)
        found += canary_check(self.device.windows, poisoned_pages=slots, live_pages=stated)
        places = list(free_host_pages)
        for tensor in (self.host.latents, self.host.states, self.host.windows):
            found += canary_check(tensor, poisoned_pages=places)
        return found + self._partly_filled()

    def _partly_filled(self) -> list[CanaryFault]:
        """Of a partly filled page, in every layer: data as far as it is written, and poison past that."""
        size, layers = self.page_size, self.spec.mla_layers
        flat = self.device.latents.flatten(0, 1)
        live: list[int] = []
        unused: list[int] = []
        for page, written in enumerate(self.device.rows):
            for unit in range(page * layers, (page + 1) * layers) if 0 < written < size else ():
                live += range(unit * size, unit * size + written)
                unused += range(unit * size + written, (unit + 1) * size)
        return canary_check(flat, poisoned_rows=unused, live_rows=live)


def _mark(stated: set[int], slot: int, holds: bool) -> None:
    """A copy of poison is poison, and no launch may start from it."""
    if holds:
        stated.add(slot)
    else:
        stated.discard(slot)
