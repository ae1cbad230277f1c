"""`headrace bench episodes`: episodes of several turns with slow tools, on one engine of a fixed number of slots.

An episode samples a turn, waits for its tool, appends the reply and samples the next. Tools take a lognormal time with a mean
of four times a turn's generation, measured first with tools that take no time and an episode for each slot. Async: eight
episodes per slot are in flight, each at its own pace, through the run's own client. Sync: as many episodes in lockstep, where a
turn begins when the slowest tool is done. Lengths and tools' times are the same in both. TRL's tool loop runs a few such
episodes with transformers' `generate`: it calls the tools of one episode after those of another, so that its tokens a second do
not rise with their number.

The slots are busy while a request holds them, whether it decodes or computes its prompt. Prompt tokens at the minimum: every
token is computed once, so each later turn computes the reply and the last token sampled before it.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.child import Child, PeerFailed
from headrace.bench.harness import Row, default_device, one_line, run_parts, say
from headrace.bench.loads import SMALL, SMOLLM2_135M, write_random_model
from headrace.bench.step_trl import grpo_config, missing_modules
from headrace.engine import EngineCore, NativeEngine, blocks_for
from headrace.envs import CallLimit, EngineClient
from headrace.model import load_model
from headrace.observe import ProcessTimeline
from headrace.records import Rollout, Sampling
from headrace.sync import Lineage, MemoryTransport, WeightSync

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.engine import Runner, StepPlan
    from headrace.records import Array

_TOOL_TURNS = 4.0  # a tool's mean time, in turns
_IN_FLIGHT = 8  # episodes per slot: five would keep all busy if every tool took the mean
_SECONDS = 600.0
_BLOCK = 16


@dataclass(frozen=True)
class Plan:
    """Episodes of `turns` turns: `prompt` tokens, then `sampled` a turn and `reply` tokens from each tool."""

    device: str
    dtype: str
    shape: dict[str, Any]
    slots: int
    prompt: int
    sampled: int
    reply: int
    turns: int
    rounds: int
    """Episodes in async, for each that is in flight at once. Sync has one round."""
    trl_episodes: int

    @property
    def in_flight(self) -> int:
        return _IN_FLIGHT * self.slots

    @property
    def length(self) -> int:
        """Tokens of a whole episode."""
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.reply

    @property
    def fewest_prompt_tokens(self) -> int:
        """Of one episode: those not computed as they are sampled."""
        return self.prompt + (self.turns - 1) * (self.reply + 1)

    def tool_seconds(self, count: int, *, mean: float) -> Array:
        """[count, turns - 1]: the same for every contestant."""
        normal = np.random.default_rng(0).lognormal(-0.5, 1.0, size=(count, self.turns - 1))  # of mean 1
        return np.asarray(mean * normal)


def make_plan(device: str, *, quick: bool, slots: int | None = None) -> Plan:
    if device == "cuda":
        slots = slots or (32 if quick else 256)
        sizes, shape, dtype = (256, 32 if quick else 64, 64), SMOLLM2_135M, "bfloat16"
    else:
        slots = slots or (8 if quick else 32)
        sizes, shape, dtype = (32, 8 if quick else 16, 8), SMALL, "float32"
    numbers = {"turns": 3, "rounds": 2, "trl_episodes": 2} if quick else {"turns": 8, "rounds": 3, "trl_episodes": 4}
    return Plan(device, dtype, shape, slots, *sizes, **numbers)


def run(*, quick: bool, json_file: Path | None, slots: int | None = None) -> int:
    plan = make_plan(default_device(), quick=quick, slots=slots)

    def part() -> Iterator[list[Row]]:
        with tempfile.TemporaryDirectory(prefix="headrace-episodes-") as name:
            folder = write_random_model(plan.shape, Path(name) / "model", dtype=plan.dtype)
            ours = asyncio.run(_measure(plan, folder))
            yield _rows(ours, plan)
            if missing := missing_modules("cpu"):
                say(f"TRL: {', '.join(missing)} not installed; it is absent from the table")
                return
            try:
                trl = _measure_trl(plan, Path(name), folder, turn_seconds=ours.turn_seconds)
            except PeerFailed as error:
                say(f"{one_line(error)}; it is absent from the table")
                return
            yield [Row("async against TRL's tool loop", ours.concurrent.tokens_per_second, "tokens/s", peers={"TRL": trl})]

    return run_parts("episodes", {"episodes": part}, quick=quick, json_file=json_file)


@dataclass(frozen=True)
class Figures:
    """Of one contestant."""

    seconds: float
    sampled: int
    busy: float
    """Share of slots × seconds."""
    prompt_tokens: float
    """Computed ÷ minimum."""

    @property
    def tokens_per_second(self) -> float:
        return self.sampled / self.seconds


@dataclass(frozen=True)
class Measured:
    turn_seconds: float
    concurrent: Figures
    lockstep: Figures


def _rows(ours: Measured, plan: Plan) -> list[Row]:
    concurrent, lockstep = ours.concurrent, ours.lockstep
    again = sum(plan.prompt + turn * (plan.sampled + plan.reply) for turn in range(plan.turns)) / plan.fewest_prompt_tokens
    say(
        f"{plan.slots} slots, {plan.in_flight} episodes in flight, {plan.rounds * plan.in_flight} in all, {plan.turns} turns "
        f"of {plan.sampled} tokens, replies of {plan.reply}, prompts of {plan.prompt}; "
        f"a turn takes {ours.turn_seconds:.3g} s, a tool {_TOOL_TURNS * ours.turn_seconds:.3g} s on average"
    )
    return [
        Row("slots busy", concurrent.busy, "share", goal="≥ 0.9", peers={"sync": lockstep.busy}),
        Row(
            "prompt tokens computed ÷ minimum",
            concurrent.prompt_tokens,
            "×",
            goal="≤ 1.05",
            peers={"sync": lockstep.prompt_tokens, "no turn cached": again},
        ),
        Row("sampled", concurrent.tokens_per_second, "tokens/s", peers={"sync": lockstep.tokens_per_second}),
    ]


class Recorder:
    """Counts what the engine's steps do."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._step = core, core.step
        self._plan = core.scheduler.plan
        self._num_running, self._ended = 0, time.perf_counter()
        self.slot_seconds, self.prompt_rows = 0.0, 0
        core.step = self._timed  # type: ignore[method-assign]
        core.scheduler.plan = self._counted  # type: ignore[method-assign]

    def _counted(self, runner: Runner) -> StepPlan:
        plan = self._plan(runner)
        self._num_running = len(self._core.scheduler.running)
        return plan

    def _timed(self) -> StepPlan:
        started = time.perf_counter()
        self.slot_seconds += self._core.num_running * (started - self._ended)
        plan = self._step()
        self._ended = time.perf_counter()
        self.slot_seconds += self._num_running * (self._ended - started)
        self.prompt_rows += plan.prompt_rows
        return plan


