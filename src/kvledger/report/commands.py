"""`kvledger report` and `kvledger perfetto`: options, reading, recording, and writing a file whole or not at all.

The helpers of `kvledger.cli` are imported when they are needed: the command line imports this module.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any

from kvledger.report.html import page
from kvledger.report.perfetto import trace_events
from kvledger.report.recording import Recording, record
from kvledger.report.saving import write_whole
from kvledger.rules import PRESETS
from kvledger.schema import escaped
from kvledger.targets import TARGETS


def add_report(commands: Any) -> None:
    """Add `kvledger report` to the subcommands of a parser."""
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="write a page that shows what became of every promise",
        description="Run traces and write one HTML page that needs nothing but itself: who was promised what, who "
        "spent it, and when it was too late.",
        epilog="Exit status: 0 the page was written, whatever it says; 2 bad input, or it cannot be written.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a kvledger-trace/1 file; - is standard input")
    _add_options(parser, "FILE.html")
    parser.set_defaults(run=_report)


def add_perfetto(commands: Any) -> None:
    """Add `kvledger perfetto` to the subcommands of a parser."""
    parser = commands.add_parser(
        "perfetto",
        allow_abbrev=False,
        help="write a trace for ui.perfetto.dev or chrome://tracing",
        description="Run a trace and write it in the Chrome trace event format: a lane for each request, counters for "
        "free, evictable, promised now and later, and slack.",
        epilog="Exit status: 0 the file was written, whatever it says; 2 bad input, or it cannot be written.",
    )
    parser.add_argument("traces", nargs=1, metavar="TRACE", help="a kvledger-trace/1 file; - is standard input")
    _add_options(parser, "FILE.json")
    parser.set_defaults(run=_perfetto)


def _add_options(parser: argparse.ArgumentParser, output: str) -> None:
    from kvledger import cli

    parser.add_argument("-o", "--output", required=True, metavar=output, help="the file to write")
    cli._add_rules(parser, "run under this preset instead of the trace's own rules")
    parser.add_argument(
        "--target",
        type=cli._one_of(TARGETS),
        default="node",
        metavar="NAME",
        help=f"the scheduler under test: {cli._listed(TARGETS)} (default: node)",
    )


def _report(options: argparse.Namespace) -> int:
    recordings = _recordings("report", options)
    return _save("report", options.output, [page(recordings)], recordings)


def _perfetto(options: argparse.Namespace) -> int:
    recordings = _recordings("perfetto", options)
    return _save("perfetto", options.output, trace_events(recordings[0]), recordings)


def _recordings(command: str, options: argparse.Namespace) -> list[Recording]:
    """Every trace is read before one is run, and all are run before anything is written."""
    from kvledger import cli

    if options.traces.count("-") > 1:
        raise cli.CommandError(f"{command}: '-', standard input, can be read only once")
    if options.output == "-":
        raise cli.CommandError(f"{command}: '-' is no file to write")
    for path in options.traces:
        if path != "-" and _is_same(path, options.output):
            raise cli.CommandError(f"{command}: {_shown(path)} would be overwritten with its own report")
    traces = [(path, cli._read(path)) for path in options.traces]
    rules = PRESETS[options.rules] if options.rules is not None else None
    recordings = []
    for path, trace in traces:
        source = cli.STDIN if path == "-" else path
        recordings.append(
            record(trace, rules, target=TARGETS[options.target], source=source, source_in_errors=_shown(source))
        )
    return recordings


def _save(command: str, path: str, pieces: Iterable[str], recordings: Sequence[Recording]) -> int:
    from kvledger import cli

    try:
        write_whole(path, pieces)
    except OSError as error:
        raise cli.CommandError(f"{command}: {_shown(path)}: {cli._words(error)}") from None
    except ValueError:
        raise cli.CommandError(f"{command}: {_shown(path)}: not a file name") from None
    verdicts = ", ".join(recording.outcome.verdict for recording in recordings[:5])
    more = f" and {len(recordings) - 5} more" if len(recordings) > 5 else ""  # noqa: PLR2004
    cli._write(f"{_shown(path)}: {verdicts}{more}\n")
    return cli.OK


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False


def _shown(path: str) -> str:
    return escaped(path, 100, keep_end=True)
