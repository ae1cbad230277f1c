"""How much memory the trainer will take at its peak, from the model's sizes and the settings alone.

What is there all the time, of P numbers in matrices and a few in vectors (norms, biases):

| | bfloat16 | float32 |
|---|---|---|
| weights, in one arena | 2 P, vectors 4 each | 4 P |
| masters the optimizer works on | 4 P | the weights themselves |
| gradients, added up in one buffer | 4 P | 4 P |
| AdamW's two moments | 8 P | 8 P |

What a forward pass leaves for its backward pass, for each token in each layer (`COMPILED.saved`, `EAGER.saved`). Of a layer
that is compiled, what torch's partitioner saves rather than computes again (`test_memory_prediction.py` asks it): the
residual stream at the layer's input (float32); both norms' outputs, the attention block's output; queries and keys after
rotation, values, what attention gave and its log-sum-exp (float32); queries and keys before their own norms, where they have
such; the MLP's two products and what they make together. Run eagerly, a layer also keeps the residual stream between its
halves, what norms make before their weights, and the activation function's output; in bfloat16 a norm's output is cast once
for each product that reads it.

The peak is that sum, at the end of the forward pass, and beside it the larger of the head's workspace (a chunk of logits and
its gradient, the gradient of the head's weight) and of a layer's backward pass (its temporaries, and its gradients before
they are added up). Recomputed, a layer leaves its input, and its own activations are part of its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.model import ModelShape
    from headrace.trainer.settings import TrainSettings

_WIDE = 4
_LAYERS_ON_DEVICE = 2
"""Whose activations are on the device while those of the others are in the host's memory."""


@dataclass(frozen=True)
class SavedTensor:
    """Tensors of one size, `count` of them: [tokens, `of`], where `of` is one of `ModelShape.widths`."""

    what: str
    of: str
    count: float = 1
    is_wide: bool = False
    """float32 whatever the model's dtype is; otherwise of that dtype."""
    is_narrow_only: bool = False
    """There in bfloat16 only."""


@dataclass(frozen=True)
class Costs:
    """Everything that is to be calibrated against a measured peak, for one way of running a layer."""

    saved: tuple[SavedTensor, ...]
    """By the forward pass of one layer, for its backward pass."""
    outside: tuple[SavedTensor, ...]
    """By the rest of a pass: embedding, last norm, the rows that go to the head."""
    backward: tuple[SavedTensor, ...]
    """What the backward pass of one layer holds beside what was saved."""
    chunk_elements: int
    """Logits that the head works on at a time."""
    wide_chunks: float
    """float32 copies of such a chunk."""
    narrow_chunks: float
    """Copies of it in the model's dtype."""
    head_gradients: float
    """float32 copies of the gradient of the head's weight, beside the buffer it is added to."""
    offloaded_share: float = 0.0
    """Of masters and moments still on the device during a pass with `offload = ["optimizer"]`."""
    spread: float = 1.0
    """Memory taken for each byte of activations: what the allocator leaves unused between them counts where the process's own
    size is what is measured."""
    process: int = 0
    """Bytes of a process before it has a model, counted there too."""


_ATTENTION = (
    SavedTensor("queries after rotation", "queries"),
    SavedTensor("keys after rotation", "keys"),
    SavedTensor("values", "values"),
    SavedTensor("log-sum-exp", "heads", is_wide=True),
    SavedTensor("roots of mean squares", "one", 2, is_wide=True),
    SavedTensor("roots of mean squares of queries and keys", "normed_heads", is_wide=True),
    SavedTensor("queries and keys before their norms", "normed"),
)
_EXPERTS = (SavedTensor("inputs and outputs of experts", "routed_hidden", 2),)

COMPILED = Costs(
    saved=(
        *_ATTENTION,
        *_EXPERTS,
        SavedTensor("residual stream", "hidden", is_wide=True),
        SavedTensor("outputs of both norms and of the attention block", "hidden", 3),
        SavedTensor("attention's output", "attended"),
        SavedTensor("gate, up and their product", "intermediate", 3),
        SavedTensor("the same of experts", "routed_intermediate", 3),
    ),
    outside=(
        SavedTensor("residual stream, last norm and rows for the head", "hidden", 3, is_wide=True),
        SavedTensor("rows for the head", "hidden"),
    ),
    backward=(
        SavedTensor("gradient of the residual stream", "hidden", 2, is_wide=True),
        SavedTensor("gradients of the norms' outputs", "hidden", 2),
        SavedTensor("gradients of gate, up and their product", "intermediate", 3),
        SavedTensor("the same of experts", "routed_intermediate", 3),
        SavedTensor("gradients of experts' inputs and outputs", "routed_hidden", 2),
    ),
    chunk_elements=1 << 28,
    wide_chunks=1.0,
    narrow_chunks=1.0,
    head_gradients=0.0,
)
"""Layers compiled one by one, attention through kernels that keep no scores: a GPU's."""

