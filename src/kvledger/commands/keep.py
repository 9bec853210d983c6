"""`kvledger shrink` and `kvledger fixture`: make a failing trace small, and keep it as a regression."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvledger.commands import Shell, add_trace_options, chosen_rules, shown_path
from kvledger.schema import escaped
from kvledger.shrink import NothingToShrink, Shrunk, shrink
from kvledger.shrink_lost import lost_causes
from kvledger.trace import Trace, dumps, write


def add_shrink(commands: Any, shell: Shell) -> None:
    """Add `kvledger shrink`."""
    parser = commands.add_parser(
        "shrink",
        allow_abbrev=False,
        help="make a failing trace as small as it gets",
        description="Make a failing trace as small as it gets, with the same invariant broken.",
        epilog="Exit status: 0 it is small; 1 the trace breaks nothing; 2 bad input.",
    )
    add_trace_options(parser, shell)
    parser.add_argument("-o", metavar="FILE", dest="output", help="write it there instead of on standard output")

    def run(options: argparse.Namespace) -> int:
        if options.output in ("-", options.traces[0]):
            raise shell.error(f"shrink: -o {escaped(options.output, 100)}: a file of its own is written")
        trace = shell.read(options.traces[0])
        if options.rules is not None:
            trace = trace.with_rules(options.rules)
        try:
            shrunk = shrink(trace, rules=chosen_rules(options), target=options.target)
        except NothingToShrink as error:
            print(f"kvledger: shrink: {error}", file=sys.stderr)
            return 1
        if options.output is None:
            shell.write(dumps(shrunk.trace))
        else:
            _save(options.output, shrunk.trace, shell)
        print(_effort(trace, shrunk), file=sys.stderr)
        _say_what_was_lost(lost_causes(trace, shrunk.trace))
        return 0

    parser.set_defaults(run=run)


def add_fixture(commands: Any, shell: Shell) -> None:
    """Add `kvledger fixture`."""
    parser = commands.add_parser(
        "fixture",
        allow_abbrev=False,
        help="shrink and explain a failing trace, and keep it as a regression",
        description="Shrink and explain a failing trace, and keep it with what every preset makes of it.",
        epilog="Exit status: 0 it is kept (already, perhaps); 1 the trace breaks nothing; 2 bad input.",
    )
    add_trace_options(parser, shell)
    parser.add_argument("--whole", action="store_true", help="keep the trace as it is instead of shrinking it")
    parser.add_argument("--save", metavar="DIR", default="tests/regressions", help="where (default: tests/regressions)")

    def run(options: argparse.Namespace) -> int:
        from kvledger.testing.failure import explain_failure

        trace = shell.read(options.traces[0])
        if options.rules is not None:
            trace = trace.with_rules(options.rules)
        try:
            failure = explain_failure(trace, options.save, options.target, small=not options.whole)
        except NothingToShrink as error:
            print(f"kvledger: fixture: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            place = shown_path(str(error.filename or options.save))
            raise shell.error(f"fixture: {place}: {escaped(error.strerror or 'cannot be written', 80)}") from None
        shell.write("\n".join(failure.lines) + "\n")
        _say_what_was_lost(failure.lost)
        return 0

    parser.set_defaults(run=run)


def _save(path: str, trace: Trace, shell: Shell) -> None:
    try:
        write(trace, path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a file name"
        raise shell.error(f"{shown_path(path)}: {escaped(reason, 80)}") from None


def _say_what_was_lost(causes: Sequence[str]) -> None:
    """The same invariant is broken by less: which may be another cause than the one that was of interest."""
    if causes:
        line = f"dropped as not needed: {', '.join(causes)}; kvledger fixture --whole keeps the trace as it is"
        print(line, file=sys.stderr)


def _effort(trace: Trace, shrunk: Shrunk) -> str:
    """What was tried, as a counter."""
    tried = ", ".join(f"{name} {count:,}" for name, count in shrunk.tried.items() if count)
    limit = "; a limit ended it, it may not be the smallest" if shrunk.limited else ""
    return (
        f"{shrunk.invariant}: {len(trace.events)} events to {len(shrunk.trace.events)} in {shrunk.evaluations:,} "
        f"replays, {shrunk.seconds:.1f} s{limit} ({tried})"
    )
