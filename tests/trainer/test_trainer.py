"""The trainer against slow, obvious arithmetic, and its independence of packing."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.algorithms.columns import ENTROPY, PROXIMAL
from headrace.buffer import Group
from headrace.config import make_recipe
from headrace.durable import seal
from headrace.engine.native.core import EngineCore
from headrace.engine.request import Request
from headrace.model.head import Head
from headrace.model.load import load_model, load_tokenizer
from headrace.records import Batch, Episode, Rollout, Sampling, Scored
from headrace.run.batches import StepParts, make_batches
from headrace.trainer import DeviceTrainer, ParameterSettings, TrainSettings, learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable


def rollouts(model_path: str, count: int = 12, *, sampling: Sampling | None = None, dtype: str = "float32") -> list[Rollout]:
    sampling = sampling or Sampling(max_tokens=14)
    core = EngineCore(load_model(model_path, dtype=dtype), name="e", slots=8, context=64)
    done: dict[int, Rollout] = {}
    for index in range(count):
        ids = np.random.default_rng(index).integers(6, 90, size=2 + (5 * index) % 11)
        most = 1 + (3 * index) % sampling.max_tokens
        request = dataclasses.replace(sampling, seed=index, max_tokens=most, min_tokens=min(most, sampling.min_tokens))
        core.submit(Request(Rollout.from_prompt(ids, id=str(index)), request, on_done=lambda r: done.__setitem__(int(r.id), r)))
    while core.has_work:
        core.step()
    return [done[index] for index in range(count)]


def make_batch(items: list[Rollout], **changes) -> Batch:
    random = np.random.default_rng(1)
    total = sum(item.num_sampled for item in items)
    values = {
        "rollouts": tuple(items),
        "advantages": tuple(np.where(item.loss_mask, random.normal(), 0).astype(np.float32) for item in items),
        "weights": tuple((item.loss_mask / total).astype(np.float32) for item in items),
        "loss": "grpo",
        "constants": {"clip_low": 0.2, "clip_high": 0.28},
        "version": 0,
    }
    return Batch(**{**values, **changes})


def make_trainer(model_path: str, *, exact: bool = False, dtype: str = "float32", **settings) -> DeviceTrainer:
    return DeviceTrainer(
        load_model(model_path, exact=exact, dtype=dtype),
        tokenizer=load_tokenizer(model_path),
        settings=TrainSettings(**settings),
        exact=exact,
    )


def nudge(model: torch.nn.Module, *, scale: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype))


def gradients(trainer: DeviceTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}


def naive(model_path: str, batch: Batch, *, correction: str = "none") -> tuple[float, dict[str, torch.Tensor]]:
    """One rollout at a time through transformers' own attention, one token at a time through the loss."""
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    nudge(model)
    total = torch.zeros(())
    for rollout, advantages, weights in zip(batch.rollouts, batch.advantages, batch.weights, strict=True):
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        logits = model(ids.unsqueeze(0), use_cache=False).logits[0].float()
        for index in np.flatnonzero(rollout.loss_mask):
            row = logits[index - 1] / float(rollout.temperatures[index])
            if rollout.sampling_mask is not None and len(rollout.sampling_mask.row(index)):
                listed = rollout.sampling_mask.row(index).astype(np.int64)
                kept = torch.from_numpy(listed if listed[0] >= 0 else np.setdiff1d(np.arange(len(row)), ~listed))
                row = torch.full_like(row, float("-inf")).index_put((kept,), row[kept])
            logprob = torch.log_softmax(row, dim=-1)[ids[index]]
            recorded, advantage = float(rollout.logprobs[index]), float(advantages[index])
            weight = float(weights[index])
            if correction == "tis":
                weight *= min(float((logprob.detach() - recorded).exp()), 2.0)
                recorded = float(logprob.detach())
            ratio = (logprob - recorded).exp()
            entropy = torch.distributions.Categorical(logits=row[row > float("-inf")]).entropy()
            if entropy >= batch.entropy_floor:
                total = total - weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            total = total - float(weights[index]) * batch.entropy_weight * entropy
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SAMPLINGS = {
    "plain": Sampling(max_tokens=14),
    "temperature": Sampling(max_tokens=14, temperature=0.7),
    "cut": Sampling(max_tokens=14, temperature=1.3, top_k=30, top_p=0.9),
    "early": Sampling(max_tokens=14, min_tokens=9, stop_ids=(1, 5, 40)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_gradient_is_that_of_a_naive_loop(tiny_model: str, sampling: str, correction: str) -> None:
    corrections = {} if correction == "none" else {"tis": {"cap": 2.0, "floor": 0.5}}
    items = rollouts(tiny_model, sampling=SAMPLINGS[sampling])
    batch = make_batch(items, corrections=corrections)
    trainer = make_trainer(tiny_model)
    nudge(trainer.model)
    seen = trainer.forward_backward(batch)
    loss, expected = naive(tiny_model, batch, correction=correction)
    assert seen["loss"] == pytest.approx(loss, abs=1e-5)
    assert seen["clipped"] > 0.05 or correction == "tis"
    found = gradients(trainer)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-3)


def test_equal_weights_give_ratio_one_under_any_sampling(tiny_model: str) -> None:
    for sampling in SAMPLINGS.values():
        seen = make_trainer(tiny_model).forward_backward(make_batch(rollouts(tiny_model, sampling=sampling)))
        assert seen["ratio"] == pytest.approx(1.0, abs=1e-5) and seen["mismatch_max"] < 1e-5


@pytest.mark.parametrize("exact", [False, True])
def test_gradient_does_not_depend_on_packing_or_order(tiny_model: str, exact: bool) -> None:
    """float32, summed in another order: relative difference of the whole gradient under 1e-5."""
    batch = make_batch(rollouts(tiny_model, 24))
    order = np.random.default_rng(0).permutation(24)
    shuffled = dataclasses.replace(
        batch,
        rollouts=tuple(batch.rollouts[i] for i in order),
        advantages=tuple(batch.advantages[i] for i in order),
        weights=tuple(batch.weights[i] for i in order),
    )
    found = []
    for budget, given in ((16384, batch), (16, batch), (64, batch), (300, shuffled)):
        trainer = make_trainer(tiny_model, exact=exact, micro_batch_tokens=budget)
        nudge(trainer.model)
        seen = trainer.forward_backward(given)
        found.append((torch.cat([g.flatten() for g in gradients(trainer).values()]), seen))
    reference, first = found[0]
    assert float(reference.norm()) > 1e-3
    for gradient, seen in found[1:]:
        assert float((gradient - reference).norm() / reference.norm()) < 1e-5
        for name in ("loss", "tokens", "entropy", "ratio", "kl", "clipped", "ess"):
            assert seen[name] == pytest.approx(first[name], abs=1e-5), name


@pytest.mark.parametrize(
    ("loss", "corrections"),
    [
        ("gspo", {"sequence_mis": {"cap": 2.0, "floor": 0.5}}),
        ("m2po", {"m2po": {"limit": 0.001}}),
        ("decoupled_ppo", {"opsm": {"limit": 1e-4}}),
        ("grpo", {"tis": {"cap": 1.1}, "opsm": {"limit": 1e-4}, "m2po": {"limit": 0.001}, "prefix": {}}),
    ],
)
def test_what_looks_at_whole_rollouts_or_batches_does_not_depend_on_packing(
    tiny_model: str, loss: str, corrections: dict[str, dict[str, float]]
) -> None:
    batch = make_batch(rollouts(tiny_model), loss=loss, constants={}, corrections=corrections, version=1)
    found = []
    for budget in (16384, 16, 64):
        trainer = make_trainer(tiny_model, micro_batch_tokens=budget)
        nudge(trainer.model, scale=0.005)
        seen = trainer.forward_backward(batch)
        found.append((torch.cat([g.flatten() for g in gradients(trainer).values()]), seen))
    reference, first = found[0]
    assert 0 < first["masked"] < 1 and float(reference.norm()) > 1e-4
    for gradient, seen in found[1:]:
        assert float((gradient - reference).norm() / reference.norm()) < 1e-4
        for name in ("loss", "masked", "correction", "correction_ess", "chi2", "ess", "version_spread", "entropy"):
            assert seen[name] == pytest.approx(first[name], abs=1e-5), name


@pytest.mark.parametrize("path", ["judged", "cut", "recomputed"])
def test_an_entropy_bonus_and_a_floor_have_the_gradient_of_a_naive_loop(tiny_model: str, path: str, monkeypatch) -> None:
    """With the loss called inside the head, with a sampling mask, and with rollouts too long for a chunk."""
    if path == "recomputed":
        monkeypatch.setattr("headrace.model.fused_head._CHUNK_ELEMENTS", {"cpu": 1})
    items = rollouts(tiny_model, 6, sampling=SAMPLINGS["cut" if path == "cut" else "temperature"])
    asked = {"corrections": {"tis": {"cap": 2.0, "floor": 0.5}}, "entropy_weight": 0.7}
    trainer = make_trainer(tiny_model, micro_batch_tokens=64)
    nudge(trainer.model)
    entropies = trainer.forward(make_batch(items), column=ENTROPY)
    floor = float(np.median(np.concatenate([e[item.loss_mask] for e, item in zip(entropies, items, strict=True)]))) + 1e-4
    batch = make_batch(items, **asked, entropy_floor=floor)
    seen = trainer.forward_backward(batch)
    loss, expected = naive(tiny_model, batch, correction="tis")
    assert seen["loss"] == pytest.approx(loss, rel=1e-4) and seen["masked"] == pytest.approx(0.5, abs=0.02)
    ours = torch.cat([gradient.flatten() for gradient in gradients(trainer).values()])
    theirs = torch.cat([expected[name].flatten() for name in gradients(trainer)])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
    _, without = naive(tiny_model, dataclasses.replace(batch, entropy_weight=0.0), correction="tis")
    assert float((ours - torch.cat([without[name].flatten() for name in gradients(trainer)])).norm() / theirs.norm()) > 0.1


def test_columns_that_come_with_the_rollouts_reach_the_loss(tiny_model: str) -> None:
    """The KL to a reference and a teacher's logprobs; to itself the distance is nothing, and so is the gradient."""
    items = rollouts(tiny_model, 6)
    trainer = make_trainer(tiny_model)
    itself = trainer.forward(make_batch(items))
    columned = [item.replace(columns={"reference": own, "teacher": own}) for item, own in zip(items, itself, strict=True)]
    seen = trainer.forward_backward(make_batch(columned, loss="distill", constants={}, kl="k3", kl_weight=0.5))
    assert abs(seen["loss"]) < 1e-10 and abs(seen["teacher_kl"]) < 1e-6 and abs(seen["reference_kl"]) < 1e-6
    assert max(float(gradient.abs().max()) for gradient in gradients(trainer).values()) < 1e-6
    nudge(trainer.model)
    assert trainer.forward_backward(make_batch(columned, loss="distill", constants={}, kl="k3", kl_weight=0.5))["loss"] > 1e-4


def test_columns_nobody_brought_are_named(tiny_model: str) -> None:
    items = rollouts(tiny_model, 2)
    trainer = make_trainer(tiny_model)
    for changes, column in [
        ({"loss": "distill"}, "teacher"),
        ({"kl": "k1", "kl_weight": 1.0}, "reference"),
        ({"loss": "ppo"}, "returns"),
    ]:
        with pytest.raises(ValueError, match=f"'{column}'"):
            trainer.forward_backward(make_batch(items, constants={}, **changes))
    with pytest.raises(ValueError, match="the trainer needs the column 'teacher'"):
        trainer.forward(make_batch(items), column="teacher")


def test_accumulating_two_halves_is_the_whole(tiny_model: str) -> None:
    batch = make_batch(rollouts(tiny_model, 10))
    whole, halves = make_trainer(tiny_model), make_trainer(tiny_model)
    whole.forward_backward(batch)
    for part in (slice(0, 4), slice(4, 10)):
        halves.forward_backward(
            dataclasses.replace(
                batch, rollouts=batch.rollouts[part], advantages=batch.advantages[part], weights=batch.weights[part]
            )
        )
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(halves)[name], gradient, atol=1e-7, rtol=1e-4)


