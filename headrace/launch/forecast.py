"""Predicts a run's memory. `headrace doctor` reports it, and a run compares it with its real peak."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.engine import adapter_places, blocks_for, engine_kind, free_memory
from headrace.launch.placement import (
    choose_device,
    choose_transport,
    device_of,
    lends,
    receiving_device,
    versions_for_servers,
)
from headrace.model import (
    ModelError,
    ModelShape,
    adapter_shapes,
    bytes_per_number,
    config_limit,
    load_config,
    parameter_shapes,
    quantized_sizes,
    tiny,
)
from headrace.settings import ConfigError
from headrace.staleness import max_untrained_groups
from headrace.sync import transport_class
from headrace.trainer import ParallelSettings, TrainerMemory, match_parameters, predict_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.engine import EngineMemory
    from headrace.envs import PromptEncoder
    from headrace.records import Plain
    from headrace.sync import TransportMemory

    Task = dict[str, Plain]

NUM_CHECKED_PROMPTS = 64
"""Prompts measured of the training tasks and of each held-out source, to estimate the longest."""
_FEWEST_ROLLOUTS = 16
"""The KV cache has room for at least this many, so that a prompt much longer than those measured still fits."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of one run, in bytes."""

    recipe: Recipe
    trainer: TrainerMemory
    engine: EngineMemory
    published: TransportMemory
    """Of one rank and one engine."""
    server: int = 0
    """Memory of the vLLM server behind an engine's process, on the same device."""
    most_blocks: int = 0
    """The most KV blocks an engine can use at once; 0 if unknown."""
    host: int = 0
    """Of a run on GPUs: what the processes of engines here, and the files for their servers, take of this host's memory."""

    @property
    def trainer_process(self) -> int:
        """Size of the trainer's process; inline, it includes the engine."""
        return self.trainer.total + (self.engine.total - self.engine.process if self.recipe.is_inline else 0)

    @property
    def engine_process(self) -> int:
        """Size of the engine's process, without any server behind it. On a CPU, weights mapped into it count."""
        return self.trainer_process if self.recipe.is_inline else self.engine.total + self.published.engine

    @property
    def fullest_device(self) -> int:
        """Bytes on the machine, or on the fullest GPU: if there are several, the trainer's ranks have the first, engines share
        the rest. Some receive weights on the first rank's, for servers elsewhere."""
        ranks = self.recipe.ranks_here
        others = torch.cuda.device_count() - ranks if choose_device(self.recipe) == "cuda" else 0
        if others < 1:
            return self.together
        count, first = self.recipe.engines_here, device_of(self.recipe, "trainer")
        beside = sum(receiving_device(self.recipe, index) == first for index in range(count)) if ranks else 0
        engines = math.ceil(count / others) * (self.server + (0 if beside else self.engine.total))
        training, waiting = self.trainer.total + self._spare(trains=True), self.trainer.resident + self._spare(trains=False)
        trainer = max(training, waiting) + self.published.exported if ranks else 0
        return max(trainer + beside * self.engine.total, engines)

    @property
    def together(self) -> int:
        """Trainer and engines on one device: the larger of training (engines may sleep) and generating."""
        settings, beside = self.recipe.engine, self.server - (self.trainer.process if self.recipe.is_inline else 0)
        ranks = self.recipe.ranks_here
        ranks = min(1, ranks) if choose_device(self.recipe) == "cuda" else ranks  # of one device
        num_engines = self.recipe.engines_here
        training = ranks * self.trainer.total + num_engines * (self.engine.asleep(settings.sleep) + beside)
        generating = ranks * self.trainer.resident + num_engines * (self.engine.total + beside)
        exported = self.published.exported if ranks else 0
        return exported + max(training + self._spare(trains=True), generating + self._spare(trains=False))

    def _spare(self, *, trains: bool) -> int:
        """Of the engine on the trainer's device (`engine.lend`), which sleeps while it trains; on a CPU its weights stay."""
        if not lends(self.recipe):
            return 0
        asleep = "weights" if choose_device(self.recipe) == "cuda" else "cache"
        return self.engine.asleep(asleep if trains else "never")


