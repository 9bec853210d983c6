"""Each stub is still needed: without it a world with a host tier cannot be imported, or cannot run a round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvledger.replay import TargetFactory
from kvledger.targets.sglang.stubs import STUBS

TRACE = Path(__file__).parent.parent / "known" / "sglang-0.5.23" / "ok-host-hit-unaligned.json"
WITHOUT = """
import sys
from kvledger.monitor import checked_replay
from kvledger.targets.sglang import versions
from kvledger.trace import load

versions.STUBS = tuple(stub for stub in versions.STUBS if stub.name != sys.argv[1])
from kvledger.targets.sglang import SglangTarget

print(checked_replay(load(sys.argv[2]), target=SglangTarget).verdict)
"""


@pytest.mark.parametrize("name", [stub.name for stub in STUBS])
def test_still_needed(name: str, sglang: TargetFactory) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, name, str(TRACE)], capture_output=True, text=True, check=False
    )
    ended = (run.returncode, run.stdout.strip())
    assert ended != (0, "ok"), f"the stub {name} is no longer needed, remove it: the trace runs without it"


def test_the_trace_runs_with_all_of_them(sglang: TargetFactory) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, "none", str(TRACE)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "ok"), run.stderr
