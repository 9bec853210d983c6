"""`kvledger report` and `kvledger perfetto`: options, recording, and writing a file whole or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvledger.commands import Shell, add_trace_options, chosen_rules, shown_path
from kvledger.report.html import page
from kvledger.report.perfetto import trace_events
from kvledger.report.recording import Recording, record
from kvledger.saving import write_whole
from kvledger.schema import escaped
from kvledger.trace import Trace

VERDICTS_SHOWN = 5


def add_report(commands: Any, shell: Shell) -> None:
    """Add `kvledger report`."""
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="write a page that shows what became of every promise",
        description="Run traces and write one HTML page that needs nothing but itself: who was promised what, who "
        "spent it, and since when it was too late.",
        epilog="Exit status: 0 the page was written, whatever it says; 2 bad input, or it cannot be written.",
    )
    add_trace_options(parser, shell, several=True)
    _add_options(parser, "FILE.html", lambda recordings: [page(recordings)], shell)


def add_perfetto(commands: Any, shell: Shell) -> None:
    """Add `kvledger perfetto`."""
    parser = commands.add_parser(
        "perfetto",
        allow_abbrev=False,
        help="write a trace for ui.perfetto.dev or chrome://tracing",
        description="Run a trace and write it in the Chrome trace event format: a lane for each request, and counters "
        "for free, evictable, promised now, promised later and slack.",
        epilog="Exit status: 0 the file was written, whatever it says; 2 bad input, or it cannot be written.",
    )
    add_trace_options(parser, shell)
    _add_options(parser, "FILE.json", lambda recordings: trace_events(recordings[0]), shell)


def _add_options(
    parser: argparse.ArgumentParser,
    output: str,
    draw: Callable[[Sequence[Recording]], Iterable[str]],
    shell: Shell,
) -> None:
    parser.add_argument("-o", "--output", required=True, metavar=output, help="the file to write")
    command = parser.prog.split()[-1]

    def run(options: argparse.Namespace) -> int:
        try:
            recordings = _recordings(options, shell.read)
            _save(options.output, draw(recordings))
        except _UnusableError as problem:
            raise shell.error(f"{command}: {problem}") from None
        verdicts = [recording.outcome.verdict for recording in recordings[:VERDICTS_SHOWN]]
        if len(recordings) > len(verdicts):
            verdicts.append(f"and {len(recordings) - len(verdicts)} more")
        shell.write(f"{shown_path(options.output)}: {', '.join(verdicts)}\n")
        return 0

    parser.set_defaults(run=run)


class _UnusableError(Exception):
    """The paths cannot be used as they were given."""


def _recordings(options: argparse.Namespace, read: Callable[[str], Trace]) -> list[Recording]:
    """Every trace is read before one is run, and all are run before anything is written."""
    if options.traces.count("-") > 1:
        raise _UnusableError("'-', standard input, can be read only once")
    if options.output == "-":
        raise _UnusableError("-o -: a file is written, not standard output")
    for path in options.traces:
        if path != "-" and _is_same(path, options.output):
            raise _UnusableError(f"{shown_path(path)} would be overwritten")
    traces = [("<stdin>" if path == "-" else path, read(path)) for path in options.traces]
    rules = chosen_rules(options)
    return [
        record(trace, rules, target=options.target, source=source, source_in_errors=shown_path(source))
        for source, trace in traces
    ]


def _save(path: str, pieces: Iterable[str]) -> None:
    try:
        write_whole(path, pieces)
    except OSError as error:
        raise _UnusableError(f"{shown_path(path)}: {escaped(error.strerror or type(error).__name__, 80)}") from None
    except ValueError:
        raise _UnusableError(f"{shown_path(path)}: not a file name") from None


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False
