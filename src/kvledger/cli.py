"""The command line: `kvledger replay` runs traces, `kvledger verify` searches for ones that break a promise.

Exit status: 0 as it should be; 1 a violation, or not what the trace expects; 2 bad input or no way to run, in one line
on standard error and with nothing on standard output; 130 interrupted; 141 the reader of a search's output is gone;
70 a fault of kvledger's own, with its traceback, so that it is never taken for a violation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from kvledger import __version__
from kvledger.commands import Shell, add_trace_options, chosen_rules, shown_path
from kvledger.commands.compare import add_compare
from kvledger.commands.draw import add_perfetto, add_report
from kvledger.commands.explain import add_explain
from kvledger.commands.keep import add_fixture, add_shrink
from kvledger.commands.upstream import add_upstream
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode
from kvledger.replay import TargetError, TargetFactory, replay
from kvledger.report import Replayed
from kvledger.report.text import replay_lines, summary_line
from kvledger.rules import PRESETS, AccountingRules
from kvledger.runs import SHOWS_FIGURES
from kvledger.schema import escaped, show
from kvledger.targets import find_target
from kvledger.trace import MAX_FILE_BYTES, Trace, TraceError, load, loads

OK, VIOLATION, BAD_INPUT, FAULT, INTERRUPTED, NO_READER = 0, 1, 2, 70, 130, 141

STDIN = "<stdin>"
EXECUTOR = "kvledger.kernels.executor"
DEVICES = ("cpu", "cuda", "interpret")
VERIFY_NEEDS = frozenset({"hypothesis", "rich", "pytest", "xdist"})
MAX_NUMBER = 2**63 - 1
EXAMPLES_HELP = (
    "Hypothesis's examples for each preset; twice as many plain ones come on top, and with --device an unsound preset "
    "gets seven times as many of both, on paper (default: what it takes to reach every branch)"
)


class CommandError(Exception):
    """The command cannot be run as it was given. Its text is one line of printable ASCII."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        return _run(argv)
    except (CommandError, TraceError) as error:
        _complain(f"kvledger: {error}")
        return BAD_INPUT
    except TargetError as error:
        _complain(f"kvledger: {escaped(str(error), 400)}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return NO_READER
    except Exception:
        traceback.print_exc()
        return FAULT


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(argv)
        status: int = options.run(options)
    except SystemExit as done:  # argparse printed the help or the version
        status = OK if done.code is None else int(done.code)
    _write("")
    return status


# --- replay


def _replay(options: argparse.Namespace) -> int:
    """Every trace is read before one is run, and all are run before one is told of: bad input leaves no output."""
    if options.device is not None and options.target is not PrefillNode:
        raise CommandError("replay: --target and --device: what runs on a device is our own node; give one of the two")
    target = options.target if options.device is None else _on_device("replay", options.device)
    if options.traces.count("-") > 1:
        raise CommandError("replay: '-', standard input, can be read only once")
    traces = [(path, _read(path)) for path in options.traces]
    _refuse_unfit(traces, target)
    note: Callable[[], str] | None = getattr(target, "note", None)
    replays, notes = [], []
    for path, trace in traces:
        replays.append(_replayed(path, trace, chosen_rules(options), target))
        notes.append(["", note()] if note else [])
    if options.json:
        documents = [replayed.outcome.document() for replayed in replays]
        _write(json.dumps(documents if len(documents) > 1 else documents[0], indent=2) + "\n")
    else:
        reports = [
            "\n".join([*replay_lines(replayed, all_rounds=options.all_rounds), *more])
            for replayed, more in zip(replays, notes, strict=True)
        ]
        if len(replays) > 1:
            reports.append(summary_line(replays))
        _write("\n\n".join(reports) + "\n")
    return OK if all(replayed.passed for replayed in replays) else VIOLATION


def _refuse_unfit(traces: Sequence[tuple[str, Trace]], target: TargetFactory) -> None:
    """A target may say why a trace had better not be run on it: `refusal(trace)`, a line or None."""
    refusal: Callable[[Trace], str | None] = getattr(target, "refusal", lambda _trace: None)
    for path, trace in traces:
        reason = refusal(trace)
        if reason is not None:
            raise CommandError(f"{shown_path(path)}: {reason}")


def _read(path: str) -> Trace:
    if path != "-":
        return load(path)
    if sys.stdin is None:
        raise CommandError(f"{STDIN}: it is closed")
    try:
        return loads(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), STDIN)
    except OSError as error:
        raise CommandError(f"{STDIN}: {_words(error)}") from None


