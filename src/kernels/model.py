"""Small hybrid models: what a layer is made of, how large, and weights that are the same everywhere and always.

A block is three KDA layers, then one MLA layer, as in Kimi-Linear; pre-norm, residual, no feed-forward parts (they hold
no state, so nothing in a pool depends on them). With h the RMS-normalised input of a layer:

    KDA   q, k, v = conv(h W_qkv), g = h W_g, beta = h W_beta + 2;  x <- x + kda(q, k, v, g, beta) W_out
    MLA   latent c = h W_latent, stored in a page;  q = h W_query;  x <- x + attention(q, c) W_out

The last `rope` numbers of each latent and of each head's query are rotated by the token's absolute position: pair n,
numbers 2n and 2n + 1, by `position * ROPE_BASE ** (-2n / rope)`. (Kimi-Linear rotates nothing; here a token that is
taken for another position's is to show in every layer.)

The output of a token is its last x, normalised. A token's input is a function of its identity, (segment, position).
Gates are slow on purpose (`dt_bias` around -6): what happened at the start of a prompt is still seen at its end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvledger.request import Prompt

Array = npt.NDArray[Any]
LayerKind = Literal["kda", "mla"]

BETA_SHIFT: Final = 2.0
NORM_EPSILON: Final = 1e-6
CONV_WIDTH: Final = 4
ROPE_BASE: Final = 10_000.0


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of one rank's share: `heads` KDA and MLA heads, states [V, K], latents of `rank` + `rope` numbers."""

    name: str
    hidden: int
    heads: int
    k_size: int
    v_size: int
    rank: int
    rope: int
    kda_layers: int
    mla_layers: int
    lower_bound: float = -5.0

    def __post_init__(self) -> None:
        if self.rope < 2 or self.rope % 2:
            raise ValueError(f"model {self.name}: got rope {self.rope}, expected pairs of numbers to rotate")

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Three KDA layers before each MLA layer, as far as there are any; an MLA layer is last."""
        kinds: list[LayerKind] = []
        for number in range(self.mla_layers):
            end = min(self.kda_layers, -(-self.kda_layers // self.mla_layers) * (number + 1))
            kinds += ["kda"] * (end - kinds.count("kda"))
            kinds.append("mla")
        return tuple(kinds)

    @property
    def channels(self) -> int:
        """Channels of a convolution window: q, k and v of all heads."""
        return self.heads * (2 * self.k_size + self.v_size)

    @property
    def latent(self) -> int:
        return self.rank + self.rope


MODELS: Final = {
    spec.name: spec
    for spec in (
        ModelSpec("tiny", 32, 1, 16, 8, 16, 8, kda_layers=3, mla_layers=1),
        ModelSpec("small", 64, 2, 32, 48, 32, 16, kda_layers=6, mla_layers=2),
        ModelSpec("kimi-linear", 2304, 32, 128, 128, 512, 64, kda_layers=20, mla_layers=7),
        ModelSpec("kimi-k3", 7168, 12, 128, 128, 512, 64, kda_layers=69, mla_layers=24),
    )
}
"""`kimi-k3` is one rank of eight: 12 of 96 heads."""


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, float32. `inner` [hidden, n]: W_qkv, W_g and W_beta side by side, or W_latent and W_query."""

    kind: LayerKind
    inner: Array
    out: Array
    conv: Array
    a_log: Array
    dt_bias: Array


@lru_cache(maxsize=2)
def weights(spec: ModelSpec) -> tuple[Layer, ...]:
    """The layers of a model, from a fixed seed. Tens of GB for the large ones: they are for machines that have them."""
    return tuple(_layer(spec, kind, number) for number, kind in enumerate(spec.layers))


def _layer(spec: ModelSpec, kind: LayerKind, number: int) -> Layer:
    source = np.random.default_rng([len(spec.layers), number])

    def drawn(*shape: int) -> Array:
        return source.standard_normal(shape, dtype=np.float32) * np.float32(shape[0] ** -0.5)

    heads, none = spec.heads, np.zeros(0, dtype=np.float32)
    if kind == "mla":
        width = spec.latent * (1 + heads)
        return Layer(kind, drawn(spec.hidden, width), drawn(heads * spec.rank, spec.hidden), none, none, none)
    inner = drawn(spec.hidden, spec.channels + heads * spec.k_size + heads)
    conv = source.uniform(0.2, 0.8, (spec.channels, CONV_WIDTH)).astype(np.float32)
    dt_bias = source.uniform(-8.0, -4.0, (heads, spec.k_size)).astype(np.float32)
    out = drawn(heads * spec.v_size, spec.hidden)
    return Layer(kind, inner, out, conv, np.zeros(heads, dtype=np.float32), dt_bias)


def embed(prompt: Prompt, start: int, end: int, hidden: int) -> Array:
    """Inputs of tokens [start, end) of a prompt, float32 [end - start, hidden], each in [-1, 1)."""
    rows: list[Array] = []
    first = 0
    for segment, tokens in prompt.segments:
        low, high = max(start, first), min(end, first + tokens)
        if low < high:
            rows.append(_embedded(segment, low - first, high - first, hidden))
        first += tokens
    return np.concatenate(rows) if rows else np.zeros((0, hidden), dtype=np.float32)


def _embedded(segment: str, low: int, high: int, hidden: int) -> Array:
    """A hash of (segment, position, channel), 24 bits of it: exact in float32."""
    seed = int.from_bytes(hashlib.blake2b(segment.encode(), digest_size=8).digest())
    cells = np.arange(low, high, dtype=np.uint64)[:, None] * np.uint64(hidden) + np.arange(hidden, dtype=np.uint64)
    mixed: npt.NDArray[np.uint64] = ((cells + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    mixed ^= np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1
