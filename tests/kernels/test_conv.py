"""The causal convolution and its window: against float64, bit for bit against itself, and together with KDA."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

import numpy as np
import torch

from kvledger.kernels.conv import causal_conv_fwd
from kvledger.kernels.kda import kda_chunk_fwd
from kvledger.kernels.launch import Backend, BackendError
from kvledger.kernels.reference import causal_convolution, kda_recurrence
from kvledger.kernels.state_plan import NO_SLOT, StateSlots
from tests.kernels.inputs import rms_ratio, same_bits
from tests.kernels.kda_checks import CONV, POISON, poisoned

pytestmark = pytest.mark.device

CPU_BACKENDS: tuple[Backend, ...] = ("torch", "interpret")


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", CONV)
def test_conv(name: str, backend: Backend) -> None:
    CONV[name](backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (2, 7), (3, 16), (40, 100), (300, 33)])
def test_torch_agrees_with_float64(tokens: int, channels: int, has_bias: bool, silu: bool, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(tokens)
    shapes = ((1, tokens, channels), (channels, 4), (channels,), (1, 3, channels))
    x, weight, bias, pool = (torch.randn(*shape, generator=source).to(dtype) for shape in shapes)
    exact = causal_convolution(x[0], weight, bias if has_bias else None, pool[0].clone(), silu=silu)
    slots = StateSlots((0,), (0,), (0,))
    out = causal_conv_fwd(x, weight, bias if has_bias else None, silu=silu, window_pool=pool, slots=slots)
    assert out.dtype == dtype
    assert rms_ratio(out[0].float(), exact) < (1e-6 if dtype == torch.float32 else 0.006)


@pytest.mark.parametrize("silu", [True, False])
def test_interpreter_agrees_with_torch(silu: bool) -> None:
    source = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 21, 20, generator=source), torch.randn(20, 4, generator=source)
    outs = [causal_conv_fwd(x, weight, silu=silu, backend=backend) for backend in CPU_BACKENDS]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_windows_are_copied_bit_for_bit(backend: Backend) -> None:
    """Minus zero and a NaN's payload survive, also those that only move from the source to the destination."""
    x = torch.tensor([[[-0.0, 1.0]]])
    pool = poisoned(3, 3, 2)
    pool[1, :, 0] = torch.tensor([1.0, -0.0, 2.0])
    causal_conv_fwd(x, torch.ones(2, 4), window_pool=pool, slots=StateSlots((1,), (2,), (0,)), backend=backend)
    words = pool[2].view(torch.int32)
    assert words[:, 0].tolist() == [-(2**31), torch.tensor(2.0).view(torch.int32).item(), -(2**31)]
    assert words[:, 1].tolist() == [POISON, POISON, torch.tensor(1.0).view(torch.int32).item()]


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_gives_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    tokens, channels = rng.randint(1, 400), rng.choice((1, 5, 24, 96))
    source = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(1, tokens, channels, generator=source), torch.randn(channels, 4, generator=source)
    whole = causal_conv_fwd(x, weight)
    pool, cuts = poisoned(2, 3, channels), sorted(rng.choices(range(tokens + 1), k=6))
    outs: list[torch.Tensor] = []
    for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        slots = StateSlots((0 if begin or outs else NO_SLOT,), (0,), (begin,))
        outs.append(causal_conv_fwd(x[:, begin:end], weight, window_pool=pool, slots=slots))
    assert same_bits(torch.cat(outs, 1), whole)


HEADS, K, V = 2, 16, 24
WIDTHS = (HEADS * K, HEADS * K, HEADS * V)


