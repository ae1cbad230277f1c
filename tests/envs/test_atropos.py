"""An environment of Atropos, run by the real package, pushes what it samples and scores into a run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from helpers import books_close, small_run

from headrace.envs import PushedEnvironment
from headrace.model.tiny import build_tokenizer
from headrace.observe.inspect import read_rollouts

pytest.importorskip("atroposlib")

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

TOKEN = "ours-0123456789abcdef"


class Talk(BaseEnv):
    """Two turns through Atropos's own managed server; longer ones earn more."""

    count = 0

    async def setup(self) -> None: ...

    async def evaluate(self, *_, **__) -> None: ...

    async def get_next_item(self) -> str:
        self.count += 1
        return str(self.count % 10)

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": item}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for more in ("again", None):
                said = await managed.chat_completion(messages=messages, n=1, max_tokens=4)
                messages += [{"role": "assistant", "content": said.choices[0].message.content}]
                messages += [{"role": "user", "content": more}]
            node = managed.get_state()["nodes"][-1]
        return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": len(node.tokens) / 10}, []


def test_a_run_trains_on_what_an_atropos_environment_pushes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_PUSH_TOKENS", TOKEN)
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    pushed = PushedEnvironment(port=0)
    address, names = pushed.url.removeprefix("http://"), {"tokenizer_name": str(tmp_path / "tokenizer")}
    settings: dict[str, Any] = {"group_size": 4, "max_batches_offpolicy": 1, "use_wandb": False}
    settings |= {"rollout_server_url": f"http://:{TOKEN}@{address}", "ensure_scores_are_not_same": False}
    config = BaseEnvConfig(**settings, **names)
    server = APIServerConfig(server_type="vllm", base_url=f"{pushed.url}/v1", api_key=TOKEN, **names)
    is_over, failures = threading.Event(), []

    async def play() -> None:
        running = asyncio.ensure_future(Talk(config, [server]).env_manager())
        await asyncio.wait({running, asyncio.ensure_future(asyncio.to_thread(is_over.wait))}, return_when="FIRST_COMPLETED")
        if running.done():
            failures.append(running.exception())
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    thread = threading.Thread(target=asyncio.run, args=(play(),))
    thread.start()
    try:
        how = {"tasks": "pushed:groups", "environment": pushed, "reward": None, "held_out": None, "model": {"context": 96}}
        run = small_run(tmp_path / "run", **how, steps=2, observe={"keep_rollouts_every": 1})
    finally:
        is_over.set()
        thread.join(30)
    assert run.summary["steps"] == 2 and not failures and not thread.is_alive()
    assert run.summary["accounting"]["trained"] == 2 * 16 and books_close(run.summary)
    assert {*pushed.push_counts} <= {"accepted", "refused/later"} and pushed.push_counts["accepted"] >= 8
    trained = [rollout for step in (1, 2) for rollout in read_rollouts(run.folder, step)[1]]
    assert len(trained) == 2 * 16 and all(len(rollout.calls) == 2 for rollout in trained), "both turns are one sequence"
    assert all(rollout.rewards == {"environment": len(rollout) / 10} for rollout in trained)
