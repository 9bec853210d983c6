"""What is installed, what importing it loads, which way imports point, and what the repository says of itself."""

import ast
import importlib
import importlib.metadata
import importlib.resources
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvledger

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "kvledger"
KERNELS = ROOT / "src" / "kernels"

# Each module may import what stands left of it.
ORDER = (
    *("arithmetic", "ledger", "rules", "adder", "decode"),
    *(
        "request",
        "pool",
        "radix",
        "record",
        "occupancy",
        "views",
        "pools",
        "slots",
        "window",
        "shared",
        "policy",
        "settings",
        "pool_settings",
        "second_pools",
        "faults",
        "node",
        "unified_adder",
        "unified",
        "pipeline",
    ),
    *("events", "trace", "replay", "evidence", "invariants", "monitor", "shrink", "diagnose", "compare"),
)
# A helper stands just left of the one module that may import it, among its siblings in this order.
HELPERS = {
    "follower": "pipeline",
    "checks_pools": "invariants",
    "checks_decision": "invariants",
    "checks_decode": "invariants",
    "checks_queue": "invariants",
    "checks_ranks": "invariants",
    "checks_state": "invariants",
    "saving": "trace",
    "schema": "trace",
    "shrink_lost": "shrink",
    "shrink_passes": "shrink",
    "shrink_worlds": "shrink",
    "diagnose_history": "diagnose",
    "diagnose_promise": "diagnose",
    "diagnose_pools": "diagnose",
    "diagnose_future": "diagnose",
    "differences": "compare",
    "runs": "compare",
}


# --- what is installed ---


def test_version_in_pyproject_is_the_installed_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == importlib.metadata.version("kvledger") == kvledger.__version__


def test_kernels_install_below_kvledger():
    assert importlib.import_module("kvledger.kernels").__doc__


def test_top_level_kernels_is_left_to_its_owner():
    files = importlib.metadata.files("kvledger")
    assert files, "the distribution lists no files"
    assert not [str(file) for file in files if file.parts[0] in ("kernels", "kernels.py")]
    assert "kvledger" not in importlib.metadata.packages_distributions().get("kernels", [])
    # An editable install lists a finder, not its packages, so ask the import system too.
    origin = run_python("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else '')").strip()
    assert not (origin and Path(origin).is_relative_to(ROOT / "src")), origin


@pytest.mark.parametrize(("package", "source"), [("kvledger", SOURCE), ("kvledger.kernels", KERNELS)])
def test_installed_modules_are_those_of_the_source(package, source):
    (installed,) = importlib.import_module(package).__path__
    assert modules_below(Path(installed)) == modules_below(source), "a stale build folder, or a package left out"


def modules_below(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    return {name for name in names if not name.startswith("kernels/")}


@pytest.mark.parametrize("name", ["py.typed", "trace.schema.json"])
def test_package_data_is_installed(name):
    assert importlib.resources.files("kvledger").joinpath(name).is_file()


# --- what importing it loads ---


def test_importing_kvledger_loads_only_the_standard_library():
    assert not foreign(loaded_by(["kvledger"]))


def test_importing_the_core_loads_only_the_standard_library():
    loaded = loaded_by([f"kvledger.{module}" for module in written(ORDER)])
    assert not foreign(loaded)
    assert not [name for name in loaded if name.startswith(("kvledger.kernels", "kvledger.testing"))]


def run_python(code: str) -> str:
    """What a fresh interpreter prints; -I keeps the working directory and PYTHONPATH off its path."""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(modules: list[str]) -> list[str]:
    imports = "\n".join(f"import {module}" for module in modules)
    return run_python(
        f"import sys\nbefore = set(sys.modules)\n{imports}\nprint(*sorted(set(sys.modules) - before))"
    ).split()


def foreign(modules: list[str]) -> list[str]:
    ours = sys.stdlib_module_names | {"kvledger"}
    return [name for name in modules if name.partition(".")[0] not in ours]


def written(modules: tuple[str, ...]) -> list[str]:
    return [module for module in modules if (SOURCE / f"{module}.py").is_file()]


# --- which way imports point ---


@pytest.mark.parametrize("module", [*ORDER, *HELPERS])
def test_imports_point_left(module):
    if not written((module,)):
        pytest.skip(f"kvledger.{module} is not written yet")
    assert not misplaced_imports(module, (SOURCE / f"{module}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ledger", "from kvledger.node import Node"),
        ("ledger", "from kvledger import node"),
        ("ledger", "from . import node"),
        ("ledger", "from .node import Node"),
        ("ledger", "import kvledger.node as n"),
        ("ledger", "from kvledger import __version__"),
        ("ledger", "from kvledger import ledger"),
        ("ledger", "def f():\n    from kvledger.node import Node"),
        ("ledger", "if TYPE_CHECKING:\n    from kvledger.node import Node"),
        ("node", "from kvledger.schema import check"),
        ("replay", "from kvledger.schema import check"),
        ("schema", "from kvledger.trace import Trace"),
        ("node", "from kvledger.cli import main"),
        ("node", "import numpy"),
        ("node", "try:\n    import numpy.linalg\nexcept ImportError:\n    pass"),
        ("node", "class C:\n    from hypothesis import given"),
    ],
)
def test_a_misplaced_import_is_seen(module, source):
    assert len(misplaced_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("arithmetic", "import math, os.path\nfrom collections.abc import Iterator"),
        ("node", "from kvledger import adder, pool\nfrom kvledger.rules import Rules\nimport kvledger.ledger"),
        ("node", "from .pool import Pool"),
        ("trace", "from kvledger.schema import check"),
        ("schema", "from kvledger.node import Node"),
        ("diagnose", "def f():\n    import rich.table"),
    ],
)
def test_a_well_placed_import_is_left_alone(module, source):
    assert not misplaced_imports(module, source)


