"""Asynchronous reinforcement learning of a language model, whole, in one file that trains on a CPU within a minute.

    tasks ─feed─► waiting ─generate─► finished ─score─► buffer ─train─► version + 1
            ▲ gate            ▲                                              │
            └─────────────────┴─────────────── weight update ◄───────────────┘

A small decoder learns to sort digits: "3142>" wants "1234.". The engine keeps decoding while the trainer computes, and
takes new weights between two decode steps, so a rollout may be older than the weights it trains. Three things keep that
sound: every token carries the version and the logprob it was drawn with (the loss is taken against those), a gate bounds
how far generation runs ahead, and what is too old all the same is rejected.

    python examples/one_file.py [--steps N] [--seed S] [--max-lag K]          (--max-lag 0 is synchronous)
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.types import Batch, Call, Episode, FinishReason, Rollout, Sampling, Scored, Source, WeightUpdate

VOCABULARY = "_0123456789>."  # id 0 is padding
SAMPLING = Sampling(max_tokens=7, stop_ids=(VOCABULARY.index("."),))
GROUP_SIZE, GROUPS_PER_BATCH, NUM_SLOTS = 8, 16, 64
BATCH_SIZE = GROUP_SIZE * GROUPS_PER_BATCH
DEADLINE_SECONDS = 60.0


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def draw_digits(generator: random.Random, *, held_out: bool) -> str:
    """Held out are the tasks whose digits sum to a multiple of ten, so that no reordering of them is trained on either."""
    while True:
        digits = generator.sample(range(10), k=generator.randint(3, 5))
        if (sum(digits) % 10 == 0) == held_out:
            return "".join(map(str, digits))


def reward_of(digits: str, rollout: Rollout) -> float:
    """The share of positions that are right, the closing stop included; 1 is success."""
    wanted, given = encode("".join(sorted(digits)) + "."), rollout.completion_ids
    return sum(a == b for a, b in zip(wanted, given, strict=False)) / max(len(wanted), len(given))


def pad(rows: Sequence[object]) -> Tensor:
    """[rows, longest]: zeros on the right, where causal attention cannot see them."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.attention_in(self.attention_norm(hidden))
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """The policy. One definition, of which the engine and the trainer each hold a copy."""

    def __init__(self, *, width: int = 64, num_heads: int = 4, num_layers: int = 2, context: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(VOCABULARY), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(VOCABULARY)), nn.LogSoftmax(dim=-1))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[rows, T] ids -> [rows, T, vocabulary] logprobs of the token that follows each."""
        logprobs: Tensor = self.head(self.blocks(self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]))
        return logprobs


@dataclass
class Slot:
    """A rollout being generated."""

    rollout: Rollout
    sampling: Sampling
    uniforms: list[float]
    drawn: list[tuple[int, float, int]] = field(default_factory=list)  # (token, logprob, version)
    started: float = field(default_factory=time.time)

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.drawn and self.drawn[-1][0] in self.sampling.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.drawn) == self.sampling.max_tokens else None

    def lengthened(self, reason: FinishReason) -> Rollout:
        """The record: each token with its version, its logprob, and how it was drawn."""
        before, start, stop = self.rollout, len(self.rollout), len(self.rollout) + len(self.drawn)
        token_ids, logprobs, versions = zip(*self.drawn, strict=True)
        times = {"started": self.started, "finished": time.time()}
        call = Call(start=start, stop=stop, engine="engine", sampling=self.sampling, finish_reason=reason, **times)
        return before.replace(
            token_ids=np.append(before.token_ids, token_ids),
            source=np.append(before.source, [Source.SAMPLED] * len(token_ids)),
            loss_mask=np.append(before.loss_mask, [True] * len(token_ids)),
            logprobs=np.append(before.logprobs, logprobs),
            versions=np.append(before.versions, versions),
            calls=(*before.calls, call),
            finish_reason=reason,
        )


class Engine:
    """Continuous batching: a slot is refilled as soon as its rollout ends. Prefixes are recomputed, not cached, so a token
    is drawn wholly under the version it is stamped with, even in a rollout begun under older weights."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.version = copy.deepcopy(model), 0
        self.slots: list[Slot] = []

    def load(self, update: WeightUpdate, tensors: dict[str, Tensor]) -> None:
        self.model.load_state_dict(tensors)
        self.version = update.version

    def admit(self, rollout: Rollout, sampling: Sampling) -> None:
        # Random numbers by (seed, position): what is drawn does not depend on who else is in the batch.
        uniforms = np.random.default_rng(sampling.seed).random(sampling.max_tokens).tolist()
        self.slots.append(Slot(rollout, sampling, uniforms))

    @torch.inference_mode()
    def step(self) -> None:
        """One decode step: a token for every slot."""
        rows = [slot.rollout.token_ids.tolist() + [token for token, _, _ in slot.drawn] for slot in self.slots]
        logprobs = self.model(pad(rows))[range(len(rows)), [len(row) - 1 for row in rows]]
        uniforms = torch.tensor([[slot.uniforms[len(slot.drawn)]] for slot in self.slots])
        tokens = (logprobs.exp().cumsum(-1) < uniforms).sum(-1, keepdim=True).clamp(max=len(VOCABULARY) - 1)
        for slot, token, logprob in zip(self.slots, tokens, logprobs.gather(1, tokens), strict=True):
            slot.drawn.append((int(token), float(logprob), self.version))

    def harvest(self) -> list[Rollout]:
        """Take out what is finished."""
        finished = [slot.lengthened(reason) for slot in self.slots if (reason := slot.finish_reason)]
        self.slots = [slot for slot in self.slots if slot.finish_reason is None]
        return finished


