"""Markdown that hostile names and messages cannot break: names stand in code spans, everything else is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from kvledger.report.plain import named, plain

MESSAGE_COLUMNS = 400


def code(name: str) -> str:
    """A name as a code span that neither ends early nor starts a table cell."""
    return f"`{named(name).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def codes(names: Iterable[str]) -> str:
    """Names in code spans, one after the other."""
    return ", ".join(map(code, names))


def escaped(text: str, columns: int = MESSAGE_COLUMNS) -> str:
    """Text in which nothing is markup, a mention or a link."""
    safe = html.escape(plain(text, columns), quote=False)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", safe).replace("@", "&#64;")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, line by line; the cells are Markdown already."""
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
