"""Predicts the trainer's peak memory from the model's sizes and the settings alone.

Always allocated, for P numbers in matrices and a few in vectors (norms, biases):

| | bfloat16, float16 | float32 |
|---|---|---|
| weights, in one arena | 2 P, vectors 4 each | 4 P |
| the optimizer's master weights | 4 P | the weights themselves |
| gradients, accumulated in one buffer | 4 P | 4 P |
| AdamW's two moments | 8 P | 8 P |
| the same in 8 bits, with a scale a block | 2.06 P | 2.13 P |
| Muon's momentum; embeddings, head and vectors have moments | 4 P | 4 P |

Frozen matrices need their weights alone. With an adapter the model is frozen, and the adapter has all of the above. In 4 bits
(`lora.quantize`) a weight takes 0.5625 P, and its layer one copy of full size while it computes.

`COMPILED.saved` and `EAGER.saved` list what a forward pass saves for its backward pass, per token and layer. A compiled layer
saves what torch's partitioner does not recompute (`test_memory_prediction.py` checks this). An eager layer saves more; in
bfloat16 a norm's output is cast once for each matmul that reads it.

The peak is that sum at the end of the forward pass, plus the larger of the head's workspace (a chunk of logits, its gradient,
the gradient of the head's weight) and a layer's backward pass (its temporaries, and its gradients before they are
accumulated). With recomputation a layer saves only its input, and its activations count for its backward pass. Routing that is
replayed, and router logits and scores for their losses, stay on the device for all layers of a pass.

With `train.parallel.shard` = S, each rank has 1/S of all that is always allocated; an adapter and its optimizer state are whole
on every rank. During a pass the embedding is whole, and so is its gradient in float32; in the head the same of its weight, and
the last layer; in a layer's backward pass two layers (the next is being gathered) and two layers' gradients (the last one's
are being added up over ranks, into 1/S of their size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.model import ALIGNMENT, bytes_per_number, held_bytes
from headrace.trainer.update_rules import AT_ONCE, CACHED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.model import ModelShape
    from headrace.trainer.settings import TrainSettings

_WIDE = 4
_STEP_COPIES = {"adamw": 0, "adamw_8bit": 6, "muon": 9}  # float32 temporaries for each number that is being updated
_REPLAYED = 2 + 8  # bytes of a replayed choice: int16 as recorded, int64 as the router takes it
_LAYERS_ON_DEVICE = 2  # layers whose activations are on the device while the others' are offloaded


@dataclass(frozen=True)
class SavedTensor:
    """`count` tensors of shape [tokens, `of`], where `of` is one of `ModelShape.widths`."""

    what: str
    of: str
    count: float = 1
    is_wide: bool = False  # float32 whatever the model's dtype
    is_narrow_only: bool = False  # exists in bfloat16 and float16 only


@dataclass(frozen=True)
class Costs:
    """The numbers to calibrate against a measured peak, for one way of running a layer."""

    saved: tuple[SavedTensor, ...]  # by one layer's forward pass
    chunk_elements: int  # logits that the head processes at a time
    wide_chunks: float  # float32 copies of such a chunk
    narrow_chunks: float  # copies of it in the model's dtype
    head_gradients: float  # float32 copies of the gradient of the head's weight, besides its accumulation buffer
    spread: float = 1.0  # memory per byte of activations: above 1 on a CPU, where the allocator's gaps count
    process: int = 0  # on a CPU, bytes of the process before it has a model


_ALWAYS_SAVED = (
    SavedTensor("queries after rotation", "queries"),
    SavedTensor("keys after rotation", "keys"),
    SavedTensor("values", "values"),
    SavedTensor("log-sum-exp", "heads", is_wide=True),
    SavedTensor("roots of mean squares", "one", 2, is_wide=True),
    SavedTensor("roots of mean squares of queries and keys", "normed_heads", is_wide=True),
    SavedTensor("queries and keys before their norms", "normed"),
    SavedTensor("inputs and outputs of experts", "routed_hidden", 2),
)
COMPILED = Costs(
    saved=(
        *_ALWAYS_SAVED,
        SavedTensor("residual stream", "hidden", is_wide=True),
        SavedTensor("outputs of both norms and of the attention block", "hidden", 3),
        SavedTensor("attention's output", "attended"),
        SavedTensor("gate, up and their product", "intermediate", 3),
        SavedTensor("the same of experts", "routed_intermediate", 3),
    ),
    chunk_elements=1 << 28,
    wide_chunks=1.0,
    narrow_chunks=1.0,
    head_gradients=0.0,
)
"""On GPUs: layers compiled one by one, attention kernels that keep no scores."""
EAGER = Costs(
    saved=(
        *_ALWAYS_SAVED,
        SavedTensor("residual stream, before and after attention", "hidden", 2, is_wide=True),
        SavedTensor("norms before their weights", "hidden", 2, is_wide=True),
        SavedTensor("norms before their weights, of queries and keys", "normed", is_wide=True),
        SavedTensor("outputs of both norms", "hidden", 2),
        SavedTensor("the same, cast for each product", "hidden", 3, is_narrow_only=True),
        SavedTensor("attention's output, and in the order of the pass", "attended", 2),
        SavedTensor("gate, its activation, up and their product", "intermediate", 4),
        SavedTensor("the same of experts", "routed_intermediate", 4),
    ),
    chunk_elements=1 << 24,
    wide_chunks=4.0,
    narrow_chunks=0.0,
    head_gradients=2.0,
    spread=1.1,
    process=500_000_000,
)
"""On CPUs, where the peak is that of the whole process."""
OUTSIDE = (
    SavedTensor("residual stream, last norm and rows for the head", "hidden", 3, is_wide=True),
    SavedTensor("rows for the head", "hidden"),
)
"""Saved by a pass outside its layers."""
BACKWARD = (
    SavedTensor("gradient of the residual stream", "hidden", 2, is_wide=True),
    SavedTensor("gradients of the norms' outputs", "hidden", 2),
    SavedTensor("gradients of gate, up and their product", "intermediate", 3),
    SavedTensor("the same of experts", "routed_intermediate", 3),
    SavedTensor("gradients of experts' inputs and outputs", "routed_hidden", 2),
)
"""Temporaries of one layer's backward pass."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes."""

    weights: int
    masters: int  # float32 copies of narrower weights
    gradients: int
    moments: int
    references: int  # weights of frozen models: a reference, a teacher
    publishing: int  # copies of the weights for the engines
    saving: int  # on a CPU, copies of weights and moments while a checkpoint is written; on a GPU they are on the host
    activations: int  # at the end of a forward pass
    head: int  # workspace of the head
    layer: int  # workspace of one layer's backward pass; with recomputation, its activations too
    step: int  # temporaries of the optimizer's step
    process: int  # on a CPU, the process before it has a model
    optimizer_in_passes: int  # masters and moments that are on the device during a pass
    tokens: int  # in the largest pass
    loading: int = 0  # on a CPU, the process with a model that is not in 4 bits yet
    gathered: int = 0  # on several ranks: the embedding and its gradient, whole during a pass

    @property
    def resident(self) -> int:
        """Between passes and steps."""
        copies = self.references + self.publishing + self.saving
        return self.process + self.weights + self.gradients + copies + self.optimizer_in_passes

    @property
    def total(self) -> int:
        """The peak of a pass, or of the optimizer step if that is higher."""
        step = self.resident - self.optimizer_in_passes + self.masters + self.moments + self.step
        passing = self.resident + self.gathered + self.activations + max(self.head, self.layer)
        return max(passing, step, self.loading)


