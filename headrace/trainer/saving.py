"""Checkpoints: a Hugging Face folder with float32 weights, and the optimizer's state in a subfolder. If an adapter is trained,
it is a PEFT folder: the adapter alone, and the name of the model it belongs to.

The ranks of a sharded trainer write it together. Weights are whole tensors, in a file for each unit of the model (a decoder
layer, or what is outside of them). The ranks take turns as writers: the slices of a unit are sent to its writer through host
memory, so that none holds more than its own part and one unit. The optimizer's state stays cut (`saved_state`). Any number of
ranks reads it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from headrace.durable import fingerprint, seal, sync
from headrace.model import ShardedArena, WeightFiles, adapter_of, held_tensors, named_tensors, read_pieces, side_stream
from headrace.trainer.saved_state import OPTIMIZER, REFERENCE, SavedState, write_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.durable import Fingerprints
    from headrace.model import Arena, Group
    from headrace.trainer.frozen_model import FrozenModel
    from headrace.trainer.optimizer import FlatOptimizer
    from headrace.trainer.ranks import Ranks

VALUE_HEAD = "value_head"  # prefix of the value head's parameters, saved with the optimizer: the folder itself is the policy
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WIDE = 4


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: FlatOptimizer,
    folder: Path,
    *,
    arena: Arena,
    ranks: Ranks | None,
    reference: FrozenModel | None,
    on_read: Callable[[], None],
) -> Fingerprints:
    """Write the optimizer's float32 masters as weights, so that a restart loses nothing, and the `reference`, if given. All
    state is copied to the host before `on_read` is called; any thread may write it. Of several ranks, each returns the
    fingerprints of its own files, when all have written theirs; replicas write none."""
    sharing = ranks if isinstance(arena, ShardedArena) else None  # the ranks that write together
    if ranks is not None and (ranks.replica or (sharing is None and ranks.rank)):
        on_read()
        return {}
    transformers_logging.disable_progress_bar()
    with side_stream(arena.device):  # the next pass need not wait for the copies
        optimizer.settle()
        weights = {name: _wide(optimizer.master(name) if name in optimizer.names else view) for name, view in arena}
        of_values = {name for name in optimizer.names if name.startswith(f"{VALUE_HEAD}.")}
        state = optimizer.state() | {name: optimizer.master(name).to("cpu", copy=True) for name in of_values}
        referred_to = reference.state() if reference is not None else {}
    on_read()
    files, adapter = _Files(), adapter_of(model)
    files.write(lambda: (folder / "trainer").mkdir(parents=True, exist_ok=True))
    if adapter is None:
        _write_weights(model, folder, arena, weights, sharing, files)
    else:
        files.write(functools.partial(adapter.write, folder, weights, base=str(model.name_or_path)))
    del weights  # before the rest is written
    rank, first = None, dict[str, int]()
    if sharing is not None:
        rank, first = sharing.shard_rank, {name: arena.first[name] for name in optimizer.names - of_values}
    if not rank:
        first |= dict.fromkeys(of_values, 0)
        files.write(lambda: [folder / Path(path).name for path in tokenizer.save_pretrained(folder)])
    files.write(lambda: write_state(folder, OPTIMIZER, state, optimizer=optimizer, first=first, rank=rank))
    if reference is not None:
        files.write(lambda: write_state(folder, REFERENCE, referred_to, first=arena.first, rank=rank))
    if sharing is None:
        files.check()
        return seal(folder)
    for path in files.written:
        files.write(functools.partial(sync, path))
    sharing.wait(sharing.saving.barrier(), "waiting for the others' files of a checkpoint")
    files.check()
    return {str(path.relative_to(folder)): fingerprint(path) for path in files.written}


class _Files:
    """What a rank has written. After an error it writes no more but goes on: the others wait for it in collectives, which the
    next checkpoint uses too."""

    def __init__(self) -> None:
        self.written: list[Path] = []
        self._error: Exception | None = None

    def write(self, action: Callable[[], list[Path] | None]) -> None:
        if self._error is None:
            try:
                self.written += [path for path in action() or () if path.is_file()]
            except Exception as error:  # noqa: BLE001  (a tokenizer raises anything when the disk is full)
                self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _write_weights(
    model: PreTrainedModel, folder: Path, arena: Arena, weights: Mapping[str, Tensor], ranks: Ranks | None, files: _Files
) -> None:
    """Write whole tensors: each unit's in its writer's file if several ranks have slices of them, else all in one."""
    if ranks is None:
        files.write(lambda: _write_file(model, folder / _WHOLE, weights))
        files.write(lambda: _write_config(model, folder))
        return
    units = {place: unit for place, unit in enumerate(cast("ShardedArena", arena).units) if unit}
    names = {place: f"model-{index:05d}-of-{len(units):05d}.safetensors" for index, place in enumerate(units, start=1)}
    for place, unit in units.items():
        tensors = _gathered(unit, arena, weights, ranks, writer=place % ranks.shard)
        if tensors:
            files.write(functools.partial(_write_file, model, folder / names[place], tensors))
    if ranks.rank == 0:
        held = {names[place]: [name for group in unit for name in group.slots] for place, unit in units.items()}
        files.write(lambda: [*_write_index(model, folder, held), *_write_config(model, folder)])


def _gathered(
    unit: Sequence[Group], arena: Arena, pieces: Mapping[str, Tensor], ranks: Ranks, *, writer: int
) -> dict[str, Tensor]:
    """A unit's tensors, whole, at its writer; none at other ranks, which send it their slices."""
    tensors: dict[str, Tensor] = {}
    for group in unit:
        dtype = torch.float32 if group.dtype.is_floating_point else group.dtype
        own = torch.zeros(group.stop - group.start, dtype=dtype)
        for name in group.slots:
            start = arena.slots[name].start - group.start
            own[start : start + pieces[name].numel()] = pieces[name]
        is_writer = ranks.shard_rank == writer
        whole = torch.empty(group.size if is_writer else 0, dtype=dtype)
        options = dist.GatherOptions()
        options.rootRank = writer
        outputs = [list(whole.chunk(ranks.shard))] if is_writer else []
        ranks.wait(ranks.saving.gather(outputs, [own], options), "collecting weights for a checkpoint")
        if is_writer:
            tensors |= group.views(whole)
    return tensors


