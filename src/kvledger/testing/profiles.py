"""Hypothesis profiles of the property tests: `dev` and `ci` repeat themselves exactly, `nightly` looks for news."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from kvledger.testing.driver import MOVES_PER_EXAMPLE

PROFILES = ("dev", "ci", "nightly")

# Traces are large on purpose, and a machine under load is slow: neither says anything about the scheduler.
_COMMON = settings(
    stateful_step_count=MOVES_PER_EXAMPLE,
    deadline=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)


def register_profiles() -> None:
    """Make the profiles known to Hypothesis. Hypothesis's own `ci` profile is replaced."""
    settings.register_profile("dev", _COMMON, max_examples=300, derandomize=True, database=None)
    settings.register_profile("ci", _COMMON, max_examples=600, derandomize=True, database=None)
    settings.register_profile("nightly", _COMMON, max_examples=20_000, derandomize=False)