def forecast_memory(
    recipe: Recipe,
    shape: ModelShape,
    *,
    context: int,
    longest_prompt: int,
    num_held_out: int = 0,
    num_parameters: int = 0,
    is_single_turn: bool = True,
) -> Forecast:
    """The memory on this machine. `context`: tokens a rollout may have at most. A user's environment may use any number of
    turns and rollouts, so that only the slots limit its KV cache."""
    device = choose_device(recipe)
    on_gpu, most_blocks = device == "cuda", 0
    if is_single_turn:
        most_blocks = max_kv_blocks(recipe, context=context, longest_prompt=longest_prompt, num_held_out=num_held_out)
    engine, server = engine_kind(recipe.engine).predict_memory(
        recipe,
        shape,
        context=context,
        free=free_memory(torch.device(device_of(recipe, "engine"))),
        most_blocks=most_blocks,
        on_gpu=on_gpu,
        total=torch.cuda.mem_get_info()[1] if on_gpu else 0,
    )
    published_bytes = bytes_per_number(recipe.model.dtype) * shape.matrices + 4 * shape.vectors
    shapes = _adapter_of(recipe)
    if shapes:
        published_bytes = sum(map(math.prod, shapes.values())) * bytes_per_number(recipe.model.dtype)
        engine = _with_adapter(engine, recipe, shapes, on_gpu=on_gpu)
    published = transport_class(choose_transport(recipe)).memory(published_bytes, on_gpu=on_gpu)
    # Each rank of a shard sends an equal part; an adapter is whole on every rank, and the first sends it.
    senders = 1 if shapes else recipe.train.parallel.shard
    published = dataclasses.replace(published, trainer=published.trainer // senders, exported=published.exported // senders)
    trainer = _trainer_memory(
        recipe,
        shape,
        adapter=shapes,
        longest=min(context, longest_prompt + recipe.sampling.max_tokens),
        on_gpu=on_gpu,
        num_parameters=num_parameters,
        publishing=published.trainer,
    )
    host = recipe.engines_here * engine.host
    if host:
        host += versions_for_servers(recipe, device=device) * published_bytes
    return Forecast(recipe, trainer, engine, published, server, most_blocks, host)


def _trainer_memory(
    recipe: Recipe,
    shape: ModelShape,
    *,
    adapter: Mapping[str, Sequence[int]],
    longest: int,
    on_gpu: bool,
    num_parameters: int,
    publishing: int = 0,
) -> TrainerMemory:
    """Of one rank, for rollouts of at most `longest` tokens. `adapter`: shapes of its tensors."""
    is_own_reference = adapter and not recipe.train.reference  # with its adapter off
    num_pairs = sum(name.endswith("lora_A.weight") for name in adapter)
    return predict_memory(
        shape,
        recipe.train,
        dtype=recipe.model.dtype,
        tokens=tokens_per_pass(recipe, longest=longest),
        on_gpu=on_gpu,
        num_parameters=num_parameters,
        frozen=frozen_sizes(recipe),
        num_references=(bool(recipe.train.kl) and not is_own_reference) + bool(recipe.train.teacher),
        publishing=publishing,
        adapter=sum(map(math.prod, adapter.values())),
        adapter_width=recipe.lora.rank * num_pairs // shape.layers,
        quantized=quantized_sizes(recipe.model, recipe.lora) if recipe.lora.is_quantized else (),
        replays=recipe.engine.record_routing,
    )


def _with_adapter(engine: EngineMemory, recipe: Recipe, shapes: Mapping[str, Sequence[int]], *, on_gpu: bool) -> EngineMemory:
    width, places = bytes_per_number(recipe.model.dtype), adapter_places(recipe.partial)
    size = sum(map(math.prod, shapes.values())) * width
    older = size * (places - 1) if on_gpu else 0  # not released while the engine sleeps
    first = sum(math.prod(each) for name, each in shapes.items() if name.endswith("lora_A.weight"))
    behind = first * width * places if on_gpu else 0  # behind the weights they multiply with
    return dataclasses.replace(engine, weights=engine.weights + size + behind, steps=engine.steps + older, staging=size)


def _adapter_of(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapter's tensors; none without one."""
    return adapter_shapes(recipe.model, recipe.lora) if recipe.lora.is_on else {}


def check_division(recipe: Recipe) -> None:
    """Raise if an engine's GPUs cannot divide the model, by its config alone."""
    if recipe.engine.vllm.shards > 1:
        engine_kind(recipe.engine).check_model(recipe, ModelShape.of(_config_of(recipe)))


def check_sft_memory(recipe: Recipe) -> None:
    """Raise if SFT cannot fit its GPU: it trains all weights in one process, before the ranks start."""
    if not (recipe.sft.is_on and recipe.train.parallel.is_on and choose_device(recipe) == "cuda"):
        return
    needed = predict_memory(
        ModelShape.of(_config_of(recipe)),
        dataclasses.replace(recipe.train, parallel=ParallelSettings()),
        dtype=recipe.model.dtype,
        tokens=recipe.train.micro_batch_tokens,
        num_parameters=sum(map(math.prod, parameter_shapes(recipe.model).values())),
    ).total
    total = torch.cuda.mem_get_info()[1]
    if needed > total:
        raise ConfigError(
            f"sft: it trains all weights on one GPU, whatever train.parallel says: it needs {needed / 1e9:,.1f} GB, predicted, "
            f"and the GPU has {total / 1e9:,.1f}; leave [sft] out, and set model.path to a model that is fine-tuned already"
        )


def _config_of(recipe: Recipe) -> Any:  # noqa: ANN401  (transformers' configs share no typed surface)
    is_tiny = recipe.model.path == tiny.NAME
    return tiny.build_config(recipe.model, tiny.build_tokenizer()) if is_tiny else load_config(recipe.model.path)


def describe_memory(recipe: Recipe) -> str:
    """The predicted memory of each of a trainer's ranks and of each engine's GPU, from the model's config alone, for the device
    the recipe names."""
    try:
        config = _config_of(recipe)
    except ModelError as error:
        return f"memory     of the trainer's ranks and engines is not predicted: {error}"
    shape, context = ModelShape.of(config), config_limit(config, recipe.model.context)
    return "\n".join((_describe_ranks(recipe, shape, context=context), *_describe_engines(recipe, shape, context=context)))


def _describe_ranks(recipe: Recipe, shape: ModelShape, *, context: int) -> str:
    memory = _trainer_memory(
        recipe,
        shape,
        adapter=_adapter_of(recipe),
        longest=min(context, recipe.model.context or recipe.train.micro_batch_tokens),
        on_gpu=recipe.device != "cpu",
        num_parameters=sum(map(math.prod, parameter_shapes(recipe.model).values())),
    )
    device, whole = "CPU" if recipe.device == "cpu" else "GPU", memory.gathered + max(memory.head, memory.layer)
    state = memory.masters + memory.gradients + memory.moments
    return (
        f"memory     {memory.total / 1e9:,.1f} GB on each of {recipe.train.parallel.ranks} trainer ranks, predicted for a "
        f"{device}: weights {memory.weights / 1e9:,.1f}, optimizer {state / 1e9:,.1f}, references "
        f"{memory.references / 1e9:,.1f}, activations of {memory.tokens} tokens {memory.activations / 1e9:,.1f}, whole layers "
        f"and workspace {whole / 1e9:,.1f}{_too_large(recipe, memory.total)}"
    )


def _describe_engines(recipe: Recipe, shape: ModelShape, *, context: int) -> list[str]:
    memory, adapter = engine_kind(recipe.engine).gpu_memory(recipe, shape, context=context), _adapter_of(recipe)
    if recipe.device == "cpu" or not memory.total:
        return []
    if adapter:
        memory = _with_adapter(memory, recipe, adapter, on_gpu=True)
    parts = {
        "weights": memory.weights,
        "an update beside them": memory.staging,
        "KV cache": memory.cache,
        "temporaries": memory.steps,
    }
    counted = ", ".join(f"{part} {size / 1e9:,.1f}" for part, size in parts.items() if size)
    further = " and ".join(part for part in ("KV cache", "temporaries") if not parts[part])
    return [
        f"memory     {memory.total / 1e9:,.1f} GB on each GPU of {recipe.engine.count or 'the'} engines, predicted: {counted}"
        f"{f'; {further} not counted' if further else ''}{_too_large(recipe, memory.total)}"
    ]


def _too_large(recipe: Recipe, needed: int) -> str:
    """For this host's GPU, if it has one."""
    total = torch.cuda.mem_get_info()[1] if recipe.device != "cpu" and torch.cuda.is_available() else needed
    return "" if needed <= total else f": more than the {total / 1e9:,.1f} GB of a GPU here"


def describe_adapter(recipe: Recipe) -> str:
    """What is trained, and what share of the model that is. Raises if a target is no layer of the model."""
    shapes = adapter_shapes(recipe.model, recipe.lora)
    count, total = (sum(map(math.prod, each.values())) for each in (shapes, parameter_shapes(recipe.model)))
    layers = f"rank {recipe.lora.rank} on {len(shapes) // 2} linear layers"
    if recipe.lora.is_quantized:
        in_four_bits = sum(quantized_sizes(recipe.model, recipe.lora))
        layers += f"; {in_four_bits / total:.0%} of the model is in {recipe.lora.quantize} while it is trained"
    return f"adapter    {count / 1e6:,.2f} million parameters are trained, {count / total:.2%} of the model's: {layers}"


def frozen_sizes(recipe: Recipe) -> list[int]:
    """Numbers in each matrix that `train.parameters` freezes; the model's config tells their names and sizes."""
    if not any(group.freeze for group in recipe.train.parameters):
        return []
    shapes = parameter_shapes(recipe.model)
    groups = match_parameters(recipe.train.parameters, shapes)
    return [math.prod(shapes[name]) for name, group in groups.items() if group.freeze and len(shapes[name]) > 1]


def max_kv_blocks(recipe: Recipe, *, context: int, longest_prompt: int, num_held_out: int) -> int:
    """The most KV blocks an engine can use at once (0: no prompt is known): within its slots, for its share of the rollouts the
    gate admits plus an evaluation, each as long as the longest prompt seen plus `sampling.max_tokens`, with some headroom."""
    if not longest_prompt:
        return 0
    engine, longest = recipe.engine, min(context, longest_prompt + recipe.max_tokens)
    least = math.ceil(longest / engine.block_size) + 1
    if 0 < engine.kv_blocks < least:
        tokens = f"{longest} tokens (longest prompt {longest_prompt} + sampling.max_tokens {recipe.max_tokens})"
        raise ConfigError(
            f"engine.kv_blocks = {engine.kv_blocks}: one rollout of {tokens} needs {least}; raise it, or leave it 0"
        )
    groups = max_untrained_groups(recipe) or engine.slots * engine.num_engines
    in_flight = groups * recipe.train.group_size + num_held_out * recipe.evaluate.rollouts_per_task
    rollouts = max(_FEWEST_ROLLOUTS, min(engine.slots, math.ceil(in_flight / engine.num_engines)))
    return min(
        blocks_for(rollouts, tokens=longest, block_size=engine.block_size),
        blocks_for(engine.slots, tokens=context, block_size=engine.block_size),
    )


def tokens_per_pass(recipe: Recipe, *, longest: int) -> int:
    """Tokens in the largest forward pass: `train.micro_batch_tokens`, unless a step has fewer or a rollout more."""
    rollouts = math.ceil(recipe.train.groups_per_batch / recipe.train.mini_batches) * recipe.train.group_size
    return max(longest, min(recipe.train.micro_batch_tokens, rollouts * longest))


def longest_prompt(rows: Iterable[Task], encoder: PromptEncoder, *, held_out: Mapping[str, Sequence[Task]]) -> int:
    """Tokens in the longest of these prompts and the first held-out ones. A prompt that cannot be encoded fails when used."""
    lengths = []
    for row in itertools.chain(rows, *(source[:NUM_CHECKED_PROMPTS] for source in held_out.values())):
        prompt: Any = row["prompt"]
        try:
            lengths.append(len(encoder.encode(prompt, row.get("chat_template_kwargs"))))
        except Exception:  # noqa: BLE001  (a template may raise anything)
            continue
    return max(lengths, default=0)


def count_parameters(folder: Path) -> int:
    """From the folder's safetensors headers; 0 if there are none."""
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{file}: not a whole safetensors file ({error})") from error
    return count
