"""Every mutant of KDA and its convolution is killed by those who must; and what FlashKDA's own inputs let pass."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

import torch

from tests.kernels.inputs import Kind, make_inputs, rms_ratio, run
from tests.kernels.kda_checks import CHECKS
from tests.kernels.kda_mutants import MUTANTS, killed_by
from tests.kernels.mla_mutants import Mutant

# A mutant may overflow on its way; numpy, under Triton's interpreter, says so.
pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

UNSEEN_BY_FLASH_KDA = (
    "lost initial state",
    "wrong source slot",
    "state of the wrong head",
    "state of the wrong block of V",
    "transposed state",
    "Neumann series a term short",
    "q not normalised",
    "k not normalised",
)


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in MUTANTS])
def test_mutant_is_killed(mutant: Mutant) -> None:
    assert mutant.killers, f"nobody is expected to kill {mutant.name}"
    survived = mutant.killers - killed_by(mutant, tuple(mutant.killers)).keys()
    assert not survived, f"{sorted(survived)} hold although {mutant.old!r} became {mutant.new!r}"


def test_every_check_is_expected_to_kill_a_mutant() -> None:
    assert {killer for mutant in MUTANTS for killer in mutant.killers} == CHECKS.keys()


@pytest.mark.parametrize("name", UNSEEN_BY_FLASH_KDA)
def test_flash_kdas_inputs_miss_what_slow_ones_catch(name: str) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == f"kda_torch: {name}")
    assert killed_by(mutant, ("FlashKDA's", "slow")).keys() == {"slow"}


@pytest.mark.parametrize(("kind", "low", "high"), [("default", 0, 1e-6), ("slow", 0.03, 1), ("swept", 0.1, 1)])
def test_how_much_a_lost_initial_state_matters_after_16_tokens(kind: Kind, low: float, high: float) -> None:
    """Default inputs: nothing is left to see, neither in the outputs nor in the final state."""
    inputs = make_inputs(kind, (64,), k_size=128, v_size=64)
    lost = inputs.changed(states=torch.zeros_like(inputs.states))
    assert low <= rms_ratio(lost.exact[0][16:], inputs.exact[0][16:]) <= high
    assert low <= rms_ratio(lost.exact[1], inputs.exact[1]) <= high


@pytest.mark.parametrize("name", CHECKS)
def test_original_is_put_back(name: str) -> None:
    for mutant in MUTANTS:
        killed_by(mutant, ())
    CHECKS[name]("torch")


def test_healthy_code_is_far_from_the_limits() -> None:
    """With slow gates mutants are at 2e-2 and more, healthy code at 1e-6 and less, against a limit of 3e-5."""
    inputs = make_inputs("slow", (256,))
    assert rms_ratio(run(inputs, initial_state=inputs.states), inputs.exact[0]) < 2e-6
