"""How long a property test searches. `dev` and `ci` repeat themselves exactly, `nightly` looks for news."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hypothesis import HealthCheck, Phase, settings

from kvledger.testing.driver import MOVES_PER_EXAMPLE

EXAMPLES: Mapping[str, int] = MappingProxyType({"dev": 300, "ci": 600, "nightly": 20_000})
"""Examples per test case, by profile."""


def profile_settings(name: str) -> settings:
    """Settings of a profile. Only `nightly` remembers failures; the others draw from fixed seeds (see the machine)."""
    common = settings(
        max_examples=EXAMPLES[name],
        # our own shrinker is thousands of times cheaper, and canonical
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target),
        stateful_step_count=MOVES_PER_EXAMPLE,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        # traces are large on purpose, and a busy machine is slow: neither says anything about the scheduler
        suppress_health_check=tuple(HealthCheck),
    )
    return common if name == "nightly" else settings(common, database=None)
