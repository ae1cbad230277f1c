"""What a reward function's parameters say: in which form to call it, and with what.

| per sample | TRL's batch form | |
|---|---|---|
| `prompt`, `completion` | `prompts`, `completions` | text; in the batch form messages where prompts are chats |
| `completion_length`, `finish_reason` | `completion_lengths`, `finish_reasons` | tokens; `stop`, `length` or `abort` |
| `prompt_ids`, `completion_ids` | the same, a list for each sample | token ids |
| `episode` | `episodes` | the whole `Episode`: its rollouts with sources, calls, step rewards |
| `turns` | the same, a list for each sample | `Turn`s: who wrote each part of the episode, as text |
| `trainer_state`, `log_metric` | the same, one for all | `TrainerState`; `log_metric(name, value)` |

Any other parameter is a column of the tasks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from headrace.records import Episode, Plain
    from headrace.score.metric_log import MetricLog

_PER_SAMPLE = {"prompt", "completion", "completion_length", "finish_reason", "episode"}
_BATCH = {"prompts", "completions", "completion_lengths", "finish_reasons", "episodes"}
_IDS = {"prompt_ids", "completion_ids"}
GIVEN = frozenset(_PER_SAMPLE | _BATCH | _IDS | {"turns", "trainer_state", "log_metric"})
"""Arguments that Headrace provides; all others are columns of the tasks."""
RESERVED = frozenset({"prompts", "completion", "completions", "completion_ids"})
"""Those that rewards get under `**row` too, so that no column may have their names."""


class RewardError(ValueError):
    """A reward function is wrong in a way that no retry can fix; the run stops and shows it."""


@dataclass(frozen=True)
class TrainerState:
    """What a reward may know of the run, under TRL's names."""

    global_step: int = 0
    """The version of the weights that sampled the end of the completion. Unlike the version being trained at the moment, it
    does not depend on how fast anything runs, so that exact runs stay exact."""
    max_steps: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """A part of an episode that was written in one go."""

    source: str
    """`prompt`, `sampled`, `tool` or `template`."""
    text: str
    """Without special tokens."""
    rollout: int = 0
    """Which of the episode's rollouts it is in; what a fork shares with its parent is listed once, for the parent."""
    finish_reason: str = ""
    """`stop`, `length` or `abort` of a sampled turn."""
    reward: float = 0.0
    """The sum of its step rewards."""


@dataclass(frozen=True)
class Sample:
    """The part of an episode that a reward sees."""

    row: dict[str, Plain]
    completion: str
    completion_ids: list[int]
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    state: TrainerState = TrainerState()
    turns: list[Turn] = field(default_factory=list)
    """Empty unless a reward asks for them."""
    episode: Episode | None = None


class Signature:
    """The parameters of a function, less those that `options` set."""

    def __init__(self, function: Callable[..., Any], *, name: str, options: Collection[str] = ()) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for option in options:
            if option in GIVEN or option not in (p.name for p in named):
                free = ", ".join(p.name for p in named if p.name not in GIVEN)
                raise ConfigError(f"reward.options.{name}.{option}: reward {name!r} has no such option (it has: {free})")
        self._names = {p.name for p in named} - set(options)
        needed = {p.name: None for p in named if p.default is p.empty and p.name not in options}
        self.required: list[str] = [each for each in needed if each not in GIVEN]
        """Task columns it cannot be called without."""
        self.given: set[str] = self._names & GIVEN - {"prompt"}
        """What it asks Headrace for."""
        single, batch = self._names & _PER_SAMPLE, self._names & _BATCH
        self.is_batched: bool = bool(batch or (self._names & _IDS and not single))
        if self.is_batched and needed.keys() & single:
            what = f"{', '.join(sorted(batch or self._names & _IDS))} of a batch and {', '.join(sorted(single))} of one sample"
            raise RewardError(f"reward {name!r} takes {what}; write {', '.join(f'{each}s' for each in sorted(single))}")
        if not self.given - {"prompt_ids", "trainer_state", "log_metric"} and not self._takes_all:
            raise RewardError(
                f"reward {name!r} takes ({', '.join(sorted(self._names))}); write f(prompt, completion, **row) or "
                f"f(prompts, completions, completion_ids, **columns)"
            )

    def arguments(self, samples: Sequence[Sample], log: MetricLog) -> dict[str, Any]:
        """Of one call; the per-sample form takes exactly one sample. A column goes before what only a parameter's name asks
        for, and never replaces the completion."""
        first = samples[0]
        given: dict[str, Any] = {"trainer_state": first.state, "log_metric": log.add}
        if self.is_batched:
            names = {name for sample in samples for name in sample.row} - {"prompt"}
            row: dict[str, Any] = {name: [sample.row.get(name) for sample in samples] for name in names}
            prompts, completions = zip(*map(_as_in_trl, samples), strict=True)
            given |= {
                "prompts": list(prompts),
                "completions": list(completions),
                "completion_lengths": [len(sample.completion_ids) for sample in samples],
                "finish_reasons": [sample.finish_reason for sample in samples],
                "prompt_ids": [sample.prompt_ids for sample in samples],
                "completion_ids": [sample.completion_ids for sample in samples],
                "turns": [sample.turns for sample in samples],
                "episodes": [sample.episode for sample in samples],
            }
        else:
            assert len(samples) == 1
            row = dict(first.row)
            given |= {"completion": first.completion, "completion_length": len(first.completion_ids)}
            own = ("finish_reason", "prompt_ids", "completion_ids", "turns", "episode")
            given |= {name: getattr(first, name) for name in own}
        asked = {name: value for name, value in given.items() if name in self._names}
        return self.pick({**asked, **row, **{name: given[name] for name in RESERVED & given.keys()}})

    def pick(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those that the function takes."""
        return arguments if self._takes_all else {name: value for name, value in arguments.items() if name in self._names}


def _as_in_trl(sample: Sample) -> tuple[Any, Any]:
    """(prompt, completion); an unfinished assistant message at the end of the prompt moves to the completion."""
    prompt: Any = sample.row["prompt"]
    if not isinstance(prompt, list):
        return prompt, sample.completion
    last = prompt[-1]
    if last["role"] == "assistant" and isinstance(last["content"], str):
        return prompt[:-1], [{"role": "assistant", "content": last["content"] + sample.completion}]
    return prompt, [{"role": "assistant", "content": sample.completion}]