class Layer:
    """Convolution, then KDA, over one pool of each: what a snapshot has to hold."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        source = torch.Generator().manual_seed(2)
        self.x = torch.randn(1, 50, sum(WIDTHS), generator=source)
        self.g = torch.randn(1, 50, HEADS, K, generator=source) - 6
        self.beta = torch.randn(1, 50, HEADS, generator=source) + 2
        self.weight = torch.rand(sum(WIDTHS), 4, generator=source)
        self.states = poisoned(6, HEADS, V, K)
        self.windows = poisoned(6, 3, sum(WIDTHS))

    def step(self, begin: int, end: int, slots: StateSlots, state_slots: StateSlots | None = None) -> torch.Tensor:
        rows = slice(begin, end)
        mixed = causal_conv_fwd(
            self.x[:, rows], self.weight, window_pool=self.windows, slots=slots, backend=self.backend
        )
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in mixed.split(WIDTHS, -1))
        gates = (torch.zeros(HEADS), torch.zeros(HEADS, K), -5.0)
        options: dict[str, Any] = {"state_pool": self.states, "slots": state_slots or slots, "backend": self.backend}
        return kda_chunk_fwd(q, k, v, self.g[:, rows], self.beta[:, rows], None, None, *gates, **options)[0]

    def exact(self) -> np.ndarray[Any, Any]:
        mixed = causal_convolution(self.x[0], self.weight)
        q, k, v = np.split(mixed, np.cumsum(WIDTHS)[:2], axis=1)
        tokens = (q.reshape(-1, HEADS, K), k.reshape(-1, HEADS, K), v.reshape(-1, HEADS, V))
        gates = (torch.zeros(HEADS), torch.zeros(HEADS, K), -5.0)
        return kda_recurrence(*tokens, self.g[0], self.beta[0], K**-0.5, *gates)[0]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_snapshot_is_state_and_window(backend: Backend) -> None:
    """A request restored from both continues with the first one's bits; without its window, it is wrong for good."""
    layer = Layer(backend)
    out = layer.step(0, 50, StateSlots((NO_SLOT,), (0,), (0,), ((NO_SLOT, 3, NO_SLOT),), 16))
    assert rms_ratio(out, layer.exact()) < 3e-5
    restored = layer.step(32, 50, StateSlots((3,), (1,), (32,)))
    assert same_bits(restored, out[32:])
    assert same_bits(layer.states[0], layer.states[1])
    assert same_bits(layer.windows[0], layer.windows[1])
    half = layer.step(32, 50, StateSlots((NO_SLOT,), (2,), (32,)), StateSlots((3,), (2,), (32,)))
    error = (half - out[32:]).flatten(1).norm(dim=1) / out[32:].flatten(1).norm(dim=1)
    assert error[:3].min() > 0.05
    assert error[3:].min() > 1e-3, "a window of zeros stays in the state"


POOL = torch.zeros(4, 3, 8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x without a batch": ({"x": torch.zeros(40, 8)}, "x: got"),
    "weight of width 3": ({"weight": torch.zeros(8, 3)}, "weight: got"),
    "bias of another size": ({"bias": torch.zeros(4)}, "bias: got"),
    "out is x": ({"x": (x := torch.zeros(1, 40, 8)), "out": x}, "shares memory"),
    "windows of width 4": ({"window_pool": torch.zeros(4, 4, 8)}, "window_pool"),
    "windows of another dtype": ({"window_pool": torch.zeros(4, 3, 8).bfloat16()}, "window_pool"),
    "channels first": ({"window_pool": torch.zeros(4, 8, 3).mT}, "strides"),
    "windows without slots": ({"slots": None}, "without slots"),
    "no weight": ({"weight": None}, "weight: got NoneType, expected a tensor"),
    "slots without windows": ({"window_pool": None}, "no pool is given"),
    "cu_seqlens between tokens": ({"cu_seqlens": [0, 20.5, 40]}, "cu_seqlens: got a list of float, int"),
    "out among the windows": (
        {"window_pool": (w := torch.zeros(20, 3, 8)), "out": w.view(-1)[:320].view(1, 40, 8)},
        "out shares memory with window_pool",
    ),
    "slot past the pool": ({"slots": StateSlots((0, 4), (0, 1), (0, 0))}, "outside"),
    "another one's source": ({"slots": StateSlots((0, 1), (1, 0), (0, 0))}, "source of sequence"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    changes, words = REFUSED[name]
    args: dict[str, Any] = {"x": torch.ones(1, 40, 8), "weight": torch.ones(8, 4), "cu_seqlens": [0, 20, 40]}
    args |= {"window_pool": POOL, "slots": StateSlots((0, 1), (0, 1), (0, 0))}
    with pytest.raises((ValueError, TypeError), match=words):
        causal_conv_fwd(**args | changes)
    assert not POOL.any()


def test_interpreter_refuses_bf16() -> None:
    with pytest.raises(BackendError, match="bfloat16"):
        causal_conv_fwd(torch.zeros(1, 4, 8).bfloat16(), torch.zeros(8, 4), backend="interpret")
