"""What a target says of itself in a report to its project: whose code ran, how a server would be set, what is meant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    """Plain text, a paragraph each. A target offers `about(trace, verdict)`, which returns one.

    `whose_code`: what ran is the project's own, and what is not. `flags`: the same settings on a server's command
    line; `beside_flags`: what has none. `notes`: what a reader must know to judge this finding. `expected`: the
    sentence to hold it against, in the place of the usual one.
    """

    whose_code: str
    flags: str | None = None
    beside_flags: str | None = None
    notes: tuple[str, ...] = ()
    expected: str | None = None


def command_line(flags: Iterable[tuple[str, object]]) -> str:
    """Flags with their values: None leaves a flag out, True stands for a flag without a value."""
    words = [[name] if value is True else [name, str(value)] for name, value in flags if value is not None]
    return " ".join(word for pair in words for word in pair)
