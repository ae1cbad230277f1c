"""`headrace serve`: an engine, a tokenizer and a server, without training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging as transformers_logging

from headrace.engine import (
    CompletionServer,
    EngineCore,
    HeldAdapter,
    NativeEngine,
    ServedModel,
    decoder_of,
    stop_tokens,
    url_of,
)
from headrace.launch.placement import pick_device
from headrace.launch.stop import StopRequest
from headrace.lora import AdapterError, add_adapter, base_of, read_settings
from headrace.model import ModelSettings, context_limit, load_model, load_tokenizer, tiny
from headrace.observe import Timeline
from headrace.run import FORMAT, MANIFEST
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync

if TYPE_CHECKING:
    import socket
    from argparse import Namespace
    from collections.abc import Iterator
    from concurrent.futures import Future

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.lora import LoraSettings


def serve(options: Namespace, listener: socket.socket) -> int:
    """Load the model, serve on `listener` until SIGINT or SIGTERM, and return the exit status. `options` are the
    command's (`headrace serve --help`), with `api_token`, `control_token` and `adapters`, (name, folder) of each."""
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    with contextlib.closing(listener):
        core, tokenizer, adapters = _load(options)
        return asyncio.run(_serve(options, core, tokenizer, adapters, listener))


def _load(options: Namespace) -> tuple[EngineCore, PreTrainedTokenizerBase, dict[str, HeldAdapter]]:
    try:
        settings = _check_adapters(options)
        with _model_folder(options) as path:
            tokenizer = load_tokenizer(path)
            model = load_model(path, dtype=options.dtype, device=pick_device(options.device))
        adapters = {} if settings is None else _read_adapters(options, model, settings)
        context = context_limit(model, options.context)
        core = EngineCore(
            model,
            name="engine-0",
            slots=options.slots,
            context=context,
            decode=decoder_of(tokenizer),
            adapter_places=1 + len(adapters),
        )
    except ValueError as error:  # the model is missing, unsupported or too large
        raise ConfigError(str(error)) from error
    core.version, core.lineage = _identity(Path(options.model))
    return core, tokenizer, adapters


def _check_adapters(options: Namespace) -> LoraSettings | None:
    """The settings that all adapters have; None if there are none. Nothing is loaded yet."""
    found: LoraSettings | None = None
    for name, folder in options.adapters:
        settings, base = read_settings(folder), base_of(folder)
        if base_of(options.model):
            raise ConfigError(f"--adapter {name}: {options.model} is an adapter itself; serve the model it belongs to")
        are_folders = [Path(each).is_dir() for each in (base, options.model)]
        if (all(are_folders) and not Path(base).samefile(options.model)) or (not any(are_folders) and base != options.model):
            raise ConfigError(f"--adapter {name}: it belongs to {base}, and not to {options.model}; serve that model")
        if found is not None and settings.to_plain() != found.to_plain():
            first, theirs = options.adapters[0][0], found.to_plain()
            raise ConfigError(
                f"--adapter {name}: it has {settings.to_plain()}, and {first!r} has {theirs}; serve them apart, or merge one"
            )
        if settings.whole:
            told = f"modules_to_save = {list(settings.whole)}, of which a batch has one version"
            raise ConfigError(f"--adapter {name}: it has {told}; serve its folder as the model, or merge it")
        found = found or settings
    return found


def _read_adapters(options: Namespace, model: PreTrainedModel, settings: LoraSettings) -> dict[str, HeldAdapter]:
    """The adapters by name. The model's own changes nothing: it is the base."""
    own, found = add_adapter(model, settings), {}
    own.turn_off()
    some = next(own.parameters())
    for name, folder in options.adapters:
        try:
            tensors = {key: tensor.to(some.device, some.dtype) for key, tensor in own.read(Path(folder)).items()}
        except AdapterError as error:
            raise ConfigError(f"--adapter {name}: {error}") from error
        version, lineage = _identity(Path(folder))
        found[name] = HeldAdapter(version, tensors, lineage=lineage)
    return found


@contextlib.contextmanager
def _model_folder(options: Namespace) -> Iterator[str]:
    """The model's folder; a built-in model's is temporary."""
    if not options.model.startswith("builtin:"):
        yield options.model
        return
    if options.model != tiny.NAME:
        raise ConfigError(f"model {options.model!r}: the built-in model is {tiny.NAME!r}")
    with tempfile.TemporaryDirectory(prefix="headrace-tiny-") as folder:
        transformers_logging.disable_progress_bar()
        tiny.build_folder(Path(folder), ModelSettings(context=options.context), seed=0)
        yield folder


def _identity(folder: Path) -> tuple[int, str]:
    """(version, lineage) of a run's checkpoint, so that tokens are stamped as in the run; (0, "") for other models."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] == FORMAT:
            return int(manifest["version"]), str(manifest["lineage"])
    return 0, ""


async def _serve(
    options: Namespace,
    core: EngineCore,
    tokenizer: PreTrainedTokenizerBase,
    adapters: dict[str, HeldAdapter],
    listener: socket.socket,
) -> int:
    """Waits for a stop signal or an engine failure."""
    loop, stopped, url = asyncio.get_running_loop(), asyncio.Event(), url_of(listener)
    engine = NativeEngine(core, sync=WeightSync(Lineage.new(), MemoryTransport()), timeline=Timeline("engine"))
    served = ServedModel(
        tokenizer,
        model_name=options.name,
        stop_ids=stop_tokens(core.model.generation_config, tokenizer),
        context=core.context,
        vocabulary=int(core.model.config.get_text_config().vocab_size),
        adapters=adapters,
    )
    server = CompletionServer(
        engine,
        served,
        api_token=options.api_token,
        control_token=options.control_token,
        host=options.host,
        max_choices=options.slots + options.queue,
        probe=lambda: engine.between_steps(lambda: None),
    )

    def on_died(died: Future[None]) -> None:  # called in the decode thread
        error = died.exception()
        loop.call_soon_threadsafe(server.fail, f"{type(error).__name__}: {error}")

    engine.died.add_done_callback(on_died)
    engine.start()
    try:
        async with server.listening(listener):
            with StopRequest().heard_by(stopped.set):
                print(f"serving {options.name} on {url}; try: {_example(options, url)}", flush=True)
                ends = [asyncio.create_task(event.wait()) for event in (stopped, server.failed)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        engine.close()
    if server.failure:
        raise RuntimeError(server.failure)
    print("stopped", flush=True)
    return 0


def _example(options: Namespace, url: str) -> str:
    token = ' -H "Authorization: Bearer $HEADRACE_API_TOKEN"' if options.api_token else ""
    body = '{"prompt": "Hello", "max_tokens": 16}'
    return f"curl {url}/v1/completions{token} -H 'Content-Type: application/json' -d '{body}'"
