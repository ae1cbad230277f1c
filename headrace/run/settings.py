"""The recipe's `[sft]`, `[evaluate]` and `[checkpoint]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.engine import DistributionSettings
from headrace.settings import ELASTIC, OPERATIONAL, check, check_least
from headrace.tasks import TaskSettings  # noqa: TC001  (`settings.build` reads the hints while it runs)


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Supervised fine-tuning before RL, on answers that are given; the result is cached. It is on if `steps` or `epochs` is
    set. Rows have a `prompt` and a `completion` or `answer` (text or messages), or a whole chat in `messages`."""

    steps: int = 0
    """Optimizer steps, at most."""
    epochs: float = 0.0
    """Instead of `steps`: how often every row is learned from."""
    batch: int = 64
    """Rows a step. The loss is the mean over all learned tokens of the batch."""
    learning_rate: float = 2e-5
    """At the top of its schedule. The other settings of the optimizer are those of `[train]`."""
    schedule: str = "constant"
    """What the learning rate does after its rise, until the last step: as `train.schedule`."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises."""
    max_length: int = 0
    """Examples of more tokens are left out and counted; 0 takes the model's limit or `model.context`."""
    until_success: float = 0.0
    """Stop once this share of the run's tasks is solved at temperature 1; 0 does not check. Judged on training tasks, never
    held-out ones."""
    check_every: int = 20
    """Steps between two lines of progress, with the held-out loss and success where they are measured."""
    tasks: tuple[TaskSettings, ...] = ()
    """What to learn from; empty takes the run's own tasks, which need an `answer` column."""
    held_out: tuple[TaskSettings, ...] = ()
    """Rows whose loss is measured and never trained, at most 512 in all."""

    def __post_init__(self) -> None:
        check_least(0, self, "steps", "max_length", "warmup_steps")
        check_least(1, self, "batch", "check_every")
        check(0 <= self.epochs < math.inf, "epochs", self.epochs, "a number ≥ 0")
        check(not (self.steps and self.epochs), "epochs", self.epochs, f"left out, since steps = {self.steps}: set one of them")
        check(0 <= self.until_success <= 1, "until_success", self.until_success, "a share, 0 to 1")
        check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")

    @property
    def is_on(self) -> bool:
        return bool(self.steps or self.epochs)


@dataclass(frozen=True, kw_only=True)
class EvaluateSamplingSettings(DistributionSettings):
    """How held-out samples are drawn; minimum length and stop strings are those of `[sampling]`."""

    max_tokens: int = 0
    """At most this many new tokens, sampled or greedy; 0 takes `sampling.max_tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(0, self, "max_tokens")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Held-out evaluation, counted apart from training."""

    every: int = field(default=0, metadata=ELASTIC)
    """Versions between evaluations; the first and last are always made if there are tasks. 0: only those two."""
    tasks: tuple[TaskSettings, ...] = ()
    """Held-out sources; built-in and reasoning-gym tasks keep held-out rows of their own."""
    limit: int = 256
    """Tasks per evaluation, the same ones each time: of each source's rows, shuffled by the seed, an equal share."""
    success_at: float = 1.0
    """A rollout whose reward reaches this is a success."""
    samples: int = 1
    """Samples of each task, with the same random numbers each time; more than one give pass@k and maj@k."""
    greedy: bool = True
    """Decode each task greedily too."""
    sampling: EvaluateSamplingSettings = field(default_factory=EvaluateSamplingSettings)
    answer: str = ""
    """What a completion votes for in maj@k: `module:f` or `file.py:f`, from its text to the answer's (None: no vote). Empty
    takes the whole text, stripped."""
    beside: bool = field(default=True, metadata=ELASTIC)
    """Evaluate while training goes on, on at most a quarter of the engines' slots. The first and last evaluations, those of
    exact and inline runs, and those with engines that sleep or pause in between, are made while the trainer waits."""

    def __post_init__(self) -> None:
        check_least(0, self, "every", "limit")
        check(1 <= self.samples <= 1024, "samples", self.samples, "from 1 to 1024")
        check(not self.answer or ":" in self.answer, "answer", self.answer, "module:f or file.py:f, or empty")

    @property
    def rollouts_per_task(self) -> int:
        return self.samples + self.greedy


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Hugging Face folders from which the same command resumes."""

    every: int = field(default=50, metadata=ELASTIC)
    """Versions between checkpoints; the last version is always saved."""
    keep: int = field(default=2, metadata=OPERATIONAL)
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        check_least(1, self, "every", "keep")