class Trainer:
    """Batches in, weight updates out. It does not know the algorithm: advantages and weights come with the batch."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def optim_step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def train(self, batch: Batch) -> None:
        """One PPO-clip step against the logprobs the engine recorded, however old they are."""
        token_ids = pad([rollout.token_ids for rollout in batch.rollouts]).long()
        recorded = pad([rollout.logprobs for rollout in batch.rollouts])[:, 1:]
        is_current = pad([rollout.versions for rollout in batch.rollouts])[:, 1:] == batch.version
        advantages, weights = pad(batch.advantages)[:, 1:], pad(batch.weights)[:, 1:]
        logprobs = self.model(token_ids)[:, :-1].gather(2, token_ids[:, 1:, None])[..., 0]
        difference = (logprobs - recorded) * (weights > 0)
        assert float((difference * is_current).detach().abs().max()) < 1e-3, "engine and trainer differ at equal version"
        ratio = difference.exp()
        clipped = ratio.clamp(1 - batch.constants["clip_low"], 1 + batch.constants["clip_high"])
        self.optim_step(-(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum())

    def publish(self, version: int) -> tuple[WeightUpdate, dict[str, Tensor]]:
        """A copy, because the next step changes the weights while the engine may not have taken these yet."""
        tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return WeightUpdate(policy="policy", lineage="", version=version), tensors


def make_batch(groups: list[list[Episode]], *, version: int) -> Batch:
    """GRPO: an episode is worth what it beats its siblings by. Equal weights that sum to 1 make the mean over tokens."""
    rollouts = [rollout for group in groups for episode in group for rollout in episode.rollouts]
    rewards = np.array([[episode.reward for episode in group] for group in groups], dtype=np.float32)
    scaled = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-4)
    weight = np.float32(1 / sum(rollout.num_sampled for rollout in rollouts))
    return Batch(
        rollouts=tuple(rollouts),
        advantages=tuple(rollout.loss_mask * value for rollout, value in zip(rollouts, scaled.flat, strict=True)),
        weights=tuple(rollout.loss_mask * weight for rollout in rollouts),
        loss="grpo",
        constants={"clip_low": 0.2, "clip_high": 0.28},
        version=version,
    )


class Run:
    """The four loops and what they share. It changes only between two awaits, so it needs no lock and the counts close."""

    def __init__(self, trainer: Trainer, *, max_lag: int, seed: int) -> None:
        self.trainer, self.engine, self.max_lag, self.random = trainer, Engine(trainer.model), max_lag, random.Random(seed)
        self.version, self.update = 0, trainer.publish(0)
        self.submitted, self.settled = 0, Counter(trained=0, rejected=0, unused=0)
        self.waiting: deque[Rollout] = deque()
        self.finished: deque[Rollout] = deque()
        self.tasks: dict[str, str] = {}
        self.siblings: dict[str, list[Episode]] = defaultdict(list)
        self.buffer: list[list[Episode]] = []
        self.lags: list[int] = []
        self.bells = {name: asyncio.Event() for name in ("feed", "generate", "score", "train")}

    async def sleep_until(self, holds: Callable[[], object], *, name: str, woken_by: str) -> None:
        """Sleep until `holds`, looking again whenever this loop's bell rings. Long silence is an error, not a hang."""
        while not holds():
            self.bells[name].clear()
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await self.bells[name].wait()
            except TimeoutError:
                raise TimeoutError(f"{name} heard nothing from {woken_by} for {DEADLINE_SECONDS} s") from None

    def accounting(self) -> dict[str, int]:
        """Where every submitted rollout is, counted where it lies."""
        in_flight = len(self.waiting) + len(self.engine.slots) + len(self.finished) + sum(map(len, self.siblings.values()))
        places = {**self.settled, "buffered": sum(map(len, self.buffer)), "in flight": in_flight}
        assert self.submitted == sum(places.values()), f"submitted {self.submitted}, found {places}"
        return places

    def gate_is_open(self) -> bool:
        """In order, what passes now is trained within max_lag versions. A rejected rollout gives its place to another."""
        return self.submitted - self.settled["rejected"] < (self.version + 1 + self.max_lag) * BATCH_SIZE

    async def feed(self) -> None:
        """Waits for the gate; woken by train, when a version is made or a group rejected. Wakes generate."""
        while True:
            await self.sleep_until(self.gate_is_open, name="feed", woken_by="train")
            group, digits = f"group-{self.submitted // GROUP_SIZE}", draw_digits(self.random, held_out=False)
            self.tasks[group] = digits
            for index in range(GROUP_SIZE):
                self.waiting.append(Rollout.from_prompt(encode(digits + ">"), id=f"{group}/{index}", group=group, index=index))
            self.submitted += GROUP_SIZE
            self.bells["generate"].set()

    async def generate(self) -> None:
        """Waits for a prompt, woken by feed; while a slot is busy it goes from one decode step to the next. Wakes score."""
        while True:
            await self.sleep_until(lambda: self.waiting or self.engine.slots, name="generate", woken_by="feed")
            if self.engine.version < self.version:
                self.engine.load(*self.update)
            while self.waiting and len(self.engine.slots) < NUM_SLOTS:
                self.engine.admit(self.waiting.popleft(), replace(SAMPLING, seed=self.random.getrandbits(32)))
            await asyncio.to_thread(self.engine.step)
            self.finished.extend(self.engine.harvest())
            self.accounting()
            self.bells["score"].set()

    async def score(self) -> None:
        """Waits for a finished rollout; woken by generate. The last sibling completes a group, which wakes train."""
        while True:
            await self.sleep_until(lambda: self.finished, name="score", woken_by="generate")
            rollout = self.finished.popleft()
            digits = self.tasks[rollout.group]
            outcome = Scored(reward_of(digits, rollout))
            names = {"id": rollout.episode, "group": rollout.group}
            self.siblings[rollout.group].append(Episode(**names, task={"digits": digits}, rollouts=(rollout,), outcome=outcome))
            if len(self.siblings[rollout.group]) == GROUP_SIZE:
                self.buffer.append(self.siblings.pop(rollout.group))
                self.bells["train"].set()

    async def train(self, num_steps: int) -> None:
        """Waits for a batch; woken by score. Wakes feed; the engine looks for the new version before each decode step."""
        while self.version < num_steps:
            await self.sleep_until(lambda: len(self.buffer) >= GROUPS_PER_BATCH, name="train", woken_by="score")
            self.buffer.sort(key=oldest_version)
            while self.buffer and oldest_version(self.buffer[0]) < self.version - self.max_lag:
                self.settled["rejected"] += len(self.buffer.pop(0))
                self.bells["feed"].set()
            if len(self.buffer) < GROUPS_PER_BATCH:
                continue
            groups = self.buffer[:GROUPS_PER_BATCH]
            await asyncio.to_thread(self.trainer.train, make_batch(groups, version=self.version))
            del self.buffer[:GROUPS_PER_BATCH]
            self.settled["trained"] += BATCH_SIZE
            self.report(groups)
            self.version += 1
            self.update = self.trainer.publish(self.version)
            self.bells["feed"].set()

    def report(self, groups: list[list[Episode]]) -> None:
        episodes, places = [episode for group in groups for episode in group], self.accounting()
        rollouts = [rollout for episode in episodes for rollout in episode.rollouts]
        lags = [self.version - int(version) for rollout in rollouts for version in rollout.versions[rollout.is_sampled]]
        self.lags.extend(lags)
        if self.version % 10 == 9:
            print(
                f"step {self.version + 1:4}  reward {np.mean([episode.reward for episode in episodes]):.2f}  lag {np.mean(lags):.2f}"
            )

    async def run(self, num_steps: int) -> None:
        """The first loop that fails stops them all."""
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(loop()) for loop in (self.feed, self.generate, self.score)]
            await self.train(num_steps)
            for task in others:
                task.cancel()

    def drain(self) -> None:
        places = self.accounting()
        self.settled["unused"] += places["buffered"] + places["in flight"]
        self.waiting, self.finished, self.siblings, self.buffer, self.engine.slots = deque(), deque(), {}, [], []


