"""Callbacks: users' objects that a run calls when a version is trained, evaluated or saved (`headrace.train(callbacks=[…])`).

Plain methods run one at a time in a thread of their own, so that they do not hold up generation; in `inline` mode in the event
loop, where breakpoints work and the order of everything is fixed. Either way the next version waits for them.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import in_words
from headrace.run.changes import changed
from headrace.settings import ConfigError
from headrace.user_code import UserThread, await_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.run.evaluate import Evaluation

SLOW_SECONDS = 1.0
"""A call that takes longer is named on the screen, the first time."""
_MAY_CHANGE = ("on_step", "on_evaluate")
"""Called at the same point of an uninterrupted and a resumed run, so that both change a setting for the same versions."""
_TRANSFORMERS = {
    "on_train_begin": "on_start", "on_init_end": "on_start", "on_step_end": "on_step", "on_log": "on_step",
    "on_optimizer_step": "on_step", "on_save": "on_checkpoint", "on_train_end": "on_end", "on_predict": "on_evaluate",
}  # fmt: skip
"""The names that `transformers.TrainerCallback` has for them."""


class CallbackError(RuntimeError):
    """A callback raised, or did not return within `deadline`."""


@dataclass
class CallbackState:
    """What a callback is given: the run as it stands. `stop` and `change` take effect when the callback returns."""

    version: int
    """The newest trained version; in `on_rollouts` the one that they will train from."""
    recipe: Recipe
    """The settings in force."""
    folder: Path | None
    metrics: dict[str, Any]
    """Of the newest version whose metrics are written, as in metrics.jsonl; empty before the first."""
    status: str
    """`running`; in `on_end` `finished`, `stopped`, `interrupted` or `failed`."""
    decode: Callable[[Sequence[int]], str]
    """From token ids to text."""
    name: str = ""
    is_stopping: bool = False
    changes: list[tuple[str, Any]] = field(default_factory=list)

    def stop(self) -> None:
        """End the run with a checkpoint, after the batch that is in training; with `exact = true` at the next checkpoint. The
        same command resumes it."""
        self.is_stopping = True

    def change(self, key: str, value: object) -> None:
        """Change a setting, such as `train.learning_rate`, for every batch not started yet."""
        if self.name.rpartition(".")[2] not in _MAY_CHANGE:
            raise ConfigError(f"{key} = {value!r}: a setting can be changed in {' and '.join(_MAY_CHANGE)}, not in {self.name}")
        self.recipe = changed(self.recipe, key, value, version=self.version)
        self.changes.append((key, value))


class Callback:
    """Derive from it, or give any object that has some of these methods, each plain or `async`. None may change what it is
    given. What one raises ends the run."""

    def on_start(self, state: CallbackState) -> Any:  # noqa: ANN401  (a coroutine, if it is async)
        """Before the first version of this start: `state.version` is above 0 if the run is resumed."""

    def on_rollouts(self, state: CallbackState, groups: Sequence[Group]) -> Any:  # noqa: ANN401
        """Scored groups, just before they are trained: all of a version, or with `train.stream_parts` some of them."""

    def on_step(self, state: CallbackState) -> Any:  # noqa: ANN401
        """A version is trained; its checkpoint is not written yet."""

    def on_evaluate(self, state: CallbackState, evaluation: Evaluation) -> Any:  # noqa: ANN401
        """A held-out evaluation of `state.version`. It comes before that version's `on_step` where training waits for it, else
        when it is done."""

    def on_checkpoint(self, state: CallbackState, folder: Path) -> Any:  # noqa: ANN401
        """A checkpoint is on disk; training may have gone on."""

    def on_end(self, state: CallbackState) -> Any:  # noqa: ANN401
        """The run has ended; `state.status` says how."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of one command, however often its trainer is restarted."""

    def __init__(self, given: Sequence[Any], *, in_thread: bool, deadline: float) -> None:
        self._given = [_checked(each) for each in given]
        self._thread = UserThread("callbacks") if in_thread and self._given else None
        self._deadline = deadline
        self._turn = asyncio.Lock()
        self._called: set[str] = set()
        self.seconds: dict[str, float] = {}
        """Of all calls, by name, such as `EarlyStop.on_step`."""

    def methods(self, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """(name, method) of each callback that has it."""
        for each in self._given:
            method = getattr(each, hook, None)
            if method is not None and getattr(type(each), hook, None) is not getattr(Callback, hook):
                yield f"{type(each).__name__}.{hook}", method

    def have(self, hook: str) -> bool:
        return any(True for _ in self.methods(hook))

    def is_due(self, hook: str) -> bool:
        """Whether to call it: `on_start` and `on_end` are called once, and the second only after the first."""
        if hook not in ("on_start", "on_end"):
            return True
        is_first = hook not in self._called and (hook == "on_start" or "on_start" in self._called)
        self._called.add(hook)
        return is_first

    async def call(self, name: str, method: Callable[..., Any], *arguments: object) -> float:
        """Call one, after any other that is running. Returns its seconds, if this is the first slow call of that name."""
        async with self._turn:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(self._deadline) as limit:
                    if self._thread is None or inspect.iscoroutinefunction(method):
                        result = method(*arguments)
                    else:
                        result = await self._thread.call(method, *arguments)
                    if inspect.iscoroutine(result):
                        await await_user(result, name=name)
            except (Exception, SystemExit) as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    raise CallbackError(f"{name} has not returned within deadline = {self._deadline:g} seconds") from error
                raise CallbackError(f"{name} raised {in_words(error)}") from error
            seconds = time.perf_counter() - began
            is_first = seconds > SLOW_SECONDS and self.seconds.get(name, 0.0) <= SLOW_SECONDS
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            return seconds if is_first else 0.0

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


def _checked(given: Any) -> Any:  # noqa: ANN401
    """A callback, made if it is a class; raises if a run would never call it."""
    callback = given() if isinstance(given, type) else given
    names = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    unknown = [name for name in names if name not in HOOKS]
    shown = type(callback).__name__
    if unknown and not isinstance(callback, Callback) and set(unknown) >= set(_TRANSFORMERS):
        raise ConfigError(f"callbacks: {shown} is a TrainerCallback of transformers; derive it from headrace.Callback instead")
    for name in unknown:
        guess = [_TRANSFORMERS[name]] if name in _TRANSFORMERS else difflib.get_close_matches(name, HOOKS, n=1)
        advice = f"did you mean {guess[0]}?" if guess else f"there are: {', '.join(HOOKS)}"
        raise ConfigError(f"callbacks: {shown}.{name} would never be called; {advice}")
    if not names:
        raise ConfigError(f"callbacks: {callback!r} has no method that a run calls; there are: {', '.join(HOOKS)}")
    return callback
