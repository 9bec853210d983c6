"""HTML that cannot be forgotten to escape: text stays text until `element` escapes it, and names are made visible."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvledger.report.plain import named, plain

Words = Sequence["str | Name"]
"""A sentence whose names are still marked as such."""

_VOID = frozenset({"meta", "link", "input", "rect", "line", "br"})
MESSAGE_COLUMNS = 400


class Html(str):
    """Markup that is safe as it stands. Made by `element`, `join` and `text` only."""

    __slots__ = ()


class Name(str):
    """A name from a trace: hostile until shown otherwise."""

    __slots__ = ()

    @property
    def short(self) -> str:
        return _short(self)

    @property
    def full(self) -> str:
        """All of it, with everything that is not plainly visible escaped."""
        return _full(self)


@lru_cache(maxsize=4096)
def _short(name: str) -> str:
    return named(name)


@lru_cache(maxsize=4096)
def _full(name: str) -> str:
    if name.isascii() and name.isprintable() and "\\" not in name:
        return name
    return plain(name, 16 * len(name) + 1)


Content = str | int | Name | Html | None


def text(content: Content) -> Html:
    """One piece of content, escaped unless it is markup; None is nothing, a Name is isolated and shortened."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, Name):
        return element("bdi", content.short, class_="name", title=None if content.short == content else content.full)
    return Html(html.escape(str(content), quote=False))


def join(contents: Iterable[Content], separator: str = "") -> Html:
    """Pieces of content one after the other."""
    return Html(html.escape(separator).join(map(text, contents)))


def element(tag: str, *contents: Content, **attributes: Content | bool) -> Html:
    """`<tag attributes>contents</tag>`. `class_`, `data_x` become `class`, `data-x`; None and False are dropped."""
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{html.escape(str(value))}"')
    start = f"<{tag}{''.join(parts)}"
    if tag in _VOID:
        assert not contents, f"<{tag}> has no content, not {contents!r}"
        return Html(f"{start}/>")
    return Html(f"{start}>{''.join(map(text, contents))}</{tag}>")


def sentence(words: Words) -> Html:
    """Words as markup."""
    return join(words)


def message_words(message: str, name: str | None) -> list[str | Name]:
    """A message made visible, with the request's own name in it marked where it could do harm."""
    if not name or (len(name) <= len("a request's") and name.isascii() and name.isprintable()):
        return [plain(message, MESSAGE_COLUMNS)]
    words: list[str | Name] = []
    for number, part in enumerate(message.split(name)):
        words += [Name(name)] * bool(number) + [plain(part, MESSAGE_COLUMNS)] * bool(part)
    return words


def script_json(value: object) -> str:
    """JSON for a data block of a page: ASCII, and without a character that could end or open anything in HTML."""
    document = json.dumps(value, separators=(",", ":"))
    return document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def csp_hash(content: str) -> str:
    """The source expression that lets exactly this inline style or script in."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
