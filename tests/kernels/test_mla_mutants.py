"""Every mutant of the attention, store, copy and poison code is killed by those who must, and no check is idle."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

from tests.kernels.mla_checks import CHECKS
from tests.kernels.mla_mutants import MUTANTS, Mutant, killed_by, swapped

# A mutant may divide by zero on its way; numpy, under Triton's interpreter, says so.
pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in MUTANTS])
def test_mutant_is_killed(mutant: Mutant) -> None:
    assert mutant.killers, f"nobody is expected to kill {mutant.name}"
    survived = mutant.killers - killed_by(mutant, mutant.killers).keys()
    assert not survived, f"{sorted(survived)} hold although {mutant.old!r} became {mutant.new!r}"


def test_every_check_is_expected_to_kill_a_mutant() -> None:
    assert {killer for mutant in MUTANTS for killer in mutant.killers} == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_original_is_put_back(name: str) -> None:
    for mutant in MUTANTS:
        with swapped(mutant):
            pass
    CHECKS[name]("torch")
