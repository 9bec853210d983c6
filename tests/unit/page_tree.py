"""An HTML page as a tree, read strictly: what is not closed, or closed twice, is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "rect", "line"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str | None = None, **attributes: str) -> list[Node]:
        """Every element below with that tag and those attributes (`class_` is one of its classes)."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                if (tag is None or child.tag == tag) and all(child.has(*each) for each in attributes.items()):
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def has(self, key: str, value: str) -> bool:
        actual = self.attributes.get(key.rstrip("_").replace("_", "-")) or ""
        return value in actual.split() if key == "class_" else actual == value

    def one(self, tag: str | None = None, **attributes: str) -> Node:
        (found,) = self.all(tag, **attributes)
        return found


class Parser(HTMLParser):
    """A tree of the page; what is not properly closed is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = [Node("", {})]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attributes))
        assert len(node.attributes) == len(attributes), f"an attribute of {tag} is there twice"
        self.stack[-1].children.append(node)
        if tag not in VOID:
            self.stack.append(node)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.stack[-1].children.append(data)


def parsed(document: str) -> Node:
    parser = Parser()
    parser.feed(document)
    parser.close()
    assert len(parser.stack) == 1, f"{parser.stack[-1].tag} is not closed"
    return parser.stack[0]
