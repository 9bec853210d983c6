"""KDA against float64, every token, and against itself, bit for bit: on torch at length, in the interpreter briefly."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
if find_spec("triton") is None:  # not importorskip: who imports Triton first says whether it interprets
    pytest.skip("no triton", allow_module_level=True)

import numpy as np
import torch

from kvledger.kernels import flash_kda
from kvledger.kernels.kda import kda_chunk_fwd
from kvledger.kernels.launch import Backend, BackendError, triton_module
from kvledger.kernels.state_plan import NO_SLOT, StateSlots, grid_points, plan_chunks
from kvledger.kernels.tables import TableError
from tests.kernels.inputs import BF16_RATIO, FP32_RATIO, TOKENS, Inputs, Kind, make_inputs, rms_ratio, run, same_bits
from tests.kernels.kda_checks import KDA, assert_exact, poisoned, with_resets

pytestmark = pytest.mark.device

CPU_BACKENDS: tuple[Backend, ...] = ("torch", "interpret")
KINDS: tuple[Kind, ...] = ("default", "slow", "swept")
SIZES = ((32, 48), (40, 24), (128, 64))
"""K and V; 40 and 24 are no powers of two."""

FLASH_KDA_TOKENS = (16, 17, 37, 64, 97, 256, 1024)
FLASH_KDA_VARLEN = (
    (16,),
    (16, 16),
    (4, 8, 12),
    (64, 128, 256),
    (1300, 547, 2048, 963, 271, 3063),
    (1024,) * 8,
    (20, 50, 100),
    (17, 33, 65),
)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", KDA)
def test_kda(name: str, backend: Backend) -> None:
    KDA[name](backend)


def assert_agrees(inputs: Inputs, backend: Backend = "torch") -> None:
    final = torch.full_like(inputs.states, float("nan"))
    assert_exact(inputs, run(inputs, backend, initial_state=inputs.states, final_state=final), final)


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "heads"), [(t, h) for t in FLASH_KDA_TOKENS for h in (1, 4) if t * h <= 1024])
def test_torch_at_flash_kdas_lengths(tokens: int, heads: int, kind: Kind, lower_bound: float | None) -> None:
    k_size, v_size = SIZES[tokens % 3]
    assert_agrees(make_inputs(kind, (tokens,), heads=heads, k_size=k_size, v_size=v_size, lower_bound=lower_bound))


@pytest.mark.parametrize(("kind", "lower_bound"), [("slow", -5.0), ("slow", None), ("swept", -5.0)])
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_torch_at_length(tokens: int, kind: Kind, lower_bound: float | None) -> None:
    assert_agrees(make_inputs(kind, (tokens,), k_size=128, v_size=64, lower_bound=lower_bound))


@pytest.mark.parametrize(("tokens", "heads"), [(37, 32), (17, 96)])
def test_torch_at_many_heads(tokens: int, heads: int) -> None:
    assert_agrees(make_inputs("slow", (tokens,), heads=heads, k_size=128, v_size=64))


def test_torch_at_flash_kdas_only_size() -> None:
    assert_agrees(make_inputs("slow", (97,), heads=2, k_size=128, v_size=128))


@pytest.mark.parametrize("kind", ["slow", "swept"])
@pytest.mark.parametrize("lengths", FLASH_KDA_VARLEN, ids=str)
def test_torch_at_flash_kdas_varlen(lengths: tuple[int, ...], kind: Kind) -> None:
    k_size, v_size = (32, 16) if sum(lengths) > 1000 else (64, 40)
    assert_agrees(make_inputs(kind, lengths, k_size=k_size, v_size=v_size))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (1,), (0, 1, 0, 17, 1, 0)], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_empty_and_single(lengths: tuple[int, ...], backend: Backend) -> None:
    inputs = make_inputs("slow", lengths)
    final = torch.full_like(inputs.states, float("nan"))
    out = run(inputs, backend, initial_state=inputs.states, final_state=final)
    if lengths:
        assert_exact(inputs, out, final)


@pytest.mark.parametrize("lengths", [(17,), (4, 8, 12), (17, 33)], ids=str)
@pytest.mark.parametrize(("k_size", "v_size"), [(16, 40), (40, 16)])
def test_interpreter_takes_any_size(lengths: tuple[int, ...], k_size: int, v_size: int) -> None:
    assert_agrees(make_inputs("slow", lengths, k_size=k_size, v_size=v_size), "interpret")


def test_interpreter_has_two_heads_and_blocks_of_keys() -> None:
    assert_agrees(make_inputs("swept", (20,), heads=2, k_size=40, v_size=24, lower_bound=None), "interpret")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("kind", KINDS)
def test_interpreter_agrees_with_torch(kind: Kind, lower_bound: float | None) -> None:
    inputs = make_inputs(kind, (33, 16), heads=1, lower_bound=lower_bound)
    pools = [inputs.states.clone(), inputs.states.clone()]
    slots = StateSlots((0, 1), (0, 1), (7, 0))
    outs = [run(inputs, b, state_pool=p, slots=slots) for b, p in zip(CPU_BACKENDS, pools, strict=True)]
    assert rms_ratio(outs[1], outs[0].double().numpy()) < 1e-5
    assert rms_ratio(pools[1], pools[0].double().numpy()) < 1e-5


def test_split_products_of_the_low_precision_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that bf16 takes on a GPU, with a float16 workspace: the interpreter has no bf16."""
    triton = triton_module("kda_triton", "interpret")
    whole = triton.make_workspace

    def narrow(call: Any) -> dict[str, torch.Tensor]:
        return {name: x.half() if name in ("ws_kd", "ws_qd", "ws_kr") else x for name, x in whole(call).items()}

    monkeypatch.setattr(triton, "make_workspace", narrow)
    monkeypatch.setattr(triton, "low_precision", lambda call: True)
    inputs = make_inputs("slow", (40,))
    final = torch.empty_like(inputs.states)
    out = run(inputs, "interpret", initial_state=inputs.states, final_state=final)
    assert 1e-5 < rms_ratio(out, inputs.exact[0]) < 2e-3
    assert 1e-5 < rms_ratio(final, inputs.exact[1]) < 2e-3


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(64, 17), (0, 1, 97), (1024,)], ids=str)
def test_bf16(lengths: tuple[int, ...], kind: Kind, state_dtype: torch.dtype) -> None:
    inputs = make_inputs(kind, lengths, k_size=64).to(torch.bfloat16)
    states = inputs.states.to(state_dtype)
    inputs = inputs.changed(states=states.float())
    final = torch.full_like(states, float("nan"))
    out = run(inputs, "torch", initial_state=states, final_state=final)
    assert (out.dtype, final.dtype) == (torch.bfloat16, state_dtype)
    assert rms_ratio(out.float(), inputs.exact[0]) < BF16_RATIO
    assert rms_ratio(final.float(), inputs.exact[1]) < BF16_RATIO


