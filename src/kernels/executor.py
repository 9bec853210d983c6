"""Runs a decided batch on a device pool: layers, pages, states and windows in place; outputs of every token kept.

Deterministic: a token's bits hang on its prompt alone, not on the batch's company, nor on page and slot numbers, nor on
cuts at multiples of 16. So projections run over tiles of 16 rows that lie at multiples of 16 of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from kvledger.kernels.conv import causal_conv_fwd
from kvledger.kernels.device_pool import DevicePool
from kvledger.kernels.kda import kda_chunk_fwd
from kvledger.kernels.launch import Backend
from kvledger.kernels.mla import PrefillPlan, SlotMap, latent_store, mla_prefill, plan_prefill, plan_slots
from kvledger.kernels.model import BETA_SHIFT, NORM_EPSILON, ROPE_BASE, Layer, ModelSpec, embed, weights
from kvledger.kernels.state_plan import CHUNK, NO_SLOT, StateSlots, grid_points
from kvledger.kernels.tables import upload
from kvledger.replay import TargetFactory
from kvledger.request import Prompt

CHUNK_TOKENS_AT_A_TIME = 16384


@dataclass(frozen=True, slots=True)
class Work:
    """One chunk [start, end) of a request: its page table, its live slot, and slots for checkpoints by position."""

    rid: str
    prompt: Prompt
    start: int
    end: int
    pages: Sequence[int]
    live: int
    saves: Mapping[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def part(self, start: int, end: int) -> Work:
        """[start, end) of it, and the checkpoints in there."""
        saves = {position: slot for position, slot in self.saves.items() if start < position <= end}
        return replace(self, start=start, end=end, saves=saves)


@dataclass(frozen=True)
class Step:
    """What all layers of one pass share: positions, tables, slots; `turns` [2, T, rope / 2] are cosines and sines."""

    bounds: list[int]
    turns: torch.Tensor
    lanes: torch.Tensor
    tiles: int
    slots: StateSlots
    stores: SlotMap
    attends: PrefillPlan | None


class Executor:
    """A model over a pool, with its own weights unless other `layers` are given.

    `grid` is where checkpoints lie; where it is no multiple of 16, passes are cut there.
    """

    def __init__(self, pool: DevicePool, grid: int, layers: Sequence[Layer] | None = None) -> None:
        self.pool = pool
        self.spec: ModelSpec = pool.spec
        self.backend: Backend = pool.backend
        self.grid = grid
        like = pool.device.latents
        self.dtype, self.device = like.dtype, like.device
        self.layers = [_on_device(layer, like) for layer in layers or weights(self.spec)]
        self.passes = 0

    def run(self, batch: Sequence[Work], *, outputs: bool = True) -> list[torch.Tensor]:
        """Run each chunk of the batch; returns its outputs, [tokens, hidden] float32 on the host.

        Without `outputs`, attention of a last MLA layer is left out: its latents are stored all the same.
        """
        parts: list[list[torch.Tensor]] = [[] for _ in batch]
        for step in self._passes(batch):
            done = self._run([work for _, work in step], outputs=outputs)
            for (index, _), part in zip(step, done, strict=True):
                parts[index].append(part)
        return [torch.cat(pieces) if pieces else torch.zeros(0, self.spec.hidden) for pieces in parts]

    def _passes(self, batch: Sequence[Work]) -> list[list[tuple[int, Work]]]:
        """The batch as it is, or cut at checkpoints that the kernels cannot take in passing."""
        cut: list[list[Work]] = []
        for work in batch:
            points = [] if self.grid % CHUNK == 0 else sorted(p for p in work.saves if p < work.end)
            cut.append([work.part(low, high) for low, high in pairwise([work.start, *points, work.end])])
        deepest = max(map(len, cut), default=0)
        return [[(i, works[n]) for i, works in enumerate(cut) if n < len(works)] for n in range(deepest)]

    def _run(self, batch: list[Work], *, outputs: bool) -> list[torch.Tensor]:
        self.passes += 1
        for work in batch:
            if work.start:
                self.pool.check_state(work.rid, work.live)
        x = torch.cat([torch.from_numpy(embed(w.prompt, w.start, w.end, self.spec.hidden)) for w in batch])
        x = x.to(self.device)
        step = self._step(batch, outputs)
        kda = mla = 0
        for layer in self.layers:
            h = _normalised(x).to(self.dtype)
            if layer.kind == "kda":
                x = x + self._kda(layer, kda, h, step)
                kda += 1
            else:
                mla += 1
                last = mla == self.spec.mla_layers
                attended = self._mla(layer, mla - 1, h, step, attend=outputs or not last)
                x = x if attended is None else x + attended
        self._wrote(batch)
        answer = _normalised(x).cpu()
        return [answer[low:high] for low, high in pairwise(step.bounds)]

    def _step(self, batch: list[Work], outputs: bool) -> Step:
        lanes: list[int] = []
        tiles = 0
        for work in batch:
            first = work.start // CHUNK * CHUNK
            lanes += range(tiles * CHUNK + work.start - first, tiles * CHUNK + work.end - first)
            tiles += -(-(work.end - first) // CHUNK)
        bounds = [0, *accumulate(work.tokens for work in batch)]
        by_kernel = self.grid % CHUNK == 0
        slots = StateSlots(
            sources=[work.live if work.start else NO_SLOT for work in batch],
            destinations=[work.live for work in batch],
            starts=[work.start for work in batch],
            checkpoints=[
                [w.saves.get(point, NO_SLOT) for point in grid_points(w.start, w.tokens, self.grid)] for w in batch
            ]
            if by_kernel
            else (),
            grid=self.grid if by_kernel else CHUNK,
        )
        size, latents = self.pool.page_size, self.pool.layer_latents(0)
        rows = [w.pages[p // size] * size + p % size for w in batch for p in range(w.start, w.end)]
        attends = None
        if outputs or self.spec.mla_layers > 1:
            longest = max(-(-work.end // size) for work in batch)
            table = torch.tensor([[*w.pages[:longest], *[0] * (longest - len(w.pages))] for w in batch])
            attends = plan_prefill(latents, table, bounds, [w.start for w in batch], backend=self.backend)
        lane_table = upload(torch.tensor(lanes, dtype=torch.int64), self.device)
        positions = np.concatenate([np.arange(work.start, work.end) for work in batch])
        turns = upload(torch.from_numpy(_turns(self.spec.rope, positions)), self.device)
        return Step(bounds, turns, lane_table, tiles, slots, plan_slots(rows, latents), attends)

    def _wrote(self, batch: list[Work]) -> None:
        """Say what the pool holds now; a checkpoint that the kernels did not take in passing is copied from live."""
        for work in batch:
            self.pool.wrote(work.pages, work.start, work.end)
            self.pool.device.stated.add(work.live)
            for slot in work.saves.values():
                if self.grid % CHUNK:
                    self.pool.restore(work.live, slot)
                self.pool.device.stated.add(slot)

    # --- layers

    def _kda(self, layer: _Weights, number: int, h: torch.Tensor, step: Step) -> torch.Tensor:
        """h [T, hidden] to [T, hidden] float32; states and windows of the step's slots change in place."""
        spec, tokens = self.spec, len(h)
        heads, keys = spec.heads, spec.heads * spec.k_size
        inner = self._project(h, layer.inner, step)
        mixed = causal_conv_fwd(
            inner[None, :, : spec.channels].to(self.dtype),
            layer.conv,
            cu_seqlens=step.bounds,
            window_pool=self.pool.layer_windows(number),
            slots=step.slots,
            backend=self.backend,
        )
        q, k, v = mixed.split([keys, keys, heads * spec.v_size], dim=2)
        gates = inner[:, spec.channels : spec.channels + keys]
        out = kda_chunk_fwd(
            q.view(1, tokens, heads, spec.k_size),
            k.view(1, tokens, heads, spec.k_size),
            v.view(1, tokens, heads, spec.v_size),
            gates.reshape(1, tokens, heads, spec.k_size).to(self.dtype),
            (inner[None, :, -heads:] + BETA_SHIFT).to(self.dtype),
            None,
            None,
            layer.a_log,
            layer.dt_bias,
            spec.lower_bound,
            cu_seqlens=step.bounds,
            state_pool=self.pool.layer_states(number),
            slots=step.slots,
            backend=self.backend,
        )
        return self._project(out.view(tokens, -1), layer.out, step).float()

    def _mla(
        self, layer: _Weights, number: int, h: torch.Tensor, step: Step, *, attend: bool
    ) -> torch.Tensor | None:  # fmt: skip
        """Store the chunk's latents; attention over all of the request's pages, [T, hidden] float32, if asked for."""
        spec, tokens, pages = self.spec, len(h), self.pool.layer_latents(number)
        inner = self._project(h, layer.inner, step).view(tokens, 1 + spec.heads, spec.latent)
        inner = _turned(inner, spec.rank, step.turns).to(self.dtype)
        latent_store(inner[:, 0].contiguous(), pages, step.stores, backend=self.backend)
        if not attend:
            return None
        assert step.attends is not None
        mixed = mla_prefill(inner[:, 1:].contiguous(), pages, step.attends, scale=spec.latent**-0.5, rank=spec.rank)
        return self._project(mixed.view(tokens, -1), layer.out, step).float()

    def _project(self, x: torch.Tensor, weight: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, n] times weight [n, m], 16 rows at a time: a row's place in its product is its place in its prompt."""
        tiles = x.new_zeros(step.tiles * CHUNK, x.shape[1])
        tiles[step.lanes] = x
        if self.device.type == "cuda":
            return (tiles @ weight)[step.lanes]
        shaped = tiles.view(step.tiles, CHUNK, -1)
        return torch.bmm(shaped, weight.expand(step.tiles, -1, -1)).view(len(tiles), -1)[step.lanes]


