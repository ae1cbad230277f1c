"""Errors that more than one room knows, and where in the user's own code one arose."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path


class SyncError(RuntimeError):
    """An update could not be moved; every engine stays on its old version."""


def user_frame(error: BaseException) -> str:
    """The last frame outside this package and the libraries, or nothing."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    ours = str(Path(__file__).parent)
    own = [f for f in frames if not f.filename.startswith((ours, sys.prefix, sys.base_prefix, "<"))]
    return f"in {own[-1].filename}:{own[-1].lineno}, {own[-1].name}: {own[-1].line}" if own else ""