def oldest_version(group: list[Episode]) -> int:
    return min(episode.oldest_version for episode in group)


def evaluate(model: Decoder, *, num_tasks: int = 512) -> float:
    """Success on held-out tasks, sampled at temperature 1."""
    engine, generator, num_right = Engine(model), random.Random(0), 0
    tasks = {str(number): draw_digits(generator, held_out=True) for number in range(num_tasks)}
    for name, digits in tasks.items():
        engine.admit(Rollout.from_prompt(encode(digits + ">"), id=name), replace(SAMPLING, seed=int(name)))
    while engine.slots:
        engine.step()
        num_right += sum(reward_of(tasks[rollout.id], rollout) == 1 for rollout in engine.harvest())
    return num_right / num_tasks


def warm_up(trainer: Trainer, *, seed: int) -> float:
    """Imitate right answers until one in five is right: enough for siblings to differ, which is all that GRPO learns from."""
    generator = random.Random(seed)
    while (success := evaluate(trainer.model)) < 0.2:
        for _ in range(5):
            tasks = [draw_digits(generator, held_out=False) for _ in range(BATCH_SIZE)]
            token_ids = pad([encode(f"{digits}>{''.join(sorted(digits))}.") for digits in tasks])
            logprobs = trainer.model(token_ids)[:, :-1].transpose(1, 2)
            trainer.optim_step(F.nll_loss(logprobs, token_ids[:, 1:], ignore_index=0))
    return success


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-lag", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    started = time.time()
    trainer = Trainer(Decoder())
    before = warm_up(trainer, seed=arguments.seed)
    print("warm", time.time() - started, before)
    run = Run(trainer, max_lag=arguments.max_lag, seed=arguments.seed)
    asyncio.run(run.run(arguments.steps))
    run.drain()
    after = evaluate(trainer.model)
    print(f"submitted {run.submitted} = " + " + ".join(f"{name} {count}" for name, count in run.accounting().items()))
    print(f"lag mean {np.mean(run.lags):.2f} max {max(run.lags)}; success: {before:.2f} -> {after:.2f}", time.time() - started)


if __name__ == "__main__":
    main()
