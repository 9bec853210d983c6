"""The pure node with an executor attached: what it admits is computed, what moves is copied, what is freed is poison.

Every decision is the pure node's own. Here the tree's moves and the slots' moves are followed by the bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from kvledger.adder import PrefillAdder
from kvledger.arithmetic import ceil_pages
from kvledger.events import Submit
from kvledger.evidence import Finding
from kvledger.kernels.device_pool import DevicePool, PageTable
from kvledger.kernels.device_space import SMALL_SPACE, TINY_SPACE
from kvledger.kernels.executor import Executor, Work, prefill
from kvledger.kernels.judge import DATA_INVARIANTS, DeviceSnapshot, Judge, Output, truth_of
from kvledger.kernels.launch import Backend
from kvledger.kernels.model import MODELS, ModelSpec
from kvledger.kernels.real_memory import Counts, DeviceSlots, RealPages
from kvledger.kernels.state_plan import CHUNK
from kvledger.kernels.tables import TableError
from kvledger.node import PrefillNode, Watcher
from kvledger.record import Snapshot
from kvledger.replay import EventError, TargetFactory
from kvledger.request import CachedPage, Prompt, Request
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings
from kvledger.slots import StateSlots
from kvledger.testing.moves import Space
from kvledger.trace import Trace

ONE_PIECE_TOKENS = 2048
"""Prompts up to this long are also run in one piece, to compare bits."""
KEPT_PREFILLS = 64

FIRST_SLOTS = 16
"""State slots that a node without a limit starts with."""

MAX_BYTES = 1 << 30
"""Of a pool on a CPU, both tiers: every free unit is looked at after every event."""

INTERPRETED_TOKENS = 8_000
"""Of all prompts of a trace: the interpreter computes some sixty a second, and fewer of long ones."""


@dataclass(slots=True)
class Prefills:
    """Prompts that somebody else has computed, each in a pool of its own; pages and checkpoints in order."""

    spec: ModelSpec
    backend: Backend
    device: str
    dtype: torch.dtype
    _kept: OrderedDict[tuple[Any, ...], tuple[DevicePool, torch.Tensor]] = field(default_factory=OrderedDict)

    def of(self, prompt: Prompt, page_size: int, grid: int, *, outputs: bool) -> tuple[DevicePool, torch.Tensor]:
        """The pool, and with `outputs` what its tokens came to."""
        key = (prompt.segments, page_size, grid, outputs)
        if key not in self._kept:
            pages, slots = ceil_pages(prompt.tokens, page_size), prompt.tokens // grid + 1
            pool = DevicePool(self.spec, pages=pages, slots=slots, page_size=page_size, backend=self.backend,
                              device=self.device, dtype=self.dtype)  # fmt: skip
            self._kept[key] = (pool, prefill(pool, prompt, grid, outputs=outputs))
            if len(self._kept) > KEPT_PREFILLS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's batches run: a device's name as the command line has it, and what that means."""

    name: str
    backend: Backend
    device: str
    model: ModelSpec
    dtype: torch.dtype
    prefills: Prefills
    counts: Counts
    max_bytes: int
    check_tables: bool = True


