"""What stands before all else in a stand-alone script: one that cannot even start must not look like one that failed.

Nothing of kvledger is imported here: the text of this file goes into the script.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

COULD_NOT_RUN = 2


def could_not_run(kind: Any, error: Any, where: Any) -> None:
    """Whatever nobody catches ends in status 2: nothing was shown, one way or the other."""
    sys.stdout.flush()
    traceback.print_exception(kind, error, where)
    print(f"COULD NOT RUN: {kind.__name__}: {error}", file=sys.stderr)
    sys.exit(COULD_NOT_RUN)


sys.excepthook = could_not_run
