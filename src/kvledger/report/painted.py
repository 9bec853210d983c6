"""Lines made of styled spans: plain text anywhere, colours where a terminal can show them and rich is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import NamedTuple, TextIO

from kvledger.report.plain import named, plain, width

Span = tuple[str, str]
"""Text, and how rich is to style it ("" is not at all)."""
Line = Sequence[Span]


class Bars(NamedTuple):
    """A character each for what is left, what a row takes, and what is more than there is."""

    left: str
    taken: str
    beyond: str


BLOCKS = Bars("█", "░", "!")
ASCII = Bars("#", "-", "!")


def painted(lines: Iterable[Line], stream: TextIO | None) -> str:
    """The lines as text for `stream`, each ended by a newline."""
    if not wants_colour(stream):
        return plain_text(lines)
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return plain_text(lines)
    console = Console(file=StringIO(), force_terminal=True)
    with console.capture() as captured:
        for line in lines:
            console.print(Text.assemble(*line), soft_wrap=True)
    return captured.get()


def plain_text(lines: Iterable[Line]) -> str:
    """The lines without their styles."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def wants_colour(stream: TextIO | None) -> bool:
    """It is a terminal that can do more than print, and nobody asked for no colour."""
    if stream is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return stream.isatty()


def bars_for(stream: TextIO | None) -> Bars:
    """The bar characters that `stream` can encode."""
    try:
        "".join(BLOCKS).encode((stream and stream.encoding) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def unstyled(lines: Iterable[str], style: str = "") -> list[Line]:
    """Lines of one span each."""
    return [[(line, style)] for line in lines]


def short_name(name: str, columns: int) -> str:
    """A name as `named` shows it, in at most `columns` columns."""
    whole = named(name)
    return whole if width(whole) <= columns else f'"{plain(name.replace(chr(34), chr(39)), columns - 2)}"'
