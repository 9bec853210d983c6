"""What every token's output should be: the whole prompt in one piece, float64, one token after another.

Written in numpy from the recurrence and from plain attention; it shares the model's weights and inputs with the
executor, and no code. Nothing here knows of pages, chunks, slots or checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvledger.kernels.model import BETA_SHIFT, NORM_EPSILON, ROPE_BASE, Layer, ModelSpec, embed, weights
from kvledger.request import Prompt

Array = npt.NDArray[np.float64]

KEPT_TOKENS = 1 << 18
ROWS_AT_A_TIME = 128


class Whole(NamedTuple):
    """Of a whole prompt: a row for each of its tokens, [tokens, hidden], and latents [tokens, MLA layers, latent]."""

    tokens: Array
    latents: Array


class Truth:
    """Reference outputs of a model, kept by prompt: a prompt that another one begins with costs nothing more."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._kept: OrderedDict[tuple[Any, ...], Whole] = OrderedDict()
        self._trunks: dict[tuple[Any, ...], Whole] = {}

    def outputs(self, prompt: Prompt) -> Array:
        """Outputs of every token, [tokens, hidden]. Attention makes this quadratic: see `at` for long prompts."""
        kept = self._find(prompt)
        if kept is None:
            x, latents = self._before_last(prompt)
            kept = Whole(self._last(x, latents, np.arange(prompt.tokens)), latents)
            self._kept[_open_key(prompt)] = self._kept[prompt.segments] = kept
            while sum(len(whole.tokens) for whole in self._kept.values()) > KEPT_TOKENS and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return kept.tokens[: prompt.tokens]

    def latents(self, prompt: Prompt) -> Array:
        """What each MLA layer stores of every token, [tokens, MLA layers, latent]."""
        whole = self._find(prompt) or self._before_last(prompt)
        return whole.latents[: prompt.tokens]

    def at(self, prompt: Prompt, positions: Sequence[int] | range) -> Array:
        """Outputs of the tokens at `positions` only, [len(positions), hidden]; all of them get their KDA states."""
        return self._last(*self._before_last(prompt), np.asarray(positions))

    def _find(self, prompt: Prompt) -> Whole | None:
        for key in (prompt.segments, _open_key(prompt)):
            whole = self._kept.get(key)
            if whole is not None and len(whole.tokens) >= prompt.tokens:
                self._kept.move_to_end(key)
                return whole
        return None

    def _last(self, x: Array, latents: Array, wanted: npt.NDArray[np.int64]) -> Array:
        layer = weights(self.spec)[-1]
        return _normalised(x[wanted] + _mla_layer(self.spec, layer, _normalised(x), latents[:, -1], wanted))

    def _before_last(self, prompt: Prompt) -> Whole:
        """What enters the last layer, one of attention: only that one can be computed for some tokens alone."""
        if prompt.segments in self._trunks:
            return self._trunks[prompt.segments]
        spec, stored = self.spec, []
        x = embed(prompt, 0, prompt.tokens, spec.hidden).astype(np.float64)
        everybody = np.arange(prompt.tokens)
        for number, layer in enumerate(weights(spec), 1):
            h = _normalised(x)
            if layer.kind == "kda":
                x = x + _kda_layer(spec, layer, h)
                continue
            stored.append(_latents(spec, layer, h))
            if number < len(spec.layers):
                x = x + _mla_layer(spec, layer, h, stored[-1], everybody)
        self._trunks.clear()
        self._trunks[prompt.segments] = Whole(x, np.stack(stored, 1))
        return self._trunks[prompt.segments]


def _open_key(prompt: Prompt) -> tuple[Any, ...]:
    """Prompts that differ in the length of their last segment alone share their tokens as far as both go."""
    return (*prompt.segments[:-1], prompt.segments[-1][0])


def _normalised(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + NORM_EPSILON))


