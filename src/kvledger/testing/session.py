"""What one test session puts under test: set once, by the pytest plugin from its options, read by `state_machine`."""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory

PROFILES = ("dev", "ci", "nightly")


@dataclass(slots=True)
class Session:
    """Defaults of `state_machine`. `rules` None: whatever a test asks for itself."""

    target: TargetFactory = PrefillNode
    rules: str | None = None
    profile: str = "dev"
    observe: bool = False


SESSION = Session()
