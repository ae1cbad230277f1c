"""Records which experts a mixture-of-experts model sends each token to, and replays what was recorded.

A transformers router returns logits, weights and indices; rollouts record the indices as `expert_routing`. Routers become
`_Followed` ones, once per model. Each reads what to replay from its own attributes and leaves what it chose there; a hook on
the decoder collects that after the last layer. So no code of a layer knows the layer's number, and one compilation serves all.

Families differ in how they make weights of logits (softmax before or after the choice, sigmoid, normalised or not, scaled), but
all choose with `topk`. A replay runs the router's own code with another answer from that one call: the recorded experts and
their live scores. So the weights follow the router's own formula, and gradients flow to it.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from headrace.model.attention import PackedContext
from headrace.model.load import ModelError, hidden_states, is_router, put_before
from headrace.records import unknown_expert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from headrace.records import Rollout

    Sink = Callable[[int, Tensor], None]

_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MOST_NARROW = 254  # experts that fit uint8, with 255 for an unknown one
_TOP_K = (torch.topk, torch.Tensor.topk)
_SIGMOID = (torch.sigmoid, torch.Tensor.sigmoid)
_PROBED = 16  # tokens


class Watched(NamedTuple):
    """What a pass leaves of one layer; differentiable."""

    logits: Tensor  # [rows, experts]
    shares: Tensor  # [rows, experts]: the router's scores of all experts, as shares of 1
    chosen: Tensor  # [rows, top_k]: the experts it used


def find_readable_routers(model: PreTrainedModel) -> Routers | None:
    """A model's routers, made to be followed. None for a dense model, and for routers of an unknown form: such a model is
    served without recording its routing. Call it once per model, before compiling it."""
    found: dict[int, nn.Module] = {}
    for name, block in model.named_modules():
        if "experts" in block._modules:
            routers = [child for child in block.children() if is_router(child)]
            layer = _DECODER_LAYER.search(f"{name}.")
            if layer is None or len(routers) != 1:
                return None
            found[int(layer[1])] = routers[0]
    match list({(getattr(router, "top_k", None), getattr(router, "num_experts", None)) for router in found.values()}):
        case [(int(top_k), int(num_experts))]:
            return Routers(model, dict(sorted(found.items())), top_k=top_k, num_experts=num_experts)
    return None


class Routers:
    """A model's routers in layer order: what they choose is seen and replayed."""

    def __init__(self, model: PreTrainedModel, routers: Mapping[int, nn.Module], *, top_k: int, num_experts: int) -> None:
        self._routers: list[Any] = list(routers.values())
        self.layers = list(routers)  # their places among all decoder layers
        for followed in self._routers:
            put_before(followed, _Followed)
            followed.headrace_top_k = top_k
        self.num_layers = len(routers)  # decoder layers with experts
        self.top_k = top_k  # experts per token in each of them
        self.num_experts = num_experts
        self.dtype_name = "uint8" if num_experts <= _MOST_NARROW else "int16"  # holds an expert's number
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self._sink: Sink | None = None
        self._differs: Tensor | None = None
        self._watched: dict[int, Watched] | None = None
        model.base_model.register_forward_hook(lambda *_: self._collect())

    @contextlib.contextmanager
    def recording(self, sink: Sink) -> Iterator[None]:
        """Within it, each forward pass ends by calling `sink` for each layer with experts, with its index among these and the
        [tokens, top_k] indices of the chosen experts, int64 on the model's device.

        In a CUDA graph `sink` must copy the indices to a fixed place and not wait for the device. If the whole model is
        compiled, and not its layers, it is compiled once per sink, so reuse it.
        """
        assert self._sink is None, "the routers are being recorded already"
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    @contextlib.contextmanager
    def replaying(self, routing: Tensor) -> Iterator[Tensor]:
        """Within it, passes send their rows to the experts in `routing`, [rows, layers, top_k]; rows of -1 are routed freely.
        Yields [layers, rows] bool, which each pass fills: where the router itself would have chosen another set. A backward
        pass that recomputes layers must be within it too."""
        assert self._differs is None, "routing is being replayed already"
        self._differs = torch.zeros(self.num_layers, len(routing), dtype=torch.bool, device=routing.device)
        for index, router in enumerate(self._routers):
            router.headrace_recorded = routing[:, index].to(torch.int64, copy=True)  # compiled once: it is no view
        try:
            yield self._differs
        finally:
            self._differs = None
            for router in self._routers:
                router.headrace_recorded = router.headrace_differs = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[dict[int, Watched]]:
        """Within it, a pass leaves each layer's `Watched` in what this yields. A backward pass that recomputes layers must be
        within it too."""
        self._watched = {}
        for router in self._routers:
            router.headrace_is_watched = True
        try:
            yield self._watched
        finally:
            self._watched = None
            for router in self._routers:
                router.headrace_is_watched, router.headrace_watched = False, None

    @torch.no_grad()
    def check_replay(self, model: PreTrainedModel) -> None:
        """Raise unless `model` takes a replay: its own choice must give the same hidden states, and every layer another one."""
        weight = next(model.parameters())
        tokens = torch.arange(_PROBED, device=weight.device)
        chosen: dict[int, Tensor] = {}

        def forward() -> tuple[Tensor, Tensor]:
            with self.recording(chosen.__setitem__):
                hidden = hidden_states(model, tokens, tokens, PackedContext([_PROBED], device=weight.device))
            return hidden, torch.stack([chosen[layer] for layer in range(self.num_layers)], dim=1)

        free, own = forward()
        other = (own + 1) % self.num_experts
        with self.replaying(own):
            difference = (forward()[0] - free).abs().max() / free.abs().max().clamp_min(1e-6)
        with self.replaying(other):
            is_forced = torch.equal(forward()[1], other)
        if not is_forced or float(difference) > (1e-4 if weight.dtype == torch.float32 else 5e-2):
            raise ModelError(f"with its own choice of experts forced, hidden states differ by {float(difference):.1e}")

    def _collect(self) -> None:
        """Pass on what the routers left during a pass."""
        for index, router in enumerate(self._routers):
            if self._differs is not None:
                self._differs[index].copy_(router.headrace_differs)
            if self._sink is not None:
                self._sink(index, router.headrace_chosen)
            if self._watched is not None:
                logits, shares = router.headrace_watched
                self._watched[index] = Watched(logits, shares, router.headrace_chosen)
                if logits.requires_grad:  # the layer was recomputed by then; what the router left again would hold all of it
                    logits.register_hook(lambda _, router=router: setattr(router, "headrace_watched", None))


