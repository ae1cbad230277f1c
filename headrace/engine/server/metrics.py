"""Request counts and times, and the engine's state, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engine.protocol import EngineState

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Histogram:
    """Durations, in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Cumulative buckets, sum and count."""
        lines, total = [], 0
        for bound, count in zip([*(f"{bound:g}" for bound in BOUNDS), "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum!r}", f"{name}_count {total}"]


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by endpoint and status; 499 is a client that left
        self.first_token = Histogram()
        self.request = Histogram()

    def render(self, state: EngineState | None) -> str:
        """The page that Prometheus scrapes; without the engine's figures if it does not answer."""
        lines: list[str] = []

        def add(name: str, kind: str, text: str, values: list[str]) -> None:
            lines.extend([f"# HELP headrace_{name} {text}", f"# TYPE headrace_{name} {kind}", *values])

        if state is not None:
            for name, kind, value, text in (
                ("requests_running", "gauge", state.running, "Completions being decoded."),
                ("requests_waiting", "gauge", state.waiting, "Completions waiting for a slot."),
                ("slots", "gauge", state.slots, "Completions that can be decoded at once."),
                ("free_blocks", "gauge", state.free_blocks, "KV cache blocks that are free."),
                ("weight_version", "gauge", state.version, "Policy version of the weights."),
                ("tokens_drawn_total", "counter", state.tokens, "Tokens sampled since the start."),
            ):
                add(name, kind, text, [f"headrace_{name} {value}"])
        up = int(state is not None)
        add("engine_up", "gauge", "1 where the engine answers.", [f"headrace_engine_up {up}"])
        counts = [
            f'headrace_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        add("requests_total", "counter", "Requests by endpoint and status; 499 is a client that left.", counts)
        for name, text, times in (
            ("time_to_first_token_seconds", "From request to first token, of streamed requests.", self.first_token),
            ("request_seconds", "From request to end, of completions and chats.", self.request),
        ):
            add(name, "histogram", text, times.lines(f"headrace_{name}"))
        return "\n".join(lines) + "\n"
