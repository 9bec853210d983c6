"""Which backend runs a kernel, and one kernel launch as a value.

Triton decides *when it is imported* whether ``triton.jit`` compiles or interprets, and a process does one or the other.
A launch is a value because the ahead-of-time compiler (``kvledger.kernels.aot``) must see exactly what the executor
launches: it takes the same ``Launch``, built by the same function from tensors on torch's ``meta`` device, or noted
down (``recording``) while an executor runs a batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Literal

import torch

Backend = Literal["torch", "interpret", "triton"]
BACKENDS: Final[tuple[Backend, ...]] = ("torch", "interpret", "triton")

POINTER_ALIGNMENT_BYTES: Final = 16


_recorded: list[list[Launch]] = []


class BackendError(RuntimeError):
    """The backend asked for cannot run these tensors, or not in this process."""


@dataclass(frozen=True)
class Launch:
    """One launch: ``kernel[grid](**args)``; ``args`` by name, compile-time constants among them."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told; multiply-add fusion is said outright, as its default differs between versions."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch, or note it while recording, unless the grid is empty; a misaligned pointer is refused.

        It would need another compiled variant than the one that was checked.
        """
        if 0 in self.grid:
            return
        compiled = type(self.kernel).__name__ != "InterpretedFunction"
        for name, value in self.args.items():
            if compiled and isinstance(value, torch.Tensor) and value.data_ptr() % POINTER_ALIGNMENT_BYTES:
                raise BackendError(f"{name} starts at {value.data_ptr():#x}, not on {POINTER_ALIGNMENT_BYTES} bytes")
        if _recorded:
            _recorded[-1].append(self)
        else:
            self.kernel[self.grid](**self.args, **self.options)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches of backend "triton" are noted and not made; tensors on a CPU stand for those on a device.

    What they would have written stays as it was. For the ahead-of-time check, which has no device.
    """
    launches: list[Launch] = []
    _recorded.append(launches)
    try:
        yield launches
    finally:
        _recorded.pop()


def compiled_reach(tensor: torch.Tensor) -> bool:
    """Whether a compiled kernel can read and write the tensor's memory."""
    return bool(_recorded) or tensor.device.type == "cuda" or tensor.is_pinned()


def resolve_backend(backend: Backend | None, device: torch.device) -> Backend:
    """Return the backend for tensors on ``device``: Triton on CUDA and torch elsewhere, unless one is named."""
    if backend is None:
        return "triton" if device.type == "cuda" else "torch"
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend == "triton" and device.type != "cuda" and not _recorded:
        raise BackendError(f"backend 'triton' needs CUDA tensors, these are on {device}; 'interpret' runs on a CPU")
    if backend == "interpret" and device.type != "cpu":
        raise BackendError(f"backend 'interpret' needs CPU tensors, these are on {device}")
    return backend


def triton_module(name: str, backend: Backend) -> ModuleType:
    """Import ``kvledger.kernels.<name>`` in the mode of ``backend``; the first such import binds the process."""
    wanted = backend == "interpret"
    if wanted and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    module = import_module(f"kvledger.kernels.{name}")
    if interprets() != wanted:
        mode = "interprets" if interprets() else "compiles"
        raise BackendError(
            f"Triton {mode} kernels in this process already; backend {backend!r} needs a process of its own"
        )
    return module


def interprets() -> bool:
    """Whether Triton, as imported in this process, interprets its own library (and so every kernel)."""
    from triton.language import standard

    return type(standard.zeros).__name__ == "InterpretedFunction"


def require_interpretable(dtype: torch.dtype) -> None:
    """Refuse what the interpreter gets wrong without saying so (bf16, in Triton 3.6 and 3.9)."""
    if dtype != torch.float32:
        raise BackendError(f"Triton's interpreter is silently wrong in {dtype}: interpret in float32 only")
