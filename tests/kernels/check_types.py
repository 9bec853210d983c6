"""mypy over the kernels, their tests and the device property tests, where torch is installed.

    $ python -m tests.kernels.check_types

`src/kernels` installs as `kvledger.kernels`, and mypy knows no such mapping: it is given a tree of links in which the
package lies where it is imported from, and the settings of `pyproject.toml`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = ("tests/kernels/*.py", "tests/properties/device_machine.py", "tests/properties/test_device_pool.py")


def lay_out(tree: Path) -> None:
    """Links to the sources below `tree`, `src/kernels` as `src/kvledger/kernels`."""
    package = tree / "src" / "kvledger"
    package.mkdir(parents=True)
    for entry in (ROOT / "src" / "kvledger").iterdir():
        (package / entry.name).symlink_to(entry)
    (package / "kernels").symlink_to(ROOT / "src" / "kernels")
    (tree / "tests").symlink_to(ROOT / "tests")


def main() -> int:
    """mypy's exit status; its cache stays in the repository's own folder."""
    tests = sorted(str(path.relative_to(ROOT)) for pattern in TESTS for path in ROOT.glob(pattern))
    modules = [f"--module={name.removesuffix('.py').replace('/', '.')}" for name in tests]
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        settings = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache" / "kernels"))
        command = [sys.executable, "-m", "mypy", *settings, "--package=kvledger.kernels", *modules]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
