"""Calls a user's reward function, in either form:

- TRL's: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`
- per sample: `f(prompt, completion, **row) -> float | None`

Its parameter names tell which, and what else it is given (`headrace.score.signature`); both may be async. As in TRL, if prompts
are chats the batch form gets completions as messages, including the start of an assistant message that the prompt ends with;
the per-sample form always gets the generated text.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from headrace.records import frames, pack_episodes
from headrace.score.metric_log import MetricLog
from headrace.score.process import ProcessEnded
from headrace.score.signature import RewardError, Signature
from headrace.score.workers import TimedOut
from headrace.user_code import await_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.score.signature import Sample
    from headrace.score.workers import RewardWorkers


@dataclass(frozen=True)
class Failure:
    """The reward raised, timed out, or returned NaN or infinity."""

    reason: str
    cause: BaseException | None = None


Result: TypeAlias = "float | Failure | None"
"""Of one sample; None where the reward does not apply."""


_NO_SIGNALS = (
    "rewards are called in threads, where no signal handler can be set: set reward.processes = 1, where one can, or switch off "
    "the time limit that sets it (math_verify: parse(..., parsing_timeout=None) and verify(..., timeout_seconds=None)); "
    "reward.timeout applies in any case"
)


@dataclass(frozen=True)
class OwnSettings:
    """How one reward differs from the `[reward]` section."""

    timeout: float | None = None
    attempts: int | None = None
    weight: float | None = None
    """None: 1, or `reward.weights`, which goes before this."""
    processes: bool = True
    """False: it is called in a thread even where `reward.processes` is set."""
    needs_process: bool = False
    """It is called in a process even where `reward.processes` is 0, because it uses signals."""
    reference: str = ""
    """`module:name`, if it was given by name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Values of parameters."""

    def __post_init__(self) -> None:
        for name, is_right, wanted in (
            ("timeout", lambda value: 0 < value < math.inf, "a number of seconds above 0"),
            ("attempts", lambda value: type(value) is int and value >= 1, "a whole number ≥ 1"),
            ("weight", math.isfinite, "a finite number"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not is_right(value)):
                raise RewardError(f"headrace.reward({name}={value!r}): must be {wanted}")


class RewardFunction:
    """A named reward function, called in the form that its parameters show."""

    def __init__(self, function: Callable[..., Any], *, name: str = "", **own: Any) -> None:  # noqa: ANN401
        """`own`: fields of `OwnSettings`."""
        if not callable(function):
            raise RewardError(f"reward: a {type(function).__name__} is not a function")
        self.own: OwnSettings = OwnSettings(**own)
        if isinstance(function, RewardFunction):
            self.own, name, function = replace(function.own, **own), name or function.name, function.function
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        self.name: str = name or getattr(inner, "__name__", type(inner).__name__)
        self.function: Callable[..., Any] = function
        self.signature = Signature(function, name=self.name, options=self.own.options)
        self.num_awaited = 0
        """Async calls that have ended, in time or not."""
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  (the user's own signature)
        """Call the user's function, so that `@headrace.reward` leaves it usable as before."""
        return self.function(*arguments, **keywords)

    @property
    def reference(self) -> str:
        """The `module:name` by which another process can import it; raises if there is none."""
        module, name = getattr(self.function, "__module__", ""), getattr(self.function, "__qualname__", "")
        found = getattr(sys.modules.get(module), name, None)
        is_found = self.function in (found, getattr(found, "function", None)) and module != "__main__"
        if not self.own.reference and not is_found:
            raise RewardError(
                f"reward {self.name!r} is {'in the script that runs' if module == '__main__' else 'no function of a module'}, "
                f"from where no process can import it; put it in a file of its own and name it, as in reward.functions = "
                f"'my_rewards.py:exact', or mark it @headrace.reward(processes=False), or set reward.processes = 0"
            )
        return self.own.reference or f"{module}:{name}"

    async def score(
        self,
        samples: Sequence[Sample],
        *,
        attempts: int,
        deadline: float = 300.0,
        workers: RewardWorkers | None = None,
        places: asyncio.Semaphore | None = None,
        log: MetricLog | None = None,
    ) -> list[Result]:
        """One result per sample. If a batch raises, each sample is retried alone, so that one cannot fail all. `workers` call a
        plain function in their threads or processes, under their timeout; without them it is called here. Each call of an async
        function takes one of `places`. What it logs goes to `log`.

        A batch that times out is split too, but with one attempt per sample, a quarter of the timeout for each and
        one timeout for all: one sample that hangs does not fail the others, and four that hang end the batch."""
        threads = None if self.is_async else workers
        if threads is not None and self.own.processes:
            threads = threads.process_workers(is_needed=self.own.needs_process) or threads
        timeout = self.own.timeout or (deadline if threads is None else threads.timeout)
        attempts = self.own.attempts or attempts
        try_each = partial(self._try_each, threads=threads, places=places, log=log or MetricLog())
        limit, budget = timeout, math.inf
        results, batches = dict[int, Result](), self._batches(samples)
        wholes = await try_each([[samples[index] for index in batch] for batch in batches], limit=timeout)
        for batch, whole in zip(batches, wholes, strict=True):
            if isinstance(whole, list):
                results |= zip(batch, whole, strict=True)
            elif isinstance(whole, TimedOut):
                attempts, limit, budget = 1, timeout / 4, timeout
        left = [index for index in range(len(samples)) if index not in results]
        for _ in range(attempts):
            tried = await try_each([[samples[index]] for index in left], limit=limit, budget=budget)
            found = dict(zip(left, tried, strict=True))
            for index, result in found.items():
                failure = self._late(result, timeout, limit) if isinstance(result, TimedOut) else result
                results[index] = failure if isinstance(failure, Failure) else failure[0]
            left = [index for index, result in found.items() if isinstance(result, Failure)]
        return [results[index] for index in range(len(samples))]

    def _batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The samples to be tried together first, by index: all, or those of one `trainer_state` if it takes that."""
        found: dict[object, list[int]] = {}
        for index, sample in enumerate(samples if self.signature.is_batched else ()):
            found.setdefault(sample.state if "trainer_state" in self.signature.given else None, []).append(index)
        return [batch for batch in found.values() if len(batch) > 1]

    async def _try_each(
        self,
        batches: Sequence[Sequence[Sample]],
        *,
        threads: RewardWorkers | None,
        places: asyncio.Semaphore | None,
        log: MetricLog,
        limit: float,
        budget: float = math.inf,
    ) -> Sequence[list[Result] | Failure | TimedOut]:
        """Call the function once with each batch."""

        async def finish(batch: Sequence[Sample], tried: object = None) -> list[Result] | Failure | TimedOut:
            async with places or contextlib.nullcontext():
                return await self._finish(batch, limit, self.attempt(batch, log) if tried is None else tried)

        if self.is_async:
            return await asyncio.gather(*map(finish, batches))
        if threads is None:
            tried = [self.attempt(batch, log) for batch in batches]
        else:
            attempt: Callable[[Sequence[Sample]], Any] = partial(self.attempt, log=log)
            if threads.has_processes:
                attempt = partial(self._attempt_in_process, threads=threads, limit=limit, log=log)
            tried = await threads.map(attempt, batches, name=self.name, limit=limit, budget=budget)
        if any(inspect.isawaitable(found) for found in tried):  # it did not look async
            return await asyncio.gather(*map(finish, batches, tried))
        return tried

    def attempt(self, samples: Sequence[Sample], log: MetricLog) -> Any:  # noqa: ANN401
        """Call the function once: the results, or a `Failure`; an awaitable if it is async, for `_finish`."""
        try:
            result = self.function(**{**self.signature.arguments(samples, log), **self.own.options})
            return result if inspect.isawaitable(result) else self._checked_results(result, samples)
        except RewardError:
            raise
        except SystemExit as error:
            raise self._exited(error) from error
        except Exception as error:  # noqa: BLE001  (anything a user's function raises becomes a typed outcome)
            return self._failed(error)

    def _attempt_in_process(
        self, samples: Sequence[Sample], *, threads: RewardWorkers, limit: float, log: MetricLog
    ) -> list[Result] | Failure:
        """`attempt` in the process of the calling worker."""
        changed = [{"state": vars(each.state), "turns": list(map(vars, each.turns)), "episode": None} for each in samples]
        plain = [{**vars(sample), **changes} for sample, changes in zip(samples, changed, strict=True)]
        asked = [each.episode for each in samples if each.episode] if self.signature.given & {"episode", "episodes"} else []
        order = {"call": self.name, "samples": plain, "episodes": pack_episodes(asked), "limit": limit}
        try:
            process = threads.process({"name": self.name, "reference": self.reference, "options": self.own.options})
            answer = process.request(order)
        except (ProcessEnded, frames.WireError) as error:
            return Failure(f"reward {self.name!r}: {error}", error)
        log.merge(answer["logged"])
        if "failure" in answer:
            return Failure(answer["failure"])
        return [Failure(each["failure"]) if isinstance(each, dict) else each for each in answer["results"]]

    async def _finish(
        self,
        samples: Sequence[Sample],
        deadline: float,
        tried: Any,  # noqa: ANN401
    ) -> list[Result] | Failure | TimedOut:
        """Await what `attempt` returned."""
        if not inspect.isawaitable(tried):
            return cast("list[Result] | Failure", tried)
        try:
            async with asyncio.timeout(deadline) as limit:
                found = await await_user(tried, name=f"reward {self.name!r}")
            return self._checked_results(found, samples)
        except RewardError:
            raise
        except SystemExit as error:
            raise self._exited(error) from error
        except Exception as error:  # noqa: BLE001
            is_late = isinstance(error, TimeoutError) and limit.expired()  # or it raised one of its own
            return TimedOut(TimeoutError(str(error))) if is_late else self._failed(error)
        finally:
            self.num_awaited += 1

    def _checked_results(self, values: Any, samples: Sequence[Sample]) -> list[Result]:  # noqa: ANN401
        if not self.signature.is_batched:
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
        setting = "reward.timeout" if self.own.timeout is None else "its own timeout"
        return Failure(f"reward {self.name!r} gave no answer within {setting} = {timeout:g} s{why}", result.cause)


def _is_about_signals(error: BaseException | None) -> bool:
    """Whether it comes from setting a signal handler outside the main thread; libraries often wrap that error in their own."""
    while error is not None:
        if isinstance(error, ValueError) and any(text in str(error) for text in ("only works in main thread", "signal.alarm")):
            return True
        error = error.__cause__ or error.__context__
    return False
