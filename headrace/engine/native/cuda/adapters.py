"""Adapters by row: each row of a step adds the version of the adapter that its rollout runs.

The bank holds several versions of the adapter's arena side by side; place 0 is the newest, which updates overwrite. The two
kernels read the place of a row's slot on the device, so that graphs stay valid when rollouts and versions change.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from headrace.engine.native.cuda.kernels.low_rank import down_kernel, up_kernel
from headrace.engine.native.engine_memory import ADAPTER_PLACES
from headrace.model import Arena, adapter_of, allocate_bytes, target_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from headrace.engine.request import HeldAdapter
    from headrace.model import Adapter, Target
    from headrace.records import Array


class _Sizes(NamedTuple):
    """How the two products are split into programs."""

    rows: int
    split: int  # inputs of a program of the first product
    tile: int  # of which it multiplies so many at once
    columns: int  # outputs of a program of the second


def _sizes(rows: int, width: int, rank_pad: int) -> _Sizes:
    """The fastest of those tried on an H200 with rank 32; higher ranks take smaller tiles, to fit shared memory."""
    tile = 128 if rank_pad <= 64 else 64 if rank_pad <= 128 else 32
    if rows > 512:
        return _Sizes(64 if rank_pad <= 64 else 32, width, tile, 128 if rank_pad <= 64 else 64 if rank_pad <= 128 else 32)
    return _Sizes(16 if rows <= 64 else 32, 256, tile, 64 if rank_pad <= 128 else 32)


@functools.cache
def _launches_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one before it has ended, and wait for that itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@torch.library.custom_op("headrace::add_low_rank", mutates_args=())
def add_low_rank(
    output: Tensor,
    hidden: Tensor,
    downs: list[Tensor],
    ups: list[Tensor],
    places: Tensor,
    scale: float,
    is_gated: bool = False,
) -> Tensor:
    """`output` [rows, all widths] + scale · up · down · `hidden` [rows, inputs], where `downs` [places, rank, inputs] and `ups`
    [places, width, rank] are of up to three layers whose outputs lie side by side, and `places` [rows] says which a row uses.
    All matrices have the same stride between places. If `output` has further columns, they are down · `hidden`: of each place,
    of each layer. `is_gated`: of two layers, silu of the first times the second."""
    given, flat = output.reshape(-1, output.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    (rows, width), (num_places, rank), widths = flat.shape, downs[0].shape[:2], [up.shape[1] for up in ups]
    rank_pad = max(16, triton.next_power_of_2(rank))
    sizes = _sizes(rows, width, rank_pad)
    tiles = [triton.cdiv(each, sizes.columns) for each in widths]
    num_columns = widths[0] if is_gated else sum(widths)
    out = given.new_empty((rows, num_columns))
    same: dict[str, Any] = {
        "RANK": rank, "RANK_PAD": rank_pad, "ROWS": sizes.rows,
        "PRECISION": "ieee" if flat.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    if given.shape[1] > sum(widths):
        splits, between = 1, given[:, sum(widths) :]
        strides = given.stride(0), rank * len(downs), rank  # of rows, places and layers
    else:
        share = triton.cdiv(min(sizes.split, width), sizes.tile) * sizes.tile
        splits = triton.cdiv(width, share)
        between = flat.new_empty((splits, rows, len(downs) * rank_pad), dtype=torch.float32)  # to be summed over the splits
        strides = between.stride(1), 0, rank_pad
        down_kernel[(triton.cdiv(rows, sizes.rows), len(downs), splits)](
            flat, *[*downs, *downs[:1] * 2][:3], places, between,
            rows, width, share, flat.stride(0), downs[0].stride(0), between.stride(1), TILE=sizes.tile, **same,
        )  # fmt: skip
    early = _launches_early(flat.device)
    up_kernel[(triton.cdiv(rows, sizes.rows), tiles[0] if is_gated else sum(tiles))](
        given, between, *[*ups, *ups[:1] * 2][:3], places, out,
        rows, *[*widths, 0, 0][:3], *[*tiles, sum(tiles)][:2],
        ups[0].stride(0), given.stride(0), out.stride(0), *strides, scale,
        SPLITS=splits, COLUMNS=sizes.columns, IS_ONE=num_places == 1, IS_GATED=is_gated, IS_EARLY=early, **same,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out.view(*output.shape[:-1], num_columns)


@add_low_rank.register_fake
def _(
    output: Tensor,
    hidden: Tensor,
    downs: list[Tensor],
    ups: list[Tensor],
    places: Tensor,
    scale: float,
    is_gated: bool = False,
) -> Tensor:
    return output.new_empty((*output.shape[:-1], ups[0].shape[1] if is_gated else sum(up.shape[1] for up in ups)))


@dataclass(frozen=True, eq=False)
class RowAdapters:
    """The adapters of one step's rows."""

    places: Tensor  # [rows] int32
    scale: float

    def add(self, output: Tensor, hidden: Tensor, targets: Sequence[Target], *, is_gated: bool = False) -> Tensor:
        downs, ups = [], []
        for target in targets:
            assert target.versions is not None
            downs.append(target.versions[0])
            ups.append(target.versions[1])
        width, num_columns = sum(up.shape[1] for up in ups), len(downs[0]) * sum(down.shape[1] for down in downs)
        if output.shape[-1] != width + num_columns:  # nobody has multiplied by all of `downs`
            output = output[..., :width]
        added: Tensor = add_low_rank(output, hidden.to(downs[0].dtype), downs, ups, self.places, self.scale, is_gated)
        return added


