"""Supervised fine-tuning before RL. Examples are rollouts with logprobs of 0, packed and trained like any batch but with
another loss: the mean of −log π over all learned tokens of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.engine import blocks_for
from headrace.envs import PromptEncoder
from headrace.launch.build import build_roles, build_trainer
from headrace.launch.examples import encode_examples
from headrace.launch.forecast import longest_prompt
from headrace.launch.inputs import held_out_examples, num_examples, open_examples, open_tasks
from headrace.launch.placement import choose_device
from headrace.lora import LoraSettings
from headrace.model import config_limit, load_config, load_tokenizer
from headrace.observe import Observer
from headrace.partial import PartialSettings
from headrace.records import Batch
from headrace.run import Evaluator, serving
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.tasks import RowSource
from headrace.trainer import LocalTrainer, TrainSettings, learning_rate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch.inputs import UserInputs
    from headrace.records import Plain, Rollout
    from headrace.run import Roles
    from headrace.trainer import PolicyTrainer

METRICS = "sft.json"
"""In the folder of the model: what each line of progress says, as a list."""
_CHECKED_TASKS = 512
_HELD_OUT = 512
_FROM_TRAIN = (
    "optimizer", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "parameters", "micro_batch_tokens", "recompute",
    "offload", "share_prefixes",
)  # fmt: skip
"""Settings of `[train]` that SFT shares."""


def optimizer_settings(recipe: Recipe) -> TrainSettings:
    """The trainer's for SFT: no reference, teacher or values."""
    sft, shared = recipe.sft, {name: getattr(recipe.train, name) for name in _FROM_TRAIN}
    how: dict[str, Any] = {"learning_rate": sft.learning_rate, "schedule": sft.schedule, "warmup_steps": sft.warmup_steps}
    return TrainSettings(loss="supervised", advantage="reward", **how, **shared)


async def run_sft(recipe: Recipe, path: str, given: UserInputs, target: Path, *, say: Callable[[str], None]) -> None:
    """Fine-tune the model in `path`, and save it in `target`. All its weights are trained: an adapter that RL trains belongs to
    the result."""
    whole: dict[str, Any] = {"lora": LoraSettings(), "partial": PartialSettings()} if recipe.lora.is_on else {}
    recipe = dataclasses.replace(recipe, train=optimizer_settings(recipe), **whole)
    async with _roles(recipe, path, given) as (trainer, check):
        metrics = await _Sft(recipe, path, given, trainer, say).train(check)
        await trainer.save(target)
    shutil.rmtree(target / "trainer")  # RL starts with a new optimizer
    (target / METRICS).write_text(json.dumps(metrics, indent=1) + "\n")