async def _measure(plan: Plan, folder: str) -> Measured:
    model = load_model(folder, dtype=plan.dtype, device=plan.device)
    blocks = blocks_for(plan.in_flight, tokens=plan.length, block_size=_BLOCK)
    sizes: dict[str, Any] = {"slots": plan.slots, "context": plan.length + 1, "block_size": _BLOCK, "most_blocks": blocks}
    core = EngineCore(model, name="engine-0", max_tokens=plan.sampled, **sizes)
    core.wait_warm()
    recorder = Recorder(core)
    sync = WeightSync(Lineage.new(), MemoryTransport(plan.device))
    engine = NativeEngine(core, sync=sync, timeline=ProcessTimeline("engine"))
    work = Work(plan, engine, core, recorder)
    engine.start()
    try:
        await work.concurrently("warm-up", in_flight=plan.slots, rounds=1)
        alone = await work.concurrently("without tools", in_flight=plan.slots, rounds=3)
        turn_seconds = plan.slots * plan.sampled / alone.tokens_per_second
        mean = _TOOL_TURNS * turn_seconds
        concurrent = await work.concurrently("async", in_flight=plan.in_flight, rounds=plan.rounds, mean=mean)
        return Measured(turn_seconds, concurrent, await work.in_lockstep(mean))
    finally:
        engine.close()


