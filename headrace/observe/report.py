"""The report at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import command
from headrace.observe.screen import budget_table, share

if TYPE_CHECKING:
    from pathlib import Path


def final_report(summary: dict[str, Any], equation: str, samples: list[tuple[str, str, float | None]], *, folder: Path) -> str:
    """Success before and after, where the time went, the accounting, the checkpoint, three rollouts."""
    seconds, tokens, lag = summary["seconds"], summary["tokens"], summary["lag"]
    lines = ["", f"{summary['status']}   version {summary['version']} of {summary['steps']}"]
    if summary["held_out"]["after"]:
        lines += _held_out_lines(**summary["held_out"])
    elif summary["reward_first"] is not None:
        lines += [f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} (no held-out tasks are given)"]
    lines += [
        f"time       {seconds['rl']:.1f} s of RL, setup {seconds['setup']:.1f} s, warm-up {seconds['warmup']:.1f} s, first "
        f"step {seconds['first_step']:.1f} s after the command",
        f"tokens     {tokens['trained']:,} trained of {tokens['sampled']:,} sampled, {tokens['wasted']:,} wasted; "
        f"lag {lag['mean']:.2f} on average, {lag['max']} at most",
        _memory_line(summary["memory"]),
        "",
        *budget_table(summary["time_budget"]),
        "",
        f"accounting {equation}",
    ]
    lines += [f"           {count} {reason}" for reason, count in summary["dropped_because"].items()]
    if summary["skipped_steps"]:
        lines += [f"skipped    {summary['skipped_steps']} optimizer steps, whose gradient was not finite"]
    if summary.get("restarts"):
        lines += ["restarts   " + ", ".join(f"{name} {count}" for name, count in summary["restarts"].items())]
    if summary.get("engines_given_up"):
        lines += [f"given up   {', '.join(summary['engines_given_up'])}: engine.restarts were spent"]
    lines += [f"checkpoint {summary['checkpoint']}", f"look       {command()} inspect {folder}"]
    if summary["status"] == "interrupted":
        lines += ["resume     give the same command again"]
    for prompt, completion, reward in samples:
        lines += [f"sample     {prompt!r} -> {completion!r}   reward {reward if reward is None else round(reward, 3)}"]
    return "\n".join(lines)


def _held_out_lines(before: dict[str, float], after: dict[str, float]) -> list[str]:
    lines = []
    for success in dict.fromkeys(["success", *(name for name in after if name.startswith("success/"))]):
        greedy, source = success.replace("success", "greedy", 1), success.partition("/")[2]
        title = f"           {source}:" if source else "held-out  "
        lines.append(
            f"{title} {share(before, success)} -> {share(after, success)} solved at temperature 1, "
            f"greedy {share(before, greedy)} -> {share(after, greedy)}"
        )
    return lines


def _memory_line(memory: dict[str, dict[str, int | None]]) -> str:
    parts = []
    for role, sizes in memory.items():
        peak, expected = sizes["peak"] or 0, sizes["predicted"]
        parts.append(f"{role} {peak / 1e9:.2f} GB" + (f" ({expected / 1e9:.2f} predicted)" if expected else ""))
    return f"memory     {', '.join(parts)} at the peak"
