"""Engines, rewards, a trainer and the gate, reduced to seconds: what a controller is told, and what its depth leads to."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from headrace.staleness.controller import LagController, Observation
from headrace.staleness.gate import DepthGate
from headrace.staleness.lengths import LengthBias

STEP = 0.02
"""Seconds between two looks at the clock."""


@dataclass
class Simulated:
    number: int
    version: int
    """Held when it was submitted."""
    at: float
    work: float
    """Seconds of generation left."""
    length: float
    reward: float = 0.0
    """Seconds of scoring left."""


@dataclass
class Pipeline:
    """Times are in seconds. Generation of each group goes at full speed while it has a slot, or all share one processor."""

    batch: int = 16
    slots: int = 64
    """Groups generated at once."""
    parts: int = 1
    """In which the trainer gets a batch."""
    train: float = 1.0
    """A version's training."""
    generate: float = 1.0
    """A group's generation, on average."""
    sigma: float = 0.0
    """Of the log-normal generation times."""
    reward: float = 0.0
    scorers: int = 1_000
    """Groups scored at once."""
    rate: float = 0.0
    """Groups generated a second by a processor that all in flight share; 0: each has its own."""
    shares_device: bool = False
    """Engines and trainer each go at half speed while both work."""
    reject: int | None = None
    """The most versions between a group's submission and its training; older groups are dropped when a batch is made."""
    seed: int = 0

    gate: DepthGate = field(init=False, repr=False)
    version: int = field(default=0, init=False)
    submitted: int = field(default=0, init=False)
    now: float = field(default=0.0, init=False)
    in_flight: list[Simulated] = field(default_factory=list, init=False)
    scoring: list[Simulated] = field(default_factory=list, init=False)
    buffered: deque[Simulated] = field(default_factory=deque, init=False)
    ahead: list[Simulated] | None = field(default=None, init=False)
    """The part that is trained next."""
    taken: list[Simulated] = field(default_factory=list, init=False)
    """Groups of the version in training, those of `ahead` not yet."""
    training: float = field(default=-1.0, init=False)
    """Seconds of a part's training left; negative while the trainer waits."""
    dropped: int = field(default=0, init=False)
    bias: LengthBias = field(default_factory=LengthBias, init=False)
    trained: set[int] = field(default_factory=set, init=False)
    lags: list[float] = field(default_factory=list, init=False)
    """Mean lag of each version."""
    idle: list[float] = field(default_factory=list, init=False)
    periods: list[float] = field(default_factory=list, init=False)
    depths: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._start_version()

    def _start_version(self) -> None:
        self._began, self._waited, self._held, self._queued, self._latencies = self.now, 0.0, 0.0, 10**9, []
        self._complete, self._arrivals = len(self.buffered) + len(self.taken) + len(self.ahead or ()), []

    def run(self, controller: LagController | None = None, *, versions: int, depth: float = 1.0) -> None:
        """Train so many more versions, with the controller's depth or a fixed one."""
        end = self.version + versions
        while self.version < end:
            depth = controller.depth if controller is not None else depth
            self.gate = DepthGate(depth=depth, groups_per_batch=self.batch, steps=10**9)
            observation = self._until_trained()
            self.idle.append(observation.waited / observation.seconds)
            self.periods.append(observation.seconds)
            self.depths.append(depth)
            if controller is not None:
                controller.observe(observation)

    def _until_trained(self) -> Observation:
        self._start_version()
        while not self._tick():
            pass
        latency = sum(self._latencies) / max(len(self._latencies), 1)
        seconds = self.now - self._began
        return Observation(
            seconds=seconds,
            waited=self._waited,
            held=self._held / seconds,
            complete=self._complete,
            arrivals=tuple(self._arrivals),
            queued=self._queued,
            latency=latency,
        )

    def _tick(self) -> bool:
        """Whether a version was trained by then."""
        self.now += STEP
        before = self.version
        while self.gate.is_open(version=self.version, submitted=self.submitted, dropped=self.dropped):
            length = self.random.lognormvariate(-(self.sigma**2) / 2, self.sigma)
            group = Simulated(self.submitted, self.version, self.now, self.generate * length, length, self.reward)
            self.in_flight.append(group)
            self.submitted += 1
        running = self.in_flight[: self.slots]
        self._held += STEP * (1 - len(running) / self.slots)
        self._queued = min(self._queued, len(self.in_flight) - len(running))
        is_training = self.training >= 0
        speed = 0.5 if self.shares_device and is_training and running else 1.0
        for group in running:
            group.work -= STEP * speed * (self.rate * self.generate / len(running) if self.rate else 1.0)
        self.scoring += [group for group in running if group.work <= 0]
        self.in_flight = [group for group in self.in_flight if group.work > 0]
        for group in self.scoring[: self.scorers]:
            group.reward -= STEP
        done = [group for group in self.scoring if group.reward <= 0]
        self.scoring = [group for group in self.scoring if group.reward > 0]
        self.buffered += done
        self._latencies += [self.now - group.at for group in done]
        self._arrivals += [self.now - self._began for _ in done]
        for group in done:
            self.bias.ended(group.number, [round(1000 * group.length)])
        if self.ahead is None:
            self._drop_old()
        size = self.batch // self.parts
        if self.ahead is None and len(self.buffered) >= size:
            self.ahead = [self.buffered.popleft() for _ in range(size)]
        if self.training >= 0:
            self.training -= STEP * speed
        else:
            self._waited += STEP
        if self.training < 0 and len(self.taken) == self.batch:
            self.lags.append(sum(self.version - group.version for group in self.taken) / self.batch)
            self.version, self.taken = self.version + 1, []
        if self.training < 0 and self.ahead is not None:
            for group in self.ahead:
                self.bias.trained(group.number)
                self.trained.add(group.number)
            self.taken += self.ahead
            self.training, self.ahead = self.train / self.parts - STEP, None
        return self.version > before

    def _drop_old(self) -> None:
        is_old = [self.reject is not None and self.version - group.version > self.reject for group in self.buffered]
        for group, old in zip(self.buffered, is_old, strict=True):
            if old:
                self.bias.dropped(group.number)
        self.dropped += sum(is_old)
        self.buffered = deque(group for group, old in zip(self.buffered, is_old, strict=True) if not old)


def main() -> None:
    """Print the table of docs/staleness.md: what each gate and rejection does to the lengths that are trained."""
    ways = {
        "depth 1, reject at 1": (1, 1.0),
        "depth 2, reject at 2": (2, 2.0),
        "depth 8, reject at 2": (2, 8.0),
        "auto": (8, None),
    }
    for way, (reject, depth) in ways.items():
        for seed in range(3):
            pipeline = Pipeline(sigma=1.0, seed=seed, reject=reject)
            controller = LagController(groups_per_batch=pipeline.batch, limit=8, start=1.0) if depth is None else None
            pipeline.run(controller, versions=150, depth=depth or 1.0)
            seen = {name: value for name, value in pipeline.bias.metrics().items() if "ratio" in name}
            seen |= {"dropped": pipeline.dropped / pipeline.submitted, "idle": sum(pipeline.idle[-50:]) / 50}
            seen |= {"lag": sum(pipeline.lags[-50:]) / 50, "depth": pipeline.depths[-1]}
            print(f"{way}, seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in seen.items()))


if __name__ == "__main__":
    main()
