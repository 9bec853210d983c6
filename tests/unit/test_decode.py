from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from kvledger.decode import (
    NewTokenRatio,
    all_can_end,
    exact,
    promised_output,
    retraction_order,
    running_share,
)
from tests.unit.builders import refusal


@dataclass
class Running:
    rid: str = "R"
    max_new_tokens: int = 100
    generated_tokens: int = 0
    ignore_eos: bool = False
    origin_tokens: int = 10


@pytest.mark.parametrize(
    ("most", "generated", "promised"),
    [(100, 0, 100), (100, 40, 60), (100, 100, 0), (100, 130, 0), (4096, 0, 4096), (5000, 0, 4096), (5000, 900, 4096),
     (5000, 905, 4095)],
)  # fmt: skip
def test_an_output_is_counted_down_before_it_is_clipped(most: int, generated: int, promised: int) -> None:
    assert promised_output(most, generated) == promised


def test_a_share_is_a_real_fraction() -> None:
    assert running_share(Running(max_new_tokens=75), exact(0.7)) == Fraction(105, 2) == 52.5
    assert running_share(Running(max_new_tokens=50), exact(0.7)) == 35
    assert running_share(Running(max_new_tokens=9, generated_tokens=8), Fraction(1, 3)) == Fraction(1, 3)


def test_a_share_of_a_known_length_is_all_of_it() -> None:
    assert running_share(Running(max_new_tokens=75, generated_tokens=5, ignore_eos=True), exact(0.1)) == 70


def test_a_ratio_is_the_decimal_that_was_written() -> None:
    assert exact(0.7) == Fraction(7, 10)
    assert exact(Fraction(1, 3)) == Fraction(1, 3)
    assert exact(1) == 1


@pytest.mark.parametrize("ratio", [-1, -0.1, 1.5, Fraction(4, 3), None, "0.7", float("nan"), float("inf")])
def test_a_ratio_is_a_part_of_one(ratio: Any) -> None:
    assert refusal(lambda: exact(ratio)) == f"new_token_ratio: {ratio!r} is not a number from 0 to 1"


def test_the_ratio_decays_in_600_rounds_to_its_floor_and_stays_there() -> None:
    ratio = NewTokenRatio(Fraction(7, 10))
    seen = []
    for _ in range(602):
        seen.append(ratio.current)
        ratio.decay()
    assert seen[300] == (Fraction(7, 10) + Fraction(98, 1000)) / 2
    assert seen[599] > Fraction(98, 1000) == seen[600] == seen[601]


@pytest.mark.parametrize(
    ("kept", "ratio"),
    [
        ([(30, 100), (10, 100)], Fraction(80, 201)),
        ([(100, 100)], 1),
        ([(0, 1000)], Fraction(20, 1001)),
        ([], 0),
        # upstream's published figures
        ([(5, 100), (3, 50)], Fraction(48, 151)),
        ([(200, 10)], 1),
        ([(0, 1000), (0, 1000)], Fraction(40, 2001)),
    ],
)
def test_a_retraction_sets_the_ratio_from_those_who_stay(kept: list[tuple[int, int]], ratio: Fraction) -> None:
    tracker = NewTokenRatio(Fraction(1, 100))
    tracker.retracted([Running(generated_tokens=generated, max_new_tokens=most) for generated, most in kept])
    assert tracker.current == ratio


def test_the_fewest_tokens_go_back_first_then_the_longest_prompt_then_who_joined_last() -> None:
    running = [
        Running("much", generated_tokens=9),
        Running("short", generated_tokens=2, origin_tokens=5),
        Running("long", generated_tokens=2, origin_tokens=50),
        Running("later", generated_tokens=2, origin_tokens=50),
    ]
    assert [each.rid for each in retraction_order(running)] == ["later", "long", "short", "much"]


@pytest.mark.parametrize(
    ("free", "requests", "fit"),
    [
        (12, [(10, 5)], True),
        (11, [(10, 5)], False),  # a token is kept for each
        # the shorter one ends after 4 tokens each and gives back what it held
        (13, [(4, 20), (10, 5)], True),
        (10, [(4, 20), (10, 5)], False),
        # in order of what is left, whatever order they come in
        (13, [(10, 5), (4, 20)], True),
        (8, [(10, 20), (4, 5)], False),
        (0, [(0, 5), (-3, 9)], True),
        (Fraction(23, 2), [(Fraction(21, 2), 5)], False),
        (12, [(Fraction(21, 2), 5)], True),
    ],
)
def test_all_can_end_in_order_of_what_is_left(free: int, requests: list[tuple[int, int]], fit: bool) -> None:
    assert all_can_end(free, requests) is fit
