"""Text from hostile documents, made safe to print: one line, nothing that steers a terminal, bounded width."""

from __future__ import annotations

import json
import textwrap
import unicodedata

COLUMNS = 100
NAME_COLUMNS = 40
_ELLIPSIS = "..."


def plain(text: str, limit: int) -> str:
    """`text` with all that is not plainly visible escaped as in JSON; beyond `limit` columns its middle is left out."""
    return _cut([_visible(character) for character in _ends(text, limit)], limit)


def named(name: str) -> str:
    """A name in at most NAME_COLUMNS columns, in quotes where it could be mistaken for anything else."""
    pieces = [_visible(character) for character in _ends(name, NAME_COLUMNS)]
    if pieces and not any(len(piece) > 1 or piece in ' ",;' for piece in pieces):
        return _cut(pieces, NAME_COLUMNS)
    body = _cut([piece.replace('"', '\\"') for piece in pieces], NAME_COLUMNS - 2)
    return f'"{body}"'


def counted(count: int, noun: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def width(text: str) -> int:
    """Terminal columns of a text that `plain` or `named` made."""
    return len(text) if text.isascii() else sum(_columns(character) for character in text)


def padded(text: str, columns: int) -> str:
    """`text` and as many spaces as bring it to `columns`."""
    return text + " " * (columns - width(text))


def wrapped(text: str, indent: int = 0) -> list[str]:
    """`text` on lines of at most COLUMNS, all but the first behind `indent` spaces."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)


def _visible(character: str) -> str:
    # str.isprintable knows controls, bidi marks, separators and surrogates; a combining mark would sit on its neighbour
    if character.isprintable() and character != "\\" and not unicodedata.category(character).startswith("M"):
        return character
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _ends(text: str, limit: int) -> str:
    """As much of both ends of a very long text as `_cut` could keep, and a little more."""
    return text if len(text) <= 2 * limit + 2 else text[: limit + 1] + text[-limit - 1 :]


def _cut(pieces: list[str], limit: int) -> str:
    """The pieces joined, or as many whole ones from both ends as leave room for the ellipsis."""
    if sum(map(width, pieces)) <= limit:
        return "".join(pieces)
    room = limit - len(_ELLIPSIS)
    head = _fitting(pieces, room - room // 2)
    tail = _fitting(pieces[::-1], room // 2)
    return "".join([*head, _ELLIPSIS, *reversed(tail)])


def _fitting(pieces: list[str], room: int) -> list[str]:
    """As many whole pieces, from the first on, as fit."""
    columns = 0
    for count, piece in enumerate(pieces):
        columns += width(piece)
        if columns > room:
            return pieces[:count]
    return pieces
