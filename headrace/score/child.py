"""What a reward process runs: `python -m headrace.score.child` imports rewards by name and calls them, one at a time.

It calls them in its main thread, where signals work. It ends when the pipe to its launcher closes, in the middle of a call too.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import resource
import signal
from typing import Any

from headrace.errors import user_frame
from headrace.helper_process import end_with_launcher, print_whole_lines
from headrace.imports import import_name
from headrace.records import Episode, frames, unpack_episodes
from headrace.score.metric_log import MetricLog
from headrace.score.rewards import Failure, RewardFunction
from headrace.score.signature import RewardError, Sample, TrainerState, Turn
from headrace.settings import ConfigError

_ORPHANED_SECONDS = 60.0
"""How long past its timeout a call may go on that holds the interpreter, if the launcher is not there to end it."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a late call is ended by SIGABRT
    faulthandler.enable()
    with open(os.dup(0), "rb") as orders, open(os.dup(1), "wb") as answers, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # what a reward prints is no answer
        print_whole_lines()
        end_with_launcher(orders.fileno())
        rewards: dict[str, RewardFunction] = {}
        for order in frames.read_frames(orders):
            answers.write(_answer(order, rewards))
            answers.flush()


def _answer(order: dict[str, Any], rewards: dict[str, RewardFunction]) -> bytes:
    """Encoded. Whatever a reward raises, `KeyboardInterrupt` too, is an answer: without one the process would count as dead."""
    try:
        if "load" in order:
            name, reference, options = (order["load"][key] for key in ("name", "reference", "options"))
            rewards[name] = RewardFunction(import_name(reference, setting="reward.functions"), name=name, options=options)
            return frames.encode({})
        return frames.encode(_call(rewards[order["call"]], _samples(order), limit=order["limit"]))
    except (RewardError, ConfigError) as error:
        return frames.encode({"error": _escaped(str(error))})
    except BaseException as error:  # noqa: BLE001
        kind, name = ("error", order["load"]["name"]) if "load" in order else ("failure", order["call"])
        return frames.encode({kind: _described(f"reward {name!r} raised {type(error).__name__}: {error}", error), "logged": {}})


def _described(reason: str, cause: BaseException | None) -> str:
    where = "" if cause is None else user_frame(cause)
    return _escaped(f"{reason}{where and f', {where}'}")


def _escaped(text: str) -> str:
    """Text that can be encoded: a reward's own may hold lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _samples(order: dict[str, Any]) -> list[Sample]:
    episodes: list[Episode | None] = [*unpack_episodes(order["episodes"])] or [None] * len(order["samples"])
    parts = [
        {"state": TrainerState(**sample["state"]), "turns": [Turn(**turn) for turn in sample["turns"]], "episode": episode}
        for sample, episode in zip(order["samples"], episodes, strict=True)
    ]
    return [Sample(**{**sample, **part}) for sample, part in zip(order["samples"], parts, strict=True)]


def _call(reward: RewardFunction, samples: list[Sample], *, limit: float) -> dict[str, Any]:
    log = MetricLog()
    faulthandler.dump_traceback_later(limit + _ORPHANED_SECONDS, exit=True)
    try:
        tried = reward.attempt(samples, log)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if inspect.isawaitable(tried):
        raise RewardError(f"reward {reward.name!r} returned an awaitable in a process of reward.processes; write `async def`")
    if isinstance(tried, Failure):
        return {"failure": _described(tried.reason, tried.cause), "logged": log.take()}
    results = [{"failure": each.reason} if isinstance(each, Failure) else each for each in tried]
    return {"results": results, "logged": log.take()}


if __name__ == "__main__":
    main()