EAGER = Costs(
    saved=(
        *_ATTENTION,
        *_EXPERTS,
        SavedTensor("residual stream, before and after attention", "hidden", 2, is_wide=True),
        SavedTensor("norms before their weights", "hidden", 2, is_wide=True),
        SavedTensor("norms before their weights, of queries and keys", "normed", is_wide=True),
        SavedTensor("outputs of both norms", "hidden", 2),
        SavedTensor("the same, cast for each product", "hidden", 3, is_narrow_only=True),
        SavedTensor("attention's output, and in the order of the pass", "attended", 2),
        SavedTensor("gate, its activation, up and their product", "intermediate", 4),
        SavedTensor("the same of experts", "routed_intermediate", 4),
    ),
    outside=COMPILED.outside,
    backward=COMPILED.backward,
    chunk_elements=1 << 24,
    wide_chunks=4.0,
    narrow_chunks=0.0,
    head_gradients=2.0,
    spread=1.1,
    process=500_000_000,
)
"""Operation by operation: a CPU's, whose peak is that of the whole process."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes. `str` is a table for people."""

    weights: int
    masters: int
    """float32 copies of the bfloat16 weights."""
    gradients: int
    moments: int
    references: int
    """Weights of models that are only asked: a reference, a teacher."""
    publishing: int
    """Copies of the weights made ready for the engines."""
    activations: int
    """When a forward pass has ended."""
    head: int
    """Workspace of the head."""
    layer: int
    """Workspace of one layer's backward pass; with recomputation, its activations too."""
    process: int
    """Of a CPU's process before it has a model."""
    optimizer_in_passes: int
    """Of masters and moments, what is on the device during a pass."""
    tokens: int
    """Of the largest pass."""

    @property
    def resident(self) -> int:
        """Outside passes and steps, where the optimizer's state is offloaded then."""
        return self.process + self.weights + self.gradients + self.references + self.publishing + self.optimizer_in_passes

    @property
    def total(self) -> int:
        """The peak: of a pass, or of the optimizer's step if that takes more."""
        step = self.resident - self.optimizer_in_passes + self.masters + self.moments
        return max(self.resident + self.activations + max(self.head, self.layer), step)

    def __str__(self) -> str:
        rows = {
            "weights": self.weights,
            "float32 masters": self.masters,
            "gradients": self.gradients,
            "AdamW's moments": self.moments,
            "reference and teacher": self.references,
            "made ready for engines": self.publishing,
            f"activations of {self.tokens:,} tokens": self.activations,
            "head, at work": self.head,
            "a layer's backward pass": self.layer,
            "the process itself": self.process,
        }
        rows = {name: value for name, value in rows.items() if value}
        width = max(len(name) for name in rows)
        lines = [f"{name:<{width}}  {value / 1e9:>8.2f} GB" for name, value in rows.items()]
        return "\n".join([*lines, f"{'at the peak':<{width}}  {self.total / 1e9:>8.2f} GB"])


def predict_memory(
    shape: ModelShape,
    settings: TrainSettings,
    *,
    dtype: str,
    tokens: int,
    on_gpu: bool = True,
    num_parameters: int = 0,
    num_references: int = 0,
    publishing: int = 0,
) -> TrainerMemory:
    """For passes of at most `tokens` tokens. `num_parameters`: as counted in the model's files, where that was done.
    `num_references`: models of the same size that are only asked. `publishing`: bytes of the weights made ready to travel, as
    far as they lie in the same memory."""
    costs, is_narrow = COMPILED if on_gpu else EAGER, dtype == "bfloat16"
    width = 2 if is_narrow else _WIDE
    vectors = shape.vectors
    matrices = max(num_parameters - vectors, 0) or shape.matrices
    weights = width * matrices + _WIDE * vectors
    masters, moments = _WIDE * matrices if is_narrow else 0, 2 * _WIDE * (matrices + vectors)
    saved = tokens * _bytes(costs.saved, shape, width)
    left = tokens * _WIDE * shape.hidden if settings.recompute == "layers" else saved
    layers = min(_LAYERS_ON_DEVICE, shape.layers) if "activations" in settings.offload else shape.layers
    again = saved if settings.recompute == "layers" else 0
    kept = costs.offloaded_share if "optimizer" in settings.offload else 1.0
    return TrainerMemory(
        weights=weights,
        masters=masters,
        gradients=_WIDE * (matrices + vectors),
        moments=moments,
        references=0 if "reference" in settings.offload else num_references * weights,
        publishing=publishing,
        activations=int(costs.spread * (layers * left + tokens * _bytes(costs.outside, shape, width))),
        head=_head(costs, shape, tokens=tokens, width=width),
        layer=int(again + tokens * _bytes(costs.backward, shape, width) + width * shape.layer_matrices),
        process=costs.process,
        optimizer_in_passes=int(kept * (masters + moments)),
        tokens=tokens,
    )


def _head(costs: Costs, shape: ModelShape, *, tokens: int, width: int) -> int:
    logits = min(costs.chunk_elements, tokens * shape.vocabulary)
    chunk = logits * (_WIDE * costs.wide_chunks + width * costs.narrow_chunks)
    return int(chunk + _WIDE * costs.head_gradients * shape.embedding + _WIDE * tokens * shape.hidden)


def _bytes(kept: Iterable[SavedTensor], shape: ModelShape, width: int) -> float:
    """Of one token."""
    widths = shape.widths()
    return sum(
        widths[each.of] * each.count * (_WIDE if each.is_wide else width)
        for each in kept
        if width < _WIDE or not each.is_narrow_only
    )
