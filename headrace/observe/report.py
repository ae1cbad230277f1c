"""The report at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import command
from headrace.observe.screen import budget_table

if TYPE_CHECKING:
    from pathlib import Path


def final_report(summary: dict[str, Any], equation: str, samples: list[tuple[str, str, float | None]], *, folder: Path) -> str:
    """Success before and after, where the time went, the accounting, the checkpoint, three rollouts."""
    seconds, tokens, lag, depth = summary["seconds"], summary["tokens"], summary["lag"], summary["staleness"]
    why = depth["why"]  # of what `staleness.max_lag = "auto"` chose
    by = f" by {summary['stopped_by']}" if summary["status"] == "stopped" else ""
    lines = ["", f"{summary['status']}{by}   version {summary['version']} of {summary['steps']}"]
    if summary["held_out"]["before"]:
        lines += _held_out_lines(**summary["held_out"], newest=summary["version"])
    elif summary["reward_first"] is not None:
        lines += [f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} (no held-out tasks are given)"]
    lines += [
        f"time       {seconds['rl']:.1f} s of RL, setup {seconds['setup']:.1f} s, model and SFT {seconds['warmup']:.1f} s, "
        f"evaluation {seconds['evaluate']:.1f} s, first step {seconds['first_step']:.1f} s after the command",
        f"tokens     {tokens['trained']:,} trained of {tokens['sampled']:,} sampled, {tokens['wasted']:,} wasted; "
        f"lag {lag['mean']:.2f} on average, {lag['max']} at most",
        *([f"max_lag    {depth['max_lag']}: {depth['depth']:.2f} versions ahead at the end, because {why}"] if why else []),
        *_lending_lines(summary["lending"]),
        _memory_line(summary["memory"]),
        "",
        *budget_table(summary["time_budget"]),
        "",
        f"accounting {equation}",
    ]
    lines += [f"           {count} {reason}" for reason, count in summary["dropped_because"].items()]
    lines += [
        f"changed    {each['key']} {each['was']} -> {each['value']} at version {each['version']}, by {each['by']}"
        for each in summary["changes"]
    ]
    slow = {name: seconds for name, seconds in summary["callbacks"].items() if seconds >= 1}
    lines += ["callbacks  " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slow.items())] if slow else []
    if summary["skipped_steps"]:
        lines += [f"skipped    {summary['skipped_steps']} optimizer steps, whose gradient was not finite"]
    if summary.get("restarts"):
        lines += ["restarts   " + ", ".join(f"{name} {count}" for name, count in summary["restarts"].items())]
    if summary.get("engines_given_up"):
        lines += [f"given up   {', '.join(summary['engines_given_up'])}: engine.restarts were spent, or the host is gone"]
    lines += [f"checkpoint {summary['checkpoint']}", f"look       {command()} inspect {folder}"]
    if summary["status"] in ("interrupted", "stopped"):
        lines += ["resume     give the same command again"]
    for prompt, completion, reward in samples:
        lines += [f"sample     {prompt!r} -> {completion!r}   reward {reward if reward is None else round(reward, 3)}"]
    return "\n".join(lines)


def _held_out_lines(
    before: dict[str, float], after: dict[str, float], version: int, temperature: float, *, newest: int
) -> list[str]:
    """A run that was stopped may have trained versions which it has not evaluated."""
    evaluated = [before, after] if version else [before]

    def change(name: str) -> str:
        return " -> ".join(f"{found[name]:.1%}" if name in found else "not judged" for found in evaluated)

    of = f", {f'version {version}' if version else 'before RL'}: no later one was evaluated" if version < max(newest, 1) else ""
    lines = []
    for success in dict.fromkeys(["success", *(name for name in evaluated[-1] if name.startswith("success/"))]):
        source = success.partition("/")[2]
        title = f"           {source}:" if source else "held-out  "
        greedy = success.replace("success", "greedy", 1)
        others = [f", greedy {change(greedy)}"] if greedy in {**before, **after} else []
        lines.append(f"{title} {change(success)} solved at temperature {temperature:g}{''.join(others)}{of}")
    return lines


def _lending_lines(lending: dict[str, Any] | None) -> list[str]:
    """What `engine.lend` did."""
    if lending is None:
        return []
    lent = f"the trainer's device {lending['times']} times, {lending['seconds']:.1f} s in all"
    return [f"lent       {lent}, for {lending['tokens']:,} tokens ({lending['share']:.1%}); {lending['why']}"]


def _memory_line(memory: dict[str, dict[str, int | None]]) -> str:
    parts = []
    for role, sizes in memory.items():
        peak, expected = sizes["peak"] or 0, sizes["predicted"]
        parts.append(f"{role} {peak / 1e9:.2f} GB" + (f" ({expected / 1e9:.2f} predicted)" if expected else ""))
    return f"memory     {', '.join(parts)} at the peak"


def evaluation_table(found: dict[str, Any]) -> str:
    """What `headrace evaluate` prints: a row for each metric, a column for all tasks, each source, and the difference."""
    settings = found["settings"]
    sampling = {name: value for name, value in settings["sampling"].items() if value not in (0, 1) or name == "temperature"}
    given = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    columns = {"all": found["metrics"], **found["sources"]}
    cells = {name: [_interval(inside.get(name), name) for inside in columns.values()] for name in found["metrics"]}
    heads = list(columns)
    if found["against"]:
        heads.append(f"minus {found['against']}")
        for name, row in cells.items():
            row.append(_interval(found["difference"].get(name), name, sign="+"))
    widths = [max(map(len, column)) for column in zip(heads, *cells.values(), strict=True)]
    version = "" if found["version"] is None else f", version {found['version']}"
    lines = [
        f"{found['model']}{version}",
        f"{len(found['tasks'])} tasks × {settings['samples']} samples at {given}{', and greedy' * settings['greedy']}; "
        f"95 % confidence intervals over tasks",
        "",
    ]
    for name, row in {"": heads, **cells}.items():
        lines.append(f"{name:16}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    if found["failed"]:
        lines += ["", f"{found['failed']} rollouts could not be judged; the first: {found['problem']}"]
    return "\n".join(lines)


def _interval(estimate: dict[str, float] | None, name: str, *, sign: str = "") -> str:
    """A share in percent; the mean reward as it is."""
    if estimate is None:
        return "not judged"
    kind = ".3f" if name == "held_out_reward" else ".1%"
    return f"{estimate['value']:{sign}{kind}} ({estimate['low']:{sign}{kind}} to {estimate['high']:{sign}{kind}})"
