"""What a released sglang asks for on import, or of a device, that a machine without one cannot give.

Each stub has a name, a reason and a way to put it in place; a test asks of each whether it is still needed. Nothing
here stands in for scheduling: admission, allocation and the prefix cache are always the package's own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Stub:
    """`before`: it must be in place before sglang is imported. `install` does nothing where the real thing is there."""

    name: str
    reason: str
    before: bool
    install: Callable[[], None]


class _Anything:
    """Stands for any class, constant or function of a picture library: processors of pictures read them on import."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> _Anything:
        return self


class _PictureFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision, and whatever module below it somebody asks for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        anything: Any = _Anything()
        module.__getattr__ = lambda name: getattr(anything, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _stub_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return
    # transformers keeps its answer, and would otherwise believe the stub
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    sys.meta_path.append(_PictureFinder())


def _stub_host_register() -> None:
    """Without CUDA there is no device for which memory could be page-locked."""
    if importlib.import_module("torch").cuda.is_available():
        return
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_, **__: None


def _stub_transfer() -> None:
    """The copy between device and host pools, whose own form is a CUDA extension: the same slots, moved by torch."""
    pool: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    if not hasattr(pool, "transfer_kv_direct"):
        pool.transfer_kv_direct = _transfer


def _transfer(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    del page_size
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


STUBS: tuple[Stub, ...] = (
    Stub(
        "torchvision",
        "configurations of picture models import it, and its wheel does not go with a CPU torch",
        True,
        _stub_torchvision,
    ),
    Stub(
        "cuda-host-register",
        "a host pool page-locks its memory through CUDA, whatever the device is",
        False,
        _stub_host_register,
    ),
    Stub(
        "transfer-kv-direct",
        "host pools copy through an extension that is only built for devices",
        False,
        _stub_transfer,
    ),
)
