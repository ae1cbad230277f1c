"""A `Trainer` of one model on one device, or on this rank's of several."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from headrace.algorithms import (
    BATCH_WIDE,
    COMPUTED,
    ENTROPY,
    PROXIMAL,
    REFERENCE,
    VALUES,
    TokenTensors,
    batch_corrections,
    missing_column,
    needed_columns,
    objective,
    ratio_base,
)
from headrace.model import (
    Arena,
    Head,
    ModelShape,
    Packed,
    PassCost,
    ShardedArena,
    ShardedWeights,
    adapter_of,
    can_group_experts,
    check_recorded,
    empty_pass,
    find_readable_routers,
    held_tensors,
    members_of,
    named_tensors,
    narrow,
    pack,
    packed_hidden,
    plan_passes,
    plan_rank_passes,
    replaying,
    take_files,
)
from headrace.observe import peak_memory
from headrace.settings import ConfigError
from headrace.trainer import layers, saving
from headrace.trainer.diagnostics import Diagnostics, is_sampled_by
from headrace.trainer.frozen_model import FrozenModel, WithoutAdapter
from headrace.trainer.loss_scale import LossScale
from headrace.trainer.optimizer import FlatOptimizer
from headrace.trainer.parameter_groups import match_parameters
from headrace.trainer.router_losses import router_losses
from headrace.trainer.sharding import Sharding, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.durable import Fingerprints
    from headrace.model import Unit, Watched
    from headrace.records import Array, Batch, Rollout
    from headrace.trainer.protocol import Metrics
    from headrace.trainer.ranks import Ranks
    from headrace.trainer.settings import TrainSettings

    Columns = Mapping[str, Sequence[Array]]
    """By name, an array for each rollout."""

_VALUE_TIMES = 10.0  # default learning rate of the value head, relative to the policy's: higher, because the head starts at 0


@dataclass(frozen=True)
class _Pass:
    """One forward and backward pass: its rows, and the objective's inputs per target."""

    packed: Packed
    counts: list[int]  # targets of each rollout
    given: dict[str, Tensor]  # recorded logprobs, versions, is_current, advantages, weights, and batch-wide corrections by name
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, members: Sequence[int], packed: Packed, rollouts: Sequence[Rollout], given: Columns, columns: Columns) -> _Pass:
        def gathered(arrays: Columns) -> dict[str, Tensor]:
            return {name: packed.gather([each[member] for member in members]) for name, each in arrays.items() if members}

        counts = [int(np.count_nonzero(_targets(rollouts[member]))) for member in members]
        return cls(packed, counts, gathered(given), gathered(columns))


