"""What several unit tests build: node settings, prompts, and the incident of the post-mortem as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from kvledger.events import Cached, Drain, Event, Submit
from kvledger.request import Prompt
from kvledger.settings import NodeSettings

REPEATABLE = settings(derandomize=True, deadline=None)
"""Every run draws the same examples, and none is judged by a clock."""


def prompt(*runs: tuple[str, int]) -> Prompt:
    return Prompt(runs)


def refusal(call: Callable[[], object]) -> str:
    """The one line of a ValueError."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        call()
    (line,) = str(caught.value).splitlines()
    return line


def node_settings(**changes: Any) -> NodeSettings:
    """A small node: ten pages of 64 slots, a grid of 256, no limit that a test did not ask for."""
    sizes: dict[str, Any] = {
        "page_size": 64,
        "checkpoint_align": 256,
        "chunked_prefill_size": 4096,
        "max_prefill_tokens": None,
        "pool_tokens": 640,
        "host_tokens": None,
    }
    return NodeSettings(**(sizes | changes))


INCIDENT_NODE = node_settings(chunked_prefill_size=16384, max_prefill_tokens=16384, pool_tokens=121408)
INCIDENT_ARRIVALS: tuple[Event, ...] = (
    Cached("device", prompt(("keim", 86784)), locked=True),
    Cached("host", prompt(("xpkq", 15360))),
    Submit("v9uj", prompt(("v9uj", 13888))),
    Submit("1keim", prompt(("keim", 94024))),
    Submit("xpkq", prompt(("xpkq", 15545))),
)
INCIDENT: tuple[Event, ...] = (*INCIDENT_ARRIVALS, Drain())
