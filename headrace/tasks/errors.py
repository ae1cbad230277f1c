"""The error that all task sources raise."""

from __future__ import annotations


class TaskError(ValueError):
    """Tasks cannot be used; the message names the source, the row and the fix."""