class _Sft:
    def __init__(
        self, recipe: Recipe, path: str, given: UserInputs, trainer: PolicyTrainer, say: Callable[[str], None]
    ) -> None:
        self.recipe, self.settings, self.trainer, self.say = recipe, recipe.sft, trainer, say
        self.encoder = PromptEncoder(load_tokenizer(path, recipe.model))
        limit = config_limit(load_config(path), recipe.model.context)
        self.longest = self.settings.max_length or limit
        if self.longest > limit:
            raise ConfigError(f"sft.max_length = {self.longest}: the model takes at most {limit} tokens (model.context)")
        self.stream = open_examples(recipe, given)
        self.num_rows = num_examples(recipe, self.stream.sources)
        self.num_steps = math.ceil(self.num_rows / self.settings.batch)
        self.num_taken = self.num_left_out = self.num_tokens = self.num_skipped = 0
        self.held_out = self._held_out(given)

    def _held_out(self, given: UserInputs) -> list[Rollout]:
        sources = held_out_examples(self.recipe, given)
        sizes = [len(source) if isinstance(source, RowSource) else _HELD_OUT for source in sources]
        counts = [min(_HELD_OUT // len(sources), size) for size in sizes]
        rows = [source.row(index) for source, count in zip(sources, counts, strict=True) for index in range(count)]
        return [each for number, row in enumerate(rows) for each in self._encode(row, name=f"h{number}")]

    def _encode(self, row: dict[str, Plain], *, name: str) -> list[Rollout]:
        examples = encode_examples(row, self.encoder, name=name)
        fitting = [each for each in examples if len(each) <= self.longest]
        self.num_left_out += len(examples) - len(fitting)
        return fitting

    def _next_batch(self) -> list[Rollout]:
        count = min(self.settings.batch, self.num_rows - self.num_taken)
        self.num_taken += count
        return [each for index in range(count) for each in self._encode(self.stream.next().row, name=f"d{index}")]

    async def train(self, check: Callable[[int], Awaitable[float]] | None) -> list[dict[str, float]]:
        """All steps, or until the tasks are solved often enough. Returns what the lines of progress say."""
        told: list[dict[str, float]] = []
        since, tokens_then, losses = time.perf_counter(), 0, list[float]()
        for step in range(self.num_steps + 1):
            if step % self.settings.check_every == 0 or step == self.num_steps:
                seconds = time.perf_counter() - since
                found = {"step": step, "loss": float(np.mean(losses)) if losses else math.nan}
                found["tokens_per_second"] = (self.num_tokens - tokens_then) / max(seconds, 1e-9)
                if self.held_out:
                    logprobs = await self.trainer.forward(supervised_batch(self.held_out))
                    num_learned = sum(each.num_sampled for each in self.held_out)
                    found["held_out_loss"] = -sum(float(each.sum()) for each in logprobs) / num_learned
                if check is not None:
                    found["success"] = await check(step)
                self._tell(found)
                told.append({name: value for name, value in found.items() if not math.isnan(value)})
                if check is not None and found["success"] >= self.settings.until_success:
                    break
                since, tokens_then, losses = time.perf_counter(), self.num_tokens, []
            if step < self.num_steps and (examples := self._next_batch()):
                self.num_tokens += sum(map(len, examples))
                rate = learning_rate(self.recipe.train, version=step, steps=self.num_steps, section="sft")
                seen = await self.trainer.step(supervised_batch(examples), learning_rate=rate)
                losses.append(seen["loss"])
                self.num_skipped += bool(seen.get("skipped", 0.0))
        if self.num_steps and not self.num_tokens and self.num_left_out:
            raise ConfigError(f"sft: no example fits {self.longest} tokens; raise sft.max_length or model.context")
        return told

    def _tell(self, found: dict[str, float]) -> None:
        parts = []
        if not math.isnan(found["loss"]):
            parts += [f"loss {found['loss']:.4f}", f"{found['tokens_per_second']:,.0f} tokens/s"]
        if "held_out_loss" in found:
            parts.append(f"held-out loss {found['held_out_loss']:.4f}")
        if "success" in found:
            parts.append(f"{found['success']:.0%} of training tasks solved at temperature 1")
        if self.num_left_out:
            parts.append(f"{self.num_left_out} examples of more than {self.longest} tokens left out")
        if self.num_skipped:
            parts.append(f"{self.num_skipped} steps skipped, their gradient was not finite")
        if parts:
            self.say(f"sft        step {int(found['step'])} of {self.num_steps}: {', '.join(parts)}")


def supervised_batch(examples: list[Rollout]) -> Batch:
    total = sum(example.num_sampled for example in examples)
    return Batch(
        rollouts=tuple(examples),
        advantages=tuple(np.zeros(len(example), dtype=np.float32) for example in examples),
        weights=tuple((example.loss_mask / total).astype(np.float32) for example in examples),
        loss="supervised",
        version=0,
    )


@contextlib.asynccontextmanager
async def _roles(
    recipe: Recipe, path: str, given: UserInputs
) -> AsyncIterator[tuple[PolicyTrainer, Callable[[int], Awaitable[float]] | None]]:
    """The trainer, and a function that measures success, which needs an engine."""
    device = choose_device(recipe)
    if not recipe.sft.until_success:
        sync, timeline = WeightSync(Lineage.new(), MemoryTransport(device)), Observer().timeline("trainer")
        yield LocalTrainer(build_trainer(recipe, path, device=device), sync=sync, timeline=timeline), None
        return
    tasks = open_tasks(dataclasses.replace(recipe, seed=recipe.seed + 1), given)
    checked = [tasks.next().row for _ in range(_CHECKED_TASKS)]
    most_blocks = 0
    if given.is_single_turn(recipe):  # only these tasks are in flight, each once
        encoder = PromptEncoder(load_tokenizer(path, recipe.model))
        longest = longest_prompt(checked, encoder, held_out={}) + recipe.sampling.max_tokens
        tokens = min(config_limit(load_config(path), recipe.model.context), longest)
        most_blocks = blocks_for(min(recipe.engine.slots, len(checked)), tokens=tokens, block_size=recipe.engine.block_size)
    roles = build_roles(recipe, path, given, observer=Observer(), lineage=Lineage.new(), most_blocks=most_blocks)
    async with serving(roles):
        yield roles.trainer, lambda step: _success(recipe, roles, checked, step=step)


async def _success(recipe: Recipe, roles: Roles, tasks: list[dict[str, Plain]], *, step: int) -> float:
    """The share of these tasks that the current weights solve at temperature 1."""
    update = (await roles.trainer.publish(step, canary=roles.canary)).update
    await roles.engine.load(update)
    await roles.trainer.release(update)
    return await Evaluator(recipe, roles).sampled_success(tasks, name=f"sft{step}")
