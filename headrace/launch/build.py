"""Checks a recipe and builds the roles that carry it out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from headrace.algorithms import (
    ADVANTAGES,
    REFERENCE,
    RETURNS,
    REWARDS,
    TEACHER,
    VALUES,
    check_loss,
    columns_to_bring,
    needed_columns,
)
from headrace.engine import engine_kind
from headrace.envs import ProcessEnvironment, PromptEncoder, ToolEnvironment, make_environment
from headrace.errors import SyncError
from headrace.imports import import_name
from headrace.launch.forecast import check_division, check_sft_memory
from headrace.launch.inputs import (
    UserInputs,
    check_inputs,
    num_examples,
    open_examples,
    open_sampler,
    open_tasks,
    reward_functions,
)
from headrace.launch.placement import (
    check_ranks,
    choose_device,
    choose_transport,
    receiving_devices,
    shares_device,
    trainer_devices,
    why_not_lent,
)
from headrace.lora import base_of, has_bitsandbytes, hold_in_four_bits, read_tensors
from headrace.model import (
    ModelError,
    ModelShape,
    adapter_shapes,
    load_config,
    load_model,
    load_tokenizer,
    parameter_shapes,
    tiny,
)
from headrace.records import SAMPLED_ENTROPY
from headrace.run import POLICY, Roles, make_canary
from headrace.score import RewardScorer, TrainerState
from headrace.settings import ConfigError, to_dict
from headrace.staleness import corrections_of
from headrace.sync import MemoryTransport, WeightSync, check_host, transport_class
from headrace.trainer import DeviceTrainer, FrozenModel, LocalTrainer, TrainSettings, learning_rate, match_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from headrace.config import Recipe
    from headrace.engine import Engine
    from headrace.envs import Environment
    from headrace.observe import Observer
    from headrace.score import RewardWorkers
    from headrace.sync import Lineage
    from headrace.trainer import PolicyTrainer, Ranks


def preflight(recipe: Recipe, given: UserInputs) -> list[str]:
    """All checks that need neither a run folder nor a loaded model. Returns what to tell the user."""
    notes = check_inputs(recipe, given)
    check_settings(recipe, given)
    if why := why_not_lent(recipe):
        notes.append(f"not lent   engine.lend = true has no effect: {why}")
    path = recipe.model.path
    if recipe.model.dtype == "float32" and path != tiny.NAME and choose_device(recipe) == "cuda":
        notes.append("slow       model.dtype = 'float32' leaves most of a GPU's speed unused; 'bfloat16' does not")
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ModelError(f"model.path = {path!r}: the folder does not exist")
    if base_of(path) and recipe.sft.is_on:
        raise ConfigError(f"model.path = {path!r}: it is an adapter, and SFT trains all weights; merge it first")
    if base_of(path) and recipe.steps and not recipe.lora.is_on:
        raise ConfigError(f"model.path = {path!r}: it is an adapter; set lora.rank to train it further, or merge it first")
    if recipe.cluster.listen and Path(base_of(path) or "").is_absolute():
        raise ConfigError(
            f"model.path = {path!r}: it is an adapter of {base_of(path)}, which other hosts do not fetch; merge it first, or "
            f"leave cluster.listen out"
        )
    if recipe.lora.is_on:
        adapter_shapes(recipe.model, recipe.lora)  # raises for a target that the model does not have
    other = recipe.train.reference if recipe.train.reference_every else ""
    if other:
        own = tiny.build_config(recipe.model, tiny.build_tokenizer()) if path == tiny.NAME else load_config(path)
        if ModelShape.of(load_config(other)) != ModelShape.of(own):
            given_as = f"train.reference_every = {recipe.train.reference_every}: train.reference = {other!r}"
            raise ConfigError(f"{given_as} has another shape than the model, so it cannot take its weights; leave one out")
    return notes


def check_quantization(recipe: Recipe) -> None:
    """Raise unless what `lora.quantize` needs is installed."""
    if recipe.lora.is_quantized and not has_bitsandbytes():
        given = f"lora.quantize = {recipe.lora.quantize!r}: it needs bitsandbytes, which is not installed"
        raise ConfigError(f"{given}; `pip install headrace[qlora]`, or leave it out")


def check_settings(recipe: Recipe, given: UserInputs) -> None:
    """Raise unless this machine and the loss have what the settings need."""
    check_ranks(recipe)
    check_division(recipe)
    check_sync(recipe)
    check_engine(recipe)
    check_loss(recipe.train.loss, recipe.train.constants)
    check_columns(recipe, given)
    check_optimizer(recipe, given)
    check_quantization(recipe)
    check_sft_memory(recipe)


def check_sync(recipe: Recipe) -> None:
    """Raise unless this machine has what the transport between processes needs."""
    device = choose_device(recipe)
    if recipe.is_inline:
        return
    transport = transport_class(choose_transport(recipe))
    if engine_kind(recipe.engine).has_server and transport.needs_gpu_per_end and device == "cuda":
        places = receiving_devices(recipe)
        if places & {"cpu", *trainer_devices(recipe)}:
            raise ConfigError(
                f"sync.transport = '{recipe.sync.transport}': the engine's process receives weights on "
                f"{', '.join(sorted(places))}, and NCCL wants a GPU of its own there; leave it auto"
            )
    try:
        host = recipe.cluster.reached_at or recipe.sync.host
        transport.check(folder=recipe.sync.folder, host=host, on_gpu=device == "cuda")
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


def check_columns(recipe: Recipe, given: UserInputs) -> None:
    """Raise unless loss and advantages get every column they need. A user's environment may add any column."""
    train = recipe.train
    wanted = needed_columns(train.loss, corrections_of(recipe))
    advantage = ADVANTAGES[train.advantage]
    if advantage.learns_values != (VALUES in wanted):
        setting = f"train.advantage = {train.advantage!r}: the loss {train.loss!r}"
        fix = "trains values; set it to 'gae' or 'turn_gae'" if VALUES in wanted else "trains no values; set train.loss = 'ppo'"
        raise ConfigError(f"{setting} {fix}")
    if not given.is_single_turn(recipe):
        return
    if TEACHER in (*wanted, advantage.made_from) and not train.teacher:
        raise ConfigError("train.teacher = '': there is no teacher to distil from; name a model folder")
    for column in columns_to_bring(train.loss):
        if column not in (RETURNS, REWARDS) and not (column == SAMPLED_ENTROPY and recipe.engine.record_entropy):
            only = "which only an environment of your own can bring"
            raise ConfigError(f"train.loss = {train.loss!r}: it needs the column {column!r}, {only}")


