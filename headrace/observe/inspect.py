"""`headrace inspect RUN`: a rollout token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.records import Source, read_frames, unpack_rollouts
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.records import Rollout


def kept_files(folder: Path) -> list[Path]:
    """Files of kept rollouts, by version."""
    return sorted((folder / "rollouts").glob("step-*.wire"), key=_version)


def _version(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def read_rollouts(folder: Path, step: int | None = None) -> tuple[int, list[Rollout]]:
    """(version, its rollouts) of `step`, by default the last whose rollouts were kept."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; `ls runs/` shows the runs that were started here")
    steps = [_version(file) for file in kept_files(folder)]
    if not steps:
        raise ConfigError(f"{folder} holds no rollouts; is it a run folder? (observe.keep_rollouts_every keeps them)")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"step {step} was not kept, or was removed by observe.max_gb; there are {steps[0]} to {steps[-1]}")
    with (folder / "rollouts" / f"step-{step}.wire").open("rb") as file:
        return step, [rollout for columns in read_frames(file) for rollout in unpack_rollouts(columns)]


def render(rollout: Rollout, token_text: Callable[[int], str]) -> str:
    """A header and one line per token: source, version, logprob, mask."""
    call = rollout.calls[-1] if rollout.calls else None
    lines = [
        f"rollout {rollout.id}  group {rollout.group}  policy {rollout.policy}  lineage {rollout.lineage}  "
        f"{rollout.finish_reason or 'not generated'}  {rollout.outcome}"
        + ("" if rollout.parent is None else f"  forked from {rollout.parent[0]} at token {rollout.parent[1]}"),
        f"rewards {rollout.rewards}" + (f"  temperature {call.sampling.temperature}  engine {call.engine}" if call else ""),
        f"{'index':>5}  {'id':>6}  {'token':14} {'source':8} {'version':>7}  {'logprob':>9}  mask",
    ]
    for index, token in enumerate(rollout.token_ids):
        is_sampled = rollout.source[index] == Source.SAMPLED
        version = str(rollout.versions[index]) if is_sampled else ""
        logprob = f"{rollout.logprobs[index]:.4f}" if is_sampled else ""
        lines.append(
            f"{index:>5}  {token:>6}  {token_text(int(token))!r:14} {Source(rollout.source[index]).name.lower():8} "
            f"{version:>7}  {logprob:>9}  {'trained' if rollout.loss_mask[index] else ''}"
        )
    return "\n".join(lines)
