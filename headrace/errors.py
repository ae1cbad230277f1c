"""Errors that rooms share, how errors are shown to users, and where in the user's code one was raised."""

from __future__ import annotations

import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_OURS = str(Path(__file__).parent)
NOT_THE_USERS = (_OURS, sys.prefix, sys.base_prefix, "<")
"""What file names of Headrace and of libraries start with."""


class SyncError(RuntimeError):
    """A weight update could not be delivered; every engine stays on its old version."""


class LinkError(SyncError):
    """The link to its source failed, not the update: another attempt may succeed."""


def is_ours(error: BaseException) -> bool:
    """Whether Headrace defines its class: then the message is enough. A failed assertion is a bug and needs its traceback."""
    return type(error).__module__.partition(".")[0] == "headrace" and not isinstance(error, AssertionError)


def in_words(error: BaseException) -> str:
    """Its message; with the class name too, unless the error is ours."""
    text = str(error).strip()
    return text if text and is_ours(error) else f"{type(error).__name__}: {text}".removesuffix(": ")


def user_frame(error: BaseException) -> str:
    """The last frame in the user's own code, or "" if there is none."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    own = [f for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    return f"in {own[-1].filename}:{own[-1].lineno}, {own[-1].name}: {own[-1].line}" if own else ""


def user_cause(error: BaseException) -> BaseException | None:
    """The exception in the user's code that caused this error, its traceback starting after our last frame; None if none."""
    cause = error.__cause__
    if cause is None or not user_frame(error):
        return None
    shown = frame = cause.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_OURS):
            shown = frame.tb_next
        frame = frame.tb_next
    return cause.with_traceback(shown)


def without_our_frames(error: E) -> E:
    """An error of ours as a caller should see it: without its traceback, which the log has, and from the user's own frames."""
    if is_ours(error):
        error.__cause__ = user_cause(error)
        return error.with_traceback(None)
    return error


def command() -> str:
    """How to run `headrace` in a shell: by name if it is on PATH, else by its path or as a module of the interpreter."""
    if shutil.which("headrace") is not None:
        return "headrace"
    script = Path(sys.executable).with_name("headrace")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m headrace"