def check_optimizer(recipe: Recipe, given: UserInputs) -> None:
    """Raise unless a schedule of the user's returns factors, and each pattern of `train.parameters` matches a parameter."""
    planned = {"train": (recipe.train, recipe.steps)}
    if recipe.sft.is_on and ":" in recipe.sft.schedule:
        num_rows = num_examples(recipe, open_examples(recipe, given).sources)
        planned["sft"] = TrainSettings(schedule=recipe.sft.schedule), math.ceil(num_rows / recipe.sft.batch)
    for section, (settings, steps) in planned.items():
        for version in (0, steps - 1) if steps else ():
            learning_rate(settings, version=version, steps=steps, section=section)
    if recipe.train.parameters:
        match_parameters(recipe.train.parameters, parameter_shapes(recipe.model))


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


def frozen_models(recipe: Recipe, start: str = "") -> dict[str, str]:
    """Column -> path, or "", of the KL reference (by default `start`) and the distillation teacher."""
    return {REFERENCE: (recipe.train.reference or start) if recipe.train.kl else "", TEACHER: recipe.train.teacher}


def build_trainer(
    recipe: Recipe, model_path: str, *, device: str, ranks: Ranks | None = None, places: Mapping[str, str] | None = None
) -> DeviceTrainer:
    """A trainer and its frozen models, which may be in other `places` than the recipe says. One of several `ranks` loads them
    on the host and moves its share to its device, or reads its share alone."""
    train = recipe.train
    device, more = (device, dict[str, Any]()) if ranks is None else ("cpu", {"ranks": ranks})
    in_parts = train.parallel.shard > 1 and ranks is not None
    start = "" if recipe.lora.is_on else model_path  # the policy with its adapter off is the reference
    frozen = {
        column: FrozenModel(
            load_model(
                (places or {}).get(path, path), dtype=recipe.model.dtype, device=device, exact=recipe.exact, in_parts=in_parts
            ),
            exact=recipe.exact,
            offload="reference" in train.offload,
            keep_digits=column == REFERENCE and train.reference_mix < 1,
            **more,
        )
        for column, path in frozen_models(recipe, start).items()
        if path
    }
    dtype = recipe.model.dtype if recipe.lora.is_on else "float32"  # what is not trained needs no more digits
    is_quantized = recipe.lora.is_quantized
    loads_on = "cpu" if is_quantized else device  # where the weights fit before they are in 4 bits
    how: dict[str, Any] = {"lora": recipe.lora, "seed": recipe.seed, "in_parts": in_parts}
    model = load_model(model_path, dtype=dtype, device=loads_on, exact=recipe.exact, **how)
    if is_quantized:
        hold_in_four_bits(model, recipe.lora, device=device)
    trainer = DeviceTrainer(
        model,
        tokenizer=load_tokenizer(model_path, recipe.model),
        settings=recipe.train,
        exact=recipe.exact,
        dtype=getattr(torch, recipe.model.dtype),
        frozen=frozen,
        **more,
    )
    if recipe.lora.is_on and base_of(model_path):
        trainer.optimizer.load_weights(read_tensors(model_path))  # with the digits that model.dtype lacks
    return trainer


