"""The error that tells a user what is wrong with the tasks."""

from __future__ import annotations


class TaskError(ValueError):
    """Tasks cannot be used; the message names the source, the row and the fix."""
