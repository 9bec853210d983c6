"""Ahead-of-time compilation for Hopper: registers, spills and shared memory of the kernels that an executor launches.

``python -m kvledger.kernels.aot [--json] [MODULE...]``, without a GPU, in a process of its own: the interpreter and the
compiler cannot share one. Each ``kvledger.kernels.*_triton`` module registers its variants by a function
``aot_variants() -> list[tuple[str, Launch]]`` whose launches are built, from tensors on the ``meta`` device, by the
functions that build the real ones. ``aot_executor`` registers what an executor was seen to launch for each model.
Triton's own argument binder then decides types and alignments as at a launch.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvledger.kernels.launch import Launch, interprets

CAPABILITY: Final = 90
MAX_SHARED_BYTES: Final = 232_448
MAX_REGISTERS: Final = 255


@dataclass(frozen=True)
class Usage:
    """What one variant takes: per thread (registers, bytes of stack and local memory) and per block (shared)."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"{self.name:<36}{self.registers:>4} registers {self.spill_bytes:>5} B spilled "
            f"{self.shared_bytes:>7} B shared  {self.num_warps} warps {self.num_stages} stages"
        )

    def excesses(self) -> list[str]:
        """Return every limit of the chip that is broken; a kernel asking for too much shared memory still compiles."""
        found = []
        if self.shared_bytes > MAX_SHARED_BYTES:
            found.append(f"{self.name}: {self.shared_bytes} B of shared memory, at most {MAX_SHARED_BYTES}")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.name}: {self.registers} registers, at most {MAX_REGISTERS}")
        if self.spill_bytes:
            found.append(f"{self.name}: {self.spill_bytes} B spilled, none allowed")
        return found


def kernel_modules() -> list[str]:
    """Return the names of this package's modules that register variants: all that hold Triton kernels, and one more."""
    found = pkgutil.iter_modules(import_module("kvledger.kernels").__path__)
    return [info.name for info in found if info.name.endswith("_triton")] + ["aot_executor"]


def collect_variants(module: str) -> dict[str, Launch]:
    """Return a module's registered variants by name; a module of kernels that registers none is an error."""
    registered = import_module(f"kvledger.kernels.{module}").aot_variants()
    variants = dict(registered)
    assert len(variants) == len(registered) > 0, f"{module} registers {len(registered)}, {len(variants)} names"
    return variants


def compile_variant(name: str, launch: Launch) -> Usage:
    """Compile one launch for sm_90 and read what it takes from the binary."""
    compiled = _compile(launch)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        printed = subprocess.run(
            [str(_cuobjdump()), "-res-usage", str(binary)], check=True, capture_output=True, text=True
        )
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed.stdout + printed.stderr))
    return Usage(
        name=name,
        registers=int(usage["REG"]),
        spill_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=int(compiled.metadata.shared),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _compile(launch: Launch) -> Any:
    import triton

    source, target, options = _specialised(launch)
    return triton.compile(source, target=target, options=options)


def fingerprint(launch: Launch) -> str:
    """Return what Triton would compile for a launch: equal for two launches that share a binary."""
    source, _, options = _specialised(launch)
    parts = (launch.kernel.fn.__name__, source.signature, source.constants, source.attrs, options)
    return repr([sorted(part.items(), key=repr) if isinstance(part, dict) else part for part in parts])


def _specialised(launch: Launch) -> tuple[Any, Any, dict[str, Any]]:
    """Source, target and options as Triton's own binder has them for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", CAPABILITY, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.args, **launch.options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, dict(launch.options), bound, specialization, options
    )
    return ASTSource(kernel, signature, constants, attributes), target, parsed.__dict__


def _cuobjdump() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the variants of the modules named (all, without a name); exit 1 if one breaks a limit."""
    parser = argparse.ArgumentParser(prog="python -m kvledger.kernels.aot", description=str(__doc__).splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(kernel_modules())}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line and variant")
    chosen = parser.parse_args(arguments)
    if interprets():
        parser.error("Triton interprets kernels in this process: unset TRITON_INTERPRET")
    failed = False
    for module in chosen.modules or kernel_modules():
        for name, launch in collect_variants(module).items():
            usage = compile_variant(name, launch)
            failed = failed or bool(usage.excesses())
            print(json.dumps(asdict(usage)) if chosen.json else usage, flush=True)
            for excess in usage.excesses():
                print(excess, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
