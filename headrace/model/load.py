"""Loads a model and its tokenizer, and rejects by name, before anything runs, what cannot be served exactly.

Weights are read from safetensors alone, since pickles run code as they load, and a model's own code is never run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_NAME, logging as transformers_logging

from headrace.lora import Adapter, adapter_of, add_adapter, base_of, find_quantized, find_targets, read_settings, read_tensors
from headrace.model import attention, experts, tiny
from headrace.model.arena import held_tensors
from headrace.model.head import Head
from headrace.model.weight_files import HELD_AS, WeightFiles, find_paths, loaded_dtypes, parameters_on_meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.lora import LoraSettings
    from headrace.model.arena import Arena
    from headrace.model.settings import ModelSettings

_WIDE = "headrace_wide_residual"
_ROUTER = re.compile(r"Top[kK]Router$")
_MATRIX = 2
_PROBED = 5  # tokens
SERVED_LAYERS = {"full_attention", "sliding_attention"}


class ModelError(ValueError):
    """The model does not exist or cannot be served; the message says why."""


def lacks_safetensors(path: str) -> ModelError:
    """The error for a model whose weights are missing, or pickled."""
    load = f"AutoModelForCausalLM.from_pretrained({path!r}, use_safetensors=False, trust_remote_code=False)"
    target = path if Path(path).is_dir() else "converted"
    script = f"from transformers import AutoModelForCausalLM; {load}.save_pretrained({target!r})"
    return ModelError(
        f"model.path = {path!r}: it could not be loaded, for it has no weights in safetensors files. Pickled ones (.bin, .pt) "
        f"can run code as they load, and are refused; if you trust them, convert them: python -c {shlex.quote(script)}"
    )


def load_tokenizer(path: str, settings: ModelSettings | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the hub, with the chat template and its variables that `settings` give."""
    if not (Path(path) / "tokenizer_config.json").is_file():  # PEFT saves an adapter without its model's
        path = base_of(path) or path
    with _explained(path, "tokenizer"):
        tokenizer = cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes an empty one if files are missing
        raise ModelError(f"model.path = {path!r}: there is no tokenizer with it; put tokenizer.json beside the weights")
    if settings is not None:
        set_template(tokenizer, settings)
    return tokenizer


def set_template(tokenizer: PreTrainedTokenizerBase, settings: ModelSettings) -> None:
    """Use the settings' chat template and give it their variables as defaults. They become part of the template, so that no
    caller can forget them and a checkpoint behaves in any server as it was trained; a caller's own variables still win."""
    if settings.chat_template:
        tokenizer.chat_template = Path(settings.chat_template).read_text(encoding="utf-8")
    before: Any = tokenizer.chat_template
    if not settings.chat_template_kwargs or before is None:
        return
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_jinja(value)} %}}{{% endif +%}}"  # +: keeps a newline after it
        for name, value in sorted(settings.chat_template_kwargs.items())
    )
    templates = before if isinstance(before, dict) else {"": before}
    templates = {name: text if text.startswith(defaults) else defaults + text for name, text in templates.items()}
    tokenizer.chat_template = templates if isinstance(before, dict) else templates[""]


def _jinja(value: object) -> str:
    """JSON is Jinja, except for null."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_jinja(str(key))}: {_jinja(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def load_generation(path: str) -> GenerationConfig:
    """The generation config, which names the stop tokens, as `load_model` finds it."""
    path = base_of(path) or path
    with _explained(path, "model"):
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:  # no such file: transformers falls back on the model's config
            return GenerationConfig.from_model_config(AutoConfig.from_pretrained(path, trust_remote_code=False))


def load_config(path: str) -> Any:  # noqa: ANN401  (transformers' configs share no typed surface)
    """The config in a folder or on the hub, checked by `check_config`."""
    path = base_of(path) or path
    with _explained(path, "model"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_config(config, path)
    return config


def parameter_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Of every parameter, by name, from the model's config alone; tied ones under their first name."""
    return {name: tuple(parameter.shape) for name, parameter in _without_weights(settings).named_parameters()}


def adapter_shapes(settings: ModelSettings, lora: LoraSettings) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the adapter that would be added, by name, from the model's config alone."""
    found = read_settings(settings.path) if base_of(settings.path) else lora
    return Adapter.shapes(find_targets(_without_weights(settings), found), found)


def quantized_sizes(settings: ModelSettings, lora: LoraSettings) -> list[int]:
    """Numbers in each weight that the trainer holds in 4 bits, from the model's config alone."""
    return [layer.weight.numel() for layer in find_quantized(_without_weights(settings), lora).values()]