def build_roles(
    recipe: Recipe,
    model_path: str,
    given: UserInputs,
    *,
    observer: Observer,
    lineage: Lineage,
    most_blocks: int = 0,
    trains: bool = True,
) -> Roles:
    """All roles in this process; the model is loaded twice, to generate and, if it `trains`, to train. `most_blocks`: the most
    KV blocks an engine can use; 0 if unknown."""
    device = choose_device(recipe)
    sync = WeightSync(lineage, MemoryTransport(device), payload=recipe.sync.payload, adapter=recipe.lora.to_plain())
    engine, stop_ids = engine_kind(recipe.engine).make_inline(
        recipe, model_path, device=device, sync=sync, timeline=observer.timeline("engine"), most_blocks=most_blocks
    )
    trainer = None
    if trains:
        own, timeline = build_trainer(recipe, model_path, device=device), observer.timeline("trainer")
        trainer = LocalTrainer(own, sync=sync, timeline=timeline, frees_memory=recipe.engine.sleeps)
    roles = make_roles(recipe, model_path, given, engine=engine, trainer=trainer, services=(engine.serve,))
    return dataclasses.replace(roles.with_stop_ids(stop_ids), engine_peak=lambda: engine.peak_memory)


def open_environment(recipe: Recipe, model_path: str, given: UserInputs, *, log: Path | None) -> Environment:
    """The environment, in this process or in its own."""
    settings = recipe.environment
    if not settings.processes:
        return make_environment(settings, environment=given.environment, tools=given.tools)
    cls = import_name(settings.name, setting="environment.name") if settings.name else ToolEnvironment
    plain = {**to_dict(settings), "tools": list(given.tools or settings.tools), "processes": 0, "concurrency": 0}
    build = {"model_path": model_path, "model": to_dict(recipe.model), "environment": plain}
    how: dict[str, Any] = {"num": settings.processes, "concurrency": settings.concurrency, "log": log}
    can_resume = bool(settings.options.get("can_resume", getattr(cls, "can_resume", False)))
    may_idle = bool(getattr(cls, "may_idle", False))
    name = settings.name or "tools"
    return cast("Environment", ProcessEnvironment(name, build, can_resume=can_resume, may_idle=may_idle, **how))


def make_roles(
    recipe: Recipe,
    model_path: str,
    given: UserInputs,
    *,
    engine: Engine,
    trainer: PolicyTrainer | None,
    workers: RewardWorkers | None = None,
    log: Path | None = None,
    **more: Any,  # noqa: ANN401
) -> Roles:
    """Combine engine and trainer, wherever they run, with the launcher's own roles. `workers` run rewards in threads; processes
    of the environment write to `log`."""
    encoder = PromptEncoder(load_tokenizer(model_path, recipe.model))
    environment = open_environment(recipe, model_path, given, log=log)
    if isinstance(environment, ProcessEnvironment):
        more["services"] = (*more["services"], environment.serve)
    return Roles(
        engine=engine,
        trainers={} if trainer is None else {POLICY: trainer},
        scorer=RewardScorer(
            reward_functions(recipe, given),
            decode=encoder.decode,
            settings=recipe.reward,
            workers=workers,
            state=TrainerState(max_steps=recipe.steps, seed=recipe.seed),
            max_tokens=recipe.sampling.max_tokens,
        ),
        environment=environment,
        encoder=encoder,
        tasks=open_sampler(recipe, given),
        canary=make_canary(encoder.encode(open_tasks(recipe, given).next().row["prompt"])),
        stop_ids=special_stops(recipe.sampling.stop, encoder.tokenizer),
        shares_device=shares_device(recipe),
        **more,
    )
