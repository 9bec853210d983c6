"""Schedulers under test, by name. A target is built from a node's settings, rules and a watcher."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory

TARGETS: Mapping[str, TargetFactory] = MappingProxyType({"node": PrefillNode})

__all__ = ["TARGETS"]
