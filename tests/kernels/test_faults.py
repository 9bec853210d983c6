"""Each fault of a real pool turns a named invariant red, whether or not tables are checked before a launch."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch

from tests.kernels.faults import FAULTS, MAX_EXAMPLES, hunt

pytestmark = pytest.mark.device

RED = {"data-is-right", "no-use-after-free"}


@pytest.mark.parametrize("check_tables", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_shows(name: str, check_tables: bool, record_property) -> None:
    torch.set_num_threads(1)
    examples, broken = hunt(FAULTS[name], check_tables=check_tables)
    record_property("fault", f"{name}: example {examples}: {', '.join(broken)}")
    assert RED & set(broken), f"{name} is not seen in {examples} examples: {broken}"
    assert examples < MAX_EXAMPLES
