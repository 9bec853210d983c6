"""What is imported when: the names a reader would try, and no torch before one of them is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvledger.kernels

pytestmark = pytest.mark.device


@pytest.mark.parametrize("name", kvledger.kernels.__all__)
def test_a_name_of_the_package(name: str) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    assert getattr(kvledger.kernels, name) is not None
    assert name in dir(kvledger.kernels)


def test_other_names_are_import_errors() -> None:
    with pytest.raises(ImportError, match="kda_chunk_bwd"):
        from kvledger.kernels import kda_chunk_bwd  # noqa: F401


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    program = "import sys, kvledger.kernels; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
