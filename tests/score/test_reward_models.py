"""The reward `reward_model`, with tiny models for sequence classification."""

from __future__ import annotations

import asyncio

import pytest
import torch
from test_rewards import make_sample
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, reward_functions
from headrace.model import tiny
from headrace.score import RewardError, RewardWorkers, reward_model
from headrace.score.reward_models import _batches

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]


def make_model(
    folder, *, kind=Qwen3ForSequenceClassification, template: bool = True, labels: int = 1, context: int = 64
) -> str:
    tokenizer = tiny.build_tokenizer()
    if not template:
        tokenizer.chat_template = None
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=labels, max_position_embeddings=context,
        initializer_range=0.3, pad_token_id=tokenizer.pad_token_id, **shape,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def scored_alone(folder: str, text: str, *, label: int = 0) -> float:
    """The slow, obvious version: one text, no padding, its last token's logits."""
    model, tokenizer = Qwen3ForSequenceClassification.from_pretrained(folder), tiny.build_tokenizer()
    ids = torch.tensor([tokenizer(text)["input_ids"][-model.config.max_position_embeddings :]])
    with torch.inference_mode():
        hidden = model.model(input_ids=ids).last_hidden_state
        return float(model.score(hidden)[0, -1, label])


def test_batches_score_as_each_text_alone(tmp_path) -> None:
    folder = make_model(tmp_path)
    prompts = ["1 + 2", "what is 3 times 4, then?", "a", "1 + 2"]
    completions = ["3", "it is twelve", "b" * 200, "4"]
    texts = [f"<|user|>{p}<|end|><|assistant|>{c}<|end|>" for p, c in zip(prompts, completions, strict=True)]
    right = [scored_alone(folder, text) for text in texts]
    assert len({round(value, 3) for value in right}) == 4
    for batch_tokens in (1, 60, 10_000):
        assert reward_model(prompts, completions, path=folder, batch_tokens=batch_tokens) == pytest.approx(right, abs=1e-5)


def test_chats_and_models_without_a_template(tmp_path) -> None:
    answer = [[{"role": "assistant", "content": "3"}]]
    folder = make_model(tmp_path / "chat", labels=3)
    text = "<|system|>Add.<|end|><|user|>1 + 2<|end|><|assistant|>3<|end|>"
    assert reward_model([CHAT], answer, path=folder, label=2) == pytest.approx([scored_alone(folder, text, label=2)], abs=1e-5)
    plain = make_model(tmp_path / "plain", template=False)
    assert reward_model(["1 + 2 = "], ["3"], path=plain) == pytest.approx([scored_alone(plain, "1 + 2 = 3")], abs=1e-5)
    assert reward_model([CHAT], answer, path=plain) == pytest.approx([scored_alone(plain, "Add.\n1 + 2\n3")], abs=1e-5)


def test_rows_of_like_length_are_scored_together_within_the_bound() -> None:
    lengths = [5, 1, 100, 2, 2, 7]
    batches = _batches(lengths, most=14)
    assert sorted(place for batch in batches for place in batch) == list(range(6))
    assert all(len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= 14 for batch in batches)
    assert batches == [[1, 3, 4], [0, 5], [2]]


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_recipe_names_it_in_threads_and_in_processes(tmp_path, processes) -> None:
    options = {"reward_model": {"path": make_model(tmp_path)}}
    samples = [make_sample("3", prompt="1 + 2"), make_sample("4", prompt="1 + 2")]
    right = reward_model(["1 + 2"] * 2, ["3", "4"], **options["reward_model"])
    recipe = make_recipe({"reward": {"functions": "headrace.score:reward_model", "options": options, "processes": processes}})
    ((reward, _),) = reward_functions(recipe, UserInputs())
    workers = RewardWorkers(timeout=120.0, num_processes=processes)
    assert asyncio.run(reward.score(samples, attempts=1, workers=workers)) == pytest.approx(right, abs=1e-5)
    workers.close()


def test_what_is_no_reward_model_is_refused(tmp_path) -> None:
    with pytest.raises(RewardError, match=r"reward_model\.path = 'nowhere': no such folder"):
        reward_model(["a"], ["b"], path="nowhere")
    folder = make_model(tmp_path / "causal", kind=Qwen3ForCausalLM)
    with pytest.raises(RewardError, match=r"is no trained reward model: it has no weights for score\.weight"):
        reward_model(["a"], ["b"], path=folder)
    folder = make_model(tmp_path / "right")
    with pytest.raises(RewardError, match=r"label = 1: .* has the labels 0 to 0"):
        reward_model(["a"], ["b"], path=folder, label=1)
    torch.save({}, tmp_path / "right" / "pytorch_model.bin")
    (tmp_path / "right" / "model.safetensors").rename(tmp_path / "right" / "kept")
    with pytest.raises(RewardError, match="cannot be loaded"):
        reward_model(["a"], ["b"], path=folder, dtype="float32")