def paired(items: list[Rollout]) -> list[Group]:
    """Two siblings each, of which one is rewarded."""
    episodes = [Episode(id=r.id, group=r.group, task={}, rollouts=(r,), outcome=Scored(int(r.id) % 2)) for r in items]
    return [Group(number=number, episodes=tuple(episodes[2 * number :][:2])) for number in range(len(items) // 2)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
def test_the_step_of_a_batch_in_parts_is_that_of_the_whole(tiny_model: str, mean: str, dtype: str) -> None:
    """Also after parts that were given up."""
    made, step = paired(rollouts(tiny_model, 10)), StepParts(5)
    train = {"batch": 10, "group_size": 2, "loss_mean": mean, "entropy": 0.01, "stream_parts": 3}
    recipe = make_recipe({"train": train, "staleness.max_lag": 1, "sampling.max_tokens": 14})
    (batch,) = make_batches(made, recipe, version=0)
    parts = [
        make_batches(made[first:last], recipe, version=0, step=step, ends_step=last == 5)[0]
        for first, last in ((0, 2), (2, 4), (4, 5))
    ]
    assert (parts[-1].gradient_scale != 1) == (mean == "token")
    smooth = {"max_grad_norm": 0.05, "eps": 1.0}  # so that a step is nearly in proportion to the gradient
    ours, theirs = (make_trainer(tiny_model, **smooth, dtype=dtype) for _ in range(2))
    is_float32, start = dtype == "float32", flat(ours, ours.optimizer.master)
    if not is_float32:
        ours.optimizer.loss_scale.value = theirs.optimizer.loss_scale.value = 2.0**10
    expected = theirs.forward_backward(batch)
    seen = [ours.forward_backward(part) for part in (*parts[:2], *parts)][-1]
    assert seen == pytest.approx(expected, rel=1e-5, abs=1e-6 if is_float32 else 2e-3)
    assert seen["tokens"] == sum(rollout.num_sampled for rollout in batch.rollouts)
    wanted, found = (flat(trainer, trainer.optimizer.gradient) for trainer in (theirs, ours))
    assert distance(parts[-1].gradient_scale * found, wanted) < (1e-5 if is_float32 else 5e-3)
    norms = [trainer.optim_step(0.1)["grad_norm"] for trainer in (theirs, ours)]
    assert norms[0] > 0.05 and norms[1] == pytest.approx(norms[0], rel=1e-5 if is_float32 else 1e-3)
    moved = [flat(trainer, trainer.optimizer.master) - start for trainer in (ours, theirs)]
    assert distance(*moved) < (1e-4 if is_float32 else 5e-3)
    again = [trainer.forward_backward(batch)["loss"] for trainer in (theirs, ours)]
    assert again[1] == pytest.approx(again[0], rel=1e-5 if is_float32 else 1e-2), "a whole batch after one in parts"


def flat(trainer: DeviceTrainer, tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor_of(name).flatten() for name in sorted(trainer.optimizer.names)])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_chunked_head_is_the_whole_head(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_model)
    hidden = torch.randn(75, 96)
    targets, temperatures = torch.randint(0, 90, (75,)), torch.full((75,), 0.8)
    results = []
    for elements in (1 << 24, 16 * Head(model).vocabulary):
        monkeypatch.setattr("headrace.model.fused_head._CHUNK_ELEMENTS", {"cpu": elements})
        leaf = hidden.clone().requires_grad_()
        model.zero_grad()
        logprobs, entropy = Head(model).logprobs(leaf, targets, temperatures)
        logprobs.square().sum().backward()
        results.append((logprobs.detach(), entropy, leaf.grad, model.get_output_embeddings().weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_proximal_column_is_what_ratios_are_taken_against(tiny_model: str) -> None:
    items = rollouts(tiny_model)
    trainer = make_trainer(tiny_model, learning_rate=1e-2)
    nudge(trainer.model)
    batch = make_batch(items, corrections={"tis": {"cap": 2.0, "floor": 0.5}})
    proximal = trainer.forward(batch)
    for item, values in zip(items, proximal, strict=True):
        assert not values[~item.loss_mask].any() and (values[item.loss_mask] < 0).all()
    columned = tuple(item.replace(columns={PROXIMAL: values}) for item, values in zip(items, proximal, strict=True))
    assert trainer.forward_backward(dataclasses.replace(batch, rollouts=columned))["clipped"] == 0
    trainer.optim_step(1e-2)
    assert trainer.forward_backward(dataclasses.replace(batch, rollouts=columned))["clipped"] > 0


def test_checkpoint_is_a_hugging_face_folder_and_training_goes_on_bitwise(tiny_model: str, tmp_path) -> None:
    batch = make_batch(rollouts(tiny_model))
    trainer = make_trainer(tiny_model)
    for _ in range(3):
        trainer.forward_backward(batch)
        trainer.optim_step(1e-3)
    assert trainer.save(tmp_path) == seal(tmp_path) and "trainer/optimizer.safetensors" in seal(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == plain.config.vocab_size
    ids = torch.randint(6, 90, (1, 12))
    with torch.no_grad():
        assert plain(ids).logits.shape == (1, 12, plain.config.vocab_size)
    resumed = make_trainer(tiny_model)
    resumed.load(tmp_path)
    for each in (trainer, resumed):
        each.forward_backward(batch)
        each.optim_step(1e-3)
    for (name, left), (_, right) in zip(trainer.tensors(), resumed.tensors(), strict=True):
        assert torch.equal(left, right), name


def test_a_skipped_step_leaves_weights_and_optimizer_bitwise_as_they_were(tiny_model: str, tmp_path) -> None:
    """By what a checkpoint holds of both, and by the step that follows."""
    (tmp_path / "lost.py").write_text("def nan(tokens):\n    return tokens.logprobs * float('nan'), {}\n")
    batch = make_batch(rollouts(tiny_model, 3))
    lost = dataclasses.replace(batch, loss=f"{tmp_path / 'lost.py'}:nan", constants={})
    trainer, undisturbed = make_trainer(tiny_model), make_trainer(tiny_model)
    for each in (trainer, undisturbed):
        each.forward_backward(batch)
        assert each.optim_step(1e-3)["skipped"] == 0
    trainer.forward_backward(batch)
    trainer.forward_backward(lost)
    assert trainer.optim_step(1e-2)["skipped"] == 1
    for round in range(2):
        for each, name in ((trainer, f"ours-{round}"), (undisturbed, f"theirs-{round}")):
            each.save(tmp_path / name)
            each.forward_backward(batch)
            each.optim_step(1e-3)
        for file in ("model.safetensors", "trainer/optimizer.safetensors"):
            ours, theirs = (load_file(tmp_path / f"{side}-{round}" / file) for side in ("ours", "theirs"))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), (round, file)


def test_a_users_loss_is_named(tiny_model: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(
        "def doubled(tokens, *, factor=1.0):\n"
        "    return -factor * tokens.advantages * tokens.logprobs, {'mine': tokens.ratio().detach()}\n"
    )
    monkeypatch.chdir(tmp_path)
    items = rollouts(tiny_model, 5)
    trainer, plain = make_trainer(tiny_model), make_trainer(tiny_model)
    seen = trainer.forward_backward(make_batch(items, loss="my_losses.py:doubled", constants={"factor": 2.0}))
    expected = plain.forward_backward(make_batch(items, loss="reinforce", constants={}))
    assert seen["mine"] == pytest.approx(1.0, abs=1e-4) and seen["loss"] == pytest.approx(2 * expected["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="has no 'absent'"):
        trainer.forward_backward(make_batch(items, loss="my_losses.py:absent", constants={}))


def test_learning_rate_rises_and_falls() -> None:
    settings = TrainSettings(learning_rate=1.0, schedule="linear", warmup_steps=10, final_learning_rate=0.1)
    rates = [learning_rate(settings, version=version, steps=110) for version in range(110)]
    assert rates[0] == pytest.approx(1 / 11) and max(rates) == pytest.approx(1.0) and rates.index(max(rates)) == 10
    assert rates[-1] == pytest.approx(0.1 + 0.9 / 100) and all(a > b for a, b in itertools.pairwise(rates[10:]))
    constant = TrainSettings(learning_rate=1.0, warmup_steps=2)
    assert [learning_rate(constant, version=v, steps=5) for v in range(5)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_bfloat16_keeps_small_steps(tiny_model: str) -> None:
    """Masters are float32 in the trainer, and begin as the digits of the folder; what runs and is published is the engine's."""
    model = load_model(tiny_model)
    digits = {name: tensor.clone() for name, tensor in model.named_parameters()}
    trainer = DeviceTrainer(model, tokenizer=load_tokenizer(tiny_model), settings=TrainSettings(), dtype=torch.bfloat16)
    optimizer = trainer.optimizer
    assert all(torch.equal(optimizer.master(name), tensor) for name, tensor in digits.items())
    for name in digits:
        optimizer.gradient(name).fill_(1.0)
    trainer.optim_step(1e-6)
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(optimizer.master(name), digits[name])
        assert torch.equal(parameter, optimizer.master(name).to(parameter.dtype))
    assert {tensor.dtype for _, tensor in trainer.tensors() if tensor.ndim > 1} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor in trainer.tensors() if tensor.ndim == 1} == {torch.float32}  # norms


def test_a_step_without_a_trained_token_says_what_others_do(tiny_model: str) -> None:
    items = [item.replace(loss_mask=np.zeros(len(item), dtype=bool)) for item in rollouts(tiny_model, 2)]
    nothing = tuple(np.zeros(len(item), dtype=np.float32) for item in items)
    trainer = make_trainer(tiny_model)
    seen = trainer.forward_backward(make_batch(items, weights=nothing, advantages=nothing))
    assert seen["tokens"] == 0 and {"loss", "ess"} <= seen.keys() and "mismatch" not in seen
    assert trainer.optim_step(1e-3)["grad_norm"] == 0


@pytest.mark.parametrize("num_masked", [1, 3])
def test_rollouts_with_nothing_to_train_are_in_no_pass(tiny_model: str, num_masked: int) -> None:
    """The head alone is trained and candidates were cut off: without targets, a pass of these has no gradient at all."""
    items = rollouts(tiny_model, 5, sampling=SAMPLINGS["cut"])[2:]
    masked = [item.replace(loss_mask=np.zeros(len(item), dtype=bool)) for item in items[:num_masked]] + items[num_masked:]
    head = tuple(ParameterSettings(match=name, freeze=name == "*") for name in ("*", "lm_head.weight"))
    with_them, without = (make_trainer(tiny_model, micro_batch_tokens=16, parameters=head) for _ in range(2))
    batch = make_batch(masked)
    kept = {name: getattr(batch, name)[num_masked:] for name in ("rollouts", "advantages", "weights")}
    seen = with_them.forward_backward(batch)
    assert seen == without.forward_backward(dataclasses.replace(batch, **kept))
    assert with_them.num_passes == without.num_passes == 3 - num_masked
    gradient = with_them.optimizer.gradient("lm_head.weight")
    torch.testing.assert_close(gradient, without.optimizer.gradient("lm_head.weight"), rtol=0, atol=0)
    assert bool(gradient.any()) == (num_masked < 3) and with_them.optim_step(1e-3)["skipped"] == 0
    assert [len(each) for each in with_them.forward(batch)] == list(map(len, items))


def test_dropout_is_off(tiny_model: str) -> None:
    model = load_model(tiny_model)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    trainer = DeviceTrainer(model, tokenizer=load_tokenizer(tiny_model), settings=TrainSettings())
    assert trainer.forward_backward(make_batch(rollouts(tiny_model, 4)))["mismatch_max"] < 1e-5
