"""Errors that more than one room knows, how they are told, and where in the user's own code one arose."""

from __future__ import annotations

import shlex
import shutil
import sys
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent)


class SyncError(RuntimeError):
    """An update could not be moved; every engine stays on its old version."""


def is_ours(error: BaseException) -> bool:
    """Whether it is of a kind of ours, whose message is written to be read. A broken assertion is a bug, and wants more."""
    return type(error).__module__.partition(".")[0] == "headrace" and not isinstance(error, AssertionError)


def in_words(error: BaseException) -> str:
    """Its message, with the name of its class where that is needed to understand it."""
    text = str(error).strip()
    return text if text and is_ours(error) else f"{type(error).__name__}: {text}".removesuffix(": ")


def user_frame(error: BaseException) -> str:
    """The last frame outside this package and the libraries, or nothing."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_OURS, sys.prefix, sys.base_prefix, "<"))]
    return f"in {own[-1].filename}:{own[-1].lineno}, {own[-1].name}: {own[-1].line}" if own else ""


def user_cause(error: BaseException) -> BaseException | None:
    """What was raised in the user's own code and became this error, from our last frame on; None if nothing was."""
    cause = error.__cause__
    if cause is None or not user_frame(error):
        return None
    shown = frame = cause.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_OURS):
            shown = frame.tb_next
        frame = frame.tb_next
    return cause.with_traceback(shown)


def command() -> str:
    """What to type for `headrace` in a shell: with its path, or by way of the interpreter, where it is not on PATH."""
    if shutil.which("headrace") is not None:
        return "headrace"
    script = Path(sys.executable).with_name("headrace")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m headrace"