class DeviceNode(PrefillNode):
    """`PrefillNode` on a real pool. `judge` compares what comes out; `snapshot` carries it to the invariants."""

    capabilities = PrefillNode.capabilities | {"data"}
    features = PrefillNode.features - {"faults"}  # its copies are made at once, and all of them arrive
    invariants = DATA_INVARIANTS

    def __init__(
        self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher | None = None, *, place: Place
    ) -> None:
        self.place = place
        self.counts = place.counts
        self.counts.nodes += 1
        self.device = self._open_device(settings)
        super().__init__(settings, rules, watcher)
        self.pool = self.tree.pool = RealPages(self.device, settings.pool_pages)
        self.executor = Executor(self.device, self.grid_tokens)
        self.judge = Judge(truth_of(place.model))
        self.cuts_aligned = self.grid_tokens % CHUNK == 0
        self._filling: Prompt | None = None

    def _open_device(self, settings: NodeSettings) -> DevicePool:
        """State slots without a limit, and such a host tier, grow as they are used. EventError: it is too big."""
        place = self.place
        slots = FIRST_SLOTS if settings.state_slots is None else settings.state_slots
        host_pages = 0 if settings.host_pages is None else min(settings.host_pages, settings.pool_pages) + 2
        self._refuse_too_big(settings, slots, host_pages)
        return DevicePool(
            place.model,
            pages=settings.pool_pages,
            slots=slots,
            page_size=settings.page_size,
            host_pages=host_pages,
            backend=place.backend,
            device=place.device,
            dtype=place.dtype,
        )

    def _refuse_too_big(self, settings: NodeSettings, slots: int, host_pages: int) -> None:
        place = self.place
        size = partial(DevicePool.bytes_of, place.model, page_size=settings.page_size, dtype=place.dtype)
        device, host = size(pages=settings.pool_pages, slots=slots), size(pages=host_pages, slots=host_pages)
        parts = {"pool_tokens": device[0], "state_slots": device[1], "host_tokens": sum(host)}
        total, name = sum(parts.values()), max(parts, key=lambda part: parts[part])
        if total > place.max_bytes:
            raise EventError(
                f"node.{name}",
                f"{getattr(settings, name)} take {parts[name]:,} of {total:,} bytes, --device {place.name} allows "
                f"{place.max_bytes:,}",
            )

    def _open_slots(self) -> StateSlots:
        return DeviceSlots(
            self,
            self.settings.state_slots,
            self.page_size,
            self.grid_tokens,
            tracking=self.settings.tracking_slots,
            copy_on_write=self.settings.copy_on_write,
        )

    @property
    def real_slots(self) -> DeviceSlots:
        assert isinstance(self.slots, DeviceSlots)
        return self.slots

    # --- prefixes that somebody else has computed

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        self._filling = prompt
        try:
            super().cache_on_device(prompt, locked=locked)
            self._fill(prompt)
        finally:
            self._filling = None

    def cache_on_host(self, prompt: Prompt) -> None:
        super().cache_on_host(prompt)
        path = self.tree.match(prompt.page_keys(self.page_size))
        fresh = [(n, cached) for n, cached in enumerate(path) if cached.page is None]
        fresh = [(n, cached) for n, cached in fresh if cached.serial not in self.real_slots.host_page]
        if not fresh:
            return
        source, host = self._computed(prompt), self.device.host
        for number, cached in fresh:
            place = self.real_slots.host_number(cached)
            host = self.device.host
            host.latents[place] = source.device.latents[number].to(host.latents.device)
            host.rows[place] = self.page_size
        for number, cached in fresh:
            if cached.serial in self.real_slots.on_host:
                self._bring(source, number, host.states, host.windows, self.real_slots.host_page[cached.serial])
                host.stated.add(self.real_slots.host_page[cached.serial])

    def bring_state(self, cached: CachedPage, slot: int) -> None:
        """A checkpoint that comes with somebody else's prefix."""
        assert self._filling is not None, "a state is brought while a prefix is cached"
        path = self.tree.match(self._filling.page_keys(self.page_size))
        self._bring(self._computed(self._filling), path.index(cached), self.device.device.states,
                    self.device.device.windows, slot)  # fmt: skip
        self.device.device.stated.add(slot)

    def _bring(
        self, source: DevicePool, page: int, states: torch.Tensor, windows: torch.Tensor, place: int
    ) -> None:  # fmt: skip
        checkpoint = (page + 1) * self.page_size // self.grid_tokens
        states[place] = source.device.states[checkpoint].to(states.device)
        windows[place] = source.device.windows[checkpoint].to(windows.device)

    def _fill(self, prompt: Prompt) -> None:
        """Latents of pages that the prefix has just been given on the device."""
        fresh = {cached.serial for cached in self.real_slots.unfilled}
        self.real_slots.unfilled.clear()
        if not fresh:
            return
        source = self._computed(prompt)
        for number, cached in enumerate(self.tree.match(prompt.page_keys(self.page_size))):
            if cached.serial in fresh and cached.page is not None:
                self.device.device.latents[cached.page] = source.device.latents[number]
                self.device.device.rows[cached.page] = self.page_size

    def _computed(self, prompt: Prompt) -> DevicePool:
        return self.place.prefills.of(prompt, self.page_size, self.grid_tokens, outputs=False)[0]

    # --- a round

    def _take_hit(self, request: Request) -> None:
        super()._take_hit(request)
        self.counts.requests += 1
        self.counts.hits += request.prefix_tokens > 0

    def _run_batch(self, adder: PrefillAdder) -> None:
        """Compute, and only then cache: a page that someone else cached meanwhile is shared, and our copy freed."""
        self.counts.rounds += 1
        if adder.can_run_list and self.judge.wrong_data is None:
            self._compute(adder)
        super()._run_batch(adder)
        self.real_slots.unfilled.clear()

    def _compute(self, adder: PrefillAdder) -> None:
        batch = []
        for chunk in adder.can_run_list:
            request = self.live[chunk.request.rid]
            saves = self.real_slots.reserve(request.rid, chunk.start, chunk.end)
            live = self.real_slots.live[request.rid]
            batch.append(Work(request.rid, request.prompt, chunk.start, chunk.end, request.pages, live, saves))
            self.cuts_aligned &= chunk.start % CHUNK == 0 and (chunk.end % CHUNK == 0 or not _tail(request, chunk.end))
        try:
            if self.place.check_tables:
                self._check(batch)
            outputs = self.executor.run(batch)
        except TableError as error:
            self.judge.refuse(batch[0].rid, str(error))
            return
        for work, values in zip(batch, outputs, strict=True):
            self.counts.tokens += work.tokens
            stored = self.device.rows_of(work.pages, work.end)
            before = self.judge.bitwise
            self.judge.look(Output(work.rid, work.prompt, work.start, values, stored, self._one_piece(work)))
            self.counts.bitwise += self.judge.bitwise - before

    def _check(self, batch: Sequence[Work]) -> None:
        tables = [PageTable(r.rid, tuple(r.pages), r.shared_pages) for r in self.live.values()]
        self.device.check_tables(tables, {work.rid: work.start for work in batch}, self.pool.released())
        slots = self.real_slots
        owners = [(rid, [slot]) for rid, slot in slots.live.items()]
        owners += [(f"{work.rid}'s checkpoints", list(work.saves.values())) for work in batch]
        self.device.check_slots([*owners, ("the prefix tree", slots.saved.values())], slots.free_numbers())

    def _one_piece(self, work: Work) -> torch.Tensor | None:
        """The same tokens of the prompt run in one piece, where cuts cannot have changed a bit."""
        if not self.cuts_aligned or self.place.name != "cpu" or work.prompt.tokens > ONE_PIECE_TOKENS:
            return None
        _, whole = self.place.prefills.of(work.prompt, self.page_size, self.grid_tokens, outputs=True)
        return whole[work.start : work.end]

    def look_at_poison(self) -> None:
        """Look at every free unit, and for NaN in those that hold data; the judge keeps what is wrong."""
        if self.judge.wrong_poison is not None:
            return
        unused = self.pool.never_used()
        free = [*self.pool.released(), *range(unused.start, min(unused.stop, self.device.pages))]
        faults = self.device.faults(free, self.real_slots.free_numbers(), self.real_slots.free_host_places())
        if faults:
            self.judge.wrong_poison = Finding(None, f"{len(faults)} units are not as they should be: {faults[0]}")

    def snapshot(self) -> Snapshot:
        plain = super().snapshot()
        plain_fields = {f.name: getattr(plain, f.name) for f in fields(Snapshot)}
        return DeviceSnapshot(**plain_fields, judge=self.judge, look_at_poison=self.look_at_poison)