@dataclass(frozen=True)
class _Weights:
    """A layer's weights where they are needed."""

    kind: str
    inner: torch.Tensor
    out: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


def _on_device(layer: Layer, like: torch.Tensor) -> _Weights:
    wide = [torch.from_numpy(array).to(like.device, like.dtype) for array in (layer.inner, layer.out, layer.conv)]
    exact = [torch.from_numpy(array).to(like.device) for array in (layer.a_log, layer.dt_bias)]
    return _Weights(layer.kind, *wide, *exact)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Root mean square 1 over the last dimension."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + NORM_EPSILON)


def _turned(x: torch.Tensor, rank: int, turns: torch.Tensor) -> torch.Tensor:
    """x [T, heads, rank + rope], the pairs of its rope part rotated in float32 by its rows' angles."""
    cosines, sines = turns[:, :, None]
    even, odd = x[..., rank::2].float(), x[..., rank + 1 :: 2].float()
    pairs = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), -1)
    return torch.cat((x[..., :rank], pairs.flatten(-2).to(x.dtype)), -1)


def _turns(rope: int, positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
    """Cosines and sines of the angles at `positions`, float32 [2, T, rope / 2]."""
    rows = 1 << max(10, int(positions.max(initial=0)).bit_length())
    return _turn_table(rope, rows)[:, positions]


@lru_cache(maxsize=8)
def _turn_table(rope: int, rows: int) -> np.ndarray[Any, Any]:
    """All positions below `rows`, a power of two: a cosine's bits may not hang on its place in an array."""
    angles = np.arange(rows)[:, None] * ROPE_BASE ** (-np.arange(0, rope, 2) / rope)
    return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)


def prefill(
    pool: DevicePool, prompt: Prompt, grid: int, *, outputs: bool
) -> torch.Tensor:  # fmt: skip
    """Run a whole prompt in a pool of its own: pages in order, live state in slot 0, checkpoint n in slot n.

    In one piece, unless the prompt is long and nobody asks for outputs.
    """
    executor = Executor(pool, grid)
    pages = range(-(-prompt.tokens // pool.page_size))
    at_a_time = prompt.tokens if outputs else CHUNK_TOKENS_AT_A_TIME // grid * grid or grid
    parts = []
    for start in range(0, prompt.tokens, at_a_time):
        end = min(start + at_a_time, prompt.tokens)
        saves = {point: point // grid for point in grid_points(start, end - start, grid)}
        parts += executor.run([Work("prefill", prompt, start, end, pages, 0, saves)], outputs=outputs)
    return torch.cat(parts)


def target(device: str) -> TargetFactory:
    """The node with its batches run on `device`: cpu (torch), interpret (Triton's interpreter), cuda (Triton)."""
    from kvledger.kernels.device_node import device_target

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device here")
    if device in ("cpu", "interpret"):
        torch.set_num_threads(1)  # products of 16 rows: threads only wait for each other
    return device_target(device)