def test_batch_without_cu_seqlens() -> None:
    inputs = make_inputs("slow", (21, 21, 21), heads=2)
    final = torch.empty_like(inputs.states)
    out = run(inputs, initial_state=inputs.states, final_state=final)
    batched = {name: getattr(inputs, name).view(3, 21, *getattr(inputs, name).shape[2:]) for name in TOKENS}
    states = torch.empty_like(final)
    gate = {"A_log": inputs.a_log, "dt_bias": inputs.dt_bias, "lower_bound": -5.0}
    options: dict[str, Any] = {**batched, **gate, "initial_state": inputs.states, "final_state": states}
    assert same_bits(kda_chunk_fwd(**options, scale=None, out=None).flatten(0, 1), out)
    assert same_bits(states, final)


@pytest.mark.parametrize("seed", range(30))
def test_any_call_of_the_contract(seed: int) -> None:
    """As somebody calls it who has read the contract and nothing else: by position, with tensors."""
    rng = random.Random(seed)
    dtype, state_dtype = rng.choices((torch.float32, torch.bfloat16), k=2)
    batched = rng.random() < 0.4
    lengths = (rng.choice((1, 2, 16, 17, 37)),) * 3 if batched else tuple(rng.choices((0, 1, 3, 16, 33, 60), k=4))
    k_size, v_size = rng.choice(((16, 40), (40, 16), (128, 64), (1, 3), (24, 32)))
    bound = rng.choice((-5.0, -0.5, None))
    inputs = make_inputs("slow", lengths, heads=2, k_size=k_size, v_size=v_size, lower_bound=bound, seed=seed).to(dtype)
    states = inputs.states.to(state_dtype) if rng.random() < 0.7 else None
    inputs = inputs.changed(states=torch.zeros_like(inputs.states) if states is None else states.float())
    final = states if states is not None and rng.random() < 0.4 else inputs.states.to(state_dtype, copy=True)
    tokens = [getattr(inputs, name) for name in TOKENS]
    if batched:
        tokens = [x.view(3, lengths[0], *x.shape[2:]) for x in tokens]
    out = torch.full_like(tokens[2], float("nan"))
    exact, exact_final = inputs.exact
    gate = (inputs.a_log, inputs.dt_bias, bound)
    arguments: list[Any] = [*tokens, inputs.scale, out, *gate, states, final, None if batched else inputs.cu_seqlens]
    call: Any = rng.choice((flash_kda.fwd, kda_chunk_fwd))
    call(*arguments)
    assert rms_ratio(out.flatten(0, 1).float(), exact) <= (FP32_RATIO if dtype == torch.float32 else BF16_RATIO)
    limit = FP32_RATIO if state_dtype == dtype == torch.float32 else BF16_RATIO
    assert rms_ratio(final.float(), exact_final) <= limit


