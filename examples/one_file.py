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

import argparse
import asyncio
import copy
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from headrace.records import Batch, Call, Episode, FinishReason, Rollout, Sampling, Scored, Source, WeightUpdate

VOCABULARY_SIZE = 64  # token ids are ASCII codes, of which ">" (62) is the largest in use; 0 is padding
SAMPLING = Sampling(max_tokens=7, stop_ids=(ord("."),))
GROUP_SIZE, GROUPS_PER_BATCH, BATCH_SIZE, NUM_SLOTS = 8, 16, 8 * 16, 64
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
DEADLINE_SECONDS = 60.0


def draw_prompt(generator: random.Random, *, held_out: bool) -> list[int]:
    """Held out are the tasks whose digits sum to a multiple of ten, so that no reordering of them is trained on either."""
    while True:
        digits = generator.sample(range(10), k=generator.randint(3, 5))
        if (sum(digits) % 10 == 0) == held_out:
            return [ord("0") + digit for digit in digits] + [ord(">")]


def judge(rollout: Rollout) -> Episode:
    """Partial credit: the reward is the share of positions that are right, the closing stop included; 1 is success."""
    digits, _, given = bytes(rollout.token_ids.tolist()).decode().partition(">")
    wanted = "".join(sorted(digits)) + "."
    outcome = Scored(sum(a == b for a, b in zip(wanted, given, strict=False)) / max(len(wanted), len(given)))
    rollout = rollout.replace(outcome=outcome)
    return Episode(id=rollout.episode, group=rollout.group, task={"digits": digits}, rollouts=(rollout,), outcome=outcome)


def pad(rows: Sequence[object]) -> Tensor:
    """[rows, longest]: zeros on the right, where causal attention cannot see them."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


class Decoder(nn.Module):
    """The policy. One definition, of which the engine and the trainer each hold a copy."""

    def __init__(self, *, width: int = 64, num_heads: int = 4, num_layers: int = 2, context: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY_SIZE, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[rows, T] ids -> [rows, T, vocabulary] logprobs of the token that follows each."""
        hidden = self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(token_ids.shape[1])
        return torch.log_softmax(self.head(self.blocks(hidden, causal, is_causal=True)), dim=-1)


def lengthen(rollout: Rollout, token: int, logprob: float, version: int) -> Rollout:
    """One sampled token more. The record is whole after each: a rollout that has not ended is one aborted, so far."""
    stop, call = len(rollout) + 1, rollout.calls[-1]
    reason = FinishReason.LENGTH if stop - call.start == call.sampling.max_tokens else FinishReason.ABORT
    reason = FinishReason.STOP if token in call.sampling.stop_ids else reason
    call = replace(call, stop=stop, finish_reason=reason, finished=time.time())
    added = {"token_ids": token, "source": Source.SAMPLED, "loss_mask": True, "logprobs": logprob, "versions": version}
    arrays = {name: np.append(getattr(rollout, name), value) for name, value in added.items()}
    return rollout.replace(**arrays, calls=(*rollout.calls[:-1], call), finish_reason=reason)


