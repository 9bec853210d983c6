"""A batch on a pool against float64, token by token, and bit for bit against itself; and the node that runs it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")

import numpy as np
import torch

from kvledger.kernels.device_node import DeviceNode, device_target
from kvledger.kernels.device_pool import DevicePool
from kvledger.kernels.executor import Executor, Work, prefill, target
from kvledger.kernels.judge import FP32_RATIO
from kvledger.kernels.model import MODELS
from kvledger.kernels.reference import causal_convolution, kda_recurrence
from kvledger.kernels.truth import Truth, _convolved, _recurrence
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode, Watcher
from kvledger.replay import Outcome, replay
from kvledger.request import Prompt
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings
from kvledger.trace import Trace, load, parse

pytestmark = pytest.mark.device

TINY = MODELS["tiny"]
CASES = Path(__file__).parents[1] / "regressions"
GRID = 32


def empty_pool(model: str = "tiny", *, pages: int = 40, page_size: int = 16) -> DevicePool:
    return DevicePool(MODELS[model], pages=pages, slots=16, page_size=page_size)


def ratios(found: torch.Tensor, exact: np.ndarray) -> np.ndarray:
    errors = np.sqrt(((found.double().numpy() - exact) ** 2).mean(1))
    return np.asarray(errors / np.sqrt((exact**2).mean()))


# --- the truth is true: against references that the kernels are held to


def test_the_truth_has_the_recurrence_of_the_kernels_reference() -> None:
    source = np.random.default_rng(0)
    q, k, g = (source.normal(size=(40, 2, 16)) for _ in range(3))
    v, beta = source.normal(size=(40, 2, 8)), source.normal(size=(40, 2))
    exact, _, _ = kda_recurrence(q, k, v, g - 6, beta, 0.25, np.zeros(2), np.zeros((2, 16)), -5.0)
    unit_q, unit_k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    decay = np.exp(-5 / (1 + np.exp(-(g - 6))))
    assert np.allclose(_recurrence(unit_q * 0.25, unit_k, v, decay, 1 / (1 + np.exp(-beta))), exact, rtol=1e-12)
    x, taps = source.normal(size=(9, 5)), source.normal(size=(5, 4))
    assert np.allclose(_convolved(x, taps), causal_convolution(x, taps), rtol=1e-12)


def test_the_truth_of_a_prefix_is_the_prefix_of_the_truth() -> None:
    truth = Truth(TINY)
    whole = truth.outputs(Prompt([("a", 50), ("b", 30)]))
    assert np.allclose(Truth(TINY).outputs(Prompt([("a", 50)])), whole[:50], rtol=1e-12)
    assert np.allclose(truth.at(Prompt([("a", 50), ("b", 30)]), [3, 79]), whole[[3, 79]], rtol=1e-12)
    assert truth.outputs(Prompt([("a", 50), ("b", 12)])) is not whole
    assert (truth.outputs(Prompt([("a", 50), ("b", 12)])) == whole[:62]).all()


# --- the executor


@pytest.mark.parametrize("model", ["tiny", "small"])
@pytest.mark.parametrize("cuts", [(150,), (32, 64, 150), (7, 16, 17, 100, 150)])
def test_a_prompt_in_pieces_is_right(model: str, cuts: tuple[int, ...]) -> None:
    prompt = Prompt([("a", 90), ("b", 60)])
    pool = empty_pool(model)
    executor = Executor(pool, GRID)
    pages = random.Random(1).sample(range(40), 10)
    parts, start = [], 0
    for end in cuts:
        saves = {p: 1 + p // GRID for p in range(GRID, end + 1, GRID) if p > start}
        parts += executor.run([Work("r", prompt, start, end, pages, 0, saves)])
        start = end
    exact = Truth(MODELS[model]).outputs(prompt)
    assert ratios(torch.cat(parts), exact).max() < FP32_RATIO
    free = sorted(set(range(40)) - set(pages))
    assert not pool.faults(free, range(6, 16))


def test_cuts_company_and_numbers_change_no_bit() -> None:
    prompt, other = Prompt([("a", 130)]), Prompt([("x", 77)])
    alone = prefill(empty_pool(), prompt, GRID, outputs=True)
    executor = Executor(empty_pool(), GRID)
    pages, more = list(range(30, 10, -1)), list(range(10))
    first = executor.run([Work("o", other, 0, 45, more, 5), Work("r", prompt, 0, 64, pages, 3)])
    second = executor.run([Work("r", prompt, 64, 130, pages, 3), Work("o", other, 45, 77, more, 5)])
    assert torch.equal(torch.cat([first[1], second[0]]), alone)


@pytest.mark.parametrize(("grid", "page_size"), [(32, 16), (16, 4), (8, 4), (20, 4)])
def test_a_restored_prompt_goes_on_as_if_it_had_never_stopped(grid: int, page_size: int) -> None:
    """On grids that are no multiple of 16 the executor cuts its passes."""
    prompt = Prompt([("a", 130)])
    pool = DevicePool(TINY, pages=40, slots=20, page_size=page_size)
    executor = Executor(pool, grid)
    pages = list(range(40))[::-1]
    saves = {p: p // grid for p in range(grid, 101, grid)}
    executor.run([Work("first", prompt, 0, 100, pages, 0, saves)])
    point = 100 // grid * grid
    pool.restore(saves[point], 19)
    pool.poison_slots([0])
    found = executor.run([Work("second", prompt, point, 130, pages, 19)])[0]
    exact = Truth(TINY).outputs(prompt)[point:]
    assert ratios(found, exact).max() < FP32_RATIO
    if grid % 16 == 0:
        assert torch.equal(found, prefill(empty_pool(), prompt, 16, outputs=True)[point:])


def test_latents_without_outputs_are_the_same_latents() -> None:
    prompt = Prompt([("a", 70)])
    pools = [empty_pool(pages=5), empty_pool(pages=5)]
    for pool, outputs in zip(pools, (True, False), strict=True):
        prefill(pool, prompt, GRID, outputs=outputs)
    rows = [pool.device.latents[:, 0].flatten(0, 1)[:70] for pool in pools]
    assert torch.equal(*rows)
    assert torch.equal(pools[0].device.states[1:3], pools[1].device.states[1:3])


# --- the node


def settings(**changes: int | None) -> NodeSettings:
    sizes: dict[str, int | None] = {
        "page_size": 16, "checkpoint_align": 32, "chunked_prefill_size": 96, "max_prefill_tokens": None,
        "pool_tokens": 512, "host_tokens": None,
    }  # fmt: skip
    return NodeSettings(**{**sizes, **changes})  # type: ignore[arg-type]


EVENTS: list[dict[str, Any]] = [
    {"event": "cached", "tier": "device", "prompt": [["d", 128]]},
    {"event": "submit", "request": "a", "prompt": [["a", 200]]},
    {"event": "submit", "request": "b", "prompt": [["d", 128], ["b", 40]]},
    {"event": "drain"},
    {"event": "cached", "tier": "host", "prompt": [["h", 160]]},
    {"event": "submit", "request": "c", "prompt": [["a", 180], ["c", 9]]},
    {"event": "submit", "request": "e", "prompt": [["h", 160], ["c", 9]]},
    {"event": "submit", "request": "f", "prompt": [["f", 300]]},
    {"event": "submit", "request": "g", "prompt": [["a", 200], ["g", 9]]},
    {"event": "drain"},
]


def trace_of(node: NodeSettings, events: list[dict[str, Any]]) -> Trace:
    sizes = {name: getattr(node, name) for name in NodeSettings.__slots__ if name != "ranks"}
    return parse({"format": "kvledger-trace/1", "node": sizes, "rules": "tail-reserved", "events": events}, "test")


def run(trace: Trace, rules: str = "tail-reserved", device: str = "cpu") -> tuple[Outcome, DeviceNode]:
    made = device_target(device)
    outcome = replay(trace, PRESETS[rules], target=made, monitor=InvariantMonitor())
    assert made.last is not None
    made.last.real_slots.check()
    return outcome, made.last


def test_hits_on_both_tiers_are_right_to_the_bit() -> None:
    outcome, node = run(trace_of(settings(), EVENTS))
    assert outcome.verdict == "ok"
    assert (node.counts.requests, node.counts.hits, node.counts.restored_from_host) == (6, 4, 2)
    assert node.judge.compared == node.judge.bitwise == node.counts.tokens == 595
    assert node.judge.worst_token < 1e-6


@pytest.mark.parametrize("state_slots", [1, 2, 3, 5])
def test_few_state_slots_cost_hits_and_nothing_else(state_slots: int) -> None:
    outcome, node = run(trace_of(settings(state_slots=state_slots), EVENTS))
    assert outcome.verdict == "ok"
    assert node.counts.requests == 6
    assert node.counts.tokens >= 595
    assert node.device.slots == state_slots


def test_the_node_decides_as_the_pure_node_does() -> None:
    for events in (EVENTS, EVENTS[1:]):
        trace = trace_of(settings(state_slots=3), events)
        pure = replay(trace, monitor=InvariantMonitor())
        assert run(trace)[0].document() == pure.document()


def test_a_real_pool_that_is_smaller_than_the_books_say_runs_out_of_memory() -> None:
    """The allocation fails where the memory is, and ends as any failed allocation does."""
    made = device_target("cpu")

    class Short(DeviceNode):
        def _open_device(self, sizes: NodeSettings) -> DevicePool:
            return DevicePool(TINY, pages=3, slots=8, page_size=16)

    outcome = replay(
        trace_of(settings(), [EVENTS[1], {"event": "drain"}]),
        target=lambda sizes, rules, watcher: Short(sizes, rules, watcher, place=made.place),
        monitor=InvariantMonitor(),
    )
    assert outcome.verdict == "oom"
    assert outcome.failure is not None
    assert outcome.failure.request == "a"


def test_without_a_limit_state_slots_are_never_what_is_missing() -> None:
    """Requests of one prompt share its pages: more of them run than pages could have states for."""
    small = settings(checkpoint_align=16, chunked_prefill_size=None, pool_tokens=80)
    events = [event for n in range(24) for event in (
        {"event": "submit", "request": f"r{n}", "prompt": [["a", 32]]}, {"event": "round"},
    )]  # fmt: skip
    trace = trace_of(small, [*events, {"event": "drain"}])
    pure = replay(trace, monitor=InvariantMonitor())
    outcome, node = run(trace)
    assert outcome.document() == pure.document()
    assert node.counts.requests == 24
    assert node.device.slots > 2 * small.pool_pages + 1


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"page_size": 64, "checkpoint_align": 256, "pool_tokens": 1 << 28}, "pool_tokens"),
        ({"page_size": 1, "pool_tokens": 50_000_000}, "pool_tokens"),
        ({"pool_tokens": 1024, "state_slots": 1 << 28}, "state_slots"),
        ({"pool_tokens": 1 << 22, "host_tokens": 1 << 22}, "host_tokens"),
    ],
)
def test_a_pool_too_big_for_the_device_is_one_line(sizes: dict[str, int], field: str, tmp_path: Path) -> None:
    node = {"page_size": 16, "checkpoint_align": 16, "chunked_prefill_size": None, "max_prefill_tokens": None}
    document = {"format": "kvledger-trace/1", "node": {**node, "host_tokens": None, **sizes}, "rules": "tail-reserved"}
    path = tmp_path / "big.json"
    path.write_text(json.dumps({**document, "events": EVENTS[1:2]}), "utf-8")
    command = [sys.executable, "-m", "kvledger", "replay", str(path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"big.json: node.{field}: {sizes[field]} take" in line
    assert "--device cpu allows 1,073,741,824" in line


def test_a_long_trace_is_not_interpreted(tmp_path: Path) -> None:
    events = [{"event": "submit", "request": f"r{n}", "prompt": [[f"s{n}", 7000]]} for n in range(3)]
    document = {"format": "kvledger-trace/1", "rules": "tail-reserved", "events": events, "node": {
        "page_size": 16, "checkpoint_align": 16, "chunked_prefill_size": None, "max_prefill_tokens": None,
        "pool_tokens": 30000, "host_tokens": None,
    }}  # fmt: skip
    path = tmp_path / "long.json"
    path.write_text(json.dumps(document), "utf-8")
    command = [sys.executable, "-m", "kvledger", "replay", str(path), "--device", "interpret"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "long.json: --device interpret takes prompts of 8,000 tokens in all, these have 21,000" in done.stderr
    assert device_target("cpu").refusal(load(path)) is None


def test_poison_is_looked_at_after_the_last_event_too() -> None:
    """Nothing is computed any more when the last request goes, and what it frees must be poison."""
    trace = trace_of(settings(), [EVENTS[1], {"event": "round"}, {"event": "abort", "request": "a"}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DevicePool, "poison_slots", lambda _self, _slots: None)
        outcome, node = run(trace)
    assert outcome.verdict == "poison-holds"
    assert node.judge.wrong_data is None


def test_target_names_its_device_and_brings_its_invariants() -> None:
    node = target("cpu")(settings(), PRESETS["aligned"], Watcher())
    assert "data" in node.capabilities
    monitor = InvariantMonitor()
    monitor.attach(node, settings(), PRESETS["aligned"])
    assert not monitor.skipped
    pure = InvariantMonitor()
    pure.attach(PrefillNode(settings(), PRESETS["aligned"]), settings(), PRESETS["aligned"])
    assert not pure.skipped


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_cuda_without_a_device_is_one_line() -> None:
    command = [sys.executable, "-m", "kvledger", "replay", str(CASES / "worked-example.json"), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvledger: replay: --device cuda: torch finds no CUDA device here\n"


@pytest.mark.parametrize("name", ["worked-example", "device-hit-lock", "incident-2026-11-02"])
@pytest.mark.parametrize("rules", ["aligned", "tail-reserved"])
def test_a_case_ends_as_the_pure_replay_does(name: str, rules: str) -> None:
    torch.set_num_threads(1)
    trace = load(CASES / f"{name}.json")
    outcome, node = run(trace, rules)
    pure = replay(trace, PRESETS[rules], monitor=InvariantMonitor())
    assert outcome.document() == json.loads(json.dumps(pure.document()))
    assert outcome.verdict == trace.expect[rules]
    assert node.judge.wrong_data is None
    assert node.judge.compared == node.counts.tokens > 0
