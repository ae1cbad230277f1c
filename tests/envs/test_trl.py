"""An environment written for TRL, unmodified in its trainer and here."""

from __future__ import annotations

import asyncio
import threading

import pytest
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.envs import TrlEnvironment, can_resume, run_episode
from headrace.records import FinishReason, InfraAbort
from headrace.settings import ConfigError

go_on = threading.Event()
END, STOP = "<|im_end|>", FinishReason.STOP
TASK = {"prompt": [{"role": "user", "content": "Count to "}], "goal": 3}


class Counter:
    """Counts to the row's goal."""

    made = 0
    resets = 0

    def __init__(self) -> None:
        Counter.made += 1

    def reset(self, goal: int, **row) -> str:
        Counter.resets += 1
        self.goal, self.count = goal, 0
        return f"{goal}."

    def add(self, number: int) -> str:
        """Add to the count.

        Args:
            number: How much to add.
        """
        if number < 0:
            raise ValueError("not below 0")
        self.count += number
        return f"The count is {self.count}."

    def get_reward(self) -> float:
        return 1.0 if self.count == self.goal else 0.0


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"number": {number}}}}}\n</tool_call>'


def play(environment, says: list[str], task=TASK):
    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = [(f"{text}{END}", STOP) for text in says]
    return asyncio.run(run_episode(environment, task, client)), client, engine


def test_an_environment_that_can_resume_takes_its_calls_again() -> None:
    environment = TrlEnvironment(Counter, can_resume=True)
    assert can_resume(environment) and not can_resume(TrlEnvironment(Counter))
    whole, _, _ = play(environment, [call(1), call(2), "Done."])
    (rollout,) = whole.rollouts
    before = rollout.forked(rollout.calls[1].stop, id="cut").replace(id=rollout.id, parent=None)
    client, engine = client_of(tokenizer_of("qwen2_5"))
    client.keeps_turns, client.partials[rollout.id], engine.says = True, before, [(f"Ready.{END}", STOP)]
    episode = asyncio.run(run_episode(environment, TASK, client))
    assert len(episode.rollouts[0].calls) == 3 and episode.rollouts[0].rewards == {"Counter": 1.0}


def test_methods_are_tools_and_it_owns_the_reward() -> None:
    environment = TrlEnvironment(Counter, max_turns=4)
    made = Counter.made
    episode, client, engine = play(environment, [call(1), call(-1), call(2), "Done."])
    (rollout,) = episode.rollouts
    messages = client.messages(rollout)
    assert next(message["content"] for message in messages if message["role"] == "user") == "Count to 3."
    replies = [message["content"] for message in messages if message["role"] == "tool"]
    assert replies == ["The count is 1.", "Error: ValueError: not below 0", "The count is 3."]
    assert rollout.rewards == {"Counter": 1.0} and episode.task == TASK
    check_trained(episode.rollouts, engine)
    again, _, _ = play(environment, ["No."])
    assert again.rollouts[0].rewards == {"Counter": 0.0} and Counter.made == made  # made once, reset often


def test_an_instance_that_raised_is_not_used_again() -> None:
    environment = TrlEnvironment(Counter)
    made = Counter.made
    episode, _, _ = play(environment, ["Done."], {"prompt": TASK["prompt"]})
    assert isinstance(episode.outcome, InfraAbort) and "goal" in episode.outcome.reason
    play(environment, ["Done."])
    assert Counter.made == made + 1


class Slow(Counter):
    def add(self, number: int) -> str:
        """Add to the count, when nobody waits for it any more.

        Args:
            number: How much to add.
        """
        assert go_on.wait(10)
        return super().add(number)


def test_an_instance_in_use_by_a_call_that_took_too_long_is_not_given_to_another_episode() -> None:
    go_on.clear()
    environment = TrlEnvironment(Slow, tool_timeout=0.05)
    late, client, _ = play(environment, [call(3), "Done."])
    (reply,) = (each["content"] for each in client.messages(late.rollouts[0]) if each["role"] == "tool")
    assert reply == "Error: it took longer than 0.05 s"
    made = Counter.made
    play(environment, ["Done."])
    assert Counter.made == made + 1
    go_on.set()


def test_what_is_not_such_an_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment.options.factory: a dict has no `reset"):
        TrlEnvironment(dict)


def test_the_same_class_trains_in_trl(tmp_path, monkeypatch) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = tokenizer_of("qwen3")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))
    how = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4, report_to=[], bf16=False, gradient_checkpointing=False, save_strategy="no",
    )  # fmt: skip
    resets = Counter.resets
    rows = datasets.Dataset.from_list([TASK] * 4)
    trainer = trl.GRPOTrainer(
        model=model, args=how, train_dataset=rows, processing_class=tokenizer, environment_factory=Counter
    )
    trainer.train()
    assert Counter.resets == resets + 2 and trainer.state.log_history[0]["rewards/Counter/mean"] == 0.0
