"""What must hold of KDA and its convolution, each a function of the backend that a mutant can fail.

The tests run them on healthy code on both CPU backends, the mutants show that each of them sees something. Sizes are
what the interpreter can take; K and V differ everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import numpy as np
import torch

from kvledger.kernels.conv import causal_conv_fwd
from kvledger.kernels.launch import Backend, triton_module
from kvledger.kernels.reference import causal_convolution
from kvledger.kernels.state_plan import NO_SLOT, StateSlots, grid_points
from tests.kernels.inputs import (
    FP32_RATIO,
    FP32_TOKEN_RATIO,
    TOKENS,
    Inputs,
    Kind,
    make_inputs,
    rms_ratio,
    run,
    same_bits,
)
from tests.kernels.inputs import worst_token as worst

Check = Callable[[Backend], None]

POISON = 0x7FC0DEAD
GRID = 16
LENGTHS = (37, 0, 1, 18)
STARTS = (0, 5, 16, 27)
"""Fresh, empty, one token on a sub-chunk's border, and from inside a sub-chunk past two grid points."""


@cache
def drawn(kind: Kind, lower_bound: float | None = -5.0, lengths: tuple[int, ...] = LENGTHS) -> Inputs:
    return make_inputs(kind, lengths, heads=2, lower_bound=lower_bound, seed=3)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.int32).view(torch.float32)


def pool_of(states: torch.Tensor, slots: tuple[int, ...], size: int = 12) -> torch.Tensor:
    """A pool of NaN but for `states` at `slots`."""
    pool = poisoned(size, *states.shape[1:])
    pool[list(slots)] = states
    return pool


def assert_exact(inputs: Inputs, out: torch.Tensor, final: torch.Tensor) -> None:
    outputs, finals = inputs.exact
    assert not out.isnan().any(), "a row was not written, or a NaN shows"
    assert rms_ratio(out, outputs) < FP32_RATIO, f"outputs: RMS ratio {rms_ratio(out, outputs):.1e}"
    assert worst(out, outputs) < FP32_TOKEN_RATIO, f"a token: RMS ratio {worst(out, outputs):.1e}"
    assert rms_ratio(final, finals) < FP32_RATIO, f"states: RMS ratio {rms_ratio(final, finals):.1e}"


def agrees(kind: Kind, lower_bound: float | None) -> Check:
    """All outputs and final states, every token, against float64."""

    def check(backend: Backend) -> None:
        inputs = drawn(kind, lower_bound)
        final = torch.full_like(inputs.states, float("nan"))
        no_slot = (NO_SLOT,) * len(LENGTHS)
        slots = StateSlots(no_slot, no_slot, STARTS)
        out = run(inputs, backend, initial_state=inputs.states.clone(), final_state=final, slots=slots)
        assert_exact(inputs, out, final)

    return check


def resets_lose_nothing(backend: Backend) -> None:
    """Tokens that forget everything, several of them in a sub-chunk: what follows is as exact as without them."""
    assert_exact_after_resets(drawn("slow", None), backend)


RESETS = (30.0, 1e3, 1e6, float("inf"))


def with_resets(inputs: Inputs, resets: Sequence[float]) -> Inputs:
    """Raw gates of all channels at token 3 of each 16, of every other one at token 5, of one head at token 9."""
    g = inputs.g.clone()
    for n, reset in enumerate(resets):
        g[:, 16 * n + 3 :: 16 * len(resets)] = reset
        g[:, 16 * n + 5 :: 16 * len(resets), :, ::2] = reset
        g[:, 16 * n + 9 :: 16 * len(resets), :1] = reset / 2
    return inputs.changed(g=g, a_log=torch.linspace(2.8, 0.0, len(inputs.a_log)))


def assert_exact_after_resets(inputs: Inputs, backend: Backend, resets: Sequence[float] = RESETS) -> None:
    inputs = with_resets(inputs, resets)
    final = torch.full_like(inputs.states, float("nan"))
    out = run(inputs, backend, initial_state=inputs.states.clone(), final_state=final)
    assert_exact(inputs, out, final)