def _kda_layer(spec: ModelSpec, layer: Layer, h: Array) -> Array:
    tokens, heads, k_size, v_size = len(h), spec.heads, spec.k_size, spec.v_size
    inner = h @ layer.inner.astype(np.float64)
    mixed = _convolved(inner[:, : spec.channels], layer.conv.astype(np.float64))
    keys_end = 2 * heads * k_size
    q = mixed[:, : heads * k_size].reshape(tokens, heads, k_size)
    k = mixed[:, heads * k_size : keys_end].reshape(tokens, heads, k_size)
    v = mixed[:, keys_end:].reshape(tokens, heads, v_size)
    gates = inner[:, spec.channels : spec.channels + heads * k_size].reshape(tokens, heads, k_size)
    strength = 1 / (1 + np.exp(-(inner[:, -heads:] + BETA_SHIFT)))
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * k_size**-0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    rate = np.exp(layer.a_log.astype(np.float64))[:, None]
    decay = np.exp(spec.lower_bound / (1 + np.exp(-rate * (gates + layer.dt_bias))))
    return _recurrence(q, k, v, decay, strength).reshape(tokens, -1) @ layer.out.astype(np.float64)


def _convolved(x: Array, taps: Array) -> Array:
    """Each channel over its own last 4 inputs, then x * sigmoid(x)."""
    total = np.zeros_like(x)
    for lag in range(taps.shape[1]):
        total[lag:] += taps[:, -1 - lag] * x[: len(x) - lag]
    return np.asarray(total / (1 + np.exp(-total)))


def _recurrence(q: Array, k: Array, v: Array, decay: Array, strength: Array) -> Array:
    """S <- S diag(a);  S <- S + b (v - S k) k^T;  o = S q, token by token; each head's S is [V, K]."""
    outputs = np.empty_like(v)
    _, heads, v_size = v.shape
    for head in range(heads):
        state = np.zeros((v_size, k.shape[2]))
        own = zip(q[:, head], k[:, head], v[:, head], decay[:, head], strength[:, head], strict=True)
        for token, (query, key, value, kept, beta) in enumerate(own):
            state *= kept
            change = state.dot(key)
            np.subtract(value, change, out=change)
            change *= beta
            state += change[:, None] * key
            outputs[token, head] = state.dot(query)
    return outputs


def _latents(spec: ModelSpec, layer: Layer, h: Array) -> Array:
    inner = layer.inner[:, : spec.latent].astype(np.float64)
    return _turned(spec, (h @ inner)[:, None], np.arange(len(h)))[:, 0]


def _mla_layer(spec: ModelSpec, layer: Layer, h: Array, latents: Array, rows: npt.NDArray[np.int64]) -> Array:
    """Attention of the tokens at `rows` over all up to themselves; the value is the latent's first `rank` numbers."""
    inner = layer.inner[:, spec.latent :].astype(np.float64)
    queries = _turned(spec, (h[rows] @ inner).reshape(len(rows), spec.heads, spec.latent), rows)
    mixed = np.empty((len(rows), spec.heads, spec.rank))
    for first in range(0, len(rows), ROWS_AT_A_TIME):
        some = slice(first, first + ROWS_AT_A_TIME)
        everybody, seen = int(rows[some].min()) + 1, int(rows[some].max()) + 1
        hidden = np.arange(everybody, seen) > rows[some][:, None]
        for head in range(spec.heads):
            scores = (queries[some, head] * spec.latent**-0.5) @ latents[:seen].T
            scores[:, everybody:][hidden] = -np.inf
            scores -= scores.max(1, keepdims=True)
            np.exp(scores, out=scores)
            mixed[some, head] = scores @ latents[:seen, : spec.rank] / scores.sum(1, keepdims=True)
    return np.asarray(mixed.reshape(len(rows), -1) @ layer.out.astype(np.float64))


def _turned(spec: ModelSpec, x: Array, positions: npt.NDArray[np.int64]) -> Array:
    """x [T, heads, latent], its rope part read as complex numbers and turned by each token's angles."""
    speeds = ROPE_BASE ** (-np.arange(0, spec.rope, 2) / spec.rope)
    turns = np.exp(1j * positions[:, None] * speeds)[:, None]
    rope = np.ascontiguousarray(x[..., spec.rank :]).view(np.complex128) * turns
    return np.concatenate([x[..., : spec.rank], rope.view(np.float64)], axis=-1)