def test_inputs_need_not_be_contiguous() -> None:
    inputs = make_inputs("slow", (40,), heads=2)
    fused = torch.cat((inputs.q, inputs.k, inputs.v, inputs.g), -1)
    q, k, v, g = fused.split((32, 32, 48, 32), -1)
    assert same_bits(run(inputs.changed(q=q, k=k, v=v, g=g)), run(inputs))


def test_slots_of_a_pool_may_lie_apart() -> None:
    """One layer of a pool that keeps all layers of a slot together."""
    inputs = make_inputs("slow", (40,))
    pool = poisoned(4, 3, *inputs.states.shape[1:])
    pool[2, 1] = inputs.states[0]
    final = torch.empty_like(inputs.states)
    expected = run(inputs, initial_state=inputs.states, final_state=final)
    for backend in CPU_BACKENDS:
        layered = pool.clone()
        out = run(inputs, backend, state_pool=layered[:, 1], slots=StateSlots((2,), (0,), (0,)))
        assert rms_ratio(out, expected.double().numpy()) < 1e-5
        assert rms_ratio(layered[0, 1], final[0].double().numpy()) < 1e-5
        layered[0, 1] = pool[0, 1]
        assert same_bits(layered, pool)


Step = dict[int, tuple[int, int]]


def random_steps(rng: random.Random, lengths: tuple[int, ...]) -> Iterator[Step]:
    """Batches of (begin, end) by request, until all are done; every end but a request's last is a multiple of 16."""
    done = dict.fromkeys(range(len(lengths)), 0)
    while any(done[n] < length for n, length in enumerate(lengths)):
        batch = rng.sample(sorted(done), rng.randint(1, len(done)))
        ends = {n: min(lengths[n], done[n] // 16 * 16 + 16 * rng.randint(1, 6)) for n in batch}
        yield {n: (done[n], ends[n]) for n in batch}
        done |= ends


def joined(inputs: Inputs, step: Step) -> Inputs:
    """The rows of a step as one batch."""
    parts = [inputs.sequence(n).rows(*bounds) for n, bounds in step.items()]
    fields = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in TOKENS}
    return inputs.changed(**fields, lengths=tuple(end - begin for begin, end in step.values()))


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_gives_the_same_bits(seed: int) -> None:
    """Requests cut at random multiples of 16, in steps of changing company, slots and checkpoints, on torch."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice((0, 1, 16, 50, 130, 300)) for _ in range(4))
    sizes = {"k_size": rng.choice((17, 24, 32, 50)), "v_size": rng.choice((16, 20, 33, 72))}
    inputs = make_inputs("slow", lengths, heads=seed % 2 + 1, lower_bound=rng.choice((-5.0, None)), seed=seed, **sizes)
    final = torch.empty_like(inputs.states)
    whole = run(inputs, initial_state=inputs.states, final_state=final)
    free = rng.sample(range(40), 40)
    live = [free.pop() for _ in lengths]
    pool = poisoned(40, *inputs.states.shape[1:])
    pool[live] = inputs.states
    saved: dict[tuple[int, int], int] = {}
    outs: list[list[torch.Tensor]] = [[whole[:0]] for _ in lengths]
    for step in random_steps(rng, lengths):
        rows = []
        for n, (begin, end) in step.items():
            points = grid_points(begin, end - begin, 64)
            rows.append([free.pop() if rng.random() < 0.5 else NO_SLOT for _ in points])
            saved |= {(n, point): slot for point, slot in zip(points, rows[-1], strict=True) if slot != NO_SLOT}
        own = [live[n] for n in step]
        batch = joined(inputs, step)
        out = run(batch, state_pool=pool, slots=StateSlots(own, own, [begin for begin, _ in step.values()], rows, 64))
        for n, part in zip(step, out.split(batch.lengths), strict=True):
            outs[n].append(part)
    for n, parts in enumerate(outs):
        assert same_bits(torch.cat(parts), whole[inputs.bounds[n] : inputs.bounds[n + 1]])
    assert same_bits(pool[live], final)
    for (n, point), slot in saved.items():
        prefix, request = torch.empty_like(final[:1]), inputs.sequence(n)
        run(request.rows(0, point), initial_state=request.states, final_state=prefix)
        assert same_bits(pool[slot], prefix[0]), f"checkpoint of {n} at {point}"


@pytest.mark.parametrize("cut", [1, 7, 15, 17, 31])
def test_other_cuts_cost_only_rounding(cut: int) -> None:
    inputs = make_inputs("slow", (48,))
    state = inputs.states.clone()
    outs = [
        run(inputs.rows(begin, end), state_pool=state, slots=StateSlots((0,), (0,), (begin,)))
        for begin, end in ((0, cut), (cut, 48))
    ]
    assert_exact(inputs, torch.cat(outs), state)


def test_plan_aligns_to_the_request() -> None:
    plan = plan_chunks((40, 0, 2), StateSlots((3, 4, 5), (6, 7, 8), (9, 0, 30), ((1, NO_SLOT, 0), (), (2,)), 16))
    assert plan.chunks == (
        (-9, 9, 16, 1, 0),  # token 0 is in lane 9
        (7, 0, 16, NO_SLOT, 0),
        (23, 0, 16, 0, 0),
        (39, 0, 1, NO_SLOT, 0),
        (26, 14, 16, 2, 2),
    )
    assert [(span.first_token, span.first_chunk, span.chunks) for span in plan.spans] == [
        (0, 0, 4),
        (40, 4, 0),
        (40, 4, 1),
    ]
    assert plan.spans[0].saves == ((7, 1), (39, 0))


POOL = torch.zeros(4, 1, 48, 32)


def call(**changes: Any) -> Any:
    """A call of two sequences of 20 tokens that is refused for its `changes`."""
    inputs = make_inputs("slow", (20, 20))
    args: dict[str, Any] = {name: getattr(inputs, name) for name in (*TOKENS, "dt_bias")}
    args |= {"scale": None, "out": None, "A_log": inputs.a_log, "lower_bound": -5.0, "cu_seqlens": [0, 20, 40]}
    return kda_chunk_fwd(**{**args, **changes})


def slots(sources=(0, 1), destinations=(0, 1), starts=(0, 0), checkpoints=(), grid=256) -> dict[str, Any]:
    return {"state_pool": POOL, "slots": StateSlots(sources, destinations, starts, checkpoints, grid)}


STATES = torch.zeros(3, 1, 48, 32)
BETWEEN: Any = [1.7, 0]
POOLED: dict[str, Any] = {"state_pool": POOL, "slots": StateSlots((0, 1), (0, 1), (0, 0))}

REFUSED: dict[str, tuple[Any, str]] = {
    "k of another shape": ({"k": torch.zeros(1, 40, 1, 16)}, "k: got"),
    "v of another dtype": ({"v": torch.zeros(1, 40, 1, 48, dtype=torch.bfloat16)}, "v: got"),
    "beta per channel": ({"beta": torch.zeros(1, 40, 1, 32)}, "beta: got"),
    "A_log in bf16": ({"A_log": torch.zeros(1, dtype=torch.bfloat16)}, "A_log: got"),
    "dt_bias per head": ({"dt_bias": torch.zeros(1)}, "dt_bias: got"),
    "half precision": ({"q": torch.zeros(1, 40, 1, 32, dtype=torch.float16)}, "float32 or bfloat16"),
    "out of another shape": ({"out": torch.zeros(1, 40, 1, 32)}, "out: got"),
    "gate bound too low": ({"lower_bound": -5.5}, "lower_bound"),
    "gate bound zero": ({"lower_bound": 0.0}, "lower_bound"),
    "cu_seqlens too short": ({"cu_seqlens": [0, 20]}, "cu_seqlens"),
    "cu_seqlens falls": ({"cu_seqlens": [0, 30, 20, 40]}, "decreases"),
    "cu_seqlens in float32": ({"cu_seqlens": torch.tensor([0.0, 40.0])}, "got torch.float32, expected int32 or int64"),
    "cu_seqlens between tokens": ({"cu_seqlens": [0, 20.5, 40]}, "cu_seqlens: got a list of float, int"),
    "no v": ({"v": None}, "v: got NoneType, expected a tensor"),
    "a list for A_log": ({"A_log": [0.0]}, "A_log: got list, expected a tensor"),
    "out in columns": (
        {"out": torch.zeros(1, 48, 1, 40).permute(0, 3, 2, 1)},
        r"out: got \[1, 40, 1, 48\] torch.float32, strides .* expected \[1, 40, 1, 48\] .* contiguous",
    ),
    "a pool without slots": ({"state_pool": POOL}, "without slots"),
    "states that overlap": ({"initial_state": STATES[0:2], "final_state": STATES[1:3]}, "initial_state shares memory"),
    "an initial state in the pool": (
        {"state_pool": POOL, "initial_state": POOL[2:4], "slots": StateSlots((-1, -1), (0, 1), (0, 0))},
        "initial_state shares memory with state_pool: name its slots",
    ),
    "the pool for an initial state": (
        {"state_pool": POOL[:2], "initial_state": POOL[:2], "slots": StateSlots((-1, -1), (1, 0), (0, 0))},
        "initial_state shares memory with state_pool",
    ),
    "a final state in the pool": (
        {"state_pool": POOL, "final_state": POOL[1:3], "slots": StateSlots((0, 1), (-1, -1), (0, 0))},
        "final_state shares memory with state_pool",
    ),
    "out among the states": ({"out": POOL.view(-1)[:1920].view(1, 40, 1, 48), **POOLED}, "out shares memory"),
    "slots of floats": (lambda: {"slots": StateSlots(BETWEEN, (0, 1), (0, 0))}, "sources: got a list of float, int"),
    "a slot that is None": (lambda: slots(checkpoints=((None,), (2,))), r"checkpoints\[0\]: got a list of NoneType"),
    "checkpoints in one list": (lambda: slots(checkpoints=(5,)), "a list of slots for each sequence"),
    "a state too few": ({"initial_state": torch.zeros(1, 1, 48, 32)}, "initial_state"),
    "K and V exchanged": ({"initial_state": torch.zeros(2, 1, 32, 48)}, "initial_state"),
    "a transposed view": ({"final_state": torch.zeros(2, 1, 32, 48).mT}, "final_state"),
    "slot past the pool": (slots(sources=(0, 4)), "outside"),
    "slot below -1": (slots(destinations=(0, -2)), "outside"),
    "slots without a pool": ({"slots": StateSlots((0, 1), (0, 1), (0, 0))}, "no pool is given"),
    "a start too few": (slots(starts=(0,)), "1 starts for 2"),
    "negative start": (slots(starts=(0, -16)), "negative"),
    "two destinations alike": (slots(destinations=(2, 2)), "written twice"),
    "another one's source": (slots(destinations=(1, 2)), "source of sequence 1"),
    "checkpoint on a source": (slots(checkpoints=((0,), (2,)), destinations=(-1, 3), grid=16), "source of sequence 0"),
    "checkpoint on a destination": (
        slots(checkpoints=((2,), (0,)), grid=16),
        "written twice: as the destination of sequence 0 and as checkpoint 0 of sequence 1",
    ),
    "checkpoint on its own destination": (
        slots(sources=(-1, 1), destinations=(3, 1), checkpoints=((3,), (2,)), grid=16),
        "slot 3 is written twice: as checkpoint 0 of sequence 0 and as the destination of sequence 0",
    ),
    "a checkpoint too few": (slots(checkpoints=((), (2,)), grid=16), "0 checkpoint slots for 1"),
    "a checkpoint too many": (slots(checkpoints=((2,), ())), "1 checkpoint slots for 0"),
    "grid off the sub-chunks": (slots(grid=24), "grid 24"),
    "source and initial_state": ({**slots(), "initial_state": torch.zeros(2, 1, 48, 32)}, "one of the two"),
    "destination and final_state": ({**slots(), "final_state": torch.zeros(2, 1, 48, 32)}, "one of the two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=words) as refusal:
        call(**(changes() if callable(changes) else changes))
    assert not POOL.any()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("rate", [0.5, 1.0, 16.0])
@pytest.mark.parametrize("reset", [5.0, 30.0, 100.0, 1e3, 1e4, 1e6, 3e38, float("inf"), float("-inf")])
def test_a_token_that_forgets_everything(reset: float, rate: float) -> None:
    """Any raw gate, finite or not: the unbounded one may be as strong as it likes."""
    inputs = make_inputs("slow", (64,), v_size=64, lower_bound=None)
    inputs = with_resets(inputs, (reset,)).changed(a_log=torch.full((1,), math.log(rate)))
    final = torch.empty_like(inputs.states)
    assert_exact(inputs, run(inputs, initial_state=inputs.states, final_state=final), final)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a_rate_past_float32(backend: Backend, lower_bound: float | None) -> None:
    """exp(A_log) is infinite in float32, and the decay is 1 or none: 0 times infinity is not asked for."""
    inputs = make_inputs("slow", (20,), heads=2, lower_bound=lower_bound)
    g = inputs.g.clone()
    g[:, ::3] = float("-inf")
    g[:, 4] = float("inf")
    g[:, 5] = 0.0
    inputs = inputs.changed(g=g, a_log=torch.tensor([100.0, 0.0]), dt_bias=torch.zeros_like(inputs.dt_bias))
    final = torch.empty_like(inputs.states)
    with np.errstate(over="ignore"):
        assert_exact(inputs, run(inputs, backend, initial_state=inputs.states, final_state=final), final)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_state_that_is_updated_in_place(backend: Backend) -> None:
    """One tensor for both is the contract's own way; layers of one pool that lie between each other are apart."""
    inputs = make_inputs("slow", (20, 17))
    final = torch.empty_like(inputs.states)
    out = run(inputs, backend, initial_state=inputs.states, final_state=final)
    both = inputs.states.clone()
    assert same_bits(run(inputs, backend, initial_state=both, final_state=both), out)
    assert same_bits(both, final)
    layers = torch.stack([inputs.states, torch.zeros_like(final)], 1)
    assert same_bits(run(inputs, backend, initial_state=layers[:, 0], final_state=layers[:, 1]), out)
    assert same_bits(layers[:, 1], final)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_stride_of_a_single_head_says_nothing(backend: Backend) -> None:
    inputs = make_inputs("slow", (20,))
    final, expected = torch.empty_like(inputs.states), torch.empty_like(inputs.states)
    odd = torch.empty(1, 2, 3, 48, 32)[:, :1, 1].as_strided((1, 1, 48, 32), (2048, 6144, 32, 1))
    odd.copy_(inputs.states)
    out = run(inputs, backend, initial_state=odd, final_state=final)
    assert same_bits(out, run(inputs, backend, initial_state=inputs.states, final_state=expected))
    assert same_bits(final, expected)
    pool = odd.clone().as_strided((1, 1, 48, 32), (7, 6144, 32, 1))
    run(inputs, backend, state_pool=pool, slots=StateSlots((0,), (0,), (0,)))
    assert same_bits(pool.contiguous(), expected)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, list])