def _replayed(path: str, trace: Trace, rules: AccountingRules | None, target: TargetFactory) -> Replayed:
    source = STDIN if path == "-" else path
    rules = rules or trace.accounting_rules
    monitor = InvariantMonitor()
    # the line of a TraceError is printed as it is, so the name goes in as the reader of traces would write it
    outcome = replay(trace, rules, target=target, monitor=monitor, source=escaped(source, 100, keep_end=True))
    return Replayed(source, trace, rules, outcome, tuple(monitor.skipped), monitor.capabilities >= SHOWS_FIGURES)


def _on_device(command: str, device: str) -> TargetFactory:
    """The node with its batches run by real kernels: `target(device)` of the executor, once there is one."""
    try:
        factory: Callable[[str], TargetFactory] = importlib.import_module(EXECUTOR).target
    except (ImportError, AttributeError) as error:
        reason = escaped(str(error), 120)
        raise CommandError(f"{command}: --device {device}: no executor to run batches on ({reason})") from None
    try:
        return factory(device)
    except RuntimeError as error:
        raise CommandError(f"{command}: --device {device}: {escaped(str(error), 200)}") from None


# --- verify


def _verify(options: argparse.Namespace) -> int:
    try:
        verify: Any = importlib.import_module("kvledger.testing.verify")
        rules = list(dict.fromkeys(options.rules))
        on_device = [] if options.device is None else [_on_device("verify", options.device)]
        status: int = verify.command(rules, options.examples, options.seed, options.save, options.json, *on_device)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in VERIFY_NEEDS:
            raise
        raise CommandError(f"verify: {missing} is not installed: pip install 'kvledger[verify]'") from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        place = f"{escaped(os.fsdecode(error.filename), 100, keep_end=True)}: " if error.filename else ""
        raise CommandError(f"verify: {place}{_words(error)}") from None
    return status


# --- options


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and neither abbreviates nor exits."""

    def error(self, message: str) -> NoReturn:
        # argparse quotes what was typed as it is; what our own types say of it is safe already and stays as it is
        line = "".join(c if c.isascii() and c.isprintable() else escaped(c, 12) for c in message[:300])
        raise CommandError(": ".join([*self.prog.split()[1:], line]))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvledger", description="Can a scheduler promise KV memory that it cannot deliver?", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvledger {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_replay(commands)
    _add_verify(commands)
    for add in (add_explain, add_compare, add_report, add_perfetto, add_shrink, add_fixture, add_upstream):
        add(commands, SHELL)
    return parser


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="run traces and show, round by round, who was promised what",
        description="Run traces and show, round by round, who was promised what and who spent it.",
        epilog="Exit status: 0 the verdict is ok, or as the trace expects under these rules; 1 it is not; 2 bad input.",
    )
    add_trace_options(parser, SHELL, several=True)
    _add_device(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the outcome's JSON object, or for several traces the list of theirs, in order",
    )
    parser.add_argument("--all-rounds", action="store_true", help="leave no round and no decision out of the text")
    parser.set_defaults(run=_replay)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        allow_abbrev=False,
        help="search for traces that break a promise",
        description="Search for traces that break a promise, and save the smallest ones.",
    )
    parser.add_argument(
        "--rules",
        type=_one_of(PRESETS),
        metavar="NAME",
        action="append",
        default=[],
        help=f"search under this preset; may be given several times: {_listed(PRESETS)}",
    )
    _add_device(parser)
    parser.add_argument("--examples", type=_number(1), metavar="N", help=EXAMPLES_HELP)
    parser.add_argument("--seed", type=_number(0), metavar="S", help="makes a search repeatable")
    parser.add_argument("--save", metavar="DIR", help="where failing traces are saved")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_verify)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=_one_of(DEVICES),
        metavar="|".join(DEVICES),
        help="run the batches on a real paged pool, there",
    )


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"{show(text)} is none of {_listed(names)}")

    return parse


def _target(name: str) -> TargetFactory:
    try:
        return find_target(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(escaped(str(error), 200)) from None


def _number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        # int() would take spaces, underscores and the digits of every script, and refuse to read very many
        if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_NUMBER))):
            raise argparse.ArgumentTypeError(f"{show(text)} is not an integer that can be used here")
        number = int(text)
        if not minimum <= number <= MAX_NUMBER:
            raise argparse.ArgumentTypeError(f"{number} is not between {minimum} and {MAX_NUMBER}")
        return number

    return parse


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)


# --- output


def _write(text: str) -> None:
    """Print and flush. A reader who has gone (`| head`) has what he wanted; any other failure is an error."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        raise CommandError(f"<stdout>: {_words(error)}") from None


def _discard_stdout() -> None:
    """What is still buffered goes nowhere; without this the interpreter would try to write it once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _complain(line: str) -> None:
    # print(file=None) would write to standard output
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def _words(error: OSError) -> str:
    return escaped(error.strerror or type(error).__name__, 80)


SHELL = Shell(read=_read, write=_write, one_of=_one_of, target=_target, error=CommandError)
