"""The launches of an executor on Hopper, seen and not listed: batches are run with every launch noted down.

For each model that runs on a device: cold and resumed chunks of one and of many tokens, a checkpoint, a restore, pages
and states to the host and back. Two launches that Triton compiles to one binary count once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from kvledger.kernels.aot import fingerprint
from kvledger.kernels.device_pool import DevicePool
from kvledger.kernels.executor import Executor, Step, Work
from kvledger.kernels.launch import Launch, recording
from kvledger.kernels.model import MODELS, Layer, ModelSpec
from kvledger.request import Prompt


class Configuration(NamedTuple):
    """A pool that an executor runs over on Hopper."""

    model: str
    dtype: torch.dtype
    page_size: int
    grid: int


CONFIGURATIONS: Final = (
    # what `--device cuda` and the device-pool machine run
    Configuration("tiny", torch.float32, 16, 32),
    Configuration("tiny", torch.float32, 4, 16),
    Configuration("tiny", torch.float32, 64, 256),
    # the benchmark's
    Configuration("small", torch.float32, 16, 256),
    # a model's own sizes
    Configuration("kimi-linear", torch.bfloat16, 64, 256),
    Configuration("kimi-k3", torch.bfloat16, 64, 256),
)

PAGES: Final = 20


class Idle(Executor):
    """Projects nothing: products are torch's, and no kernel of ours sees their values."""

    def _project(self, x: torch.Tensor, weight: torch.Tensor, _step: Step) -> torch.Tensor:
        return x.new_zeros(len(x), weight.shape[1])


def executor_launches(configuration: Configuration) -> list[Launch]:
    """Return all that one executor launches, in order."""
    model, dtype, page_size, grid = configuration
    spec = MODELS[model]
    pool = DevicePool(spec, pages=PAGES, slots=4, page_size=page_size, host_pages=2, backend="triton", dtype=dtype)
    executor = Idle(pool, grid, layers=_zeros(spec))
    with recording() as launches:
        for batch in _batches(grid):
            executor.run(batch)
        executor.run([Work("r", Prompt([("r", 20)]), 0, 20, range(PAGES), 0)], outputs=False)
        pool.restore(0, 2)
        pool.write_back(0, 1)
        pool.load_back([1], [3])
        pool.write_state_back(2, 1)
        pool.load_state_back(1, 3)
    return launches


def _batches(grid: int) -> Iterator[list[Work]]:
    """A cold prompt cut off the grid, its next token alone, and the rest beside a second request of one token."""
    prompt, other, pages = Prompt([("r", grid + 17)]), Prompt([("o", 1)]), range(PAGES - 1)
    yield [Work("r", prompt, 0, grid + 7, pages, 0, {grid: 1})]
    yield [Work("r", prompt, grid + 7, grid + 8, pages, 0)]
    yield [Work("r", prompt, grid + 8, grid + 17, pages, 0), Work("o", other, 0, 1, [PAGES - 1], 2)]


def _zeros(spec: ModelSpec) -> list[Layer]:
    """Layers of the model's shapes; of a large one, three KDA layers and one MLA layer stand for all."""
    none = np.zeros(0, dtype=np.float32)

    def zeros(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.zeros(shape, dtype=np.float32)

    heads, keys = spec.heads, spec.heads * spec.k_size
    kda = Layer(
        "kda",
        zeros(spec.hidden, spec.channels + keys + heads),
        zeros(heads * spec.v_size, spec.hidden),
        zeros(spec.channels, 4),
        zeros(heads),
        zeros(heads, spec.k_size),
    )
    mla = Layer(
        "mla", zeros(spec.hidden, spec.latent * (1 + heads)), zeros(heads * spec.rank, spec.hidden), *[none] * 3
    )
    return [kda, kda, kda, mla]


def aot_variants() -> list[tuple[str, Launch]]:
    """Return one launch for each binary that an executor makes Triton compile."""
    found: dict[str, tuple[str, Launch]] = {}
    for configuration in CONFIGURATIONS:
        dtype = str(configuration.dtype).removeprefix("torch.")
        for launch in executor_launches(configuration):
            name = f"{configuration.model} {dtype} page{configuration.page_size} {launch.kernel.fn.__name__}"
            found.setdefault(fingerprint(launch), (name, launch))
    names: dict[str, int] = {}
    variants = []
    for name, launch in found.values():
        names[name] = names.get(name, 0) + 1
        variants.append((name if names[name] == 1 else f"{name} {names[name]}", launch))
    return variants
