"""A user's reward function, in either form it may have.

- TRL's: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`
- per sample: `f(prompt, completion, **row) -> float | None`

Which one it is shows in its parameter names. Both may be async. As in TRL, the batch form gets completions as messages
where prompts are chats; the per-sample form always gets text.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from headrace.types import Plain


T = TypeVar("T")


class RewardError(ValueError):
    """A reward function is wrong in a way no retry can mend; the run stops and shows it."""


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

    async def score(self, samples: Sequence[Sample], *, attempts: int, deadline: float = 300.0) -> list[float | Failure | None]:
        """One result per sample; a batch that raises is taken apart and each tried alone, so that one cannot sink all."""
        if not self._is_batched:
            each = (self._one(sample, attempts=attempts, deadline=deadline) for sample in samples)
            return await together(each, is_async=self.is_async)
        for _ in range(attempts if len(samples) == 1 else 1):
            try:
                return await self._batch(samples, deadline=deadline)
            except RewardError:
                raise
            except Exception as error:  # noqa: BLE001  (whatever a user's function raises becomes a typed outcome)
                failure = Failure(reason=f"reward {self.name!r} raised {type(error).__name__}: {error}", cause=error)
        if len(samples) == 1:
            return [failure]
        alone = (self.score([sample], attempts=attempts, deadline=deadline) for sample in samples)
        return [results[0] for results in await together(alone, is_async=self.is_async)]

    async def _one(self, sample: Sample, *, attempts: int, deadline: float) -> float | Failure | None:
        arguments: dict[str, Any] = {**sample.row, "completion": sample.completion, "completion_ids": sample.completion_ids}
        for _ in range(attempts):
            try:
                return self._checked(await self._call(arguments, deadline=deadline))
            except RewardError:
                raise
            except Exception as error:  # noqa: BLE001
                failure = Failure(reason=f"reward {self.name!r} raised {type(error).__name__}: {error}", cause=error)
        return failure

    async def _batch(self, samples: Sequence[Sample], *, deadline: float) -> list[float | Failure | None]:
        names = {name for sample in samples for name in sample.row} - {"prompt"}
        columns: dict[str, Any] = {name: [sample.row.get(name) for sample in samples] for name in names}
        columns["prompts"] = [sample.row["prompt"] for sample in samples]
        columns["completions"] = [_as_messages(sample) for sample in samples]
        columns["completion_ids"] = [sample.completion_ids for sample in samples]
        values = await self._call(columns, deadline=deadline)
        try:
            results = list(values)
        except TypeError:
            raise RewardError(f"reward {self.name!r} must return a list, one number per completion, not {values!r}") from None
        if len(results) != len(samples):
            raise RewardError(f"reward {self.name!r} returned {len(results)} values for {len(samples)} completions")
        return [self._checked(value) for value in results]

    async def _call(self, arguments: dict[str, Any], *, deadline: float) -> Any:  # noqa: ANN401
        chosen = arguments if self._takes_all else {k: v for k, v in arguments.items() if k in self._names}
        result = self._function(**chosen)
        if not inspect.isawaitable(result):
            return result
        try:
            return await asyncio.wait_for(result, deadline)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within reward.timeout = {deadline:g} s") from error

    def _checked(self, value: Any) -> float | Failure | None:  # noqa: ANN401
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(f"reward {self.name!r} returned {value!r}, which is not a number") from None
        return number if math.isfinite(number) else Failure(reason=f"reward {self.name!r} returned {number}")


async def together(calls: Iterable[Coroutine[Any, Any, T]], *, is_async: bool) -> list[T]:
    """Async calls at once. Plain ones one after another and without giving way, so that their time is theirs alone."""
    return list(await asyncio.gather(*calls)) if is_async else [await call for call in calls]


def _as_messages(sample: Sample) -> Any:  # noqa: ANN401
    is_chat = isinstance(sample.row["prompt"], list)
    return [{"role": "assistant", "content": sample.completion}] if is_chat else sample.completion
