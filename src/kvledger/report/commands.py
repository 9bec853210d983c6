"""`kvledger report` and `kvledger perfetto`: options, recording, and writing a file whole or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvledger.report.html import page
from kvledger.report.perfetto import trace_events
from kvledger.report.recording import Recording, record
from kvledger.report.saving import write_whole
from kvledger.rules import PRESETS
from kvledger.schema import escaped
from kvledger.targets import TARGETS
from kvledger.trace import Trace

VERDICTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Shell:
    """What the command line gives: the trace of a path, printing, a type of some names, the error for one line."""

    read: Callable[[str], Trace]
    write: Callable[[str], None]
    one_of: Callable[[Collection[str]], Callable[[str], str]]
    error: Callable[[str], Exception]


def add_report(commands: Any, **shell: Any) -> None:
    """Add `kvledger report`. `read` gives the trace of a path, `write` prints, `one_of` makes a type of some names,
    `error` is what to raise with one line of printable ASCII.
    """
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="write a page that shows what became of every promise",
        description="Run traces and write one HTML page that needs nothing but itself: who was promised what, who "
        "spent it, and since when it was too late.",
        epilog="Exit status: 0 the page was written, whatever it says; 2 bad input, or it cannot be written.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a kvledger-trace/1 file; - is standard input")
    _add_options(parser, "FILE.html", lambda recordings: [page(recordings)], _Shell(**shell))


def add_perfetto(commands: Any, **shell: Any) -> None:
    """Add `kvledger perfetto`; the rest is as for `add_report`."""
    parser = commands.add_parser(
        "perfetto",
        allow_abbrev=False,
        help="write a trace for ui.perfetto.dev or chrome://tracing",
        description="Run a trace and write it in the Chrome trace event format: a lane for each request, and counters "
        "for free, evictable, promised now, promised later and slack.",
        epilog="Exit status: 0 the file was written, whatever it says; 2 bad input, or it cannot be written.",
    )
    parser.add_argument("traces", nargs=1, metavar="TRACE", help="a kvledger-trace/1 file; - is standard input")
    _add_options(parser, "FILE.json", lambda recordings: trace_events(recordings[0]), _Shell(**shell))


def _add_options(
    parser: argparse.ArgumentParser,
    output: str,
    draw: Callable[[Sequence[Recording]], Iterable[str]],
    shell: _Shell,
) -> None:
    parser.add_argument("-o", "--output", required=True, metavar=output, help="the file to write")
    parser.add_argument(
        "--rules",
        type=shell.one_of(PRESETS),
        metavar="NAME",
        help=f"run under this preset instead of the trace's own rules: {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--target",
        type=shell.one_of(TARGETS),
        default="node",
        metavar="NAME",
        help=f"the scheduler under test: {', '.join(TARGETS)} (default: node)",
    )
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
        shell.write(f"{_shown(options.output)}: {', '.join(verdicts)}\n")
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
            raise _UnusableError(f"{_shown(path)} would be overwritten")
    traces = [("<stdin>" if path == "-" else path, read(path)) for path in options.traces]
    rules = PRESETS[options.rules] if options.rules is not None else None
    return [
        record(trace, rules, target=TARGETS[options.target], source=source, source_in_errors=_shown(source))
        for source, trace in traces
    ]


def _save(path: str, pieces: Iterable[str]) -> None:
    try:
        write_whole(path, pieces)
    except OSError as error:
        raise _UnusableError(f"{_shown(path)}: {escaped(error.strerror or type(error).__name__, 80)}") from None
    except ValueError:
        raise _UnusableError(f"{_shown(path)}: not a file name") from None


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False


def _shown(path: str) -> str:
    return escaped(path, 100, keep_end=True)
