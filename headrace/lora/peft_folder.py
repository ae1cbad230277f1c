"""Reads and writes adapters as PEFT does: `adapter_config.json` beside `adapter_model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.lora.settings import ALL, LoraSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
KEPT_BASE = "base"
"""In a run's folder, beside `checkpoints`: the model that its adapters belong to, if that was made for the run."""
_PREFIX = "base_model.model."
_ALL_LINEAR = "all-linear"
_READ = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora"}
_READ |= {"target_modules", "target_parameters", "modules_to_save"}
_HARMLESS = {"task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "lora_dropout"}
_HARMLESS |= {"layers_pattern", "megatron_core", "qalora_group_size"}  # of others, which are refused
_HARMLESS |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # of `init_lora_weights`
_SUPPORTED: dict[str, tuple[str | bool, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),  # others subtract the first product from the model
    "revision": ("main",),
}
"""The values of other settings that change nothing, beside those that mean off: None, False and empty ones."""


class AdapterError(ValueError):
    """An adapter cannot be used; the message says which and why."""


def to_peft(settings: LoraSettings, tensors: Iterable[str], *, base: str, expert_weights: Iterable[str] = ()) -> dict[str, Any]:
    """PEFT's `LoraConfig` of an adapter with tensors of these names; `base` is the model it belongs to, `expert_weights` are
    the parameters of experts among its targets."""
    of_experts = {path.rpartition(".")[0] for path in expert_weights}
    layers = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    layers = {layer for layer in layers if layer.partition(".base_layer")[0] not in of_experts}
    named = [target for target in settings.targets if any(f".{layer}".endswith(f".{target}") for layer in layers)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers} if ALL in settings.targets else named),
        "modules_to_save": list(settings.whole) or None,
        "target_parameters": sorted({".".join(path.split(".")[-2:]) for path in expert_weights}) or None,
        "use_rslora": settings.rslora,
        "inference_mode": True,
    }


def base_of(path: str) -> str:
    """The model that an adapter in this folder belongs to; "" if the folder holds no adapter."""
    file = Path(path) / CONFIG_FILE
    named = str(_read_json(file).get("base_model_name_or_path") or "") if file.is_file() else ""
    kept = Path(path).absolute().parent.parent / KEPT_BASE  # a run's folder may have been moved since
    return str(kept) if Path(named).name == KEPT_BASE and kept.is_dir() else named


def read_settings(folder: Path | str) -> LoraSettings:
    """The configuration of an adapter, whoever wrote it. Raises if it asks for what is not supported."""
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        raise AdapterError(f"{folder}: there is no adapter, for it has no {CONFIG_FILE}")
    given = _read_json(file)
    if given.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type = {given.get('peft_type')!r}; only LORA is supported")
    for key in sorted(given.keys() - _READ - _HARMLESS):
        if given[key] and given[key] not in _SUPPORTED.get(key, ()):
            raise AdapterError(f"{file}: {key} = {given[key]!r} is not supported; merge this adapter into its model with peft")
    targets = given.get("target_modules")
    if isinstance(targets, str) and targets != _ALL_LINEAR:
        raise AdapterError(f"{file}: target_modules = {targets!r} is a pattern; write the list of names it stands for")
    try:
        if int(given["r"]) < 1:
            raise ValueError(f"r = {given['r']}")
        parameters = sorted(given.get("target_parameters") or ())
        is_all = targets == _ALL_LINEAR or (targets is None and not parameters)
        return LoraSettings(
            rank=int(given["r"]),
            alpha=float(given["lora_alpha"]),
            targets=(ALL, *parameters) if is_all else (*sorted(targets or ()), *parameters),
            whole=tuple(given.get("modules_to_save") or ()),
            rslora=bool(given.get("use_rslora")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"{file}: it is not a LoRA configuration: {error}") from error


def read_tensors(folder: Path | str) -> dict[str, Tensor]:
    """An adapter's tensors by the names of `Adapter`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(folder) / WEIGHTS_FILE
    if not file.is_file():
        raise AdapterError(
            f"{folder}: it has no {WEIGHTS_FILE}; pickled weights (.bin) can run code as they load, and are refused"
        )
    try:
        return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise AdapterError(f"{file}: it cannot be read: {error}") from error


def write_folder(
    folder: Path, settings: LoraSettings, tensors: Mapping[str, Tensor], *, base: str, expert_weights: Sequence[str] = ()
) -> None:
    """Write an adapter that `peft` loads and vLLM serves."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE, {"format": "pt"}
    )
    config = to_peft(settings, tensors, base=base, expert_weights=expert_weights)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file}: it cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{file}: it is not a LoRA configuration")
    return found
