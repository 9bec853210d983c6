"""Subcommands of the command line. Each module adds its own to a parser, given what the shell around it can do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory
from kvledger.rules import PRESETS, AccountingRules
from kvledger.schema import escaped
from kvledger.targets import TARGETS
from kvledger.trace import Trace


@dataclass(frozen=True, slots=True)
class Shell:
    """Reads a path's trace, prints, makes argparse types of names and of targets, and has the error for one line."""

    read: Callable[[str], Trace]
    write: Callable[[str], None]
    one_of: Callable[[Collection[str]], Callable[[str], str]]
    target: Callable[[str], TargetFactory]
    error: Callable[[str], Exception]


def add_trace_options(parser: argparse.ArgumentParser, shell: Shell, *, several: bool = False) -> None:
    """The trace or traces, the preset to run under instead of their own rules, and the scheduler under test."""
    add_trace_argument(parser, several=several)
    add_rules_option(parser, shell)
    parser.add_argument(
        "--target",
        type=shell.target,
        default=PrefillNode,
        metavar="NAME",
        help=f"the scheduler under test: {', '.join(TARGETS)}, or package.module:attribute (default: node)",
    )


def add_trace_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """One trace, or more; either way `options.traces` is a list."""
    parser.add_argument(
        "traces", nargs="+" if several else 1, metavar="TRACE", help="a kvledger-trace/1 file; - is standard input"
    )


def add_rules_option(parser: argparse.ArgumentParser, shell: Shell) -> None:
    """The preset to run under instead of a trace's own rules."""
    parser.add_argument(
        "--rules",
        type=shell.one_of(PRESETS),
        metavar="NAME",
        help=f"run under this preset instead of the trace's own rules: {', '.join(PRESETS)}",
    )


def shown_path(path: str) -> str:
    """A path in one line of printable ASCII; `-` is standard input."""
    return escaped("<stdin>" if path == "-" else path, 100, keep_end=True)


def chosen_rules(options: argparse.Namespace) -> AccountingRules | None:
    """The preset that was asked for; None: the trace's own rules."""
    return None if options.rules is None else PRESETS[options.rules]