def test_cu_seqlens_of_either_width(kind: Any) -> None:
    inputs = make_inputs("slow", (20, 17))
    ends = inputs.bounds if kind is list else torch.tensor(inputs.bounds, dtype=kind)
    assert same_bits(run(inputs, cu_seqlens=ends), run(inputs))


def test_cu_seqlens_need_a_batch_of_one() -> None:
    x = torch.zeros(2, 4, 1, 16)
    with pytest.raises(TableError, match="batch of 1"):
        kda_chunk_fwd(x, x, x, x, x[..., 0], None, None, torch.zeros(1), torch.zeros(1, 16), -5.0, cu_seqlens=[0, 4])


def test_interpreter_refuses_bf16() -> None:
    inputs = make_inputs("slow", (20,))
    with pytest.raises(BackendError, match="bfloat16"):
        run(inputs.to(torch.bfloat16), "interpret")
    with pytest.raises(BackendError, match="bfloat16"):
        run(inputs, "interpret", initial_state=inputs.states.bfloat16())


def flash_kda_arguments(inputs: Inputs, out: torch.Tensor) -> dict[str, Any]:
    """FlashKDA's required parameters, by its names."""
    gate = {"A_log": inputs.a_log, "dt_bias": inputs.dt_bias, "lower_bound": -5.0}
    return {**{name: getattr(inputs, name) for name in TOKENS}, "scale": inputs.scale, "out": out, **gate}


