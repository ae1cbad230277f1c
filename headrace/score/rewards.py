"""Calls a user's reward function, in either form:

- TRL's: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`
- per sample: `f(prompt, completion, **row) -> float | None`

Its parameter names tell which; both may be async. As in TRL, if prompts are chats the batch form gets completions as
messages, including the start of an assistant message that the prompt ends with; the per-sample form always gets the
generated text.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from headrace.score.workers import RewardError, TimedOut
from headrace.user_code import await_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.records import Plain
    from headrace.score.workers import RewardWorkers


GIVEN = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
"""Arguments that Headrace provides; all others are columns of the tasks."""


@dataclass(frozen=True)
class Sample:
    """The part of a rollout that a reward sees."""

    row: dict[str, Plain]
    completion: str
    completion_ids: list[int]


@dataclass(frozen=True)
class Failure:
    """The reward raised, timed out, or returned NaN or infinity."""

    reason: str
    cause: BaseException | None = None


Result: TypeAlias = "float | Failure | None"
"""Of one sample; None where the reward does not apply."""


_NO_SIGNALS = (
    "rewards are called in threads, where no signal handler can be set: switch off the time limit that sets one (math_verify: "
    "parse(..., parsing_timeout=None) and verify(..., timeout_seconds=None)); reward.timeout applies in any case"
)


class RewardFunction:
    """A named reward function, called in the form that its parameters show."""

    def __init__(self, function: Callable[..., Any], *, name: str = "") -> None:
        if not callable(function):
            raise RewardError(f"reward: a {type(function).__name__} is not a function")
        if isinstance(function, RewardFunction):
            name, function = name or function.name, function.function
        self.name: str = name or getattr(function, "__name__", type(function).__name__)
        self.function: Callable[..., Any] = function
        parameters = inspect.signature(function).parameters.values()
        self._names = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        self.required: list[str] = [name for name in needed if name not in GIVEN]
        """Task columns it cannot be called without."""
        self._is_batched = bool(self._names & {"prompts", "completions"})
        self.num_awaited = 0
        """Async calls that have ended, in time or not."""
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        if not self._is_batched and "completion" not in self._names and not self._takes_all:
            raise RewardError(
                f"reward {self.name!r} takes ({', '.join(sorted(self._names))}); write f(prompt, completion, **row) or "
                f"f(prompts, completions, completion_ids, **columns)"
            )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  (the user's own signature)
        """Call the user's function, so that `@headrace.reward` leaves it usable as before."""
        return self.function(*arguments, **keywords)

    async def score(
        self,
        samples: Sequence[Sample],
        *,
        attempts: int,
        deadline: float = 300.0,
        workers: RewardWorkers | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> list[Result]:
        """One result per sample. If a batch raises, each sample is retried alone, so that one cannot fail all. `workers` call a
        plain function in their threads, under their timeout; without them it is called here. Each call of an async function
        takes one of `places`.

        A batch that times out in a thread is split too, but with one attempt per sample, a quarter of the timeout for each and
        one timeout for all: one sample that hangs does not fail the others, and four that hang end the batch."""
        threads = None if self.is_async else workers
        timeout = deadline if threads is None else threads.timeout
        limit, budget = timeout, math.inf
        if self._is_batched and len(samples) > 1:
            (whole,) = await self._try_each([samples], threads, places, limit=timeout)
            if isinstance(whole, list):
                return whole
            if isinstance(whole, TimedOut):
                attempts, limit, budget = 1, timeout / 4, timeout
        results: dict[int, Result] = {}
        left = list(range(len(samples)))
        for _ in range(attempts):
            tried = await self._try_each([[samples[index]] for index in left], threads, places, limit=limit, budget=budget)
            found = dict(zip(left, tried, strict=True))
            for index, result in found.items():
                if isinstance(result, TimedOut):
                    results[index] = self._late(result, timeout, limit)
                else:
                    results[index] = result if isinstance(result, Failure) else result[0]
            left = [index for index, result in found.items() if isinstance(result, Failure)]
        return [results[index] for index in range(len(samples))]

    async def _try_each(
        self,
        batches: Sequence[Sequence[Sample]],
        threads: RewardWorkers | None,
        places: asyncio.Semaphore | None,
        *,
        limit: float,
        budget: float = math.inf,
    ) -> Sequence[list[Result] | Failure | TimedOut]:
        """Call the function once with each batch."""

        async def finish(batch: Sequence[Sample], tried: object = None) -> list[Result] | Failure:
            async with places or contextlib.nullcontext():
                return await self._finish(batch, limit, tried)

        if self.is_async:
            return await asyncio.gather(*map(finish, batches))
        if threads is not None:
            tried = await threads.map(self._try, batches, name=self.name, limit=limit, budget=budget)
        else:
            tried = [self._try(batch) for batch in batches]
        if any(inspect.isawaitable(found) for found in tried):  # it did not look async
            return await asyncio.gather(*map(finish, batches, tried))
        return tried

    def _try(self, samples: Sequence[Sample]) -> Any:  # noqa: ANN401
        """The results, or a `Failure`; an awaitable if the function is async, for `_finish`."""
        try:
            result = self._call(samples)
            return result if inspect.isawaitable(result) else self._checked_results(result, samples)
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  (anything a user's function raises becomes a typed outcome)
            return self._failed(error)

    async def _finish(self, samples: Sequence[Sample], deadline: float, tried: Any) -> list[Result] | Failure:  # noqa: ANN401
        """Await what `_try` returned, calling it first unless it was called."""
        tried = self._try(samples) if tried is None else tried

        async def result() -> object:
            try:  # inside the task that `await_user` makes: a `SystemExit` that leaves a task ends the whole event loop
                return await tried
            except SystemExit as error:
                raise self._exited(error) from error

        if not inspect.isawaitable(tried):
            return cast("list[Result] | Failure", tried)
        try:
            async with asyncio.timeout(deadline):
                found = await await_user(result(), name=f"reward {self.name!r}")
            return self._checked_results(found, samples)
        except RewardError:
            raise
        except TimeoutError:
            return self._failed(TimeoutError(f"no answer within reward.timeout = {deadline:g} s"))
        except Exception as error:  # noqa: BLE001
            return self._failed(error)
        finally:
            self.num_awaited += 1

    def _call(self, samples: Sequence[Sample]) -> Any:  # noqa: ANN401  (what the user's function returns)
        """Call the function once; the per-sample form takes exactly one sample."""
        if self._is_batched:
            arguments = _columns(samples)
        else:
            (sample,) = samples
            arguments = {**sample.row, "completion": sample.completion, "completion_ids": sample.completion_ids}
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        try:
            return self.function(**arguments)
        except SystemExit as error:
            raise self._exited(error) from error

    def _checked_results(self, values: Any, samples: Sequence[Sample]) -> list[Result]:  # noqa: ANN401
        if not self._is_batched:
            return [self._checked(values)]
        try:
            if isinstance(values, str | bytes | dict):  # iterable, but not a list of numbers
                raise TypeError
            results = list(values)
        except TypeError:
            raise RewardError(f"reward {self.name!r} must return a list, one number per completion, not {values!r}") from None
        if len(results) != len(samples):
            raise RewardError(f"reward {self.name!r} returned {len(results)} values for {len(samples)} completions")
        return [self._checked(value) for value in results]

    def _checked(self, value: Any) -> Result:  # noqa: ANN401
        if value is None:
            return None
        try:
            if isinstance(value, str | bytes):  # float would accept "1"
                raise TypeError
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"reward {self.name!r} returned {value!r}, which is not a number but a {type(value).__name__}; return a "
                f"number, or None where the reward does not apply"
            ) from None
        return number if math.isfinite(number) else Failure(reason=f"reward {self.name!r} returned {number}")

    def _exited(self, error: SystemExit) -> RewardError:
        return RewardError(
            f"reward {self.name!r} called sys.exit({'' if error.code is None else repr(error.code)}), which would end the run; "
            f"raise an exception for a failure, or return None where the reward does not apply"
        )

    def _failed(self, error: Exception) -> Failure:
        advice = f"; {_NO_SIGNALS}" if _is_about_signals(error) else ""
        return Failure(reason=f"reward {self.name!r} raised {type(error).__name__}: {error}{advice}", cause=error)

    def _late(self, result: TimedOut, timeout: float, limit: float) -> Failure:
        why = ""
        if limit < timeout:
            alone = f"nor for it alone within {limit:g} s" if result.cause else "and then no time was left to try it alone"
            why = f" for its batch, {alone}"
        return Failure(f"reward {self.name!r} gave no answer within reward.timeout = {timeout:g} s{why}", result.cause)


def _columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """The arguments of the batch form."""
    names = {name for sample in samples for name in sample.row} - {"prompt"}
    columns: dict[str, Any] = {name: [sample.row.get(name) for sample in samples] for name in names}
    prompts, completions = zip(*map(_as_in_trl, samples), strict=True)
    ids = [sample.completion_ids for sample in samples]
    return {**columns, "prompts": list(prompts), "completions": list(completions), "completion_ids": ids}


def _as_in_trl(sample: Sample) -> tuple[Any, Any]:
    """(prompt, completion); an unfinished assistant message at the end of the prompt moves to the completion."""
    prompt: Any = sample.row["prompt"]
    if not isinstance(prompt, list):
        return prompt, sample.completion
    last = prompt[-1]
    if last["role"] == "assistant" and isinstance(last["content"], str):
        return prompt[:-1], [{"role": "assistant", "content": last["content"] + sample.completion}]
    return prompt, [{"role": "assistant", "content": sample.completion}]


def _is_about_signals(error: BaseException | None) -> bool:
    """Whether it comes from setting a signal handler outside the main thread; libraries often wrap that error in their own."""
    while error is not None:
        if isinstance(error, ValueError) and any(text in str(error) for text in ("only works in main thread", "signal.alarm")):
            return True
        error = error.__cause__ or error.__context__
    return False
