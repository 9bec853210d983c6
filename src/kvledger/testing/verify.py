"""`kvledger verify`: runs the search, shows its progress, and ends in tables that say what was met."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS, SOUND_PRESETS
from kvledger.testing.fixtures import save_fixture
from kvledger.testing.moves import NODE_SPACE, Space
from kvledger.testing.reached import BRANCHES, DECODE_BRANCHES, PARTS
from kvledger.testing.search import NOT_CONFIRMED, Progress, SearchResult, document, search
from kvledger.testing.swarm_space import SWARM_SPACE
from kvledger.testing.unified_moves import UNIFIED_SPACE

DEFAULT_SAVE = "kvledger-found"


def command(
    rules: Sequence[str],
    examples: int | None,
    seed: int | None,
    save: str | None,
    as_json: bool,
    target: TargetFactory | None = None,
) -> int:
    """Search the presets `rules` (none: all). 0 if each gave what it should and reached what it must, else 1.

    A `target` may bring its own `space` of nodes, and a `note` on what it did.
    """
    target = target or PrefillNode
    space: Space = getattr(target, "space", NODE_SPACE)
    names = list(rules) or [name for name in PRESETS if space.thorough or name in SOUND_PRESETS]
    searches = [(name, space) for name in names]
    if target is PrefillNode:
        searches += [(name, each) for each in (UNIFIED_SPACE, SWARM_SPACE) for name in names if name in each.sound]
    left_out = [name for name in PRESETS if not rules and name not in names]
    too_few = examples is not None and any(examples < each.examples for _, each in searches)
    with _progress() as progress:
        results = [
            search(
                name,
                examples=examples or each.examples,
                seed=seed or 0,
                target=target,
                progress=progress,
                space=each,
            )
            for name, each in searches
        ]
    paths = {
        result.title: str(save_fixture(result.found.trace, result.found.invariant, save or DEFAULT_SAVE))
        for result in results
        if result.found is not None
    }
    if as_json:
        print(json.dumps(document(results, paths), indent=2), flush=True)  # a reader who has gone is noticed here
    else:
        _print_tables(_Console(), results, paths, too_few=too_few)
        if left_out:
            print(f"left out: {', '.join(left_out)}: what they break is on paper, and quicker found elsewhere")
        if hasattr(target, "totals"):
            print(target.totals())
    return 0 if all(result.as_expected for result in results) else 1


class _progress:
    """One status line on standard error while the search runs; silent where nobody watches."""

    def __enter__(self) -> Progress:
        self._shown = sys.stderr.isatty()
        self._last = ""
        return self._tell

    def _tell(self, rules: str, done: int, total: int) -> None:
        line = f"{rules}: {100 * done // total} %"
        if self._shown and line != self._last:
            self._last = line
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Console(Console):
    """Leaves it to the command line what a reader that is gone means; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _print_tables(
    console: Console, results: Sequence[SearchResult], paths: Mapping[str, str], *, too_few: bool
) -> None:
    """`too_few`: fewer examples were asked for than it takes to reach every branch."""
    console.print(_reached_table(results))
    console.print(_verdict_table(results, too_few=too_few))
    for result in results:
        if result.found is not None:
            found = result.found
            console.print(f"[bold]{result.title}[/] breaks {found.invariant}: {escape(found.message)}")
            events, replays = len(found.trace.events), found.replays
            console.print(
                f"  shrunk to {events} events in {replays:,} replays: {escape(paths[result.title])}", soft_wrap=True
            )
        if result.missing:
            few = too_few and NOT_CONFIRMED not in result.missing
            words = f"{result.title}: too few examples to reach" if few else f"{result.title} never reached"
            console.print(f"[bold red]{words}: {', '.join(result.missing)}[/]")


def _verdict(result: SearchResult, *, too_few: bool) -> str:
    if result.as_expected:
        return "[green]as expected[/]"
    broke_a_promise = result.sound and result.found is not None
    if too_few and not broke_a_promise and NOT_CONFIRMED not in result.missing:
        return "[bold red]too few examples[/]"
    return "[bold red]NOT expected[/]"


def _verdict_table(results: Sequence[SearchResult], *, too_few: bool) -> Table:
    table = _table(
        "rules",
        *_right("examples", "rounds", "seconds"),
        Column("failure", no_wrap=True),
        *_right("found at"),
        "verdict",
    )
    for result in results:
        found = result.found
        table.add_row(
            _narrow(result),
            f"{result.examples:,}",
            f"{result.rounds:,}",
            f"{result.seconds:.1f}",
            found.invariant if found else "none",
            f"{found.example:,}" if found else "-",
            _verdict(result, too_few=too_few),
        )
    return table


def _reached_table(results: Sequence[SearchResult]) -> Table:
    table = _table("reached", *_right(*(_narrow(result) for result in results)))
    expected = [result.must_reach for result in results]
    asked = {branch for result in results for branch in result.asks or ()}
    groups = (DECODE_BRANCHES, *(part.BRANCHES for part in PARTS))
    for branch in (*BRANCHES, *(branch for group in groups if asked & {*group} for branch in group)):
        table.add_row(
            branch,
            *(
                f"{result.reached[branch]:,}"
                if result.reached[branch]
                else "[bold red]never[/]"
                if branch in must
                else "[dim]-[/]"
                for result, must in zip(results, expected, strict=True)
            ),
        )
    return table


def _narrow(result: SearchResult) -> str:
    """Its title on two lines if it has a space of its own: 80 columns are not many."""
    return "\n".join(filter(None, (result.rules, result.space)))


def _table(*columns: str | Column) -> Table:
    """A table without frames: 80 columns hold it, and so does a log."""
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]