def _tail(request: Request, end: int) -> int:
    return request.prompt_tokens - end


class DeviceTarget:
    """Makes nodes on one device; a `TargetFactory`. `space`: nodes of a size to search there."""

    def __init__(self, place: Place, space: Space) -> None:
        self.place = place
        self.space = space
        self.last: DeviceNode | None = None

    def __call__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> DeviceNode:
        self.last = DeviceNode(settings, rules, watcher, place=self.place)
        return self.last

    def lean(self, invariant: str) -> TargetFactory:
        """What to shrink with: the pure node decides the same, and a promise on paper needs no data."""
        return self if any(invariant == own.name for own in DATA_INVARIANTS) else PrefillNode

    def refusal(self, trace: Trace) -> str | None:
        """Why a trace had better not be replayed here, in one line, or None."""
        tokens = sum(event.prompt.tokens for event in trace.events if isinstance(event, Submit))
        if self.place.name != "interpret" or tokens <= INTERPRETED_TOKENS:
            return None
        return (
            f"--device interpret takes prompts of {INTERPRETED_TOKENS:,} tokens in all, these have {tokens:,}: "
            "--device cpu computes the same"
        )

    def totals(self) -> str:
        """What all nodes did."""
        return f"{self.place.name}: {self.place.counts.line()}"

    def note(self) -> str:
        """What the last node computed, and how it was compared."""
        model = self.place.model
        layers = f"model {model.name}: {model.kda_layers} KDA + {model.mla_layers} MLA layers, hidden {model.hidden}"
        return f"{self.place.name} ({layers}): {self.last.judge.note() if self.last else 'nothing ran'}"


def device_target(device: str, model: str = "tiny", *, check_tables: bool = True) -> DeviceTarget:
    """cpu: torch. interpret: Triton's interpreter, in a process that has not compiled. cuda: compiled Triton."""
    backend: Backend = {"cpu": "torch", "interpret": "interpret", "cuda": "triton"}[device]  # type: ignore[assignment]
    where = "cuda" if device == "cuda" else "cpu"
    spec = MODELS[model]
    dtype = torch.float32
    prefills = Prefills(spec, "triton" if device == "cuda" else "torch", where, dtype)
    max_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else MAX_BYTES
    place = Place(device, backend, where, spec, dtype, prefills, Counts(), max_bytes, check_tables)
    return DeviceTarget(place, TINY_SPACE if device == "interpret" else SMALL_SPACE)