class _Followed:
    """Comes before a router's own class."""

    headrace_recorded: Tensor | None = None  # [rows, top_k]: what to replay
    headrace_is_watched = False
    headrace_top_k: int
    headrace_chosen: Tensor  # this and the rest is what a pass leaves
    headrace_differs: Tensor | None
    headrace_watched: tuple[Tensor, Tensor] | None  # logits, shares

    def forward(self, *given: Any) -> Any:  # noqa: ANN401  (a router's inputs and outputs)
        router: Any = self
        own, recorded = super().forward, self.headrace_recorded  # type: ignore[misc]
        live: list[Tensor] = []
        scores: list[Tensor] = []
        with contextlib.ExitStack() as seeing:
            if recorded is not None:
                seeing.enter_context(_ForcedChoice(recorded, live, num_experts=router.num_experts))
            if self.headrace_is_watched:
                seeing.enter_context(_SeenScores(scores, num_experts=router.num_experts))
            output = own(*given)
        if recorded is not None:
            if len(live) != 1:
                raise ModelError(f"{type(self).__name__} does not choose its experts by one call of `topk`")
            self.headrace_differs = (live[0].sort().values != recorded.sort().values).any(dim=-1)
        self.headrace_chosen = _indices(router, output, top_k=self.headrace_top_k)
        if self.headrace_is_watched:
            logits = _logits(output)
            shares = scores[0] / scores[0].sum(dim=-1, keepdim=True) if scores else logits.float().softmax(dim=-1)
            self.headrace_watched = logits, shares
        return output


class _ForcedChoice(TorchFunctionMode):
    """Within it, the `topk` over [rows, experts] gives the recorded experts with their live scores."""

    def __init__(self, recorded: Tensor, live: list[Tensor], *, num_experts: int) -> None:
        """`live` gets what the router itself would have chosen."""
        super().__init__()
        self._recorded, self._live, self._num_experts = recorded, live, num_experts

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  (whatever the function returns)
        found = function(*args, **(kwargs or {}))
        recorded = self._recorded
        if function not in _TOP_K or args[0].shape != (len(recorded), self._num_experts) or found[1].shape != recorded.shape:
            return found  # DeepSeek's choice of groups is one too
        self._live.append(found[1])
        chosen = torch.where((recorded >= 0).all(dim=-1, keepdim=True), recorded, found[1])
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class _SeenScores(TorchFunctionMode):
    """Within it, sigmoids over [rows, experts] are noted in `scores`."""

    def __init__(self, scores: list[Tensor], *, num_experts: int) -> None:
        super().__init__()
        self._scores, self._num_experts = scores, num_experts

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  (whatever the function returns)
        found = function(*args, **(kwargs or {}))
        if function in _SIGMOID and found.shape[-1] == self._num_experts:
            self._scores.append(found.reshape(-1, self._num_experts))
        return found


def check_recorded(routers: Routers | None, rollouts: Iterable[Rollout]) -> None:
    """Raise unless the routing that rollouts carry can be replayed by the model with these routers."""
    for rollout in rollouts:
        routing = rollout.expert_routing
        if routing is None:
            continue
        its = f"rollout {rollout.id!r}: its expert_routing"
        if routers is None:
            raise ModelError(f"{its} cannot be replayed: the model has no experts whose routing can be read")
        if routing.shape[1:] != (routers.num_layers, routers.top_k):
            layers, top_k = routing.shape[1:]
            wanted = f"{routers.num_layers} layers with {routers.top_k}"
            raise ModelError(f"{its} is of {layers} layers with {top_k} experts per token, but the model has {wanted}")
        known = routing[routing != unknown_expert(routing.dtype)].astype(np.int64)
        wrong = known[(known < 0) | (known >= routers.num_experts)]
        if len(wrong):
            raise ModelError(f"{its} names expert {wrong[0]}, but the model's are 0 to {routers.num_experts - 1}")


def _logits(output: Any) -> Tensor:  # noqa: ANN401  (a router's outputs)
    """Routers return indices at one end and logits at the other."""
    first, *_, last = output
    found: Tensor = last if first.dtype == torch.int64 else first
    return found.reshape(-1, found.shape[-1])


def _indices(router: nn.Module, output: object, *, top_k: int) -> Tensor:
    """The one integer output: most routers return it last, some first."""
    outputs = output if isinstance(output, tuple) else (output,)
    whole = [entry for entry in outputs if isinstance(entry, torch.Tensor) and not entry.dtype.is_floating_point]
    if len(whole) != 1 or whole[0].shape[-1] != top_k:
        raise ModelError(f"{type(router).__name__} does not return the indices of {top_k} experts for each token")
    return whole[0].reshape(-1, top_k)