class DeviceTrainer:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase,
        settings: TrainSettings,
        exact: bool = False,
        dtype: torch.dtype = torch.float32,
        frozen: Mapping[str, FrozenModel] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`frozen`: models by the column of their logprobs. If the model has an adapter, that alone is trained, and without it
        the model is the reference, unless another is given. `ranks`: the group this process has joined; the model may then be
        on the host, and only this rank's part of it moves to its device; or in its files, and only that part is read."""
        self.model = model.eval()  # no dropout, as in the engine; gradients still flow
        self.num_passes = 0
        self._tokenizer, self._settings, self._exact = tokenizer, settings, exact
        self._frozen: dict[str, FrozenModel | WithoutAdapter] = dict(frozen or {})
        self._ranks = ranks if ranks is not None and ranks.count > 1 else None
        self._device = next(model.parameters()).device if self._ranks is None else self._ranks.device
        adapter = adapter_of(model)
        if adapter is not None:
            self._frozen.setdefault(REFERENCE, WithoutAdapter(model, exact=exact))
        learner: nn.Module = model if adapter is None else adapter
        digits: dict[str, Tensor] = {}
        files = take_files(model)
        if _loses_digits(learner, dtype):  # on the host until the masters exist: a GPU would hold them twice
            digits = {name: tensor.to("cpu") for name, tensor in named_tensors(learner)}
        if dtype != torch.float32:
            narrow(model, dtype)
        groups = match_parameters(settings.parameters, dict(learner.named_parameters()))
        for name, group in groups.items():
            learner.get_parameter(name).requires_grad_(not group.freeze)
        self._sharding = self._shard(learner)
        self._weights = Arena.adopt(model) if self._sharding is None else self._sharding.arena
        # What is trained, as engines lay it out; an adapter is whole on every rank.
        self.arena = self._weights if adapter is None else Arena.adopt(adapter.narrow(model, dtype).to(self._device))
        self._head = Head(model, exact=exact)
        self._routers = find_readable_routers(model)
        for name in ("router_aux", "router_z"):
            if self._routers is None and getattr(settings, name):
                raise ConfigError(f"train.{name} = {getattr(settings, name):g}: the model has no router to train; set it to 0")
        self._values = make_value_head(model) if VALUES in needed_columns(settings.loss) else None
        trained = [(self.arena, {name: p for name, p in learner.named_parameters() if p.requires_grad})]
        outer = [name for name, p in model.named_parameters() if id(p) in _embeddings(model)]
        if self._values is not None:
            holder = nn.ModuleDict({saving.VALUE_HEAD: self._values})
            trained.append((Arena.adopt(holder), dict(holder.named_parameters())))
            outer += dict(holder.named_parameters())
        self._seen, self._gradient_scale, self._is_between_parts = Diagnostics(), 1.0, False
        self._is_loss_finite = True
        self.optimizer = FlatOptimizer(
            trained,
            settings,
            offload="optimizer" in settings.offload,
            groups=groups,
            outer=outer,
            loss_scale=LossScale() if torch.float16 in self.arena.flat else None,
            ranks=self._ranks,
        )
        if digits:
            self.optimizer.load_weights({name: self.arena.piece(name, tensor) for name, tensor in digits.items()})
        if files is not None:
            assert self._sharding is not None
            saving.read_weights(model, self.optimizer, self._sharding.arena, files)
            self._sharding.probe(model, exact=exact)
        if settings.recompute == "layers":
            layers.recompute(model)
        if self._device.type == "cuda" and not exact and dtype != torch.float32 and can_group_experts(model):
            layers.compile_all(model)

    def _shard(self, learner: nn.Module) -> Sharding | None:
        """Move the model to this rank's device, whole or in part."""
        ranks, settings = self._ranks, self._settings
        if ranks is not None and ranks.shard > 1:
            layout = f"train.parallel.shard = {ranks.shard}"
            if settings.optimizer == "muon" and learner is self.model:
                raise ConfigError(f"{layout}: train.optimizer = 'muon' needs whole matrices; set it to 'adamw' or 'adamw_8bit'")
            untrained = [name for name, tensor in held_tensors(self.model) if not tensor.requires_grad]
            if settings.reference_every and untrained:
                given = "a reference that follows the policy (train.reference_every) cannot be sharded"
                raise ConfigError(f"{layout}: {given} where not all is trained: {untrained[0]} is not; leave one of them out")
        return place(self.model, ranks)

    def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        scorer = self._frozen.get(column)
        is_own = column in (PROXIMAL, ENTROPY) or (column == VALUES and self._values is not None)
        if column not in COMPUTED or (scorer is None and not is_own):
            raise missing_column("the trainer", column)
        model, head = (self.model, self._head) if scorer is None else (scorer.model, scorer.head)
        sharding = scorer.sharding if isinstance(scorer, FrozenModel) else self._sharding
        results = [np.zeros(len(rollout), dtype=np.float32) for rollout in batch.rollouts]
        with torch.no_grad(), scorer or contextlib.nullcontext():
            for members, packed in self._passes(batch.rollouts):
                self.num_passes += 1
                with sharding or contextlib.nullcontext():
                    with replaying(self._routers if scorer is None else None, packed):
                        rows = self._hidden(model, packed, sharding)
                    if column == VALUES:
                        values = self._estimates(rows)
                        assert values is not None
                    else:
                        logprobs, entropies = head.logprobs(rows, packed.wanted, packed.temperatures, allowed=packed.allowed)
                        values = entropies if column == ENTROPY else logprobs
                found, sequence = values.cpu().numpy(), packed.sequence.cpu().numpy()
                for place, member in enumerate(members):
                    results[member][_targets(batch.rollouts[member])] = found[sequence == place]
        return results if self._ranks is None else self._ranks.merge(results)

    def forward_backward(self, batch: Batch) -> Metrics:
        rollouts, columns = batch.rollouts, self._columns(batch)
        given: dict[str, Sequence[Array]] = {
            "recorded": [rollout.logprobs for rollout in rollouts],
            "versions": [rollout.versions for rollout in rollouts],
            "is_current": [is_sampled_by(rollout, batch.version) for rollout in rollouts],
            "advantages": batch.advantages,
            "weights": batch.weights,
        }
        if columns.get(PROXIMAL):
            given |= batch_corrections(batch, columns[PROXIMAL])

        if batch.part == 0:
            self._seen = Diagnostics()
            if self._is_between_parts:
                self.optimizer.zero_gradient()
        seen, self._is_between_parts, self._gradient_scale = self._seen, not batch.is_last, batch.gradient_scale
        # All passes are packed and on their way to the device before the first starts, so that none waits for the host.
        for each in [_Pass.of(*each, rollouts, given, columns) for each in self._passes(rollouts)]:
            self.num_passes += 1
            # The backward pass is within both: it may recompute layers.
            with (
                self._sharding or contextlib.nullcontext(),
                replaying(self._routers, each.packed) as differs,
                self._watching() as watched,
            ):
                self._train_pass(batch, each, seen, watched)
            if differs is not None:
                seen.add_routing(differs, each.packed)
        metrics = seen.metrics(self._ranks, scale=batch.gradient_scale)
        self._is_loss_finite = math.isfinite(metrics["loss"])
        return metrics

    def optim_step(self, learning_rate: float) -> Metrics:
        settings, rates, scaling = self._settings, {"learning_rate": learning_rate}, dict[str, float]()
        if self._values is not None:
            times = settings.value_learning_rate / settings.learning_rate or _VALUE_TIMES
            rates["value_learning_rate"] = times * learning_rate
        norms, scale = self.optimizer.step(*rates.values(), times=self._gradient_scale).tolist(), self.optimizer.loss_scale
        is_finite, is_overflow = bool(np.isfinite(norms).all()), False
        if scale is not None:
            scaling["loss_scale"] = scale.value
            is_overflow = self._is_loss_finite and scale.adapt(is_finite=is_finite)
            scaling["overflowed"] = float(is_overflow)
        return {
            **{name: norm if is_finite else -1.0 for name, norm in zip(("grad_norm", "value_grad_norm"), norms, strict=False)},
            "skipped": float(not is_finite and not is_overflow),
            **rates,
            **scaling,
            "memory_peak": float(peak_memory(self._device)),
        }

    def mix_reference(self, share: float) -> None:
        reference = self._frozen[REFERENCE]
        assert isinstance(reference, FrozenModel)
        reference.mix(self.arena, share)

    def tensors(self) -> Arena | ShardedWeights:
        """Return the weights in the engine's dtypes; if there are several ranks, this one's ranges of them."""
        if isinstance(self.arena, ShardedArena):
            return self.arena.weights(is_offered=self._ranks is not None and self._ranks.replica == 0)
        return self.arena if self._ranks is None or not self._ranks.rank else ShardedWeights(self.arena.slots, ())

    def save(self, folder: Path, *, on_read: Callable[[], None] = lambda: None) -> Fingerprints:
        return saving.save(
            self.model,
            self._tokenizer,
            self.optimizer,
            folder,
            arena=self.arena,
            ranks=self._ranks,
            reference=self._reference,
            on_read=on_read,
        )

    def load(self, folder: Path) -> None:
        saving.load(self.model, self.optimizer, folder, arena=self.arena, reference=self._reference)

    @property
    def _reference(self) -> FrozenModel | None:
        """The reference, if it changes and so is part of a checkpoint."""
        reference = self._frozen.get(REFERENCE)
        return reference if self._settings.reference_every and isinstance(reference, FrozenModel) else None

    def _passes(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[list[int], Packed]]:
        """Yield the indexes of each pass's rollouts, and these packed; rollouts without a target are in no pass."""
        check_recorded(self._routers, rollouts)
        places = [place for place, rollout in enumerate(rollouts) if _targets(rollout).any()]
        rollouts, settings = [rollouts[place] for place in places], self._settings
        is_target, share = [rollout.loss_mask for rollout in rollouts], settings.share_prefixes and not self._exact
        for units in self._plan(rollouts, share=share):
            if not units:
                yield [], empty_pass(device=self._device, exact=self._exact)
                continue
            packed = pack(rollouts, is_target, units=units, device=self._device, exact=self._exact)
            yield [places[member] for member in members_of(units)], packed

    def _plan(self, rollouts: Sequence[Rollout], *, share: bool) -> list[list[Unit]]:
        """The passes of this rank; an empty one where others need one more."""
        budget = self._settings.micro_batch_tokens
        if self._ranks is None:
            return plan_passes(rollouts, budget=budget, share=share)
        shape = ModelShape.of(self.model.config)
        cost = PassCost(shape.row_flops, shape.pair_flops)
        return plan_rank_passes(rollouts, budget=budget, count=self._ranks.count, cost=cost, share=share)[self._ranks.rank]

    def _columns(self, batch: Batch) -> dict[str, Sequence[Array]]:
        """Return the columns that every rollout has, and compute the needed ones that are missing. `proximal` is computed only
        for batch-wide corrections: if a version is one optimizer step, the training pass itself gives it."""
        shared = set.intersection(*(set(rollout.columns) for rollout in batch.rollouts)) if batch.rollouts else set()
        columns: dict[str, Sequence[Array]] = {
            name: [rollout.columns[name] for rollout in batch.rollouts] for name in sorted(shared)
        }
        wanted = {*needed_columns(batch.loss, batch.corrections, batch.kl), *([ENTROPY] if batch.entropy_floor else [])}
        if BATCH_WIDE.isdisjoint(batch.corrections):
            wanted.discard(PROXIMAL)
        for name in sorted(wanted - shared):
            if name not in COMPUTED:
                raise missing_column(f"the batch of version {batch.version}", name)
            columns[name] = self.forward(batch, column=name)
        return columns

    def _train_pass(self, batch: Batch, each: _Pass, seen: Diagnostics, watched: Mapping[int, Watched] | None) -> None:
        packed = each.packed
        with layers.saved_tensors(self._weights, on_host="activations" in self._settings.offload):
            rows = self._hidden(self.model, packed, self._sharding)

        def judge(start: int, stop: int, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                leaves = logprobs.detach().requires_grad_(), entropies.detach().requires_grad_()
                loss = self._objective(batch, each, slice(start, stop), *leaves, None, seen)
                of_logprobs, of_entropies = torch.autograd.grad(self._scaled(loss), leaves, allow_unused=True)
                return torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs, of_entropies

        loss = None if each.counts else rows.sum()  # of no rows: an empty pass has gradients of 0
        if loss is None and packed.allowed is None and self._values is None:
            gathered = self.optimizer.gradient_of(self._head.weight)
            loss = self._head.backpropagate(
                rows, packed.wanted, packed.temperatures, judge, counts=each.counts, gathered=gathered
            )
        if loss is None:
            logprobs, entropies = self._head.logprobs(rows, packed.wanted, packed.temperatures, allowed=packed.allowed)
            loss = self._scaled(self._objective(batch, each, slice(None), logprobs, entropies, self._estimates(rows), seen))
        if watched and each.counts:
            num_targets = sum(int(np.count_nonzero(_targets(rollout))) for rollout in batch.rollouts)
            aux, z = router_losses(list(watched.values()), packed, num_targets=num_targets)
            added = self._settings.router_aux * aux + self._settings.router_z * z
            seen.add_totals(added, router_aux=aux, router_z=z)
            loss = loss + self._scaled(added)
        if loss.requires_grad or each.counts:
            loss.backward()
        if self._sharding is not None:
            self._sharding.end_backward()

    def _watching(self) -> contextlib.AbstractContextManager[Mapping[int, Watched] | None]:
        """Within it, routers leave what their losses need, if there are any."""
        is_wanted = self._routers is not None and (self._settings.router_aux or self._settings.router_z)
        return self._routers.watching() if self._routers is not None and is_wanted else contextlib.nullcontext()

    def _objective(
        self,
        batch: Batch,
        each: _Pass,
        span: slice,
        logprobs: Tensor,
        entropies: Tensor,
        values: Tensor | None,
        seen: Diagnostics,
    ) -> Tensor:
        """Compute the loss of the targets in `span`, which covers whole rollouts."""
        given, columns = ({name: tensor[span] for name, tensor in part.items()} for part in (each.given, each.columns))
        proximal = columns.get(PROXIMAL, logprobs.detach())
        tokens = TokenTensors(
            logprobs=logprobs,
            recorded=given["recorded"],
            proximal=proximal,
            old=ratio_base(batch.corrections, recorded=given["recorded"], proximal=proximal),
            advantages=given["advantages"],
            sequence=each.packed.sequence[span],
            num_sequences=len(each.counts),
            versions=given["versions"],
            version=batch.version,
            columns=columns,
            entropy=entropies,
            values=values,
        )
        asked = objective(tokens, given["weights"], batch, batch_wide=given)
        seen.add(asked, tokens, is_current=given["is_current"])
        return asked.loss

    def _scaled(self, loss: Tensor) -> Tensor:
        """What a gradient is taken of, so that it does not underflow in float16."""
        scale = self.optimizer.loss_scale
        return loss if scale is None else loss * scale.value

    def _estimates(self, rows: Tensor) -> Tensor | None:
        """The value head's estimate at each row."""
        return None if self._values is None else self._values(rows.float()).squeeze(1)

    def _hidden(self, model: PreTrainedModel, packed: Packed, sharding: Sharding | None) -> Tensor:
        rows = packed_hidden(model, packed, exact=self._exact)
        if sharding is not None:
            sharding.use_head()
        return rows


def _targets(rollout: Rollout) -> Array:
    """[T] bool: the trained tokens, without the first, which nothing predicts."""
    mask = rollout.loss_mask.copy()
    mask[:1] = False
    return mask


def make_value_head(model: PreTrainedModel) -> nn.Linear:
    """The value head estimates the reward still to come from the hidden state that a token is sampled from. All values start at
    0, so that the first advantages are plain rewards."""
    width, device = int(model.config.get_text_config().hidden_size), next(model.parameters()).device
    head: nn.Linear = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=torch.float32)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def _embeddings(model: PreTrainedModel) -> set[int]:
    """Ids of the weights of the head, and of embeddings of tokens or positions."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(weight) for weight in (*embeddings, model.get_output_embeddings().weight)}


def _loses_digits(model: nn.Module, dtype: torch.dtype) -> bool:
    return dtype != torch.float32 and any(
        p.dtype == torch.float32 and p.ndim >= 2 and not p.is_meta for p in model.parameters()
    )
