"""Speed of the kernels and the executor: `python benchmarks/bench_kernels.py [--json FILE] [--gpu | --dry-run]`.

Without a GPU, ratios within one run (best of several): the torch executor against the float64 recurrence, token by
token, and against Triton's interpreter. With one (`--gpu`; `--dry-run` walks the same code on a CPU, at sizes that say
nothing):

1. `kda_chunk_fwd` against float64 in both precisions, slow gates, K != V (RMS ratio at most 3e-5 and 0.006).
2. `kda_chunk_fwd` at T = 8192, D = 128, H = 96 and 64, one sequence, six, and eight of 1024: milliseconds, times the
   floor, and, where flash-linear-attention is importable, `chunk_kda` in the same run. Its gate and sigmoid are
   computed beforehand and not timed; ours are part of the kernel.
3. `page_copy` and `latent_store` as fractions of what a plain copy of as many bytes gets.
4. The executor on the device against the same model on torch there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from kvledger.kernels.device_pool import DevicePool
from kvledger.kernels.executor import prefill
from kvledger.kernels.kda import kda_chunk_fwd
from kvledger.kernels.launch import Backend
from kvledger.kernels.mla import latent_store, plan_slots
from kvledger.kernels.model import MODELS, weights
from kvledger.kernels.pages import page_copy
from kvledger.kernels.reference import kda_recurrence
from kvledger.kernels.truth import Truth
from kvledger.request import Prompt

FLOOR_MS = 0.236
"""H200, H = 96, T = 8192, D = 128 bf16: inputs read and outputs written once. With a workspace between: 0.552."""
SHAPES = {"fixed": (8192,), "varlen": (1300, 547, 2048, 963, 271, 3063), "1024x8": (1024,) * 8}
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 0.006}


def best_seconds(work: Callable[[], object], times: int = 3) -> float:
    work()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


# --- CPU


def executor_tokens_per_second(tokens: int, backend: Backend, device: str = "cpu", model: str = "tiny") -> float:
    """A cold prompt in one piece, outputs included."""
    spec, prompt = MODELS[model], Prompt([(f"bench{tokens}", tokens)])
    pool = DevicePool(
        spec, pages=tokens // 16 + 1, slots=tokens // 256 + 2, page_size=16, backend=backend, device=device
    )  # fmt: skip
    return tokens / best_seconds(lambda: prefill(pool, prompt, 256, outputs=True), 1 if backend == "interpret" else 3)


def cpu(tokens: int = 2048, interpreted_tokens: int = 64) -> dict[str, float]:
    torch.set_num_threads(1)
    spec = MODELS["tiny"]
    weights(spec)
    exact = tokens / best_seconds(lambda: Truth(spec).outputs(Prompt([("exact", tokens)])))
    executor = executor_tokens_per_second(tokens, "torch")
    small = executor_tokens_per_second(interpreted_tokens, "torch")
    command = [sys.executable, __file__, "--interpret", str(interpreted_tokens)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    interpreter = float(done.stdout)
    return {
        "torch executor, tokens/s": executor,
        "float64 recurrence, tokens/s": exact,
        "torch / float64": executor / exact,
        f"torch executor at {interpreted_tokens} tokens, tokens/s": small,
        "interpreter, tokens/s": interpreter,
        f"torch / interpreter at {interpreted_tokens} tokens": small / interpreter,
    }


# --- GPU


def milliseconds(work: Callable[[], object], device: str, times: int = 20) -> float:
    """Median of single runs by events; on a CPU by the clock."""
    if device == "cpu":
        return best_seconds(work, 1) * 1e3
    for _ in range(3):
        work()
    found = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def kda_inputs(tokens: int, heads: int, k_size: int, v_size: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Slow gates, strong updates, correlated keys."""
    source = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int, uniform: bool = False) -> torch.Tensor:
        draw = torch.rand if uniform else torch.randn
        return draw(1, tokens, heads, *shape, generator=source, device=device)

    q, k, v = drawn(k_size, uniform=True), drawn(k_size, uniform=True), drawn(v_size)
    g, beta = drawn(k_size) - 6, drawn() + 2
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    exact = {"A_log": torch.zeros(heads), "dt_bias": torch.zeros(heads, k_size)}
    return {n: x.to(device, dtype) for n, x in inputs.items()} | {n: x.to(device) for n, x in exact.items()}


def correctness(device: str) -> dict[str, float]:
    """RMS ratios against float64; SystemExit names the first that is too large."""
    found = {}
    for dtype, limit in LIMITS.items():
        for k_size, v_size in ((128, 128), (128, 64), (32, 48)):
            x = kda_inputs(300, 2, k_size, v_size, dtype, device)
            out = kda_chunk_fwd(**x, scale=None, out=None, lower_bound=-5.0).float().cpu()[0]
            tokens = [x[name][0].float().cpu() for name in ("q", "k", "v", "g", "beta")]
            exact, _, _ = kda_recurrence(*tokens, k_size**-0.5, x["A_log"].cpu(), x["dt_bias"].cpu(), -5.0)
            wanted = torch.from_numpy(exact)
            ratio = float(((out - wanted) ** 2).mean().sqrt() / (wanted**2).mean().sqrt())
            found[f"{str(dtype)[6:]} K={k_size} V={v_size}"] = ratio
            if not ratio <= limit:
                raise SystemExit(f"kda_chunk_fwd {dtype} K={k_size} V={v_size}: RMS ratio {ratio:.2g}")
    return found