class Engine:
    """Continuous batching: a slot is refilled as soon as its rollout ends. Prefixes are recomputed, not cached, so a token
    is drawn wholly under the version it is stamped with, even in a rollout begun under older weights."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.version, self.slots = copy.deepcopy(model), 0, list[Rollout]()

    def load(self, update: WeightUpdate, tensors: dict[str, Tensor]) -> None:
        self.model.load_state_dict(tensors)
        self.version = update.version

    def admit(self, rollout: Rollout, sampling: Sampling) -> None:
        end, now, reason = len(rollout), time.time(), FinishReason.ABORT
        call = Call(start=end, stop=end, engine="engine", sampling=sampling, finish_reason=reason, started=now, finished=now)
        self.slots.append(rollout.replace(calls=(*rollout.calls, call), finish_reason=reason))

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """One decode step: a token more for every slot. Runs in a thread, so it leaves `slots` for `harvest` to change."""
        rows = [rollout.token_ids for rollout in self.slots]
        logprobs = self.model(pad(rows))[range(len(rows)), [len(row) - 1 for row in rows]]
        # Random numbers by (seed, position): what is drawn does not depend on who else is in the batch.
        keys = [(rollout.calls[-1].sampling.seed, len(rollout)) for rollout in self.slots]
        uniforms = torch.tensor([[np.random.default_rng(key).random()] for key in keys])
        tokens = (logprobs.exp().cumsum(-1) < uniforms).sum(-1, keepdim=True).clamp(max=VOCABULARY_SIZE - 1)
        drawn = zip(self.slots, tokens.flatten().tolist(), logprobs.gather(1, tokens).flatten().tolist(), strict=True)
        return [lengthen(rollout, token, logprob, self.version) for rollout, token, logprob in drawn]

    def harvest(self, rollouts: list[Rollout]) -> list[Rollout]:
        self.slots = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.ABORT]
        return [rollout for rollout in rollouts if rollout.finish_reason is not FinishReason.ABORT]


class Trainer:
    """Batches in, weight updates out. It does not know the algorithm: advantages and weights come with the batch."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def optim_step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self, batch: Batch) -> None:
        """One PPO-clip step against the logprobs the engine recorded, however old they are."""
        token_ids = pad([rollout.token_ids for rollout in batch.rollouts]).long()
        recorded = pad([rollout.logprobs for rollout in batch.rollouts])[:, 1:]
        is_current = pad([rollout.versions for rollout in batch.rollouts])[:, 1:] == batch.version
        advantages, weights = pad(batch.advantages)[:, 1:], pad(batch.weights)[:, 1:]
        logprobs = self.model(token_ids)[:, :-1].gather(2, token_ids[:, 1:, None])[..., 0]
        ratio = ((logprobs - recorded) * (weights > 0)).exp()
        assert bool((((ratio - 1) * is_current).abs() < 1e-3).all()), "engine and trainer disagree at the same version"
        clipped = ratio.clamp(1 - batch.constants["clip_low"], 1 + batch.constants["clip_high"])
        self.optim_step(-(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum())

    def publish(self, version: int) -> tuple[WeightUpdate, dict[str, Tensor]]:
        """A copy, because the next step changes the weights while the engine may not have taken these yet."""
        return WeightUpdate(policy="policy", lineage="", version=version), copy.deepcopy(self.model.state_dict())


def make_batch(groups: list[list[Episode]], *, version: int) -> Batch:
    """GRPO: an episode is worth what it beats its siblings by. Equal weights that sum to 1 make the mean over tokens."""
    rollouts = tuple(rollout for group in groups for episode in group for rollout in episode.rollouts)
    rewards = np.array([[episode.reward for episode in group] for group in groups], dtype=np.float32)
    scaled = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-4)
    advantages = tuple(rollout.loss_mask * value for rollout, value in zip(rollouts, scaled.flat, strict=True))
    num_tokens = sum(rollout.num_sampled for rollout in rollouts)
    weights = tuple(rollout.loss_mask / num_tokens for rollout in rollouts)
    return Batch(rollouts=rollouts, advantages=advantages, weights=weights, loss="grpo", constants=CLIP, version=version)


class Run:
    """The four loops and what they share. It changes only between two awaits, so it needs no lock and the counts close."""

    def __init__(self, trainer: Trainer, *, max_lag: int, seed: int) -> None:
        self.trainer, self.engine, self.max_lag, self.random = trainer, Engine(trainer.model), max_lag, random.Random(seed)
        self.version, self.update, self.lags = 0, trainer.publish(0), list[int]()
        self.submitted, self.settled = 0, Counter(trained=0, rejected=0, unused=0)
        self.waiting, self.finished = deque[Rollout](), deque[Rollout]()
        self.siblings, self.buffer = defaultdict[str, list[Episode]](list), list[list[Episode]]()
        self.bells = {name: asyncio.Event() for name in ("feed", "generate", "score", "train")}

    async def sleep_until(self, holds: Callable[[], object], *, name: str, woken_by: str) -> None:
        """Sleep until `holds`, looking again whenever this loop's bell rings. Long silence is an error, not a hang."""
        while not holds():
            self.bells[name].clear()
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await self.bells[name].wait()
            except TimeoutError:
                raise TimeoutError(f"{name} heard nothing from {woken_by} for {DEADLINE_SECONDS:.0f} s") from None

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
            prompt, group = draw_prompt(self.random, held_out=False), f"group-{self.submitted // GROUP_SIZE}"
            for index in range(GROUP_SIZE):
                self.waiting.append(Rollout.from_prompt(prompt, id=f"{group}/{index}", group=group, index=index))
            self.submitted += GROUP_SIZE
            self.bells["generate"].set()

    async def generate(self) -> None:
        """Waits for a prompt, woken by feed; decodes while a slot is busy, taking new weights between steps. Wakes score."""
        while True:
            await self.sleep_until(lambda: self.waiting or self.engine.slots, name="generate", woken_by="feed")
            if self.engine.version < self.version:
                self.engine.load(*self.update)
            while self.waiting and len(self.engine.slots) < NUM_SLOTS:
                self.engine.admit(self.waiting.popleft(), replace(SAMPLING, seed=self.random.getrandbits(32)))
            self.finished.extend(self.engine.harvest(await asyncio.to_thread(self.engine.step)))
            self.accounting()
            self.bells["score"].set()

    async def score(self) -> None:
        """Waits for a finished rollout; woken by generate. The last sibling completes a group, which wakes train."""
        while True:
            await self.sleep_until(lambda: self.finished, name="score", woken_by="generate")
            episode = judge(self.finished.popleft())
            self.siblings[episode.group].append(episode)
            if len(self.siblings[episode.group]) == GROUP_SIZE:
                self.buffer.append(self.siblings.pop(episode.group))
                self.bells["train"].set()

    async def train(self, num_steps: int) -> None:
        """Waits for a batch; woken by score. Wakes feed; the engine looks for the new version before each decode step."""
        while self.version < num_steps:
            await self.sleep_until(lambda: len(self.buffer) >= GROUPS_PER_BATCH, name="train", woken_by="score")
            oldest = self.version - self.max_lag
            fresh = [group for group in self.buffer if min(episode.oldest_version for episode in group) >= oldest]
            self.settled["rejected"] += GROUP_SIZE * (len(self.buffer) - len(fresh))
            self.buffer, groups = fresh, fresh[:GROUPS_PER_BATCH]
            if len(groups) == GROUPS_PER_BATCH:
                batch = make_batch(groups, version=self.version)
                await asyncio.to_thread(self.trainer.train, batch)
                del self.buffer[:GROUPS_PER_BATCH]
                self.settled["trained"] += BATCH_SIZE
                self.version, self.update = self.version + 1, self.trainer.publish(self.version + 1)
                self.report(batch)
            self.bells["feed"].set()

    def report(self, batch: Batch) -> None:
        lags = batch.version - np.concatenate([rollout.versions[rollout.is_sampled] for rollout in batch.rollouts])
        self.lags.extend(lags.tolist())
        if self.version % 10 == 0:
            reward = sum(rollout.reward or 0.0 for rollout in batch.rollouts) / BATCH_SIZE
            print(f"version {self.version:4}  reward {reward:.2f}  lag {lags.mean():.2f}  {self.accounting()}", flush=True)

    async def run(self, num_steps: int) -> None:
        """The first loop that fails stops them all."""
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(loop()) for loop in (self.feed, self.generate, self.score)]
            await self.train(num_steps)
            for task in others:
                task.cancel()


