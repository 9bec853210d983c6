"""A trace as a script that needs a scheduler's own package, and nothing of kvledger.

A target offers `standalone(trace)`: the text of a module that defines `World(node, rules)` (what it must do:
`script_runner`). Here that text is joined with the trace, the recorded chunks and the code that plays them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from importlib import resources

from kvledger import __version__
from kvledger.replay import Outcome
from kvledger.schema import escaped
from kvledger.trace import Trace, to_document

LOOKED_FOR: dict[str, tuple[str, ...]] = {
    "oom": ("oom",),
    "admitted-finishes": ("preempted", "begun again", "oom"),
    "promises-covered": ("short", "oom"),
    "stuck": ("stuck",),
    "progress": ("stuck",),
    "never-raises": ("raised",),
    "conserved": ("lost",),
    "quiescent": ("not given back",),
    "one-half-done": ("two half done",),
    "everyone-served": ("never served",),
}
"""What a run of a script must show for a report of that verdict; what is not here it cannot show."""


def looked_for(outcome: Outcome) -> tuple[str, ...]:
    """What the script of this outcome looks for; nothing if it has no eyes for it."""
    verdict = outcome.verdict
    if verdict == "never-forced" and any(each.invariant == "promises-covered" for each in outcome.broken):
        return LOOKED_FOR["promises-covered"]  # forced chunks show themselves by what is missing, if anything is
    if verdict == "conserved" and "host tier" in outcome.broken[0].message:
        return ()
    return LOOKED_FOR.get(verdict, ())


class NoScriptError(ValueError):
    """There is no script of this trace for this target: why, in one line."""


def packaged(*path: str) -> str:
    """The text of a file below `kvledger.targets`, read and not imported."""
    return resources.files("kvledger.targets").joinpath(*path).read_text("utf-8")


def script(trace: Trace, outcome: Outcome, world: str, versions: Mapping[str, str], name: str) -> str:
    """The whole script, to be called `name`; the same for the same trace, outcome and versions."""
    needs = ", ".join(f"{package} {version}" for package, version in versions.items()) or "the scheduler's own module"
    parts = [
        f"# {escaped(trace.title, 110)}" if trace.title else "",
        f"# Made by kvledger {__version__}, of which it needs nothing. Recorded with {needs}.",
        f"# Run it: python {name}",
        "# Exit status: 1, it fails as reported; 0, it does not; 2, it could not run, or cannot show what is reported.",
        "",
        "from __future__ import annotations",
        "",
        body_of("A script that cannot start ends with status 2.", packaged("script_head.py")),
        "",
        *_data(trace, outcome),
        "",
        body_of("The scheduler under test, driven through its own interface.", world),
        "",
        body_of("What plays the events.", packaged("script_runner.py")),
        "",
        'if __name__ == "__main__":',
        '    sys.exit(main(World(NODE, RULES), NODE["page_size"], EVENTS, RECORDED, VERDICT, LOOKED_FOR, RAISES))',
        "",
    ]
    text = "\n".join(parts).lstrip("\n")
    compile(text, name, "exec")
    return text


def _data(trace: Trace, outcome: Outcome) -> Iterator[str]:
    """The trace and what came of it, as assignments: an event a line, a round a line."""
    # the round that failed has a batch, but no chunk of it ran
    records = outcome.rounds if outcome.failure is None else outcome.rounds[:-1]
    yield f"NODE = {asdict(trace.node)!r}"
    yield f"RULES = {asdict(trace.accounting_rules)!r}"
    yield "EVENTS = ["
    yield from (f"    {event!r}," for event in to_document(trace)["events"])
    yield "]"
    yield "RECORDED = ["
    yield from (f"    {[[d.request, d.start, d.end] for d in record.joined]!r}," for record in records)
    yield "]"
    yield f"VERDICT = {outcome.verdict!r}"
    yield f"LOOKED_FOR = {list(looked_for(outcome))!r}"
    raised = next((each.message for each in outcome.broken if each.invariant == "never-raises"), None)
    # its message begins with the exception's type
    yield f"RAISES = {raised and re.split(r'[ :]', raised)[0]!r}"


def body_of(heading: str, text: str, provided: Collection[str] = ()) -> str:
    """A module's text behind a heading, without what only a module of a package has.

    That is its docstring, its __future__ import, remarks to a linter, and imports of `provided` modules, whose text
    stands before it.
    """
    tree = ast.parse(text)
    gone: set[int] = set()
    for index, node in enumerate(tree.body):
        taken = isinstance(node, ast.ImportFrom) and node.module in {"__future__", *provided}
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if taken or docstring:
            gone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    kept = [line for number, line in lines if number not in gone and not line.startswith("# ruff:")]
    return f"# --- {heading}\n\n" + "\n".join(kept).strip("\n") + "\n"