def kda_times(device: str) -> dict[str, dict[str, float]]:
    shrink = 64 if device == "cpu" else 1
    found = {}
    for heads in (96, 64):
        for name, sizes in SHAPES.items():
            lengths = [max(1, tokens // shrink) for tokens in sizes]
            count = max(1, heads // shrink)
            x = kda_inputs(sum(lengths), count, 128, 128, torch.float32 if device == "cpu" else torch.bfloat16, device)
            states = torch.zeros(len(lengths), count, 128, 128, device=device)
            bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
            out, finals = torch.empty_like(x["v"]), torch.empty_like(states)
            ours = milliseconds(
                lambda x=x, out=out, states=states, finals=finals, bounds=bounds: kda_chunk_fwd(
                    **x, scale=None, out=out, lower_bound=-5.0, initial_state=states, final_state=finals,
                    cu_seqlens=bounds,
                ),
                device,
            )  # fmt: skip
            row = {"ms": ours, "x floor": ours / (FLOOR_MS * heads / 96)}
            theirs = fla_milliseconds(x, states, bounds, device)
            if theirs is not None:
                row |= {"fla ms": theirs, "speed-up over fla": theirs / ours}
            found[f"H={heads} {name}"] = row
    return found


def fla_milliseconds(x: dict[str, Any], states: torch.Tensor, bounds: list[int], device: str) -> float | None:
    """flash-linear-attention's chunk_kda on the same numbers, or None if it does not import or run."""
    try:
        chunk_kda = import_module("fla.ops.kda").chunk_kda
    except (ImportError, AttributeError, RuntimeError):
        return None
    gate = -5.0 * torch.sigmoid(x["g"].float())
    beta = torch.sigmoid(x["beta"].float()).to(x["beta"].dtype)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int64, device=device)
    try:
        return milliseconds(
            lambda: chunk_kda(
                x["q"], x["k"], x["v"], gate, beta, scale=128**-0.5, initial_state=states, output_final_state=True,
                use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
            ),
            device,
        )  # fmt: skip
    except Exception as error:  # another version's signature, or its kernels do not build here
        print(f"fla: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def copies(device: str) -> dict[str, float]:
    """Fractions of a plain copy's bandwidth: latents of all layers of Kimi-Linear in pages of 64."""
    small = device == "cpu"
    pages, layers, tokens = (16, 2, 128) if small else (1024, 7, 8192)
    dtype = torch.float32 if small else torch.bfloat16
    source, target = (torch.randn(pages, layers, 64, 576, device=device, dtype=dtype) for _ in range(2))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    plain = milliseconds(lambda: target.copy_(source), device)
    found = {
        "page_copy within the device / copy_": plain
        / milliseconds(lambda: page_copy(source, target, range(pages), order), device)
    }
    host = torch.empty(pages, layers, 64, 576, dtype=dtype, pin_memory=not small)
    for name, (one, two) in {"to the host": (source, host), "from the host": (host, source)}.items():
        plain = milliseconds(lambda one=one, two=two: two.copy_(one, non_blocking=True), device)
        ours = milliseconds(lambda one=one, two=two: page_copy(one, two, range(pages), order), device)
        found[f"page_copy {name} / copy_"] = plain / ours
    pool = source[:, 0]
    latents = torch.randn(tokens, 576).to(device, dtype)
    slots = plan_slots(torch.randperm(pages * 64)[:tokens], pool)
    elsewhere = torch.empty_like(latents)
    plain = milliseconds(lambda: elsewhere.copy_(latents), device)
    found["latent_store / copy_"] = plain / milliseconds(lambda: latent_store(latents, pool, slots), device)
    return found


def gpu(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"correctness, RMS ratio": correctness(device), "kda_chunk_fwd": kda_times(device)}
    found["copies, fraction of copy_"] = copies(device)
    backend: Backend = "torch" if device == "cpu" else "triton"
    tokens = 256 if device == "cpu" else 8192
    ours = executor_tokens_per_second(tokens, backend, device, "tiny" if device == "cpu" else "small")
    found["executor, tokens/s"] = {f"{tokens} tokens in one piece": ours}
    return found


def show(found: dict[str, Any], indent: str = "") -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name:44} {value:>12,.3g}" if value < 1000 else f"{indent}{name:44} {value:>12,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the kernels and the executor.")
    parser.add_argument("--gpu", action="store_true", help="what needs a GPU, and nothing else")
    parser.add_argument("--dry-run", action="store_true", help="the same code on a CPU, tiny, its figures worthless")
    parser.add_argument("--json", metavar="FILE", help="where the figures go, too")
    parser.add_argument("--interpret", type=int, metavar="TOKENS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpret:
        torch.set_num_threads(1)
        print(executor_tokens_per_second(options.interpret, "interpret"))
        return
    found = gpu("cuda") if options.gpu else gpu("cpu") if options.dry_run else cpu()
    show(found)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
