"""The kernels that an executor launches on Hopper, compiled without one: registers, spills and shared memory.

Each module in a process of its own: this one may interpret kernels, and a process does one or the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

from kvledger.kernels import aot
from kvledger.kernels.aot import MAX_REGISTERS, MAX_SHARED_BYTES, Usage

pytestmark = pytest.mark.device

MODULES = sorted(path.stem for path in Path(aot.__file__).parent.glob("*_triton.py"))

KERNELS = {
    "copy_kernel", "outputs_kernel", "prefill_kernel", "recurrence_kernel", "store_kernel", "terms_kernel",
    "windows_kernel",
}  # fmt: skip

TOO_GREEDY = """
import json, sys
from dataclasses import asdict, replace
from kvledger.kernels.aot import collect_variants, compile_variant

launch = collect_variants("mla_triton")["mla_prefill-bf16-page64"]
greedy = replace(launch, args=launch.args | {"BLOCK_N": 128})
print(json.dumps(asdict(compile_variant("greedy", greedy))))
"""


def compiling_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=compiling_environment(), capture_output=True, text=True, check=False
    )


def compiled(module: str) -> list[Usage]:
    done = python("-m", "kvledger.kernels.aot", "--json", module)
    assert done.returncode == 0, done.stderr
    usages = [Usage(**json.loads(line)) for line in done.stdout.splitlines()]
    assert usages
    for usage in usages:
        assert not usage.excesses()
        assert usage.registers > 0, "cuobjdump's report was not understood"
    return usages


@pytest.mark.parametrize("module", MODULES)
def test_variants_fit_the_chip(module: str) -> None:
    compiled(module)


def test_what_an_executor_launches_fits_the_chip() -> None:
    """Noted while batches run over pools of each model: every kernel there is, at the sizes of each."""
    usages = compiled("aot_executor")
    for model in ("tiny", "kimi-linear"):
        seen = {usage.name.split()[3] for usage in usages if usage.name.startswith(f"{model} ")}
        assert seen == KERNELS
    assert any(usage.name.startswith("kimi-k3 ") for usage in usages)


def test_every_module_of_kernels_is_known() -> None:
    assert sorted(aot.kernel_modules()) == sorted([*MODULES, "aot_executor"])


def test_a_kernel_that_asks_for_too_much_shared_memory_is_caught() -> None:
    """It compiles without a complaint: the limit is ours to check."""
    done = python("-c", TOO_GREEDY)
    assert done.returncode == 0, done.stderr
    usage = Usage(**json.loads(done.stdout))
    assert usage.shared_bytes > MAX_SHARED_BYTES
    assert [excess for excess in usage.excesses() if "shared memory" in excess]


FITS = Usage("fits", MAX_REGISTERS, 0, MAX_SHARED_BYTES, 4, 1)


def test_what_just_fits() -> None:
    assert not FITS.excesses()


@pytest.mark.parametrize(
    ("one_more", "what"),
    [
        ({"shared_bytes": MAX_SHARED_BYTES + 1}, "shared memory"),
        ({"registers": MAX_REGISTERS + 1}, "registers"),
        ({"spill_bytes": 4}, "spilled"),
    ],
)
def test_one_more_than_fits(one_more: dict[str, Any], what: str) -> None:
    (excess,) = replace(FITS, **one_more).excesses()
    assert what in excess
    assert "fits" in excess


def test_a_module_without_variants_is_an_error() -> None:
    done = python("-m", "kvledger.kernels.aot", "launch")
    assert done.returncode != 0
    assert "aot_variants" in done.stderr


def test_an_interpreting_process_is_told_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvledger.kernels.aot", "pages_triton"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in done.stderr


def test_a_usage_is_its_json() -> None:
    assert Usage(**json.loads(json.dumps(asdict(FITS)))) == FITS
