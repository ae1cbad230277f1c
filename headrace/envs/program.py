"""An agent that is a program of its own: one process for each episode, which finds the model as any OpenAI client does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

from headrace.envs.agents import AgentEnvironment
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.envs.agents import Session

_TAIL = 2000
"""Characters of the end of a program's stderr that an error shows."""
_TAIL_SECONDS = 1.0
"""How long to wait for the rest of it: a process that left the group may keep the pipe open."""
_OURS = "HEADRACE_"
"""Variables with this start may hold tokens, and no program gets them."""


def inherited_variables() -> dict[str, str]:
    """The environment variables of programs that work for episodes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}


class ProgramAgent(AgentEnvironment):
    """Starts a command for each task, in a process group of its own, with `OPENAI_BASE_URL`, `OPENAI_API_KEY` and the row as
    JSON on its standard input. When the episode ends, all of the group is killed. Stdout is thrown away, and of stderr only the
    end is kept."""

    def __init__(self, command: Sequence[str], *, can_resume: bool = False) -> None:
        """`can_resume`: the same answers lead it to the same calls."""
        super().__init__(shlex.join(command))
        self._command, self.can_resume = tuple(command), can_resume
        if shutil.which(self._command[0]) is None:
            raise ConfigError(f"environment.command = {list(command)}: there is no program {self._command[0]!r}")

    async def act(self, session: Session) -> None:
        reading, writing = os.pipe()
        pipe = os.fdopen(reading, "rb", buffering=0)
        try:
            with tempfile.TemporaryFile() as task:
                task.write(json.dumps(session.row).encode())
                task.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=task,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=writing,  # a pipe of asyncio's would keep `wait` waiting for children that have it too
                    env={**inherited_variables(), "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key},
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it, and what it starts is killed with it
                )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(writing)
        tail, transport = _Tail(), None
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, pipe)
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if transport is None:
                pipe.close()
            else:
                await asyncio.wait({tail.ended}, timeout=_TAIL_SECONDS)
                transport.close()
        if status:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            said = tail.kept.decode(errors="replace").strip()[-_TAIL:]
            shown = f"; the end of its stderr:\n{said}" if said else ""
            raise RuntimeError(f"the program {self.name!r} {how}{shown}")


class _Tail(asyncio.Protocol):
    """Keeps the last bytes of a pipe."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.kept += data
        del self.kept[: -4 * _TAIL]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
