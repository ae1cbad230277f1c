"""Checkpoints of a sharded trainer: a Hugging Face folder like that of one rank, written by all ranks, and read by any number.

Weights are whole float32 tensors, in a file for each unit of the model (a decoder layer, or what is outside of them). The ranks
take turns as writers: the slices of a unit are sent to its writer through host memory, so that none holds more than its own
part and one unit. The optimizer's state stays cut: `trainer/optimizer-RANK.safetensors` has a rank's slices, and the JSON file
of the same name says what they are (`saved_state`). The folder is complete when a rank returns.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from headrace.durable import fingerprint, sync
from headrace.model import WeightFiles, held_tensors, read_pieces
from headrace.trainer.saved_state import OPTIMIZER, REFERENCE, SavedState, write_state
from headrace.trainer.saving import VALUE_HEAD, load_whole, side_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.durable import Fingerprints
    from headrace.model import ShardedArena
    from headrace.trainer.frozen_model import FrozenModel
    from headrace.trainer.optimizer import FlatOptimizer
    from headrace.trainer.ranks import Ranks

_INDEX = "model.safetensors.index.json"
_WIDE = 4


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: FlatOptimizer,
    folder: Path,
    *,
    arena: ShardedArena,
    ranks: Ranks,
    reference: FrozenModel | None,
    on_read: Callable[[], None],
) -> Fingerprints:
    """Write this rank's files, and return their fingerprints. Only the first replica writes."""
    if ranks.replica:
        on_read()
        return {}
    transformers_logging.disable_progress_bar()
    with side_stream(arena.device):
        optimizer.settle()
        weights = {name: _wide(optimizer.master(name) if name in optimizer.names else view) for name, view in arena}
        state = optimizer.state()
        of_values = {name for name in optimizer.names if name.startswith(f"{VALUE_HEAD}.")}
        state |= {name: optimizer.master(name).to("cpu", copy=True) for name in of_values}
        referred_to = reference.state() if reference is not None else {}
    on_read()
    files = _Files()
    files.write(lambda: (folder / "trainer").mkdir(parents=True, exist_ok=True))
    _write_weights(model, folder, arena, weights, ranks, files)
    del weights  # before the rest is written
    first = {name: arena.first[name] for name in optimizer.names - of_values}
    if ranks.rank == 0:
        first |= dict.fromkeys(of_values, 0)
        files.write(lambda: _write_rest(model, tokenizer, folder, arena))
    files.write(lambda: write_state(folder, OPTIMIZER, state, optimizer=optimizer, first=first, rank=ranks.shard_rank))
    if reference is not None:
        files.write(lambda: write_state(folder, REFERENCE, referred_to, first=arena.first, rank=ranks.shard_rank))
    for path in files.written:
        files.write(functools.partial(sync, path))
    ranks.wait(ranks.saving.barrier(), "waiting for the others' files of a checkpoint")
    if files.error is not None:
        raise files.error
    return {str(path.relative_to(folder)): fingerprint(path) for path in files.written}


class _Files:
    """What a rank has written. After an error it writes no more but goes on: the others wait for it in collectives, which the
    next checkpoint uses too."""

    def __init__(self) -> None:
        self.written: list[Path] = []
        self.error: Exception | None = None

    def write(self, action: Callable[[], list[Path] | None]) -> None:
        if self.error is None:
            try:
                self.written += action() or ()
            except Exception as error:  # noqa: BLE001  (a tokenizer raises anything when the disk is full)
                self.error = error


def load(
    model: PreTrainedModel,
    optimizer: FlatOptimizer,
    folder: Path,
    *,
    arena: ShardedArena,
    reference: FrozenModel | None,
) -> None:
    """Read what this rank has of weights and state, whatever the number of ranks that wrote them."""
    files, state = WeightFiles(model, sorted(folder.glob("*.safetensors"))), SavedState(folder, OPTIMIZER)
    read_weights(model, optimizer, arena, files if files.has_all else folder)
    optimizer.load_weights(state.values(VALUE_HEAD))
    optimizer.load_state(state.of(optimizer, arena.first))
    if reference is not None:
        kept = SavedState(folder, REFERENCE)
        reference.load_state({name: kept.read(name, arena.first[name], view.numel()) for name, view in reference.arena})


@torch.no_grad()
def read_weights(model: PreTrainedModel, optimizer: FlatOptimizer, arena: ShardedArena, files: WeightFiles | Path) -> None:
    """Set what this rank has of the weights, from files that can be read by ranges or a folder that only transformers can."""
    if isinstance(files, WeightFiles):
        pieces = read_pieces(model, arena, files)
    else:
        pieces = ((name, arena.piece(name, tensor)) for name, tensor in load_whole(model, files).items())
    for name, piece in pieces:
        optimizer.load_weights({name: piece})
        if name not in optimizer.names:
            arena.views[name].copy_(piece)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _write_weights(
    model: PreTrainedModel, folder: Path, arena: ShardedArena, pieces: Mapping[str, Tensor], ranks: Ranks, files: _Files
) -> None:
    """Send the slices of each unit to its writer, which writes them as whole tensors."""
    for place, file in _files(arena).items():
        writer = place % ranks.shard
        tensors: dict[str, Tensor] = {}
        for group in arena.units[place]:
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
        if tensors:
            files.write(functools.partial(_write_unit, model, folder / file, tensors))


def _write_unit(model: PreTrainedModel, file: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    named = {name: tensor.contiguous() for name, tensor in _as_saved(model, tensors).items()}
    save_file(_apart(named), file, metadata={"format": "pt"})
    return [file]


def _files(arena: ShardedArena) -> dict[int, str]:
    """The file of each unit that has tensors."""
    places = [place for place, unit in enumerate(arena.units) if unit]
    return {place: f"model-{index:05d}-of-{len(places):05d}.safetensors" for index, place in enumerate(places, start=1)}


def _as_saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names, and in the shapes, that the model's family has in files."""
    dropped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    found: dict[str, Tensor] = revert_weight_conversion(model, kept)
    return found


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies where two share memory, which a file cannot; slices of one buffer seem to."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _write_rest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, arena: ShardedArena) -> list[Path]:
    """Configuration, tokenizer, and the index of the weights."""
    places: dict[str, str] = {}
    num_bytes = 0
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held_tensors(model)}
    for place, file in _files(arena).items():
        named = _as_saved(model, {name: shapes[name] for group in arena.units[place] for name in group.slots})
        places |= dict.fromkeys(named, file)
        num_bytes += sum(each.numel() * (_WIDE if each.is_floating_point() else each.element_size()) for each in named.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    model.config.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "float32", "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    names = {_INDEX, "config.json"}
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
        names.add("generation_config.json")
    names |= {path.rpartition("/")[2] for path in tokenizer.save_pretrained(folder)}
    return [folder / name for name in sorted(names) if (folder / name).is_file()]