class Work:
    """The episodes, and the ways to run them."""

    def __init__(self, plan: Plan, engine: NativeEngine, core: EngineCore, recorder: Recorder) -> None:
        self.plan, self._engine, self._core, self._recorder = plan, engine, core, recorder
        self._vocabulary = int(plan.shape["vocab_size"])
        self._random = np.random.default_rng(1)
        self._limit = CallLimit(2 * plan.slots)
        self._sampling = Sampling(max_tokens=plan.sampled)

    def _tokens(self, count: int) -> Array:
        return self._random.integers(1, self._vocabulary, size=count)

    def _client(self, id: str) -> EngineClient:
        names: dict[str, Any] = {"encoder": None, "episode": id, "group": id, "index": 0}  # it encodes no text
        return EngineClient(engine=self._engine, sampling=self._sampling, seed=0, limit=self._limit, **names)

    async def concurrently(self, name: str, *, in_flight: int, rounds: int, mean: float = 0.0) -> Figures:
        """Each at its own pace. Slots and speed are those until the last episode has begun; then there is less to do."""
        plan, count = self.plan, in_flight * rounds
        tools, numbers = plan.tool_seconds(count, mean=mean), iter(range(count))
        before, all_begun = self._mark(), self._mark()

        async def go_on() -> None:
            nonlocal all_begun
            for number in numbers:
                all_begun = self._mark()
                client = self._client(f"{name} {number}")
                rollout = await client.generate(Rollout.from_prompt(self._tokens(plan.prompt), id=client.episode))
                for seconds in tools[number]:
                    await asyncio.sleep(seconds)
                    rollout = await client.generate(rollout.append(self._tokens(plan.reply)))
                self._engine.release([rollout.id])
                assert len(rollout) == plan.length

        await asyncio.gather(*(go_on() for _ in range(in_flight)))
        return self._figures(name, before, all_begun, num_episodes=count)

    async def in_lockstep(self, mean: float) -> Figures:
        """As many episodes as are in flight in async, turn by turn."""
        tools, before = self.plan.tool_seconds(self.plan.in_flight, mean=mean), self._mark()
        clients = [self._client(f"sync {number}") for number in range(self.plan.in_flight)]
        rollouts = [Rollout.from_prompt(self._tokens(self.plan.prompt), id=client.episode) for client in clients]
        for turn in range(self.plan.turns):
            if turn:
                await asyncio.sleep(float(tools[:, turn - 1].max()))
                rollouts = [rollout.append(self._tokens(self.plan.reply)) for rollout in rollouts]
            pairs = zip(clients, rollouts, strict=True)
            rollouts = await asyncio.gather(*(client.generate(rollout) for client, rollout in pairs))
        self._engine.release([rollout.id for rollout in rollouts])
        return self._figures("sync", before, self._mark(), num_episodes=self.plan.in_flight)

    def _mark(self) -> tuple[float, int, float, int]:
        return time.perf_counter(), self._core.num_sampled, self._recorder.slot_seconds, self._recorder.prompt_rows

    def _figures(
        self, name: str, before: tuple[float, int, float, int], after: tuple[float, int, float, int], *, num_episodes: int
    ) -> Figures:
        seconds, sampled = after[0] - before[0], after[1] - before[1]
        busy = (after[2] - before[2]) / (self.plan.slots * seconds)
        rows = self._recorder.prompt_rows - before[3]
        ratio = rows / (num_episodes * self.plan.fewest_prompt_tokens)
        say(f"{name}: {sampled:,} tokens in {seconds:.1f} s, slots {busy:.1%} busy, {ratio:.3f} × the fewest prompt tokens")
        return Figures(seconds, sampled, busy, ratio)


# TRL


def _measure_trl(plan: Plan, folder: Path, model: str, *, turn_seconds: float) -> float:
    """Tokens that TRL's tool loop samples a second."""
    tools = plan.tool_seconds(plan.trl_episodes, mean=_TOOL_TURNS * turn_seconds)
    sizes = {name: getattr(plan, name) for name in ("device", "prompt", "sampled", "reply", "turns", "length")}
    order = {**sizes, "model": model, "output": str(folder), "seconds": tools.T.reshape(-1)}
    with Child("TRL", "headrace.bench.episodes:trl_episodes", order, log=folder / "trl.log") as child:
        seconds = float(child.hear(seconds=_SECONDS))
    return plan.trl_episodes * plan.turns * plan.sampled / seconds


_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }} {% endfor %}{% endfor %}"
)


def trl_episodes(order: dict[str, Any], orders: Iterator[Any]) -> Iterator[float]:
    """Runs in TRL's process: the seconds of one batch's tool loop. Whatever the model samples is taken for a tool call."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    trl: Any = importlib.import_module("trl")  # for mypy, which may run without it
    tokenizer: Any = AutoTokenizer.from_pretrained(order["model"], trust_remote_code=False)
    tokenizer.eos_token, tokenizer.chat_template = tokenizer.pad_token, _TEMPLATE
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    tokenizer.response_schema = {"type": "object"}  # not used: what parses it is replaced
    tokenizer.parse_response = lambda *_, **__: {"role": "assistant", "content": "", "tool_calls": [call]}
    tools, words = iter(order["seconds"].tolist()), [f"w{number + 1}" for number in range(order["reply"])]
    taken: list[tuple[float, list[int]]] = []

    def look() -> str:
        """Look something up."""
        time.sleep(next(tools))
        return " ".join(words)

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> Any:  # noqa: ANN401
            started = time.perf_counter()
            found = super()._generate(prompts)
            taken.append((time.perf_counter() - started, [len(ids) for ids in found[1]]))
            return found

    count, longest = len(order["seconds"]) // (order["turns"] - 1), order["length"] - order["prompt"]
    prompts = [" ".join(f"w{1 + (number + place) % 400}" for place in range(order["prompt"])) for number in range(count)]
    config = grpo_config(
        is_on_gpu=False,
        output_dir=order["output"],
        max_steps=1,
        per_device_train_batch_size=count,
        num_generations=2,
        max_completion_length=longest,
        max_tool_calling_iterations=order["turns"] - 1,
        generation_kwargs={"max_new_tokens": order["sampled"], "min_new_tokens": order["sampled"]},
    )
    config.use_cpu = order["device"] == "cpu"
    Timed(
        model=order["model"],
        args=config,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts]),
        processing_class=tokenizer,
        tools=[look],
    ).train()
    ((seconds, lengths),) = taken
    if set(lengths) != {longest}:
        raise RuntimeError(f"{lengths} tokens after the prompt where {longest} were asked for")
    yield seconds
