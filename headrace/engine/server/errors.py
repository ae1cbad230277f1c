"""What a client is told when it cannot have what it asked for, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Ends a request with a status and an OpenAI error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error object OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the parameter."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)