def _as_saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names, and in the shapes, that the model's family has in files."""
    dropped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    found: dict[str, Tensor] = revert_weight_conversion(model, kept)
    return found


def _write_file(model: PreTrainedModel, file: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    named = {name: tensor.contiguous() for name, tensor in _as_saved(model, tensors).items()}
    for name, tensor in named.items():
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # a slice: a file holds no tensors that share memory
            named[name] = tensor.clone()
    save_file(named, file, metadata={"format": "pt"})
    return [file]


def _write_index(model: PreTrainedModel, folder: Path, held: Mapping[str, Sequence[str]]) -> list[Path]:
    """`held`: the tensors in each file."""
    places: dict[str, str] = {}
    num_bytes = 0
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held_tensors(model)}
    for file, names in held.items():
        named = _as_saved(model, {name: shapes[name] for name in names})
        places |= dict.fromkeys(named, file)
        num_bytes += sum(each.numel() * (_WIDE if each.is_floating_point() else each.element_size()) for each in named.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / _INDEX]


def _write_config(model: PreTrainedModel, folder: Path) -> list[Path]:
    model.config.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "float32", "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return [folder / "config.json", folder / "generation_config.json"]


def load(
    model: PreTrainedModel, optimizer: FlatOptimizer, folder: Path, *, arena: Arena, reference: FrozenModel | None
) -> None:
    """Read what this rank has of weights and state, whatever the number of ranks that wrote them."""
    transformers_logging.disable_progress_bar()
    adapter = adapter_of(model)
    if adapter is not None:
        _take(optimizer, arena, adapter.read(folder).items())
    else:
        files = WeightFiles(model, sorted(folder.glob("*.safetensors")))
        read_weights(model, optimizer, arena, files if files.has_all else folder)
    state = SavedState(folder, OPTIMIZER)
    optimizer.load_weights(state.values(VALUE_HEAD))
    optimizer.load_state(state.of(optimizer, arena.first))
    if reference is not None:
        kept, held = SavedState(folder, REFERENCE), reference.arena
        reference.load_state(
            {name: kept.read(name, held.first.get(name, 0), view.numel()) for name, view in held if name in kept}
        )


def read_weights(model: PreTrainedModel, optimizer: FlatOptimizer, arena: Arena, files: WeightFiles | Path) -> None:
    """Set what this rank has of the weights, from files that can be read by ranges or a folder that only transformers can."""
    if isinstance(files, WeightFiles):
        _take(optimizer, arena, read_pieces(model, arena, files))
    else:
        whole = named_tensors(type(model).from_pretrained(files, dtype=torch.float32, use_safetensors=True))
        _take(optimizer, arena, ((name, arena.piece(name, tensor)) for name, tensor in whole))


@torch.no_grad()
def _take(optimizer: FlatOptimizer, arena: Arena, pieces: Iterable[tuple[str, Tensor]]) -> None:
    for name, piece in pieces:
        if name in optimizer.names:
            optimizer.load_weights({name: piece})
        else:
            arena.views[name].copy_(piece.view_as(arena.views[name]))
