"""Request counts and times, and the engine's state, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.engine.protocol import EngineState

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Histogram:
    """Durations, in cumulative buckets."""

    def __init__(self) -> None:
        names = [*map("{:g}".format, BOUNDS), "+Inf"]
        self.values = {**{f'_bucket{{le="{name}"}}': 0.0 for name in names}, "_sum": 0.0, "_count": 0.0}

    def observe(self, seconds: float) -> None:
        self.values["_sum"] += seconds
        for name, bound in zip(self.values, (*BOUNDS, float("inf")), strict=False):
            self.values[name] += seconds <= bound
        self.values["_count"] += 1


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by endpoint and status; 499 is a client that left
        self.first_token = Histogram()
        self.request = Histogram()

    def render(self, state: EngineState | None) -> str:
        """The page that Prometheus scrapes; without the engine's figures if it does not answer."""
        lines: list[str] = []

        def add(name: str, kind: str, values: float | Mapping[str, float], text: str) -> None:
            lines.extend([f"# HELP headrace_{name} {text}", f"# TYPE headrace_{name} {kind}"])
            for labels, value in ({"": values} if isinstance(values, int | float) else values).items():
                lines.append(f"headrace_{name}{labels} {value:.15g}")

        if state is not None:
            add("requests_running", "gauge", state.running, "Completions being decoded.")
            add("requests_waiting", "gauge", state.waiting, "Completions waiting for a slot.")
            add("slots", "gauge", state.slots, "Completions that can be decoded at once.")
            add("free_blocks", "gauge", state.free_blocks, "KV cache blocks that are free.")
            add("weight_version", "gauge", state.version, "Policy version of the weights.")
            add("tokens_drawn_total", "counter", state.tokens, "Tokens sampled since the start.")
        add("engine_up", "gauge", int(state is not None), "1 where the engine answers.")
        requests = {f'{{endpoint="{where}",status="{status}"}}': n for (where, status), n in sorted(self.requests.items())}
        add("requests_total", "counter", requests, "Requests by endpoint and status; 499 is a client that left.")
        first_token, request = self.first_token.values, self.request.values
        add("time_to_first_token_seconds", "histogram", first_token, "From request to first token, of streamed requests.")
        add("request_seconds", "histogram", request, "From request to end, of completions and chats.")
        return "\n".join(lines) + "\n"