@contextmanager
def narrow_blocks(backend: Backend) -> Iterator[None]:
    """In the interpreter, blocks of 16 channels as a GPU has them: else one block holds all of them."""
    if backend == "torch":
        yield
        return
    kda_triton, conv_triton = (triton_module(name, "interpret") for name in ("kda_triton", "conv_triton"))
    with patch.object(kda_triton, "interprets", lambda: False), patch.object(conv_triton, "block_c", lambda _: 16):
        yield


def narrow(check: Check) -> Check:
    def checked(backend: Backend) -> None:
        with narrow_blocks(backend):
            check(backend)

    return checked


def flash_kda_would_notice(backend: Backend) -> None:
    """FlashKDA's random inputs, and what is left of them after the first sub-chunk: last outputs and final state."""
    inputs = drawn("default", lengths=(40,))
    final = torch.empty_like(inputs.states)
    out = run(inputs, backend, initial_state=inputs.states.clone(), final_state=final)
    assert rms_ratio(out[16:], inputs.exact[0][16:]) < 0.005, "outputs past token 16"
    assert rms_ratio(final, inputs.exact[1]) < 0.005, "final state"


def one_piece(inputs: Inputs, backend: Backend, starts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states without a pool."""
    final = torch.empty_like(inputs.states)
    none = (NO_SLOT,) * len(inputs.lengths)
    slots = StateSlots(none, none, starts)
    return run(inputs, backend, initial_state=inputs.states.clone(), final_state=final, slots=slots), final


def splits_do_not_matter(backend: Backend) -> None:
    """One request in steps that end at multiples of 16, its state in one slot all the while."""
    whole = drawn("slow", lengths=(70,))
    out, final = one_piece(whole, backend, (0,))
    pool = pool_of(whole.states, (4,))
    parts = [
        run(whole.rows(begin, end), backend, state_pool=pool, slots=StateSlots((4,), (4,), (begin,)))
        for begin, end in ((0, 16), (16, 64), (64, 70))
    ]
    assert same_bits(torch.cat(parts), out), "outputs"
    assert same_bits(pool[4:5], final), "state"


def checkpoints_are_prefixes(backend: Backend) -> None:
    """A checkpoint is the final state of its prefix, at positions of the request and not of the call."""
    whole = drawn("slow", lengths=(80,))
    begin, slots = 24, (7, NO_SLOT, 2, 6)
    first = whole.rows(0, begin)
    pool = pool_of(first.states, (5,))
    run(first, backend, state_pool=pool, slots=StateSlots((5,), (5,), (0,)))
    before = pool.clone()
    rest = whole.rows(begin, 80)
    run(rest, backend, state_pool=pool, slots=StateSlots((5,), (0,), (begin,), (slots,), GRID))
    for point, slot in zip(grid_points(begin, 56, GRID), slots, strict=True):
        if slot == NO_SLOT:
            continue
        prefix = before.clone()
        run(whole.rows(begin, point), backend, state_pool=prefix, slots=StateSlots((5,), (9,), (begin,)))
        assert same_bits(pool[slot], prefix[9]), f"checkpoint at {point}"
    untouched = [slot for slot in range(len(pool)) if slot not in (0, 2, 6, 7)]
    assert same_bits(pool[untouched], before[untouched]), "a slot that nobody named was written"


def restored_continues(backend: Backend) -> None:
    """From a checkpoint on, a second request computes the first one's bits."""
    whole = drawn("slow", lengths=(50,))
    pool = pool_of(whole.states, (3,))
    out = run(whole, backend, state_pool=pool, slots=StateSlots((3,), (6,), (0,), ((NO_SLOT, 8, NO_SLOT),), GRID))
    again = run(whole.rows(32, 50), backend, state_pool=pool, slots=StateSlots((8,), (1,), (32,)))
    assert same_bits(again, out[32:]), "outputs"
    assert same_bits(pool[1], pool[6]), "state"


def slot_numbers_do_not_matter(backend: Backend) -> None:
    """Renumbered slots, all of them in place, and poison where nobody writes."""
    inputs = drawn("slow")
    out, final = one_piece(inputs, backend, STARTS)
    for slots in ((0, 1, 2, 3), (9, 2, 11, 5)):
        pool = pool_of(inputs.states, slots)
        assert same_bits(run(inputs, backend, state_pool=pool, slots=StateSlots(slots, slots, STARTS)), out)
        assert same_bits(pool[list(slots)], final)
        others = [slot for slot in range(len(pool)) if slot not in slots]
        assert same_bits(pool[others], poisoned(*pool[others].shape)), "poison vanished"


def company_does_not_matter(backend: Backend) -> None:
    """Each sequence alone, and among sequences of NaN."""
    inputs = drawn("slow")
    out, final = one_piece(inputs, backend, STARTS)
    for n in range(len(LENGTHS)):
        begin, end = inputs.bounds[n : n + 2]
        alone = one_piece(inputs.sequence(n), backend, STARTS[n : n + 1])
        assert same_bits(alone[0], out[begin:end]), f"outputs of sequence {n}"
        assert same_bits(alone[1], final[n : n + 1]), f"state of sequence {n}"
    healthy = slice(*inputs.bounds[2:4])
    fields = {name: torch.full_like(getattr(inputs, name), float("nan")) for name in TOKENS}
    for name, field in fields.items():
        field[:, healthy] = getattr(inputs, name)[:, healthy]
    sick, states = one_piece(inputs.changed(**fields), backend, STARTS)
    assert same_bits(sick[healthy], out[healthy]), "a neighbour's NaN shows"
    assert same_bits(states[2], final[2]), "a neighbour's NaN is in the state"


def fresh_requests_start_from_zero(backend: Backend) -> None:
    """No source, though the first and the last slot hold something; an empty fresh sequence leaves zeros."""
    inputs = drawn("slow")
    pool = pool_of(inputs.states[:2], (0, 11))
    out = run(inputs, backend, state_pool=pool, slots=StateSlots((NO_SLOT,) * 4, (0, 3, NO_SLOT, 7), STARTS))
    zero = inputs.changed(states=torch.zeros_like(inputs.states))
    exact, final = one_piece(zero, backend, STARTS)
    assert same_bits(out, exact)
    assert same_bits(pool[[0, 3, 7]], final[[0, 1, 3]])
    assert same_bits(pool[11], inputs.states[1]), "the last slot was written: -1 is not a slot"


CHANNELS = 24


@cache
def conv_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [1, T, C] of LENGTHS, weight, bias, and a window per sequence."""
    source = torch.Generator().manual_seed(5)
    shapes = ((1, sum(LENGTHS), CHANNELS), (CHANNELS, 4), (CHANNELS,), (len(LENGTHS), 3, CHANNELS))
    x, weight, bias, windows = (torch.randn(*shape, generator=source) for shape in shapes)
    return x, weight, bias, windows


def conv_bounds() -> list[int]:
    return [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]


def conv_run(x: torch.Tensor, pool: torch.Tensor | None, slots: StateSlots, backend: Backend, ends: list[int]):
    _, weight, bias, _ = conv_inputs()
    out = torch.full_like(x, float("nan"))
    return causal_conv_fwd(x, weight, bias, out, ends, window_pool=pool, slots=slots, backend=backend)[0]


def conv_agrees_with_float64(backend: Backend) -> None:
    x, weight, bias, windows = conv_inputs()
    bounds, slots = conv_bounds(), (7, 1, 4, 2)
    out = conv_run(x, pool_of(windows, slots), StateSlots(slots, slots, STARTS), backend, bounds)
    for n, window in enumerate(windows):
        begin, end = bounds[n : n + 2]
        exact = causal_convolution(x[0, begin:end], weight, bias, window)
        np.testing.assert_allclose(out[begin:end].numpy(), exact, atol=2e-6, err_msg=f"sequence {n}")


def conv_fresh_requests_have_no_window(backend: Backend) -> None:
    x, weight, bias, windows = conv_inputs()
    pool = pool_of(windows, (0, 1, 2, 11))
    out = conv_run(x, pool, StateSlots((NO_SLOT,) * 4, (0, 5, 6, NO_SLOT), STARTS), backend, conv_bounds())
    np.testing.assert_allclose(out[:37].numpy(), causal_convolution(x[0, :37], weight, bias), atol=2e-6)
    assert not pool[5].any(), "an empty fresh sequence's window"
    assert same_bits(pool[6], torch.cat((torch.zeros(2, CHANNELS), x[0, 37:38]))), "window after one token"


def conv_splits_do_not_matter(backend: Backend) -> None:
    """Any cut, steps shorter than the window among them, in one slot all the while."""
    x, _, _, windows = conv_inputs()
    x = x[:, :37]
    whole = conv_run(x, pool_of(windows[:1], (3,)), StateSlots((3,), (3,), (0,)), backend, [0, 37])
    pool, parts = pool_of(windows[:1], (3,)), []
    for begin, end in ((0, 1), (1, 3), (3, 3), (3, 5), (5, 21), (21, 37)):
        step = StateSlots((3,), (3,), (begin,))
        parts.append(conv_run(x[:, begin:end], pool, step, backend, [0, end - begin]))
    assert same_bits(torch.cat(parts), whole), "outputs"
    assert same_bits(pool[3], x[0, -3:]), "the window is not the last 3 inputs"
    others = [slot for slot in range(len(pool)) if slot != 3]
    assert same_bits(pool[others], poisoned(*pool[others].shape)), "a slot that nobody named was written"


def conv_checkpoints_are_the_last_inputs(backend: Backend) -> None:
    """Of the request: a grid point two tokens into the call takes one row from the source window; the last one's end
    is the call's."""
    x, _, _, windows = conv_inputs()
    for tokens in (37, 34):
        pool = pool_of(windows[:1], (3,))
        slots = StateSlots((3,), (3,), (14,), ((8, NO_SLOT, 6),), GRID)
        conv_run(x[:, :tokens], pool, slots, backend, [0, tokens])
        assert same_bits(pool[8], torch.cat((windows[0, 2:], x[0, :2]))), "checkpoint at 16"
        assert same_bits(pool[6], x[0, 31:34]), "checkpoint at 48"
        assert same_bits(pool[3], x[0, tokens - 3 : tokens]), "destination"


def conv_company_does_not_matter(backend: Backend) -> None:
    x, _, _, windows = conv_inputs()
    bounds, slots = conv_bounds(), (7, 1, 4, 2)
    out = conv_run(x, pool_of(windows, slots), StateSlots(slots, slots, STARTS), backend, bounds)
    assert not out.isnan().any(), "another slot's poison shows"
    for n in range(len(LENGTHS)):
        begin, end = bounds[n : n + 2]
        single = StateSlots((0,), (0,), STARTS[n : n + 1])
        alone = conv_run(x[:, begin:end], pool_of(windows[n : n + 1], (0,)), single, backend, [0, end - begin])
        assert same_bits(alone, out[begin:end]), f"outputs of sequence {n}"


KDA: dict[str, Check] = {
    "default": agrees("default", -5.0),
    "slow": agrees("slow", -5.0),
    "swept": agrees("swept", -5.0),
    "unbounded": agrees("slow", None),
    "unbounded swept": agrees("swept", None),
    "resets": resets_lose_nothing,
    "FlashKDA's": flash_kda_would_notice,
    "splits": splits_do_not_matter,
    "checkpoints": checkpoints_are_prefixes,
    "restored": restored_continues,
    "slots": slot_numbers_do_not_matter,
    "company": company_does_not_matter,
    "fresh": fresh_requests_start_from_zero,
    "blocks": narrow(agrees("slow", -5.0)),
    "unbounded blocks": narrow(agrees("swept", None)),
}

CONV: dict[str, Check] = {
    "conv exact": conv_agrees_with_float64,
    "conv fresh": conv_fresh_requests_have_no_window,
    "conv splits": conv_splits_do_not_matter,
    "conv checkpoints": conv_checkpoints_are_the_last_inputs,
    "conv company": conv_company_does_not_matter,
    "conv blocks": narrow(conv_agrees_with_float64),
    "conv blocks of windows": narrow(conv_splits_do_not_matter),
}

CHECKS = KDA | CONV