def _whole_bytes(shape: ModelShape, *, width: int, shard: int, is_trained: bool) -> tuple[int, int, int]:
    """(outside of layers, in the head, in a layer): what is whole on every rank of a sharded model while it is in use."""
    if shard == 1:
        return 0, 0, 0
    gradient = _WIDE if is_trained else 0
    layer, embedding = shape.layer_matrices, shape.embedding
    head = 0 if shape.is_tied else (width + gradient) * embedding
    received = 2 * gradient * layer // shard
    return (width + gradient) * embedding, head + width * layer, 2 * (width + gradient) * layer + received


def _moment_bytes(settings: TrainSettings, trained: int, *, outer: int, vectors: int, width: int) -> int:
    """Of the optimizer's state for so many numbers in matrices, of which `outer` are embeddings and head, and in vectors."""
    if settings.optimizer == "adamw_8bit":  # two codes each, and two scales for a block
        scales = _WIDE * (trained * width + vectors * _WIDE) // ALIGNMENT
        return 2 * (trained + vectors + scales)
    with_one = max(0, trained - outer) if settings.optimizer == "muon" else 0
    return _WIDE * (2 * (trained + vectors) - with_one)


def _step_bytes(shape: ModelShape, settings: TrainSettings, trained: int, *, on_gpu: bool) -> int:
    """Of the optimizer's temporaries. Muon never splits a matrix."""
    at_once = AT_ONCE if on_gpu or settings.optimizer == "muon" else CACHED
    if settings.optimizer == "muon":
        at_once = max(at_once, shape.hidden * max(shape.intermediate, 2 * shape.expert_intermediate))
    return _WIDE * _STEP_COPIES[settings.optimizer] * min(trained, at_once)