def evaluate(model: Decoder, *, num_tasks: int = 256) -> float:
    """Success on held-out tasks, sampled at temperature 1."""
    engine, generator, num_right = Engine(model), random.Random(0), 0
    for number in range(num_tasks):
        rollout = Rollout.from_prompt(draw_prompt(generator, held_out=True), id=str(number))
        engine.admit(rollout, replace(SAMPLING, seed=number))
    while engine.slots:
        num_right += sum(judge(rollout).reward == 1 for rollout in engine.harvest(engine.step()))
    return num_right / num_tasks


def warm_up(trainer: Trainer, generator: random.Random) -> float:
    """Imitate right answers until one in five is right: enough for siblings to differ, which is all that GRPO learns from."""
    while (success := evaluate(trainer.model)) < 0.2:
        for _ in range(5):
            prompts = [draw_prompt(generator, held_out=False) for _ in range(BATCH_SIZE)]
            token_ids = pad([prompt + sorted(prompt[:-1]) + [ord(".")] for prompt in prompts])
            logprobs = trainer.model(token_ids)[:, :-1].transpose(1, 2)
            trainer.optim_step(nn.functional.nll_loss(logprobs, token_ids[:, 1:], ignore_index=0))
    return success


def main() -> None:
    parser = argparse.ArgumentParser(description="Sort digits by asynchronous reinforcement learning.")
    for name, default in {"--steps": 150, "--seed": 0, "--max-lag": 1}.items():
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.max_lag < 0:
        parser.error("--steps must be ≥ 1 and --max-lag ≥ 0")
    torch.set_num_threads(1)  # one for the engine, one for the trainer
    torch.manual_seed(arguments.seed)
    started, trainer = time.monotonic(), Trainer(Decoder())
    before = warm_up(trainer, random.Random(arguments.seed))
    run = Run(trainer, max_lag=arguments.max_lag, seed=arguments.seed)
    asyncio.run(run.run(arguments.steps))
    run.settled["unused"] = run.accounting()["buffered"] + run.accounting()["in flight"]  # cut off by the end of the run
    for place in (run.waiting, run.engine.slots, run.finished, run.siblings, run.buffer):
        place.clear()
    print(f"submitted {run.submitted} = " + " + ".join(f"{place} {count}" for place, count in run.accounting().items()))
    summary = f"lag: mean {np.mean(run.lags):.2f} max {max(run.lags)}  success: {before:.2f} -> {evaluate(trainer.model):.2f}"
    print(f"{arguments.steps} steps in {time.monotonic() - started:.0f} s  {summary}")


if __name__ == "__main__":
    main()
