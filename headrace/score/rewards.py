"""A user's reward function, in either form it may have.

- TRL's: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`
- per sample: `f(prompt, completion, **row) -> float | None`

Which one it is shows in its parameter names. Both may be async. As in TRL, the batch form gets completions as messages
where prompts are chats, and a message that the prompt began is moved from its prompt to the completion, whole; the
per-sample form always gets the text that was generated.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.score.errors import RewardError
from headrace.score.workers import TimedOut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from headrace.records import Plain
    from headrace.score.workers import RewardWorkers


T = TypeVar("T")
GIVEN = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
"""What a reward gets whatever the columns of the tasks are."""


@dataclass(frozen=True)
class Sample:
    """What a reward sees of a rollout."""

    row: dict[str, Plain]
    completion: str
    completion_ids: list[int]


@dataclass(frozen=True)
class Failure:
    """The reward raised, or returned something that is not a number."""

    reason: str
    cause: BaseException | None = None


class _IsAsync(Exception):
    """A function that did not look async returned something to await."""


_NO_SIGNALS = (
    "rewards are called in threads, where no signal handler can be set: switch off the time limit that sets one (math_verify: "
    "parse(..., parsing_timeout=None) and verify(..., timeout_seconds=None)); reward.timeout is there in any case"
)


class RewardFunction:
    """One reward under one name, called the way it wants to be."""

    def __init__(self, function: Callable[..., Any], *, name: str = "") -> None:
        if not callable(function):
            raise RewardError(f"reward: a {type(function).__name__} is not a function")
        if isinstance(function, RewardFunction):
            name, function = name or function.name, function._function
        self.name: str = name or getattr(function, "__name__", type(function).__name__)
        self._function: Callable[..., Any] = function
        parameters = inspect.signature(function).parameters.values()
        self._names = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        self.required: list[str] = [name for name in needed if name not in GIVEN]
        """Columns without which it cannot be called."""
        self._is_batched = bool(self._names & {"prompts", "completions"})
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        if not self._is_batched and "completion" not in self._names and not self._takes_all:
            raise RewardError(
                f"reward {self.name!r} takes ({', '.join(sorted(self._names))}); write f(prompt, completion, **row) or "
                f"f(prompts, completions, completion_ids, **columns)"
            )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  (the user's own signature)
        """The function itself, as it was before `headrace.reward` named it."""
        return self._function(*arguments, **keywords)

    @property
    def function(self) -> Callable[..., Any]:
        """What the user wrote."""
        return self._function

    async def score(
        self, samples: Sequence[Sample], *, attempts: int, deadline: float = 300.0, workers: RewardWorkers | None = None
    ) -> list[float | Failure | None]:
        """One result per sample; a batch that raises is taken apart and each tried alone, so that one cannot sink all.

        With `workers`, a plain function is called in their threads and under their deadline, never in this one.
        """
        if workers is not None and not self.is_async:
            try:
                return await (self._batch_beside if self._is_batched else self._each_beside)(samples, attempts, workers)
            except _IsAsync:
                self.is_async = True
        if not self._is_batched:
            each = (self._one(sample, attempts=attempts, deadline=deadline) for sample in samples)
            return await together(each, is_async=self.is_async)
        for _ in range(attempts if len(samples) == 1 else 1):
            try:
                return self._listed(await self._call(self._columns(samples), deadline=deadline), samples)
            except RewardError:
                raise
            except Exception as error:  # noqa: BLE001  (whatever a user's function raises becomes a typed outcome)
                failure = self._failed(error)
        if len(samples) == 1:
            return [failure]
        alone = (self.score([sample], attempts=attempts, deadline=deadline) for sample in samples)
        return [results[0] for results in await together(alone, is_async=self.is_async)]

    async def _one(self, sample: Sample, *, attempts: int, deadline: float) -> float | Failure | None:
        arguments = _arguments(sample)
        for _ in range(attempts):
            try:
                return self._checked(await self._call(arguments, deadline=deadline))
            except RewardError:
                raise
            except Exception as error:  # noqa: BLE001
                failure = self._failed(error)
        return failure

    async def _call(self, arguments: dict[str, Any], *, deadline: float) -> Any:  # noqa: ANN401
        try:
            result = self._function(**self._chosen(arguments))
        except SystemExit as error:
            raise self._exited(error) from error
        if not inspect.isawaitable(result):
            return result
        try:
            return await asyncio.wait_for(self._awaited(result), deadline)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within reward.timeout = {deadline:g} s") from error

    async def _awaited(self, result: Awaitable[T]) -> T:
        """In the task that `wait_for` makes of it: a `SystemExit` that leaves a task ends the whole event loop."""
        try:
            return await result
        except SystemExit as error:
            raise self._exited(error) from error

    # In worker threads

    async def _each_beside(
        self, samples: Sequence[Sample], attempts: int, workers: RewardWorkers
    ) -> list[float | Failure | None]:
        def one(sample: Sample) -> float | Failure | None:
            return self._tried(lambda: self._checked(self._call_here(_arguments(sample))), attempts, workers)

        results = await workers.map(one, samples, name=self.name)
        return [self._late(result, workers) if isinstance(result, TimedOut) else result for result in results]

    async def _batch_beside(
        self, samples: Sequence[Sample], attempts: int, workers: RewardWorkers
    ) -> list[float | Failure | None]:
        """A batch that timed out is taken apart too, but once and within one more `reward.timeout` for all, a quarter for
        each: one that hangs does not sink its siblings, and four that do end it."""
        limit, budget, why = workers.timeout, math.inf, ""
        if len(samples) > 1:
            (whole,) = await workers.map(lambda batch: self._tried_batch(batch, 1, workers), [samples], name=self.name)
            if isinstance(whole, list):
                return whole
            if isinstance(whole, TimedOut):
                attempts, limit, budget = 1, workers.timeout / 4, workers.timeout
                why = f" for its batch, nor for it alone within {limit:g} s"

        def alone(sample: Sample) -> float | Failure | None:
            result = self._tried_batch([sample], attempts, workers)
            return result if isinstance(result, Failure) else result[0]

        results = await workers.map(alone, samples, name=self.name, limit=limit, budget=budget)
        return [self._late(result, workers, why) if isinstance(result, TimedOut) else result for result in results]

    def _tried_batch(
        self, samples: Sequence[Sample], attempts: int, workers: RewardWorkers
    ) -> list[float | Failure | None] | Failure:
        return self._tried(lambda: self._listed(self._call_here(self._columns(samples)), samples), attempts, workers)

    def _tried(self, call: Callable[[], T], attempts: int, workers: RewardWorkers) -> T | Failure:
        for attempt in range(attempts):
            if attempt:
                workers.again()
            try:
                return call()
            except (RewardError, _IsAsync):
                raise
            except Exception as error:  # noqa: BLE001
                failure = self._failed(error)
        return failure

    def _call_here(self, arguments: dict[str, Any]) -> Any:  # noqa: ANN401
        try:
            result = self._function(**self._chosen(arguments))
        except SystemExit as error:
            raise self._exited(error) from error
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise _IsAsync
        return result

    # Both ways

    def _chosen(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments if self._takes_all else {k: v for k, v in arguments.items() if k in self._names}

    def _columns(self, samples: Sequence[Sample]) -> dict[str, Any]:
        names = {name for sample in samples for name in sample.row} - {"prompt"}
        columns: dict[str, Any] = {name: [sample.row.get(name) for sample in samples] for name in names}
        pairs = [_as_in_trl(sample) for sample in samples]
        columns["prompts"] = [prompt for prompt, _ in pairs]
        columns["completions"] = [completion for _, completion in pairs]
        columns["completion_ids"] = [sample.completion_ids for sample in samples]
        return columns

    def _listed(self, values: Any, samples: Sequence[Sample]) -> list[float | Failure | None]:  # noqa: ANN401
        try:
            if isinstance(values, str | bytes | dict):  # each is a sequence of something, and none of numbers
                raise TypeError
            results = list(values)
        except TypeError:
            raise RewardError(f"reward {self.name!r} must return a list, one number per completion, not {values!r}") from None
        if len(results) != len(samples):
            raise RewardError(f"reward {self.name!r} returned {len(results)} values for {len(samples)} completions")
        return [self._checked(value) for value in results]

    def _exited(self, error: SystemExit) -> RewardError:
        return RewardError(
            f"reward {self.name!r} called sys.exit({'' if error.code is None else repr(error.code)}), which would end the run; "
            f"raise an exception for a failure, or return None where the reward does not apply"
        )

    def _failed(self, error: Exception) -> Failure:
        advice = f"; {_NO_SIGNALS}" if _is_about_signals(error) else ""
        return Failure(reason=f"reward {self.name!r} raised {type(error).__name__}: {error}{advice}", cause=error)

    def _late(self, result: TimedOut, workers: RewardWorkers, why: str = "") -> Failure:
        if result.cause is None:
            why = " for its batch, and then no time was left to try it alone"
        reason = f"reward {self.name!r} gave no answer within reward.timeout = {workers.timeout:g} s{why}"
        return Failure(reason=reason, cause=result.cause)

    def _checked(self, value: Any) -> float | Failure | None:  # noqa: ANN401
        if value is None:
            return None
        try:
            if isinstance(value, str | bytes):  # float would take "1" for a number
                raise TypeError
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"reward {self.name!r} returned {value!r}, which is not a number but a {type(value).__name__}; return a "
                f"number, or None where the reward does not apply"
            ) from None
        return number if math.isfinite(number) else Failure(reason=f"reward {self.name!r} returned {number}")


async def together(calls: Iterable[Coroutine[Any, Any, T]], *, is_async: bool) -> list[T]:
    """Async calls at once. Plain ones one after another and without giving way, so that their time is theirs alone."""
    return list(await asyncio.gather(*calls)) if is_async else [await call for call in calls]


def _as_in_trl(sample: Sample) -> tuple[Any, Any]:
    """(prompt, completion) of the batch form: a message that the prompt began is the completion's, whole."""
    prompt: Any = sample.row["prompt"]
    if not isinstance(prompt, list):
        return prompt, sample.completion
    last = prompt[-1]
    is_begun = last["role"] == "assistant" and isinstance(last["content"], str)
    begun = last["content"] if is_begun else ""
    return prompt[:-1] if is_begun else prompt, [{"role": "assistant", "content": begun + sample.completion}]


def _arguments(sample: Sample) -> dict[str, Any]:
    return {**sample.row, "completion": sample.completion, "completion_ids": sample.completion_ids}


def _is_about_signals(error: BaseException | None) -> bool:
    """Whether a handler was to be set outside the main thread; libraries like to wrap that error in one of their own."""
    while error is not None:
        if isinstance(error, ValueError) and any(text in str(error) for text in ("only works in main thread", "signal.alarm")):
            return True
        error = error.__cause__ or error.__context__
    return False
