"""Output files that are either wholly new or left as they were."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], pieces: Iterable[str]) -> None:
    """Write UTF-8 text beside `path` and put it there in one step. Raises OSError; ValueError for no file name.

    A link is followed; what is there and is no regular file (a device, a pipe) is refused, not replaced.
    """
    if not os.fspath(path):
        raise ValueError("an empty path names no file")
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "not a regular file", path)
    # not tempfile: its files can be read by their owner alone, and this one is to be handed on
    temporary = Path(path).with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
