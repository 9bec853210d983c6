"""The same promises on a GPU, at the sizes of a model; on a CPU the same lines at a small size, so that they are run.

On a GPU machine run this file in a process of its own (`pytest tests/kernels/test_mla_on_device.py`): the other tests
of this folder interpret kernels, and a process that interprets does not compile.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")

import torch

from kvledger.kernels.mla import latent_store, mla_prefill, plan_prefill
from kvledger.kernels.pages import Engine, canary_check, canary_fill, page_copy
from tests.kernels.mla_cases import Case, Memory, error_ratios, lay_out, reference, same_bits
from tests.kernels.mla_checks import FP32_RATIO

pytestmark = pytest.mark.device

BF16_RATIO = 0.006
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="cuda: no device")),
]


def case_on(device: str, dtype: torch.dtype) -> Case:
    small = Case((100, 0, 1, 65), (70, 3, 64, 0), page_size=64, dtype=dtype, layers=2)
    return replace(small, rank=512, rope=64, heads=3, scale=576**-0.5) if device == "cuda" else small


def run_on(device: str, case: Case, memory: Memory) -> torch.Tensor:
    pages = memory.pages.to(device)
    plan = plan_prefill(pages, memory.page_table, case.cu_seqlens, case.starts)
    out: torch.Tensor = mla_prefill(case.q.to(device), pages, plan, scale=case.scale, rank=case.rank)
    return out.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FP32_RATIO), (torch.bfloat16, BF16_RATIO)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_attention(device: str, dtype: torch.dtype, bound: float, page_size: int) -> None:
    """Against float64, and to the bit: other page numbers, other company, any split; unused rows are NaN throughout."""
    case = replace(case_on(device, dtype), page_size=page_size)
    memory = lay_out(case)
    out = run_on(device, case, memory)
    whole, worst = error_ratios(out, reference(case, memory))
    assert whole < bound
    assert worst < bound
    assert same_bits(run_on(device, case, lay_out(case, page_seed=3)), out)
    pages = lay_out(case, page_seed=4).pages.to(device)
    table = lay_out(case, page_seed=4).page_table[:1]
    parts, first = [], case.starts[0]
    for start, end in ((first, first + 1), (first + 1, 128), (128, case.ends[0])):
        q = case.queries[0][start:end].to(device)
        parts.append(mla_prefill(q, pages, table, [0, end - start], [start], scale=case.scale, rank=case.rank).cpu())
    assert same_bits(torch.cat(parts), out[: case.lengths[0]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store(device: str, dtype: torch.dtype) -> None:
    case = case_on(device, dtype)
    memory = lay_out(case, ends=[0, 0, 0, 0])
    pages = memory.pages.to(device)
    for n, end in enumerate(case.ends):
        slots = [memory.tables[n][p // case.page_size] * case.page_size + p % case.page_size for p in range(end)]
        latent_store(case.latents[n].to(device), pages, slots)
    assert same_bits(pages.cpu(), lay_out(case).pages.contiguous())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["kernel", "runs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_to_the_host_and_back(device: str, engine: Engine, dtype: torch.dtype) -> None:
    """Random words and poison, to pinned memory and back into other pages; the device's pages are poisoned between."""
    width = 576 if device == "cuda" else 24
    noise = torch.randn(6, 8, width).to(dtype)
    canary_fill(noise, pages=[4], rows=[9])
    pool = noise.to(device, copy=True)
    host = torch.zeros(6, 8, width, dtype=dtype, pin_memory=device == "cuda")
    page_copy(pool, host, [1, 2, 4, 5], [0, 1, 2, 5], engine=engine).wait()
    assert same_bits(host[[0, 1, 2, 5]], noise[[1, 2, 4, 5]])
    assert not host[3:5].any()
    canary_fill(pool, pages=range(6))
    page_copy(host, pool, [0, 1, 2, 5], [3, 4, 5, 0], engine=engine).wait()
    assert same_bits(pool.cpu()[[3, 4, 5, 0]], noise[[1, 2, 4, 5]])
    assert not canary_check(pool, poisoned_pages=[1, 2, 5], poisoned_rows=[3 * 8 + 1], live_pages=[0, 4])


@pytest.mark.parametrize("device", DEVICES)
def test_copy_from_unpinned_memory(device: str) -> None:
    host, pool = torch.randn(4, 2, 24), torch.zeros(4, 2, 24, device=device)
    page_copy(host, pool, [3, 0], [1, 2]).wait()
    assert same_bits(pool.cpu(), torch.stack([torch.zeros(2, 24), host[3], host[0], torch.zeros(2, 24)]))
