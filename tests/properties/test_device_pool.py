"""What is admitted is computed, and every token is right: the pure node's machine over a real pool, on each executor.

The interpreter and CUDA get a process of their own: Triton compiles or interprets, and a process does one or the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch

from kvledger.kernels.device_node import device_target
from kvledger.rules import AccountingRules
from kvledger.testing.session import SESSION
from tests.properties.device_machine import run_machine

pytestmark = pytest.mark.device

RULES: dict[str, str | AccountingRules] = {
    "tail_reserved": "tail-reserved",
    "upstream": "upstream",
    "gap_spent": AccountingRules(spend_gap=True),
}
EXAMPLES = {"dev": 50, "ci": 120, "nightly": 1000}
INTERPRETED = {"dev": 6, "ci": 12, "nightly": 100}
CUDA_SECONDS = 60
HITS = 1 / 3
"""Of all requests admitted, so many at least start from a restored snapshot."""

Record = Callable[[str, object], None]


def judge(executor: str, done: dict[str, Any], record_property: Record) -> None:
    record_property("device_pool", json.dumps({"executor": executor, **done}))
    print(f"{executor}: {done}")
    assert done["compared"] == done["tokens"] > 0
    assert done["hits"] >= HITS * done["requests"], f"{done['hits']} of {done['requests']} requests hit a snapshot"


SHARDS = (("tail_reserved", 0), ("tail_reserved", 1), ("upstream", 2), ("gap_spent", 3))


@pytest.mark.parametrize(("name", "shard"), SHARDS)
def test_cpu(name: str, shard: int, record_property: Record) -> None:
    torch.set_num_threads(1)
    done = run_machine(device_target("cpu"), RULES[name], examples=EXAMPLES[SESSION.profile], shard=shard)
    judge("cpu", done, record_property)
    assert done["loaded_back_pages"]
    assert done["written_back_pages"]
    assert done["bitwise"], "no request was compared bit for bit with its prompt in one piece"


def apart(device: str, *options: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.properties.device_machine", device, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_interpret(record_property: Record) -> None:
    pytest.importorskip("triton")
    judge("interpret", apart("interpret", "--examples", str(INTERPRETED[SESSION.profile])), record_property)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuda: no device")
def test_cuda(record_property: Record) -> None:
    done = apart("cuda", "--examples", "10", "--seconds", str(CUDA_SECONDS))
    judge("cuda", done, record_property)
