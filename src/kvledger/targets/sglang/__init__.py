"""The released SGLang scheduler as a target: its own admission, allocation and prefix cache, on a CPU, with no model.

Importing this package costs nothing. Asking it for `SglangTarget` imports sglang: 10 to 20 seconds, once a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvledger.targets.sglang.target import SglangTarget

__all__ = ["SglangTarget"]


def __getattr__(name: str) -> Any:
    if name != "SglangTarget":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvledger.targets.sglang.target import SglangTarget

    return SglangTarget
