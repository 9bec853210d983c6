"""`kvledger upstream`: a failing trace as a report for another project, with a script that needs no kvledger."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvledger.commands import Shell, add_trace_options, shown_path
from kvledger.report.bundle import NothingToReport, bundle_of
from kvledger.saving import write_whole
from kvledger.schema import escaped

DEFAULT_FOLDER = "kvledger-upstream"
WRITTEN, NOTHING_BROKE = 0, 1


class OtherReport(Exception):
    """A file of another report is in the way: its path."""


def add_upstream(commands: Any, shell: Shell) -> None:
    """Add `kvledger upstream`."""
    parser = commands.add_parser(
        "upstream",
        allow_abbrev=False,
        help="write a report of a failing trace for the project whose scheduler it is",
        description="Write a Markdown report of a failing trace, a script that repeats it with the scheduler's own "
        "package and without kvledger, and the trace. Shrink it first.",
        epilog="Exit status: 0 it is written (already, perhaps); 1 the trace breaks nothing; 2 bad input, or other "
        "files are in the way.",
    )
    add_trace_options(parser, shell)
    parser.add_argument(
        "-o", "--output", metavar="DIR", default=DEFAULT_FOLDER, help=f"the folder (default: {DEFAULT_FOLDER})"
    )

    def run(options: argparse.Namespace) -> int:
        if options.output in ("", "-"):
            raise shell.error(f"upstream: -o {options.output}: not a folder name")
        trace = shell.read(options.traces[0])
        if options.rules is not None:
            trace = trace.with_rules(options.rules)
        try:
            bundle = bundle_of(trace, options.target, source=shown_path(options.traces[0]))
        except NothingToReport as error:
            print(f"kvledger: upstream: {error}", file=sys.stderr)
            return NOTHING_BROKE
        folder = Path(options.output)
        try:
            _save(folder, bundle.files)
        except OtherReport as error:
            raise shell.error(f"upstream: {shown_path(str(error))}: is there already, and is another report") from None
        except OSError as error:
            place = shown_path(os.fsdecode(error.filename or folder))
            raise shell.error(f"upstream: {place}: {escaped(error.strerror or 'cannot be written', 80)}") from None
        except ValueError:
            raise shell.error(f"upstream: -o {shown_path(options.output)}: not a folder name") from None
        lines = [shown_path(str(folder / name)) for name in bundle.files]
        lines += [f"no script: {escaped(bundle.no_script, 200)}"] if bundle.no_script else []
        shell.write("\n".join(lines) + "\n")
        return WRITTEN

    parser.set_defaults(run=run)


def _save(folder: Path, files: Mapping[str, str]) -> None:
    """All or none: what is there already must be the same. OtherReport names what is not; OSError, ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
    missing = []
    for name, text in files.items():
        path = folder / name
        if not path.exists():
            missing.append(name)
        elif path.read_bytes() != text.encode():
            raise OtherReport(str(path))
    for name in missing:
        write_whole(folder / name, [files[name]])
