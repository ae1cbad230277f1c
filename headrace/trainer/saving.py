"""Saves a trainer as a Hugging Face folder: float32 weights beside the configuration, and a subfolder for the optimizer. If an
adapter is trained, it is a PEFT folder: the adapter alone, and the name of the model it belongs to."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from headrace.durable import seal
from headrace.model import adapter_of, named_tensors
from headrace.trainer.saved_state import OPTIMIZER, REFERENCE, SavedState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.durable import Fingerprints
    from headrace.trainer.frozen_model import FrozenModel
    from headrace.trainer.optimizer import FlatOptimizer

OPTIMIZER_FILE = "trainer/optimizer.safetensors"  # other readers take .safetensors files in the folder itself for weights
REFERENCE_FILE = "trainer/reference.safetensors"  # of a reference that changes in the run
VALUE_HEAD = "value_head"  # prefix of the value head's parameters, saved with the optimizer: the folder itself is the policy


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: FlatOptimizer,
    folder: Path,
    *,
    reference: FrozenModel | None = None,
    on_read: Callable[[], None],
) -> Fingerprints:
    """Write the optimizer's float32 masters as weights, so that a restart loses nothing, and the `reference`, if given. All
    state is copied to the host before `on_read` is called; any thread may write it."""
    transformers_logging.disable_progress_bar()
    with side_stream(next(model.parameters()).device):
        optimizer.settle()
        adapter = adapter_of(model)
        weights, state = _state(model if adapter is None else adapter, optimizer), optimizer.state()
        for name in optimizer.names:
            if name.startswith(f"{VALUE_HEAD}."):
                state[name] = optimizer.master(name).to("cpu", copy=True)
        referred_to = reference.state() if reference is not None else {}
    on_read()
    if adapter is not None:
        adapter.write(folder, weights, base=str(model.name_or_path))
    else:
        model.save_pretrained(folder, state_dict=weights)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n")
    del weights  # before the rest is written
    tokenizer.save_pretrained(folder)
    (folder / OPTIMIZER_FILE).parent.mkdir(exist_ok=True)
    save_file(state, folder / OPTIMIZER_FILE)
    if reference is not None:
        save_file(referred_to, folder / REFERENCE_FILE)
    return seal(folder)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, copy in a separate stream, after what is queued so far: the next pass need not wait for the copies."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _state(model: nn.Module, optimizer: FlatOptimizer) -> dict[str, Tensor]:
    """Copy each tensor out of its arena, where all tensors would seem to share memory; tied ones share their copy."""
    copies: dict[int, Tensor] = {}
    names = {id(tensor): name for name, tensor in model.named_parameters() if name in optimizer.names}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            held = optimizer.master(names[id(tensor)]) if id(tensor) in names else tensor.detach()
            copies[id(tensor)] = held.to("cpu", torch.float32 if held.is_floating_point() else held.dtype, copy=True)
        state[name] = copies[id(tensor)]
    return state


def load(model: PreTrainedModel, optimizer: FlatOptimizer, folder: Path, *, reference: FrozenModel | None = None) -> None:
    transformers_logging.disable_progress_bar()
    adapter = adapter_of(model)
    learner: nn.Module = model if adapter is None else adapter
    theirs = load_whole(model, folder) if adapter is None else adapter.read(folder)
    state = SavedState(folder, OPTIMIZER)
    optimizer.load_weights({**theirs, **state.values(VALUE_HEAD)})
    with torch.no_grad():
        for name, tensor in named_tensors(learner):
            if name not in optimizer.names:
                tensor.copy_(theirs[name])
    optimizer.load_state(state.of(optimizer, {}))
    if reference is not None:
        kept = SavedState(folder, REFERENCE)
        reference.load_state(
            {name: kept.read(name, 0, view.numel()).reshape(view.shape) for name, view in reference.arena if name in kept}
        )


def load_whole(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """A folder's weights, in float32 in the host's memory."""
    return dict(named_tensors(type(model).from_pretrained(folder, dtype=torch.float32, use_safetensors=True)))
