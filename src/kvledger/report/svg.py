"""What the page's pictures share: columns of rounds, bars and frames, as inline SVG.

Horizontal places are percentages, so that a picture is as wide as the screen and its text is never stretched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvledger.report.markup import Html, element

MAX_LABELLED_ROUNDS = 12
"""With more rounds there is no room for figures in the columns."""
MAX_SPACED_COLUMNS = 60
MAX_COLUMNS_ON_A_PHONE = 5


@dataclass(frozen=True, slots=True)
class Columns:
    """Where each of `count` columns from number `first` on stands; many of them have no gap between them."""

    count: int
    first: int = 0

    @property
    def labelled(self) -> bool:
        return self.count <= MAX_LABELLED_ROUNDS

    @property
    def label_class(self) -> str:
        """Figures in many columns are left out where the screen is narrow."""
        return "" if self.count <= MAX_COLUMNS_ON_A_PHONE else " wide"

    @property
    def end(self) -> int:
        return self.first + self.count

    def x(self, column: float) -> str:
        return percent(100 * (column - self.first) / max(1, self.count))

    def bar(self, first: int, columns: int = 1) -> dict[str, str]:
        """The x and width of a bar over so many columns."""
        gap = 0.12 if self.count <= MAX_SPACED_COLUMNS else 0
        return {"x": self.x(first + gap / 2), "width": percent(100 * (columns - gap) / max(1, self.count))}


def frame(height: int, label: str | None, parts: Sequence[Html], **attributes: str) -> Html:
    """An SVG as wide as its place. Without a label it only repeats what is said elsewhere."""
    shown = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    return element("svg", *parts, width="100%", height=height, **shown, **attributes)


def group(title: str, *parts: Html) -> Html:
    """Shapes that tell on hovering what they are."""
    return element("g", element("title", title), *parts)


def percent(value: float) -> str:
    """A share of the width, as SVG takes it."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"
