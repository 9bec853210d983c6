"""Runs the stand-alone scripts of known holes where kvledger cannot be imported, one after the other in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvledger.replay import TargetFactory
from kvledger.report.bundle import bundle_of, versions_of
from kvledger.trace import load

DRIVER = """
import contextlib, io, json, runpy, sys
sys.modules["kvledger"] = None
results = {}
for path in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(path, run_name="__main__")
            status = None
        except SystemExit as done:
            status = done.code
    results[path] = [status, printed.getvalue()]
print("RESULTS " + json.dumps(results))
"""


def holes(folder: str) -> list[Path]:
    """The traces in a folder of `known` that break it."""
    known = Path(__file__).parent / "known" / folder
    return [path for path in sorted(known.glob("*.json")) if not path.name.startswith("ok-")]


def assert_committed(name: str, path: Path, target: TargetFactory) -> None:
    """Report and trace in docs/findings are those of today, with the versions that they were made with."""
    folder = Path(__file__).parents[2] / "docs" / "findings" / name
    bundle = bundle_of(load(path), target)
    seen = f"Seen with {', '.join(f'{name} {version}' for name, version in versions_of(target).items())}."
    if seen not in (folder / "report.md").read_text():
        pytest.skip(f"{name} was made with other versions than these: {seen}")
    for file in ("report.md", "trace.json"):
        assert (folder / file).read_text() == bundle.files[file]


def run_scripts(cases: Iterable[tuple[Path, TargetFactory]], folder: Path) -> dict[str, Any]:
    """Status and output of each case's script, by the name of its trace."""
    names = {}
    for path, target in cases:
        script = folder / f"{path.parent.name}-{path.stem}.py"
        script.write_text(bundle_of(load(path), target).files["reproduce.py"])
        names[str(script)] = f"{path.parent.name}/{path.stem}"
    empty = folder / "empty"
    empty.mkdir()
    command = [sys.executable, "-I", "-c", DRIVER, *names]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    results = json.loads(line.removeprefix("RESULTS "))
    assert list(empty.iterdir()) == [], "a script leaves nothing behind"
    return {names[path]: result for path, result in results.items()}
