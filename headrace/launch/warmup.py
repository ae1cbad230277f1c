"""The model RL starts from: as given, built in, or warmed up by supervised steps on tasks that have an answer.

Warmed-up models are cached. Demonstrations are rollouts with logprobs of 0, trained like any batch but with another loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

from headrace import __version__
from headrace.engine import blocks_for
from headrace.envs import PromptEncoder
from headrace.launch.build import build_roles
from headrace.launch.folder import FolderLock, cache_folder
from headrace.launch.forecast import longest_prompt
from headrace.launch.inputs import UserInputs, fingerprint_inputs, open_tasks
from headrace.model import config_limit, load_config, load_tokenizer, tiny
from headrace.observe import Observer
from headrace.records import Batch, Call, FinishReason, Rollout, Sampling
from headrace.run import Evaluator, first_failure
from headrace.settings import ConfigError, to_dict
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.config import Recipe
    from headrace.records import Plain
    from headrace.run import Roles

_CHECKED_TASKS = 512
_NUM_KEPT = 16
"""Models kept in the cache, besides those in use."""


@contextlib.contextmanager
def model_folder(recipe: Recipe, given: UserInputs, *, say: Callable[[str], None]) -> Iterator[str]:
    """The folder of the model RL starts from. A cached one is not removed before the block ends."""
    is_builtin = recipe.model.path.startswith("builtin:")
    if is_builtin and recipe.model.path != tiny.NAME:
        raise ConfigError(f"model.path = {recipe.model.path!r}: the built-in model is {tiny.NAME!r}")
    if not is_builtin and not recipe.warmup.steps:
        yield recipe.model.path
        return
    target = cache_folder() / "warmup" / _key(recipe, given)
    in_use = FolderLock(target, is_shared=True)
    if in_use.acquire(create=False):
        say(f"warm-up    cached in {target}")
    else:
        _make(target, recipe, given, say)
        if not in_use.acquire(create=False):
            raise OSError(f"the warmed-up model could not be put in {target}")
    try:
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(target)
            _remove_unused(target.parent)
        yield str(target)
    finally:
        in_use.release()


def _make(target: Path, recipe: Recipe, given: UserInputs, say: Callable[[str], None]) -> None:
    """Build and warm up a model in a temporary folder of the cache, then rename it."""
    is_builtin = recipe.model.path == tiny.NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, lock = _temporary_folder(target.parent)
    try:
        transformers_logging.disable_progress_bar()
        if is_builtin:
            tiny.build_folder(temporary, recipe.model, seed=recipe.seed)
        if recipe.warmup.steps:
            start = str(temporary) if is_builtin else recipe.model.path
            try:
                asyncio.run(_warm_up(recipe, start, given, temporary, say))
            except BaseExceptionGroup as failures:
                failure = first_failure(failures)
                raise failure from failure.__cause__
        with contextlib.suppress(OSError):  # another process has finished the same model first
            temporary.rename(target)
    finally:
        lock.release()
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_folder(cache: Path) -> tuple[Path, FolderLock]:
    """A new locked folder. Another process may remove it as abandoned before it is locked; then try again."""
    for _ in range(100):
        folder = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
        lock = FolderLock(folder)
        if lock.acquire(create=False):
            return folder, lock
        shutil.rmtree(folder, ignore_errors=True)
    raise OSError(f"no folder in {cache} can be locked; set HEADRACE_CACHE to one on a file system with locks")


def _remove_unused(cache: Path) -> None:
    """Remove all models but the most recently used ones and those a live process uses or is making."""

    def used_at(folder: Path) -> float:
        try:
            return folder.stat().st_mtime
        except FileNotFoundError:  # another process has just removed it
            return 0.0

    made = sorted((folder for folder in cache.iterdir() if folder.name[0] != "."), key=used_at, reverse=True)
    for folder in (*made[_NUM_KEPT:], *cache.glob(".making-*")):
        lock = FolderLock(folder)
        if lock.acquire(create=False):
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


async def _warm_up(recipe: Recipe, path: str, given: UserInputs, target: Path, say: Callable[[str], None]) -> None:
    settings = recipe.warmup
    train = dataclasses.replace(
        recipe.train,
        learning_rate=settings.learning_rate,
        value_learning_rate=0.0,
        micro_batch_tokens=16384,
        # Only demonstrations: no reference, teacher or values.
        loss="supervised",
        constants={},
        advantage="reward",
        kl=0.0,
        kl_in_reward=False,
        reference="",
        teacher="",
    )
    tasks = open_tasks(dataclasses.replace(recipe, seed=recipe.seed + 1), given)
    checked = [tasks.next() for _ in range(_CHECKED_TASKS)]
    most_blocks = 0
    if given.environment is None:  # only these tasks are in flight, each once
        longest = longest_prompt(checked, PromptEncoder(load_tokenizer(path)), held_out={}) + recipe.sampling.max_tokens
        tokens = min(config_limit(load_config(path), recipe.model.context), longest)
        most_blocks = blocks_for(min(recipe.engine.slots, len(checked)), tokens=tokens, block_size=recipe.engine.block_size)
    warming = dataclasses.replace(recipe, train=train)
    roles = build_roles(warming, path, given, observer=Observer(), lineage=Lineage.new(), most_blocks=most_blocks)
    if settings.tasks:
        tasks = open_tasks(dataclasses.replace(recipe, tasks=settings.tasks), UserInputs())
    async with asyncio.TaskGroup() as group:
        services = [group.create_task(service()) for service in roles.services]
        for step in range(settings.steps):
            if step % settings.check_every == 0:
                success = await _success(recipe, roles, checked, step=step)
                say(f"warm-up    step {step}: {success:.0%} of training tasks solved at temperature 1")
                if success >= settings.until_success:
                    break
            rate = settings.learning_rate * min(1.0, (step + 1) / 20)
            examples = [demonstration(tasks.next(), roles.encoder, name=f"d{index}") for index in range(settings.batch)]
            await roles.trainer.step(_supervised_batch(examples), learning_rate=rate)
        for service in services:
            service.cancel()
    await roles.trainer.save(target)
    shutil.rmtree(target / "trainer")  # RL starts with a new optimizer


async def _success(recipe: Recipe, roles: Roles, tasks: list[dict[str, Plain]], *, step: int) -> float:
    """The share of these tasks that the current weights solve at temperature 1."""
    update = (await roles.trainer.publish(step, canary=roles.canary)).update
    await roles.engine.load(update)
    await roles.trainer.release(update)
    return await Evaluator(recipe, roles).sampled_success(tasks, name=f"warmup{step}")


def demonstration(task: dict[str, Plain], encoder: PromptEncoder, *, name: str) -> Rollout:
    """The task's prompt followed by its answer and the end token."""
    answer = task.get("answer")
    if not isinstance(answer, str):
        raise ConfigError("warmup.steps: the tasks have no 'answer' column of text to learn from; set it to 0")
    prompt = Rollout.from_prompt(encoder.encode(task["prompt"]), id=name, episode=name, group=name)
    end = int(encoder.tokenizer.eos_token_id)
    ids = np.asarray([*encoder.tokenizer(answer, add_special_tokens=False)["input_ids"], end], dtype=np.int32)
    call = Call(
        start=len(prompt),
        stop=len(prompt) + len(ids),
        engine="demonstration",
        sampling=Sampling(max_tokens=len(ids)),
        finish_reason=FinishReason.STOP,
        started=0.0,
        finished=0.0,
    )
    logprobs, versions = np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int32)
    return prompt.extend(call, token_ids=ids, logprobs=logprobs, versions=versions, policy=prompt.policy, lineage="")


def _supervised_batch(examples: list[Rollout]) -> Batch:
    total = sum(example.num_sampled for example in examples)
    return Batch(
        rollouts=tuple(examples),
        advantages=tuple(np.zeros(len(example), dtype=np.float32) for example in examples),
        weights=tuple((example.loss_mask / total).astype(np.float32) for example in examples),
        loss="supervised",
        version=0,
    )


def _key(recipe: Recipe, given: UserInputs) -> str:
    """A hash of everything that decides the warmed-up weights."""
    settings, inputs, train, sampling = to_dict(recipe), fingerprint_inputs(recipe, given), recipe.train, recipe.sampling
    parts = {
        **{name: settings[name] for name in ("model", "tasks", "warmup", "seed", "exact")},
        "reward_weights": recipe.reward.weights,
        "inputs": [content for key, (_, content) in inputs.items() if not key.startswith(("evaluate.", "held_out", "train."))],
        "success_at": recipe.evaluate.success_at,
        "optimizer": [train.beta1, train.beta2, train.weight_decay, train.max_grad_norm],
        "sampling": [sampling.max_tokens, sampling.min_tokens, sampling.stop],
        "versions": [torch.__version__, transformers.__version__, __version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