class AdapterBank:
    """The versions that running rollouts use, and which place each has."""

    def __init__(self, adapter: Adapter, arena: Arena, *, slots: int, places: int = ADAPTER_PLACES) -> None:
        """`arena`: of the newest version, which moves to place 0. `places`: for so many versions at first."""
        self.arena, self.scale, self._beyond_linear = arena, adapter.settings.scale, adapter.beyond_linear
        self._held: dict[int, HeldAdapter] = {}  # by place
        self._given = np.zeros(slots + 1, dtype=np.int32)
        self.places = torch.zeros(slots + 1, dtype=torch.int32, device=arena.device)
        self._models: list[PreTrainedModel] = []
        self._rooms: list[tuple[Tensor, Tensor]] = []  # behind the weights of a linear layer, and what belongs there
        self._copies: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # of a place: the rooms, and their content
        self._allocate(places)

    def attach(self, model: PreTrainedModel) -> None:
        """Point the layers of a model, or of its twin, at the versions."""
        self._models.append(model)
        self._point(model)
        self.fill_rooms()

    @torch.no_grad()
    def fill_rooms(self, place: int = 0) -> None:
        """Copy the first matrices of a version behind the weights whose product computes them too."""
        if not self._rooms:
            return
        if place not in self._copies:  # kept: decoding waits while hundreds of tensors are made
            self._copies[place] = [room[place] for room, _ in self._rooms], [versions[place] for _, versions in self._rooms]
        torch._foreach_copy_(*self._copies[place])

    @contextlib.contextmanager
    def adding(self, model: PreTrainedModel, slots: Tensor) -> Iterator[None]:
        """Within it, a pass of the model adds to each row the adapter of its slot."""
        adapter = adapter_of(model)
        assert adapter is not None
        adapter.by_row = RowAdapters(self.places.index_select(0, slots), self.scale).add
        try:
            yield
        finally:
            adapter.by_row = None

    def choose_places(self, held: Mapping[int, HeldAdapter]) -> Array | None:
        """The place of every slot, if any has changed; copies in what is not there. `held`: by slot; all others run the newest.
        The bank has room (`lacks_room`)."""
        wanted = set(held.values())
        self._held = {place: each for place, each in self._held.items() if each in wanted}
        place_of = {each: place for place, each in self._held.items()}
        free = [place for place in range(1, len(self._memory)) if place not in self._held]
        for each in wanted - place_of.keys():
            place = place_of[each] = free.pop(0)
            self._held[place] = each
            self._fill(place, each)
        given = np.zeros_like(self._given)
        for slot, each in held.items():
            given[slot] = place_of[each]
        is_changed = not np.array_equal(given, self._given)
        self._given = given
        return given if is_changed else None

    def lacks_room(self, held: Mapping[int, HeldAdapter]) -> bool:
        return len(set(held.values())) >= len(self._memory)

    def grow(self) -> None:
        """Twice as many places, in other memory: no step may run."""
        assert not self._beyond_linear, f"{self._beyond_linear}, of which a batch on a GPU has one version"
        before = self._memory
        self._rooms.clear()  # they have no place for more versions
        self._allocate(2 * len(before))
        self._memory[1 : len(before)] = before[1:]
        if before.is_cuda:
            torch.cuda.synchronize(before.device)  # an update that is being received may read the newest version
        for model in self._models:
            self._point(model)

    def _allocate(self, num_places: int) -> None:
        num_bytes = self.arena.num_bytes
        self._memory = allocate_bytes(num_places * num_bytes, self.arena.device).view(num_places, num_bytes).zero_()
        newest = Arena(self.arena.slots, device=self.arena.device, allocate=lambda *_: self._memory[0])
        newest.copy_from(self.arena)
        self.arena.exchange(newest)

    def _versions(self, name: str) -> Tensor:
        """[places, *shape of the tensor]"""
        slot = self.arena.slots[name]
        start = self.arena.views[name].data_ptr() - self._memory.data_ptr()
        part = self._memory[:, start : start + self.arena.views[name].nbytes]
        versions: Tensor = part.view(slot.dtype).unflatten(1, slot.shape)
        return versions

    def _fill(self, place: int, held: HeldAdapter) -> None:
        if held.memory is not None:
            self._memory[place].copy_(held.memory)
        else:
            for name in self.arena.slots:
                self._versions(name)[place].copy_(held.tensors[name])
        self.fill_rooms(place)

    def _point(self, model: PreTrainedModel) -> None:
        self._copies.clear()
        for module in model.modules():
            target = target_of(module)
            if target is not None:
                down, up = (self._versions(f"{target.name}.{part}.weight") for part in ("lora_A", "lora_B"))
                target.versions = down, up
                room = getattr(module, "headrace_room", None)
                if room is not None and len(room) == len(down):
                    self._rooms.append((room, down))