def test_flash_kda_signature_and_result() -> None:
    inputs = make_inputs("slow", (17, 20))
    final, expected_final = torch.empty_like(inputs.states), torch.empty_like(inputs.states)
    out = torch.empty_like(inputs.v)
    states: dict[str, Any] = {"initial_state": inputs.states, "final_state": final, "cu_seqlens": inputs.cu_seqlens}
    flash_kda.fwd(**flash_kda_arguments(inputs, out), **states)
    assert same_bits(out[0], run(inputs, initial_state=inputs.states, final_state=expected_final))
    assert same_bits(final, expected_final)


@pytest.mark.parametrize(
    ("changes", "implementation", "reason"),
    [
        ({}, "flash_kda", "installed"),
        ({"device": SimpleNamespace(type="cpu")}, "kvledger", "tensors on"),
        ({"dtype": torch.float32}, "kvledger", "float32"),
        ({"shape": (1, 8, 1, 64)}, "kvledger", "K = 64"),
        ({"lower_bound": None}, "kvledger", "unbounded"),
        ({"capability": (8, 0)}, "kvledger", "SM90"),
        ({"module": None}, "kvledger", "does not import"),
    ],
)
def test_flash_kda_is_chosen_openly(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], implementation: str, reason: str
) -> None:
    given: dict[str, Any] = {"device": SimpleNamespace(type="cuda"), "dtype": torch.bfloat16, "shape": (1, 8, 1, 128)}
    given |= {"lower_bound": -5.0, "capability": (9, 0), "module": ModuleType("flash_kda")} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(flash_kda, "installed", lambda: given["module"])
    tensor: Any = SimpleNamespace(device=given["device"], dtype=given["dtype"], shape=given["shape"])
    choice = flash_kda.chosen(tensor, tensor, given["lower_bound"])
    assert choice.implementation == implementation
    assert reason in choice.reason


def test_flash_kda_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs("slow", (5,))
    with caplog.at_level(logging.INFO, logger="kvledger.kernels.flash_kda"):
        flash_kda.fwd(**flash_kda_arguments(inputs, torch.empty_like(inputs.v)))
    assert "fwd -> kvledger (tensors on cpu)" in caplog.text


def test_installed_flash_kda_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    module = ModuleType("flash_kda")
    module.fwd = lambda *args: seen.append(args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_kda", module)
    monkeypatch.setattr(flash_kda, "chosen", lambda q, v, bound: flash_kda.Choice("flash_kda", "so"))
    inputs = make_inputs("slow", (5,))
    flash_kda.fwd(**flash_kda_arguments(inputs, inputs.v), cu_seqlens=[0, 5])
    ((*_, initial, final, ends),) = seen
    assert (initial, final, ends.tolist()) == (None, None, [0, 5])