def _without_weights(settings: ModelSettings) -> PreTrainedModel:
    is_tiny = settings.path == tiny.NAME
    config = tiny.build_config(settings, tiny.build_tokenizer()) if is_tiny else load_config(settings.path)
    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))


def load_plain(path: str, *, dtype: str) -> PreTrainedModel:
    """A model on the CPU as transformers loads it, checked that it has all its weights."""
    load_config(path)
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with _explained(path, "model"):
            # Have mismatches listed rather than raised: transformers' error does not name them.
            told: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False, **told
            )
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    model, report = loaded
    _check_weights(model, report, path)
    return cast("PreTrainedModel", model)


def load_model(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    exact: bool = False,
    lora: LoraSettings | None = None,
    seed: int = 0,
    in_parts: bool = False,
) -> PreTrainedModel:
    """A causal language model ready for `attention_context=`, checked that we serve it exactly. If the folder holds an adapter,
    the model it belongs to, with it; otherwise with a new one if `lora` asks for it, made from `seed`. `in_parts`: its weights
    may be left in their files (`take_files`); who reads them then calls `probe`."""
    folder, path = path, base_of(path) or path
    found = lora if folder == path else read_settings(folder)
    needs_weights = any(each.is_quantized or each.whole for each in (lora, found) if each is not None)
    model = _load_without_weights(path, dtype=dtype) if in_parts and not needs_weights else None
    is_whole = model is None
    model = prepare(model or load_plain(path, dtype=dtype), name=path, exact=exact)
    if is_whole:
        model = cast("PreTrainedModel", cast("nn.Module", model).to(device))  # transformers wraps `to` and loses its types
    if folder != path:
        assert found is not None
        if lora is not None and lora.is_on and lora.to_plain() != found.to_plain():
            raise ModelError(
                f"model.path = {folder!r}: its adapter has {found.to_plain()}, and [lora] {lora.to_plain()}; set these"
            )
        own = find_targets(model, found).keys()
        if lora is not None and lora.is_on and (odd := sorted(find_targets(model, lora).keys() ^ own)):
            raise ModelError(
                f"model.path = {folder!r}: its adapter and lora.targets = {list(lora.targets)} differ in {len(odd)} layers, "
                f"such as {odd[0]}; set lora.targets to the adapter's: {sorted({name.rpartition('.')[2] for name in own})}"
            )
        add_adapter(model, found, tensors=read_tensors(folder))
    elif lora is not None and lora.is_on:
        add_adapter(model, lora, seed=seed)
    return model


def _load_without_weights(path: str, *, dtype: str) -> PreTrainedModel | None:
    """A model whose parameters are on the meta device and wait in its files. None if only transformers can read those."""
    config = load_config(path)
    if any(getattr(config, name, None) is not None for name in ("quantization_config", "transformers_weights")):
        return None  # quantized, or in a file of another name
    with _explained(path, "model"):
        with parameters_on_meta():
            model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)))
        files = WeightFiles(model, find_paths(path), dtypes=loaded_dtypes(model, getattr(torch, dtype)))
    if not files.has_all:
        return None
    model.generation_config = load_generation(path)
    cast("Any", model)._weight_conversions = files.used
    model.__dict__[HELD_AS] = files
    return model


def read_pieces(model: PreTrainedModel, arena: Arena, files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """What the arena holds of each tensor of the model, one by one, in one dimension."""
    parameters = dict(model.named_parameters())
    for name, view in arena:
        first = arena.first.get(name, 0)
        piece = files.read(name, first, first + view.numel()) if view.numel() else view
        if name in parameters and not piece.sum(dtype=torch.float32).isfinite():
            raise ModelError(f"model.path = {model.name_or_path!r}: the weights cannot be used: {name} holds NaN or infinity")
        yield name, piece


@torch.no_grad()
def prepare(model: PreTrainedModel, *, name: str, exact: bool = False) -> PreTrainedModel:
    """Install our attention, and `probe` the model unless its weights have not been read yet."""
    attention.register()
    experts.register()
    check_config(model.config, name)
    model.eval()
    _widen_residual(model)
    if next(model.parameters()).is_meta:
        _use_ours(model, exact=exact)
    else:
        probe(model, name=name, exact=exact)
    return model


def _use_ours(model: PreTrainedModel, *, exact: bool) -> None:
    model.set_attn_implementation(attention.NAME)
    if model._can_set_experts_implementation():
        # If exact, one product per token and expert: a token's bits must not depend on how many others chose its expert.
        model.set_experts_implementation("batched_mm" if exact else experts.NAME)


@torch.no_grad()
def probe(model: PreTrainedModel, *, name: str, exact: bool = False) -> None:
    """Raise unless every layer uses our attention, and our logprobs equal the model's own; without its adapter, if any."""
    adapter, generator = adapter_of(model), torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    vocabulary = cast("Tensor", model.get_input_embeddings().weight).shape[0]
    tokens = torch.randint(vocabulary, (_PROBED,), generator=generator).to(device)
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with contextlib.nullcontext() if adapter is None else adapter.off():
        with _precision(model, device):
            own = torch.log_softmax(model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0].float(), dim=-1)
        _use_ours(model, exact=exact)
        _compare(model, f"model {name!r} ({model.config.model_type}) cannot be served", tokens, own)


