"""Awaits coroutines and calls functions that users wrote, which may not end when they are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.errors import NOT_THE_USERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")
log = logging.getLogger("headrace")
END_SECONDS = 10.0
"""How long a cancelled coroutine may take to end."""


async def await_user(awaitable: Awaitable[T], *, name: str, on_stuck: Callable[[str], None] = log.warning) -> T:
    """Await it in a task of its own. If this is cancelled, so is the task; if that has not ended after `END_SECONDS`, because
    it catches `CancelledError` and goes on, it is left behind, and `on_stuck` is told where it stands."""
    exits: list[SystemExit] = []

    async def ended() -> T | None:
        try:
            return await awaitable
        except SystemExit as error:  # one that leaves a task ends the whole event loop
            exits.append(error)
            return None

    task = asyncio.ensure_future(ended())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=END_SECONDS)
        finally:
            if task.done():
                _ = task.cancelled() or task.exception()  # so that asyncio does not report it
            else:
                asyncio._unregister_task(task)  # otherwise `asyncio.run` waits for it when the run ends
                on_stuck(f"{name} was cancelled and has not ended within {END_SECONDS:g} s; it is left at {_place(task)}")
        raise
    if exits:
        raise exits[0]
    return cast("T", task.result())


async def then_end_tasks(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await it, then cancel every other task. `asyncio.run` would wait forever for one that does not end, such as a task of a
    user's environment; these are named and left behind."""
    try:
        return await coroutine
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        for task in (await asyncio.wait(others, timeout=END_SECONDS))[1] if others else ():
            asyncio._unregister_task(task)
            log.warning("a task was cancelled and has not ended within %g s; it is left at %s", END_SECONDS, _place(task))


def _place(task: asyncio.Task[Any]) -> str:
    """Its innermost line in the user's own code."""
    found = "a place in a library"
    inner: Any = task.get_coro()
    while inspect.iscoroutine(inner) and inner.cr_frame is not None:
        file, line, name = inner.cr_code.co_filename, inner.cr_frame.f_lineno, inner.cr_code.co_qualname
        if not file.startswith(NOT_THE_USERS):
            found = f"{file}:{line}, in {name}"
        inner = inner.cr_await
    return found


class UserThread:
    """A thread that calls users' plain functions one after another. Unlike one of `asyncio.to_thread`, it does not keep the
    process from ending if a call never returns."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def job() -> None:
            result, error = None, None
            try:
                result = function(*arguments)
            except BaseException as raised:  # noqa: BLE001  (raised again below)
                error = raised
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(settle, result, error)

        def settle(result: T | None, error: BaseException | None) -> None:
            if not done.done():  # else whoever waited was cancelled
                done.set_result((result, error))

        if not self._thread.ident:
            self._thread.start()
        self._jobs.put(job)
        result, error = await done
        if error is not None:
            raise error
        return cast("T", result)

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
