"""What a report to another project is made of: the text to read, the script to run, and the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from kvledger.events import Drain
from kvledger.replay import TargetFactory
from kvledger.report.recording import Recording, record
from kvledger.report.upstream import Sources, upstream_lines
from kvledger.targets.about import About
from kvledger.targets.standalone import script
from kvledger.trace import Trace, dumps

REPORT, SCRIPT, TRACE = "report.md", "reproduce.py", "trace.json"


class NothingToReport(ValueError):
    """The trace breaks nothing on this target."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files by name, the same for the same trace and versions; and why there is no script, if there is none."""

    files: Mapping[str, str]
    no_script: str | None = None


def bundle_of(trace: Trace, target: TargetFactory, *, source: str = "trace") -> Bundle:
    """Replay and explain `trace` on `target`. NothingToReport, or TraceError, naming the source."""
    recording = _to_the_end(trace, target, source)
    if recording.outcome.verdict == "ok":
        raise NothingToReport("the trace does not break any invariant (verdict ok)")
    versions = versions_of(target)
    text, no_script = _script(recording, target, versions)
    name: str = getattr(target, "__name__", "target")
    tells: Callable[[Trace, str], About] | None = getattr(target, "about", None)
    about = None if tells is None else tells(recording.trace, recording.outcome.verdict)
    lines = upstream_lines(recording, Sources(name, versions, TRACE, SCRIPT if text else None, about))
    files = {REPORT: "\n".join(lines) + "\n"}
    if text is not None:
        files[SCRIPT] = text
    return Bundle(files | {TRACE: dumps(recording.trace)}, no_script)


def versions_of(target: TargetFactory) -> dict[str, str]:
    """The versions of what the target says belongs into a report."""
    found = {}
    for name in getattr(target, "packages", ()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "of unknown version"
    return found


def _to_the_end(trace: Trace, target: TargetFactory, source: str) -> Recording:
    """A broken promise is news to another project if it ends badly: a drain is put behind a trace that stops before."""
    recording = record(trace, target=target, source=source, source_in_errors=source)
    outcome = recording.outcome
    if outcome.failure is not None or outcome.stuck is not None or outcome.verdict == "ok" or not trace.events:
        return recording
    if isinstance(trace.events[-1], Drain):
        return recording
    drained = replace(trace, events=(*trace.events, Drain()), expect={})
    further = record(drained, target=target, source=source, source_in_errors=source)
    return further if further.outcome.failure is not None else recording


def _script(recording: Recording, target: TargetFactory, versions: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The script, or why there is none."""
    standalone: Callable[[Trace], str] | None = getattr(target, "standalone", None)
    if standalone is None:
        return None, "this target has no standalone(trace): see kvledger.replay.Target"
    try:
        world = standalone(recording.trace)
    except ValueError as error:
        return None, str(error)
    return script(recording.trace, recording.outcome, world, versions, SCRIPT), None
