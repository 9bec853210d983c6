"""What is known of sglang's admission, as traces: the holes must still be there, the safe neighbours must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.replay import TargetFactory
from tests.downstream.known import check_known, known_traces


@pytest.mark.parametrize("path", known_traces("sglang-0.5.23"))
def test_known(path: Path, sglang: TargetFactory) -> None:
    check_known(path, sglang)