def narrow(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert a model in place to what an engine that runs it in `dtype` holds; the caller keeps the digits it needs."""
    for name, tensor in held_tensors(model):
        tensor.data = tensor.data.to(served_dtype(model, name, tensor, dtype))
    _widen_residual(model)


def _widen_residual(model: PreTrainedModel) -> None:
    """Make the residual stream, norms and routers of a bfloat16 or float16 model float32; other matrices, their products and
    the cache stay narrow."""
    dtype = next(p for p in model.parameters() if p.ndim >= _MATRIX).dtype
    if dtype in (torch.bfloat16, torch.float16) and not hasattr(model, _WIDE):
        setattr(model, _WIDE, dtype)
        model.get_input_embeddings().register_forward_hook(lambda module, given, embedded: embedded.float())
        for module in filter(is_router, model.modules()):
            put_before(module, _WideRouter)
        for name, tensor in held_tensors(model):
            tensor.data = tensor.data.to(served_dtype(model, name, tensor, dtype))


def served_dtype(model: PreTrainedModel, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype an engine in `dtype` gives a tensor. Transformers keeps some float32, such as DeepSeek's router biases."""
    if not tensor.is_floating_point():
        return tensor.dtype
    always = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    is_wide = tensor.ndim < _MATRIX or is_router(model.get_submodule(name.rpartition(".")[0]))
    return torch.float32 if is_wide or not always.isdisjoint(name.split(".")) else dtype


def is_router(module: nn.Module) -> bool:
    return _ROUTER.search(type(module).__name__) is not None


class _WideRouter:
    """A router that computes in float32, whatever the precision of the products around it."""

    def forward(self, hidden: Tensor, *given: Any) -> Any:  # noqa: ANN401  (a router's inputs and outputs)
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float(), *given)  # type: ignore[misc]


def put_before(module: Any, mixin: type) -> None:  # noqa: ANN401
    """Put `mixin` before the module's class, once. A class and not a hook, so that compiled layers share their code."""
    if not isinstance(module, mixin):
        module.__class__ = _combined(mixin, module.__class__)


@functools.cache
def _combined(mixin: type, kind: type) -> type:
    return type(kind.__name__, (mixin, kind), {})


def can_group_experts(model: PreTrainedModel) -> bool:
    """Whether its experts run as grouped products, in shapes that depend on no token's choice; true of dense models."""
    text = model.config.get_text_config()
    is_dense = not any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return is_dense or model._can_set_experts_implementation()


def check_config(config: Any, name: str) -> None:  # noqa: ANN401  (transformers' configs share no typed surface)
    """Reject architectures with layers outside the attention interface."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    odd = sorted(kinds - SERVED_LAYERS)
    if odd:
        raise ModelError(
            f"model {name!r} ({text.model_type}) has layers of kind {', '.join(odd)}; the native engine serves decoders made "
            f"of full or sliding attention and would serve this one wrongly"
        )
    if getattr(text, "is_encoder_decoder", False):
        raise ModelError(f"model {name!r} ({text.model_type}) is an encoder-decoder; only decoders are served")


def context_limit(model: PreTrainedModel, wanted: int) -> int:
    """The most tokens a rollout may have: `wanted`, or if 0 the model's own limit."""
    return config_limit(model.config, wanted)


