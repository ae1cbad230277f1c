"""The command `headrace bench`. Imports a benchmark, and what it needs, only when it runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.launch import sigterm_as_interrupt
from headrace.settings import ConfigError

if TYPE_CHECKING:
    import argparse

BENCHES = {
    "learn": "whether the quickstart learns, over several seeds",
    "lag": "what lag costs: the area under the reward curve by loss and lag, every token at exactly that lag",
    "sparse": "whether a task that almost never pays at first is learned, with and without filter and sampler",
    "controller": "the launcher's own cost per rollout, with 10,000 in flight",
    "overlap": "generation and training at the same time, against the slower of the two alone",
    "sync": "sending new weights to the engines: every transport, full and delta, against a plain copy",
    "partial": "what each interrupt costs: tokens wasted, time stalled, KV cache recomputed, lag",
    "engine": "the native engine's tokens a second, against the memory bandwidth's limit, transformers and vLLM",
    "trainer": "the trainer's tokens a second, FLOPs utilization and memory, against transformers",
    "ranks": "two trainer ranks on two cores against one and against FSDP2, how even their loads are, and predicted memory",
    "mismatch": "how far logprobs of engine and trainer differ at other precision, with and without replayed experts and mask",
    "moe": "a mixture of experts in engine and trainer, against a dense model of equal active parameters, and vLLM",
    "lora": "an adapter's cost in decoding and publishing, and logprobs of engine and trainer with one, live and merged",
    "presets": "every preset on the same work: an emulated cluster against its bound, and the quickstart for a few seconds",
    "step": "whole RL steps, synchronous and asynchronous, against TRL with vLLM",
    "episodes": "episodes of eight turns with slow tools: slots busy, prompt tokens computed, async, sync and TRL's tool loop",
    "trl": "the quickstart with TRL and with Headrace: seconds until it is learned",
    "vllm": "a vLLM server as the engine, against the native one: tokens a second, logprobs, updates in flight",
}
"""Each is a module of `headrace.bench` with a `run(*, quick, json_file)`."""
BENCH_OPTIONS: dict[str, dict[str, Any]] = {
    "seeds": {
        "type": int,
        "help": "lag, learn, presets, trl: number of seeds (default: 5; 3 with --losses and for trl; 1 for presets)",
    },
    "steps": {"type": int, "help": "learn: versions to train (default: the recipe's 150, or 10 with --quick)"},
    "losses": {"help": "learn: losses to try on every seed, such as grpo,sapo,algorithm=dapo, or all"},
    "model": {"help": "engine, sync, trl, vllm: a Hugging Face folder to measure with"},
    "device": {"choices": ["auto", "cpu", "cuda"], "help": "partial: where to run (default: auto, a GPU if there is one)"},
    "lengths": {"choices": ["8k", "32k"], "help": "step: measure completions with a long tail up to this many tokens"},
    "slots": {"type": int, "help": "episodes: rollouts decoded at once (default: 256 on a GPU, 32 on a CPU)"},
    "only": {
        "help": "lag, lora, mismatch, presets, ranks, sparse, trainer, step: parts to measure, by commas; a wrong one lists all"
    },
}
"""Options that only some benchmarks have: those their help begins with."""


def add_bench_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="run a benchmark; prints a table and can write JSON")
    bench.add_argument("name", choices=list(BENCHES), help="; ".join(f"{name}: {text}" for name, text in BENCHES.items()))
    bench.add_argument("--json", type=Path, help="also write the figures to this file")
    bench.add_argument(
        "--quick", action="store_true", help="under a minute on 2 cores: shows that it runs, not what it measures"
    )
    for option, how in BENCH_OPTIONS.items():
        bench.add_argument(f"--{option}", **how)
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    given = {name: getattr(options, name) for name in BENCH_OPTIONS if getattr(options, name) is not None}
    for name, value in given.items():
        benches = BENCH_OPTIONS[name]["help"].partition(":")[0].split(", ")
        if options.name not in benches:
            raise ConfigError(f"--{name} = {value}: only `headrace bench {' or '.join(benches)}` has {name}")
    if options.model is not None and not (Path(options.model) / "config.json").is_file():
        raise ConfigError(f"--model = {options.model}: the folder does not exist, or has no config.json")
    module = importlib.import_module(f"headrace.bench.{options.name}")
    with sigterm_as_interrupt():
        return int(module.run(quick=options.quick, json_file=options.json, **given))
