"""KDA and the causal convolution in float64, one token at a time: what the kernels are held to.

It shares no code with them: written from the recurrence and not from its chunk form, in numpy and not in torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def as_array(values: Any) -> Array:
    """float64 copy of an array or tensor of any float type."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.array(values, dtype=np.float64)


def kda_recurrence(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float,
    a_log: Any,
    dt_bias: Any,
    lower_bound: float | None,
    initial_state: Any = None,
    save_after: Collection[int] = (),
) -> tuple[Array, Array, dict[int, Array]]:
    """One sequence: q, k, g [T, H, K], v [T, H, V], beta logits [T, H], state [H, V, K].

    Returns outputs [T, H, V], the final state, and the state after each count of tokens in `save_after`.
    """
    q, k, v, g, beta, a_log, dt_bias = (as_array(x) for x in (q, k, v, g, beta, a_log, dt_bias))
    tokens, heads, k_size = q.shape
    v_size = v.shape[2]
    state = np.zeros((heads, v_size, k_size)) if initial_state is None else as_array(initial_state)
    outputs = np.empty((tokens, heads, v_size))
    saved = {}
    for token in range(tokens):
        for head in range(heads):
            drive = g[token, head] + dt_bias[head]
            if lower_bound is None:
                log_decay = -np.exp(a_log[head]) * np.logaddexp(0.0, drive)
            else:
                with np.errstate(over="ignore"):
                    log_decay = lower_bound / (1.0 + np.exp(-np.exp(a_log[head]) * drive))
            key = k[token, head] / np.sqrt(k[token, head] @ k[token, head] + 1e-6)
            query = q[token, head] / np.sqrt(q[token, head] @ q[token, head] + 1e-6)
            strength = 1.0 / (1.0 + np.exp(-beta[token, head]))
            own = state[head]
            own *= np.exp(log_decay)
            own += strength * np.outer(v[token, head] - own @ key, key)
            outputs[token, head] = own @ query * scale
        if token + 1 in save_after:
            saved[token + 1] = state.copy()
    return outputs, state, saved


def causal_convolution(x: Any, weight: Any, bias: Any = None, window: Any = None, silu: bool = True) -> Array:
    """One sequence: x [T, C] after window [W - 1, C] (oldest first), weight [C, W] (last column: the token itself)."""
    x, weight = as_array(x), as_array(weight)
    channels, width = weight.shape
    before = np.zeros((width - 1, channels)) if window is None else as_array(window)
    history = [*before, *x]
    outputs: Array = np.empty_like(x)
    for token in range(len(x)):
        total = np.zeros(channels) if bias is None else as_array(bias)
        for tap in range(width):
            total = total + weight[:, tap] * history[token + tap]
        outputs[token] = total / (1.0 + np.exp(-total)) if silu else total
    return outputs