def config_limit(config: Any, wanted: int) -> int:  # noqa: ANN401
    """`context_limit` from the config alone."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 4096
    if wanted > limit:
        raise ModelError(f"model.context = {wanted}: the model takes at most {limit} tokens")
    return wanted or int(limit)


def hidden_states(model: PreTrainedModel, token_ids: Tensor, positions: Tensor, context: attention.AttentionContext) -> Tensor:
    """[tokens, hidden] of a packed forward pass; `use_cache=False` keeps transformers from guessing boundaries."""
    with _precision(model, token_ids.device):
        output = model.base_model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attention_context=context
        )
    return cast("Tensor", output.last_hidden_state[0])


def _precision(model: PreTrainedModel, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast for a model with a wide residual stream. Without autocast's cache, which threads share: a graph being captured
    could hold a cast bias that the decode thread frees, or the reverse."""
    narrow_dtype: torch.dtype | None = getattr(model, _WIDE, None)
    if narrow_dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, narrow_dtype, cache_enabled=False)


def _check_weights(model: PreTrainedModel, report: dict[str, Any], path: str) -> None:
    """Check that every weight was loaded and is finite: transformers initialises missing ones at random."""
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    for name, found, wanted in sorted(report["mismatched_keys"]):
        wrong.append(f"{name} has shape {tuple(found)} instead of {tuple(wanted)}")
    if not wrong:  # a sum is NaN or infinite if a number is, and needs no temporary of the weight's size
        sums = {name: weight.detach().sum(dtype=torch.float32) for name, weight in model.named_parameters()}
        wrong = [f"{name} holds NaN or infinity" for name, total in sums.items() if not total.isfinite()]
    if wrong:
        others = f"; and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
        raise ModelError(f"model.path = {path!r}: the weights are not those of its config.json: {wrong[0]}{others}")


class _CountingContext(attention.PackedContext):
    layers: set[int]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: attention.AttentionSpec) -> Tensor:
        self.layers.add(attention.layer_of(module))
        return super().attend(module, query, key, value, spec)


def _compare(model: PreTrainedModel, refusal: str, tokens: Tensor, own: Tensor) -> None:
    """One forward pass over the tokens twice, as two documents: every layer must use the hook, neither document may see the
    other, and logprobs must equal the model's `own`, [tokens, vocabulary]."""
    count, is_wide = len(tokens), next(model.parameters()).dtype == torch.float32
    context = _CountingContext([count, count], device=tokens.device)
    context.layers = set()
    positions = torch.arange(count, device=tokens.device)
    try:
        hidden = hidden_states(model, tokens.repeat(2), positions.repeat(2), context)
    except (attention.AttentionError, TypeError) as error:
        raise ModelError(f"{refusal}: {error}") from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    leak = float((hidden[:count] - hidden[count:]).abs().max() / hidden.abs().max().clamp_min(1e-6))
    if len(context.layers) != layers or leak > (1e-4 if is_wide else 5e-2):
        raise ModelError(
            f"{refusal} exactly: {len(context.layers)} of {layers} layers use the attention interface, packed documents "
            f"differ by {leak:.1e}"
        )
    try:  # of the median token: in bfloat16 a router may send some token to another expert than in transformers
        ours = torch.log_softmax(Head(model).logits(hidden[:count]), dim=-1)
        difference = float((ours - own).abs().amax(dim=-1).median())
    except RuntimeError:  # hidden states are not as wide as the head's rows
        difference = float("inf")
    noise = 1e-3 if is_wide else 0.05  # the most seen with bfloat16 is 0.013
    if not difference <= noise * max(1.0, float(own.max() - own.min())):
        raise ModelError(
            f"{refusal}: logprobs computed from its hidden states differ from its own by {difference:.1e}, so it treats "
            f"positions, hidden states or logits in a way unknown to Headrace"
        )


@contextlib.contextmanager
def _explained(path: str, what: str) -> Iterator[None]:
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1  # a hub's name is `owner/name`
    if is_local and not Path(path).exists():
        raise ModelError(f"model.path = {path!r}: the folder does not exist")
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ModelError):
            raise
        place = "the folder does not exist, and it" if not Path(path).exists() else "it"
        if isinstance(error, OSError) and SAFE_WEIGHTS_NAME in str(error):
            raise lacks_safetensors(path) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):  # transformers' advice is to set it
            reason = "it needs Python code of its own (auto_map), which is never run; name a model that transformers itself has"
        if "connect to" in reason:
            reason += " Without a network, name a folder that has the model; HF_HUB_OFFLINE=1 skips the retries."
        raise ModelError(f"model.path = {path!r}: {place} could not be loaded as a {what}: {reason}") from error
