"""The judge sees what is wrong: NaN, a small error, a latent in another's place, a bit; and passes what is right."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")

import torch

from kvledger.kernels import judge as judging
from kvledger.kernels.judge import Judge, Output
from kvledger.kernels.model import MODELS
from kvledger.kernels.truth import Truth
from kvledger.request import Prompt

pytestmark = pytest.mark.device

TRUTH = Truth(MODELS["tiny"])
PROMPT = Prompt([("a", 40)])
NAN = float("nan")


def output(start: int = 16, prompt: Prompt = PROMPT) -> Output:
    """Tokens from `start` on, all of it right."""
    values = torch.from_numpy(TRUTH.outputs(prompt)[start:].copy()).float()
    stored = torch.from_numpy(TRUTH.latents(prompt).copy()).float()
    return Output("r", prompt, start, values, stored, values.clone())


def looked(changed: Output) -> Judge:
    judge = Judge(TRUTH)
    judge.look(changed)
    return judge


def test_what_is_right_is_right() -> None:
    judge = looked(output())
    assert (judge.wrong_data, judge.compared, judge.bitwise) == (None, 24, 24)
    assert judge.worst < 1e-6
    assert "24 tokens computed, every one compared with float64, 24 of them bit by bit" in judge.note()
    assert "0 of them bit by bit" in Judge(TRUTH).note()


def test_the_limits_are_those_of_the_facts() -> None:
    assert (judging.FP32_RATIO, judging.FP32_TOKEN_RATIO) == (3e-5, 3e-4)


WRONG: dict[str, tuple[Any, str]] = {
    "all NaN": (lambda o: o.values.fill_(NAN), "token 16 is off by nan"),
    "one NaN": (lambda o: o.values[7].fill_(NAN), "token 23 is off by nan"),
    "one element NaN": (lambda o: o.values.view(-1)[-1:].fill_(NAN), "token 39 is off by nan"),
    "a chunk off by 1e-4": (lambda o: o.values.mul_(1 + 1e-4), "chunk 16..40 by 0.0001"),
    "a token off by 1e-3": (lambda o: o.values[3].mul_(1 + 1e-3), "token 19 is off"),
    "the next token's": (lambda o: o.values.copy_(o.values.roll(-1, 0)), "token 16 is off"),
    "a latent NaN": (lambda o: o.stored[2].fill_(NAN), "the latent of token 2 is off by nan"),
    "latents off by 1e-4": (lambda o: o.stored.mul_(1 + 1e-4), "those of tokens 0..40 by 0.0001"),
    "pages of the past exchanged": (lambda o: o.stored[:16].copy_(o.stored[:16].roll(8, 0)), "the latent of token 0"),
    "a bit": (lambda o: o.whole.view(torch.int32)[5, 1].add_(1), "token 21 differs in bits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    spoil, words = WRONG[name]
    spoiled = output()
    spoil(spoiled)
    wrong = looked(spoiled).wrong_data
    assert wrong is not None
    assert wrong.request == "r"
    assert words in wrong.message


def test_a_position_is_part_of_a_latent() -> None:
    """One token's latents differ by where it stands, in the rope part alone if nothing stands before it."""
    spec = MODELS["tiny"]
    latents = TRUTH.latents(Prompt([("a", 3)]))
    turned = latents[:, 0, spec.rank :]
    assert abs(turned[0] - turned[1]).max() > 0.1


def test_a_long_prompt_is_compared_where_it_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "KEPT_WHOLE_TOKENS", 8)
    judge = looked(output(start=30))
    assert (judge.wrong_data, judge.compared) == (None, 10)
    spoiled = output(start=30)
    spoiled.stored[5] = 0
    assert looked(spoiled).wrong_data is not None