def _routing_bytes(shape: ModelShape, settings: TrainSettings, *, width: int, replays: bool) -> int:
    """Of one token's replayed routing in all layers, and of what router losses keep: logits and scores of all experts, and what
    a loss makes of both in float32."""
    watched = shape.experts * (width + 3 * _WIDE) if settings.router_aux or settings.router_z else 0
    return shape.expert_layers * (watched + shape.experts_per_token * _REPLAYED * replays)


def predict_memory(
    shape: ModelShape,
    settings: TrainSettings,
    *,
    dtype: str,
    tokens: int,
    on_gpu: bool = True,
    num_parameters: int = 0,
    frozen: Sequence[int] = (),
    num_references: int = 0,
    publishing: int = 0,
    adapter: int = 0,
    adapter_width: int = 0,
    quantized: Sequence[int] = (),
    replays: bool = False,
) -> TrainerMemory:
    """Predict one rank's, for passes of at most `tokens` tokens. `num_parameters`: as counted in the model's files, 0 if
    unknown. `frozen`: the numbers in each matrix that is not trained. `num_references`: frozen models of the same size.
    `publishing`: bytes that the weight sync takes in the same memory. `adapter`: numbers in the adapter that alone is trained,
    if there is one, and `adapter_width`: what it computes per token and layer between its matrices.
    `quantized`: the numbers in each weight that is held in 4 bits. `replays`: whether rollouts carry their routing."""
    costs = COMPILED if on_gpu else EAGER
    width = bytes_per_number(dtype)
    vectors = shape.vectors
    matrices = max(num_parameters - vectors, 0) or shape.matrices
    shard = settings.parallel.shard
    reference = width * (matrices // shard) + _WIDE * vectors // shard  # never in 4 bits, and without an adapter
    unquantized = reference + width * adapter
    weights = unquantized - (width * sum(quantized) - sum(map(held_bytes, quantized))) // shard
    trained, vectors = (adapter, 0) if adapter else ((matrices - sum(frozen)) // shard, vectors // shard)
    outer = 0 if adapter else shape.embedding * ((1 if shape.is_tied else 2) - frozen.count(shape.embedding)) // shard
    masters = _WIDE * trained if width < _WIDE else 0
    moments = _moment_bytes(settings, trained, outer=outer, vectors=vectors, width=width)
    recomputes = settings.recompute == "layers"
    layers = min(_LAYERS_ON_DEVICE, shape.layers) if "activations" in settings.offload else shape.layers
    widths = shape.widths()

    def size(tensors: Iterable[SavedTensor]) -> float:
        real = [each for each in tensors if width < _WIDE or not each.is_narrow_only]
        return tokens * sum(widths[each.of] * each.count * (_WIDE if each.is_wide else width) for each in real)

    saved = size(costs.saved) + tokens * adapter_width * width
    kept = size(OUTSIDE) + tokens * _routing_bytes(shape, settings, width=width, replays=replays)
    layer_gradients = adapter // shape.layers if adapter else shape.layer_matrices
    head_gradient = 0 if adapter else _WIDE * costs.head_gradients * shape.embedding
    # On a CPU a reference that follows the policy is copied into checkpoints; one that is mixed in is held in float32 too.
    wide = 0 if on_gpu or settings.reference_mix == 1 or width == _WIDE else _WIDE * matrices // shard
    references = 0 if "reference" in settings.offload and on_gpu else num_references * reference
    copied = 0 if on_gpu or not settings.reference_every else wide or reference
    logits = min(costs.chunk_elements, tokens * shape.vocabulary)
    chunk = logits * (_WIDE * costs.wide_chunks + width * costs.narrow_chunks)
    outside, in_head, in_layer = _whole_bytes(shape, width=width, shard=shard, is_trained=not adapter)
    return TrainerMemory(
        weights=weights,
        masters=masters,
        gradients=_WIDE * (trained + vectors),
        moments=moments,
        references=references + wide,
        publishing=publishing,
        saving=0 if on_gpu else _WIDE * ((adapter or matrices // shard) + vectors) + moments + copied,
        activations=int(costs.spread * (layers * (tokens * _WIDE * shape.hidden if recomputes else saved) + kept)),
        head=int(chunk + head_gradient + _WIDE * tokens * shape.hidden) + in_head,
        layer=int((saved if recomputes else 0) + size(BACKWARD) + width * (layer_gradients + max(quantized, default=0)))
        + in_layer,
        step=_step_bytes(shape, settings, trained, on_gpu=on_gpu),
        process=costs.process,
        optimizer_in_passes=0 if "optimizer" in settings.offload else masters + moments,
        tokens=tokens,
        loading=0 if on_gpu or not quantized else costs.process + unquantized,
        gathered=outside,
    )
