"""Hands new weights to a vLLM server, as in a saved model.

The server reads them from a folder, or takes them over its weight-transfer interface: from this process's GPU memory, which it
opens (`ipc`, where both use the same GPU), or broadcast to its workers' GPUs (`nccl`). It is started for one of these two.
Adapters go through folders, each version under a name of its own.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import secrets
import shutil
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from headrace.cuda_driver import Bytes
from headrace.engine.vllm.api import VllmRefused
from headrace.engine.vllm.shared_folders import SharedFolders
from headrace.model import named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.vllm.api import VllmApi
    from headrace.lora import Adapter

    Named = tuple[str, Tensor]
    Tensors = Mapping[str, Tensor]
    """By the names of a saved folder."""

_SIZE, _STRIDE, _OFFSET, _STORAGE, _DTYPE, _DEVICE, _COUNTER, _WAITS = 1, 2, 3, 4, 5, 6, slice(11, 13), 14
"""Indices into the arguments with which torch rebuilds a tensor of another process."""


@torch.no_grad()
def saved_form(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors under the names and in the shapes of a saved folder: experts one by one, tied ones once."""
    held = dict(named_tensors(model))
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, held).items()}


def described(tensors: Iterable[Named]) -> dict[str, Any]:
    """The names, dtypes and shapes of an update."""
    named = list(tensors)
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


class Handover:
    """One way to hand over weights. An update's tensors stay unchanged until the next one is prepared."""

    adapter = ""
    """What new calls must name to use what was handed over last; empty if that is the model itself."""

    async def open(self, api: VllmApi, release: str) -> None:
        """Called once, when the server is up; `release` is its vLLM version."""

    def prepare(self, tensors: Tensors, *, name: str) -> None:
        """Everything that can be done while the server runs. `name` identifies the weights among those of all engines. Blocks;
        called in a thread."""
        raise NotImplementedError

    async def offer(self, api: VllmApi) -> None:
        """Have the server load what it can while it runs. Raises `VllmRefused` if it rejects that; nothing has changed then."""

    async def hand_over(self, api: VllmApi) -> None:
        """Have the paused server load what was prepared."""
        raise NotImplementedError

    async def retire(self, api: VllmApi, used: set[str]) -> None:
        """Have the server drop what is neither current nor `used` by calls."""

    def close(self) -> None:
        """Free what is held. Blocks."""


class FolderHandover(Handover):
    """Through a file in a folder, best in memory. The engines of a run on one host share it: the first to have a version writes
    it for the servers of all, and it stays until all engines have a later one."""

    def __init__(self, folder: Path) -> None:
        self._shared, self._prepared = SharedFolders(folder), folder

    def prepare(self, tensors: Tensors, *, name: str) -> None:
        self._shared.drop_all_but(name)  # the server has loaded what it was given before
        self._prepared = self._shared.take(name, lambda path: save_file(dict(tensors), path / "model.safetensors"))

    async def hand_over(self, api: VllmApi) -> None:
        await api.reload(str(self._prepared))

    def close(self) -> None:
        self._shared.drop_all_but()


class AdapterHandover(Handover):
    """Each version of an adapter has a folder and a name, and is loaded beside those that calls still use.

    vLLM could also replace an adapter in place, but 0.32 then reads its files again in every step, and for calls that began
    before, the old ones."""

    def __init__(self, folder: Path, adapter: Adapter, *, base: str) -> None:
        """`base` is the model that the server serves."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._write, self._base = folder, adapter.write, base
        self._names = (f"policy-{secrets.token_hex(4)}-{number}" for number in itertools.count())  # new to any server
        self._prepared, self._loaded, self._unused = "", list[str](), set[str]()

    def prepare(self, tensors: Tensors, *, name: str) -> None:
        self._prepared = next(self._names)
        self._write(self._folder / self._prepared, tensors, base=self._base)

    async def offer(self, api: VllmApi) -> None:
        try:
            await api.load_adapter(self._prepared, str(self._folder / self._prepared))
        except VllmRefused:
            shutil.rmtree(self._folder / self._prepared)
            raise
        self._loaded.append(self._prepared)

    async def hand_over(self, api: VllmApi) -> None:
        self.adapter = self._prepared

    async def retire(self, api: VllmApi, used: set[str]) -> None:
        """Of those not in use at the last update either: calls that were cancelled here end a little later at the server, which
        may read a folder again as long as one runs."""
        unused = {name for name in self._loaded if name not in used and name != self.adapter}
        for name in unused & self._unused:
            with contextlib.suppress(VllmRefused):
                await api.unload_adapter(name)
            self._loaded.remove(name)
            shutil.rmtree(self._folder / name, ignore_errors=True)
        self._unused = unused

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class IpcHandover(Handover):
    """Through handles to GPU memory, which the server opens and copies from. It must use the GPU that has the tensors."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._gpu = str(torch.cuda.get_device_properties(index).uuid)
        self._update: dict[str, Any] = {}
        self._held: list[Tensor] = []  # what the server may still read

    async def open(self, api: VllmApi, release: str) -> None:
        await api.init_transfer({})

    def prepare(self, tensors: Tensors, *, name: str) -> None:
        """Tell the server how to rebuild each tensor. Nearly all lie in one block of memory, for which one handle is enough."""
        handles: dict[int, list[Any]] = {}
        rebuilt = []
        for tensor in tensors.values():
            address = tensor.untyped_storage().data_ptr()
            if address not in handles:
                handles[address] = _handle_of(tensor)
            parts = [*handles[address]]
            parts[_SIZE], parts[_STRIDE] = tensor.size(), tensor.stride()
            parts[_OFFSET], parts[_DTYPE] = tensor.storage_offset(), tensor.dtype
            rebuilt.append({self._gpu: tuple(parts)})
        torch.cuda.synchronize(next(iter(tensors.values())).device)
        self._held = list(tensors.values())
        self._update = {**described(tensors.items()), "ipc_handles_pickled": _written(rebuilt)}

    async def hand_over(self, api: VllmApi) -> None:
        await api.start_update()
        await api.update_weights(self._update)
        await api.finish_update()

    def close(self) -> None:
        self._held, self._update = [], {}


def _handle_of(tensor: Tensor) -> list[Any]:
    """How another process rebuilds all of the memory that a tensor lies in. torch would hold the memory until no process has it
    open; here the handover holds it, so torch's count is released at once, and no event is waited for."""
    storage = tensor.untyped_storage()
    alias = torch.as_tensor(Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    parts = list(reduce_tensor(alias)[1])
    parts[_STORAGE]._release_ipc_counter(*parts[_COUNTER], device=parts[_DEVICE])
    parts[_WAITS] = False
    return parts


def _written(handles: list[dict[str, tuple[Any, ...]]]) -> str:
    """Pickled, the only form that vLLM reads over HTTP. Headrace never reads it."""
    return base64.b64encode(ForkingPickler.dumps(handles)).decode()
