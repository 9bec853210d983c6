"""Inputs of KDA that open a test's eyes, the float64 answers to them, and how far from those a result is.

FlashKDA's own inputs forget: a token keeps 0.11 of the state, so that what happened 16 tokens ago is gone. `slow` gates
(g - 6, A_log = 0) with strong updates (beta logit + 2) and correlated keys (uniform) remember; `swept` mixes both kinds
of channel, after the sweep in FlashKDA's test against fla.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from kvledger.kernels.kda import kda_chunk_fwd
from kvledger.kernels.launch import Backend
from kvledger.kernels.reference import kda_recurrence

Kind = Literal["default", "slow", "swept"]

TOKENS = ("q", "k", "v", "g", "beta")

FP32_RATIO = 3e-5
FP32_TOKEN_RATIO = 3e-4
"""Of the worst token and head: one whose output happens to be small has the rounding of its neighbours."""
BF16_RATIO = 0.006


@dataclass(frozen=True, eq=False)
class Inputs:
    """N sequences, concatenated; q, k, g [1, T, H, K], v [1, T, H, V], beta [1, T, H], states [N, H, V, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    lengths: tuple[int, ...]
    lower_bound: float | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[3] ** -0.5)

    @property
    def bounds(self) -> list[int]:
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor(self.bounds, dtype=torch.int64)

    def changed(self, **fields: Any) -> Inputs:
        return replace(self, **fields)

    def rows(self, begin: int, end: int) -> Inputs:
        """Tokens [begin, end) as one sequence."""
        taken = {name: getattr(self, name)[:, begin:end] for name in TOKENS}
        return self.changed(**taken, lengths=(end - begin,), states=self.states[:1])

    def sequence(self, n: int) -> Inputs:
        return self.rows(self.bounds[n], self.bounds[n + 1]).changed(states=self.states[n : n + 1])

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers, rounded to `dtype`; states, A_log and dt_bias stay."""
        return self.changed(**{name: getattr(self, name).to(dtype) for name in TOKENS})

    @cached_property
    def exact(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Float64 outputs [T, H, V] and final states [N, H, V, K], one token after another."""
        outputs, finals = [], []
        for begin, end, state in zip(self.bounds, self.bounds[1:], self.states, strict=False):
            tokens: dict[str, Any] = {name: getattr(self, name)[0, begin:end] for name in TOKENS}
            gate: dict[str, Any] = {"a_log": self.a_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}
            out, final, _ = kda_recurrence(**tokens, **gate, scale=self.scale, initial_state=state)
            outputs.append(out)
            finals.append(final)
        return np.concatenate(outputs), np.stack(finals)


def make_inputs(
    kind: Kind,
    lengths: tuple[int, ...],
    *,
    heads: int = 1,
    k_size: int = 32,
    v_size: int = 48,
    lower_bound: float | None = -5.0,
    seed: int = 0,
) -> Inputs:
    """Draw inputs; K and V differ unless told otherwise."""
    source = torch.Generator().manual_seed(seed)
    tokens = (1, sum(lengths), heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=source)

    draw = normal if kind == "default" else uniform
    q, k = draw(*tokens, k_size), draw(*tokens, k_size)
    v, g, beta = normal(*tokens, v_size), normal(*tokens, k_size), normal(*tokens)
    a_log, dt_bias = uniform(heads), uniform(heads, k_size)
    if kind == "default":
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if kind == "slow":
        g, a_log, beta = g - 6, torch.zeros(heads), beta + 2
    if kind == "swept":
        g[..., ::2] = torch.linspace(-8, 8, k_size)[::2]
        g[..., 1::2] *= 8
        dt_bias = torch.where(dt_bias < 0.5, -4.0, 4.0)
        a_log = torch.zeros(heads)
    states = normal(len(lengths), heads, v_size, k_size)
    return Inputs(q, k, v, g, beta, a_log, dt_bias, states, lengths, lower_bound)


def run(inputs: Inputs, backend: Backend | None = None, **options: Any) -> torch.Tensor:
    """Outputs [T, H, V] of `kda_chunk_fwd`; options as its own, `cu_seqlens` included unless given."""
    options.setdefault("cu_seqlens", inputs.bounds)
    out = torch.full_like(inputs.v, float("nan"))
    answer = kda_chunk_fwd(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        inputs.scale,
        out,
        inputs.a_log,
        inputs.dt_bias,
        inputs.lower_bound,
        backend=backend,
        **options,
    )
    assert answer is out
    return out.squeeze(0)


def rms_ratio(result: Any, exact: np.ndarray[Any, Any]) -> float:
    """RMS of the error over the RMS of the answer."""
    got = result.double().numpy() if isinstance(result, torch.Tensor) else result
    return float(np.linalg.norm(got - exact) / (np.linalg.norm(exact) + 1e-30))


def worst_token(result: torch.Tensor, exact: np.ndarray[Any, Any]) -> float:
    """The largest RMS ratio of one token and head of [T, H, V]."""
    error = np.sqrt(np.mean((result.double().numpy() - exact) ** 2, axis=-1))
    return float(np.max(error / (np.sqrt(np.mean(exact**2, axis=-1)) + 1e-30), initial=0.0))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of words, so that NaN equals itself and -0 is not 0."""
    words = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[left.dtype]
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(words), right.contiguous().view(words))