def misplaced_imports(module: str, source: str) -> list[str]:
    """Imports of ours, anywhere in it, that do not stand left of `module`, and foreign ones at its module level."""
    allowed = {f"kvledger.{name}" for name in may_import(module)}
    complaints = []
    for line, name, deferred in imports_of(ast.parse(source)):
        root = name.partition(".")[0]
        if root == "kvledger" and not any(name == left or name.startswith(f"{left}.") for left in allowed):
            complaints.append(f"{module}.py:{line} imports {name}, which does not stand left of it")
        if root not in sys.stdlib_module_names | {"kvledger"} and not deferred:
            complaints.append(f"{module}.py:{line} imports {name} at module level")
    return complaints


def may_import(module: str) -> set[str]:
    if module in HELPERS:
        siblings = [helper for helper, user in HELPERS.items() if user == HELPERS[module]]
        return {*ORDER[: ORDER.index(HELPERS[module])], *siblings[: siblings.index(module)]}
    helpers = {helper for helper, user in HELPERS.items() if user == module}
    return helpers | set(ORDER[: ORDER.index(module)])


def imports_of(node: ast.AST, deferred: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name, and whether it is inside a function, of every import below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield child.lineno, alias.name, deferred
        elif isinstance(child, ast.ImportFrom):
            for name in names_imported_from(child):
                yield child.lineno, name, deferred
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(child, deferred or inside)


def names_imported_from(node: ast.ImportFrom) -> Iterator[str]:
    assert node.level <= 1, f"line {node.lineno}: a relative import that leaves kvledger"
    source = ".".join(filter(None, ["kvledger" if node.level else "", node.module]))
    if source != "kvledger":
        yield source
        return
    # `from kvledger import node` names a module; anything else comes from the package, which stands right of all.
    yield from (f"kvledger.{alias.name}" for alias in node.names)


# --- what the repository says of itself ---


def test_readme_gives_the_command_that_ci_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 1
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert commands[0] in [line.strip() for line in readme]


def test_constraints_are_exact():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert not [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", pin)]
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert len(names) == len(set(names))


DOCUMENT_SUFFIXES = {".cfg", ".ini", ".json", ".md", ".rst", ".toml", ".txt", ".yaml", ".yml"}
MACHINE_PATH = re.compile(r"(?<![\w.~}-])(?:/(?:home|root|tmp|work|Users)/|[A-Z]:\\Users\\)")
INDEX_HOST = re.compile(r"(?:\bpypi|pythonhosted|download\.pytorch)\.org", re.IGNORECASE)


def test_no_document_or_setting_names_a_path_of_one_machine(tracked_texts):
    documents = {
        name: text
        for name, text in tracked_texts.items()
        if Path(name).suffix in DOCUMENT_SUFFIXES or Path(name).parts[0] == ".ci"
    }
    assert documents
    assert not matches(MACHINE_PATH, documents)


def test_no_file_names_a_package_index(tracked_texts):
    assert not matches(INDEX_HOST, tracked_texts)


@pytest.mark.parametrize("text", ["see /tmp/x.json", "cd /work/x", "`/home/me/src`", r"C:\Users\me"])
def test_a_machine_path_is_seen(text):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["docs/work/notes", "{tox_root}/tmp/x", "prefill/decode", "a/home/b", "~/work/x"])
def test_a_relative_path_is_left_alone(text):
    assert not MACHINE_PATH.search(text)


@pytest.mark.parametrize("host", ["pypi", "test.pypi", "files.pythonhosted", "download.pytorch"])
def test_a_package_index_is_seen(host):
    assert INDEX_HOST.search(f"https://{host}.org/simple")


@pytest.fixture(scope="module")
def tracked_texts() -> dict[str, str]:
    """Every tracked text file, by its path from the root."""
    try:
        top, names = (git("rev-parse", "--show-toplevel").strip(), git("ls-files", "-z").split("\0"))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    if Path(top).resolve() != ROOT:
        pytest.skip(f"not a git checkout of its own: its repository is {top}")
    texts = {}
    for name in filter(None, names):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:
            texts[name] = content.decode("utf-8", errors="replace")
    if not texts:
        pytest.skip("git tracks no file yet")
    return texts


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def matches(pattern: re.Pattern[str], texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
