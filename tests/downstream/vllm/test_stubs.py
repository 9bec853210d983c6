"""A stub that is no longer needed turns its test red, and so does a part of one that nobody asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvledger.node import Watcher
from kvledger.request import Prompt
from kvledger.rules import PRESETS
from kvledger.settings import NodeSettings

SETTINGS = NodeSettings(
    page_size=4,
    checkpoint_align=4,
    chunked_prefill_size=16,
    max_prefill_tokens=None,
    pool_tokens=48,
    host_tokens=None,
)


@pytest.fixture
def no_configuration_is_kept(vllm: Any) -> Any:
    from kvledger.targets.vllm import world

    world._config.cache_clear()
    yield
    world._config.cache_clear()


def test_vllm_still_needs_it(vllm: Any, no_configuration_is_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvledger.targets.vllm import stubs, world

    for stub in stubs.STUBS:
        monkeypatch.setattr(stubs, stub.name.upper(), _without(stub))
        with pytest.raises(AttributeError, match="NoneType"):
            world.build(SETTINGS, align=False)


def test_it_has_no_part_that_nobody_asks_for(
    vllm: Any, no_configuration_is_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvledger.targets.vllm import stubs

    asked: set[str] = set()
    facts: list[dict[str, object]] = []

    class Recorder:
        def __init__(self, **parts: object) -> None:
            facts.append(parts)

        def __getattr__(self, name: str) -> object:
            asked.add(name)
            if name not in facts[0]:
                raise AttributeError(name)
            return facts[0][name]

    monkeypatch.setattr(stubs, "SimpleNamespace", Recorder)
    target = vllm.VllmTarget(SETTINGS, PRESETS["upstream"], Watcher())
    target.submit("A", Prompt((("a", 20),)))
    target.run_round()
    unasked = facts[0].keys() - asked
    assert not unasked, f"vllm no longer asks for {sorted(unasked)}: remove them"


def _without(stub: Any) -> Any:
    return replace(stub, install=lambda config, max_model_len: setattr(config, stub.replaces, None))
