"""Checks a recipe and builds the roles that carry it out."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.algorithms import (
    ADVANTAGES,
    REFERENCE,
    RETURNS,
    REWARDS,
    TEACHER,
    VALUES,
    columns_to_bring,
    needed_columns,
    resolve_loss,
)
from headrace.engine import engine_kind
from headrace.envs import PromptEncoder, SingleTurn
from headrace.errors import SyncError
from headrace.launch.inputs import UserInputs, check_inputs, open_tasks, reward_functions
from headrace.launch.placement import (
    choose_device,
    choose_transport,
    device_of,
    receiving_devices,
)
from headrace.model import ModelError, load_model, load_tokenizer
from headrace.run import POLICY, Roles, make_canary
from headrace.score import RewardScorer
from headrace.settings import ConfigError
from headrace.staleness import correction_of
from headrace.sync import MemoryTransport, WeightSync, check_host, transport_class
from headrace.trainer import DeviceTrainer, FrozenModel, LocalTrainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from headrace.config import Recipe
    from headrace.engine import Engine
    from headrace.observe import Observer
    from headrace.score import RewardWorkers
    from headrace.sync import Lineage
    from headrace.trainer import PolicyTrainer


def preflight(recipe: Recipe, given: UserInputs) -> None:
    """All checks that need neither a run folder nor a loaded model."""
    check_inputs(recipe, given)
    check_settings(recipe, given)
    path = recipe.model.path
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ModelError(f"model.path = {path!r}: the folder does not exist")


def check_settings(recipe: Recipe, given: UserInputs) -> None:
    """Raise unless this machine and the loss have what the settings need."""
    check_sync(recipe)
    check_engine(recipe)
    check_loss(recipe)
    check_columns(recipe, given)


def check_sync(recipe: Recipe) -> None:
    """Raise unless this machine has what the transport between processes needs."""
    device = choose_device(recipe)
    if recipe.is_inline:
        return
    transport = transport_class(choose_transport(recipe))
    if engine_kind(recipe.engine).has_server and transport.needs_gpu_per_end and device == "cuda":
        places = receiving_devices(recipe)
        if places & {"cpu", device_of(device, "trainer")}:
            raise ConfigError(
                f"sync.transport = '{recipe.sync.transport}': the engine's process receives weights on "
                f"{', '.join(sorted(places))}, and NCCL wants a GPU of its own there; leave it auto"
            )
    try:
        transport.check(folder=recipe.sync.folder, host=recipe.sync.host, on_gpu=device == "cuda")
    except SyncError as error:
        raise ConfigError(str(error)) from error


def check_engine(recipe: Recipe) -> None:
    """Raise unless this machine has what the engine needs."""
    device, kind = choose_device(recipe), engine_kind(recipe.engine)
    if kind.listens_on_host(recipe, device=device):
        try:
            check_host(recipe.sync.host)
        except SyncError as error:
            raise ConfigError(f"{error} (engine.kind = '{kind.name}')") from error
    kind.check_machine(recipe, device=device)


def check_loss(recipe: Recipe) -> None:
    """Raise unless the loss exists and takes `train.constants`."""
    parameters = inspect.signature(resolve_loss(recipe.train.loss)).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
    for name in recipe.train.constants:
        if name not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"train.constants.{name}: the loss {recipe.train.loss!r} takes no {name!r}; it takes: {known}")


def check_columns(recipe: Recipe, given: UserInputs) -> None:
    """Raise unless loss and advantages get every column they need. A user's environment may add any column."""
    train = recipe.train
    wanted = needed_columns(train.loss, correction_of(recipe))
    advantage = ADVANTAGES[train.advantage]
    if advantage.learns_values != (VALUES in wanted):
        setting = f"train.advantage = {train.advantage!r}: the loss {train.loss!r}"
        fix = "trains values; set it to 'gae'" if VALUES in wanted else "trains no values; set train.loss = 'ppo'"
        raise ConfigError(f"{setting} {fix}")
    if given.environment is not None:
        return
    if TEACHER in (*wanted, advantage.made_from) and not train.teacher:
        raise ConfigError("train.teacher = '': there is no teacher to distil from; name a model folder")
    for column in columns_to_bring(train.loss):
        if column not in (RETURNS, REWARDS):
            only = "which only an environment of your own can bring"
            raise ConfigError(f"train.loss = {train.loss!r}: it needs the column {column!r}, {only}")


def special_stops(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the stop strings that are special tokens. Stop strings are searched in text without special tokens, so one that
    mixes a special token with other text would never match and is rejected."""
    special = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    for text in stop:
        inside = next((token for token in special if token in text), "")
        if inside and text not in special:
            reason = f"{inside!r} is a special token, which is not part of the text that stop strings are searched in"
            raise ConfigError(f"sampling.stop = {text!r}: {reason}; write {inside!r} alone, or leave it out of the text")
    return tuple(special[text] for text in stop if text in special)


def build_trainer(recipe: Recipe, model_path: str, *, device: str) -> DeviceTrainer:
    """A trainer and its frozen models: the KL reference (by default the model RL starts from) and the distillation teacher."""
    train = recipe.train
    frozen_paths = {REFERENCE: (train.reference or model_path) if train.kl else "", TEACHER: train.teacher}
    frozen = {
        column: FrozenModel(
            load_model(path, dtype=recipe.model.dtype, device=device, exact=recipe.exact),
            exact=recipe.exact,
            offload="reference" in train.offload,
        )
        for column, path in frozen_paths.items()
        if path
    }
    return DeviceTrainer(
        load_model(model_path, dtype="float32", device=device, exact=recipe.exact),
        tokenizer=load_tokenizer(model_path),
        settings=recipe.train,
        exact=recipe.exact,
        dtype=getattr(torch, recipe.model.dtype),
        frozen=frozen,
    )


def build_roles(
    recipe: Recipe, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage, most_blocks: int = 0
) -> Roles:
    """All roles in this process; the model is loaded twice, to generate and to train."""
    device = choose_device(recipe)
    sync = WeightSync(lineage, MemoryTransport(device), payload=recipe.sync.payload)
    engine, stop_ids = engine_kind(recipe.engine).make_inline(
        recipe, model_path, device=device, sync=sync, timeline=observer.timeline("engine"), most_blocks=most_blocks
    )
    own, timeline = build_trainer(recipe, model_path, device=device), observer.timeline("trainer")
    trainer = LocalTrainer(own, sync=sync, timeline=timeline, frees_memory=recipe.engine.sleeps)
    roles = make_roles(recipe, model_path, given, engine=engine, trainer=trainer, services=(engine.serve,))
    return dataclasses.replace(roles.with_stop_ids(stop_ids), engine_peak=lambda: engine.peak_memory)


def make_roles(
    recipe: Recipe,
    model_path: str,
    given: UserInputs,
    *,
    engine: Engine,
    trainer: PolicyTrainer,
    workers: RewardWorkers | None = None,
    **more: Any,  # noqa: ANN401
) -> Roles:
    """Combine engine and trainer, wherever they run, with the launcher's own roles. `workers` run rewards in threads."""
    encoder = PromptEncoder(load_tokenizer(model_path))
    return Roles(
        engine=engine,
        trainers={POLICY: trainer},
        scorer=RewardScorer(reward_functions(recipe, given), decode=encoder.decode, settings=recipe.reward, workers=workers),
        environment=given.environment or SingleTurn(),
        encoder=encoder,
        tasks=open_tasks(recipe, given),
        canary=make_canary(encoder.encode(open_tasks(recipe, given).next()["prompt"])),
        stop_ids=special_stops(recipe.sampling.stop, encoder.tokenizer),
        **more,
    )
