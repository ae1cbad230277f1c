"""The pictures in README and docs, as SVG files that follow the reader's light or dark theme.

python tools/pictures.py architecture docs/architecture.svg
python tools/pictures.py timeline RUN/trace.json docs/timeline.svg --versions 4
python tools/pictures.py in_flight docs/in_flight.svg        simulates an hour first, as `headrace bench controller` does
python tools/pictures.py learning OUT.json docs/learning.svg        of `headrace bench trl --json OUT.json`
python tools/pictures.py lag OUT.json docs/lag.svg                  of `headrace bench lag --json OUT.json`
python tools/pictures.py presets OUT.json docs/presets.svg          of `headrace bench presets --json OUT.json`
python tools/pictures.py runs "guess, async=RUN/metrics.jsonl" … docs/turns.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

STYLE = """
text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e } .title { font-weight: 600 }
.box { fill: #f6f8fa; stroke: #818b98 } .process { fill: none; stroke: #818b98; stroke-dasharray: 5 4 }
.arrow { stroke: #59636e; stroke-width: 1.6; fill: none; marker-end: url(#head) } #head path { fill: #59636e }
.mark { stroke: #818b98; stroke-dasharray: 2 3 } .track { fill: #f6f8fa }
.c0 { fill: #0969da } .c1 { fill: #1a7f37 } .c2 { fill: #bf8700 } .c3 { fill: #8250df }
.c4 { fill: #cf222e } .c5 { fill: #1b7c83 } .c6 { fill: #e16f24 } .c7 { fill: #768390 }
.line { fill: none; stroke-width: 2 } .l0 { stroke: #0969da } .l1 { stroke: #bf8700; stroke-dasharray: 6 4 }
.l2 { stroke: #1a7f37 } .l3 { stroke: #8250df } .l4 { stroke: #cf222e } .l5 { stroke: #1b7c83 } .l6 { stroke: #e16f24 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .box, .track { fill: #151b23; stroke: #3d444d } .process { stroke: #656c76 }
  .arrow { stroke: #9198a1 } #head path { fill: #9198a1 } .mark { stroke: #656c76 } .track { stroke: none }
  .c0 { fill: #4493f8 } .c1 { fill: #3fb950 } .c2 { fill: #d29922 } .c3 { fill: #ab7df8 }
  .c4 { fill: #f85149 } .c5 { fill: #39c5cf } .c6 { fill: #f0883e } .c7 { fill: #9198a1 }
  .l0 { stroke: #4493f8 } .l1 { stroke: #d29922 } .l2 { stroke: #3fb950 } .l3 { stroke: #ab7df8 }
  .l4 { stroke: #f85149 } .l5 { stroke: #39c5cf } .l6 { stroke: #f0883e }
}
"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z"/></marker>'
)


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int
    lines: tuple[str, ...]


BOXES = (
    Box(20, 50, 130, 74, ("tasks", "rows with a prompt")),
    Box(200, 50, 160, 74, ("feed", "submits groups,", "as far as the gate allows")),
    Box(430, 50, 210, 74, ("engines", "continuous batching,", "stamp every token's version")),
    Box(430, 200, 210, 74, ("score", "rewards and outcomes,", "in worker threads")),
    Box(200, 200, 160, 74, ("buffer", "scored groups wait", "for a whole batch")),
    Box(200, 330, 160, 74, ("trainer", "packed passes,", "loss named in the batch")),
    Box(430, 330, 210, 74, ("weight sync", "full or delta, hashed,", "swapped between two steps")),
)
ARROWS = (
    ("M150 87H196", "", 0, 0),
    ("M360 87H426", "prompts", 364, 80),
    ("M535 124V196", "Rollout", 543, 164),
    ("M430 237H364", "Episode", 372, 230),
    ("M275 274V326", "Batch", 283, 304),
    ("M360 367H426", "tensors", 368, 360),
    ("M640 367H690V87H644", "WeightUpdate", 600, 304),
    ("M200 367H175V100H196", "version + 1 opens the gate", 20, 300),
)
PROCESSES = ((410, 28, 250, 110, "engine processes", 418, 44), (180, 312, 480, 106, "trainer process", 188, 434))


def architecture() -> str:
    """The loop of a run: what each part does and what crosses between processes."""
    parts = [f'<rect class="process" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>' for x, y, w, h, *_ in PROCESSES]
    parts += [_text(x, y, name, "small") for *_, name, x, y in PROCESSES]
    for box in BOXES:
        parts.append(f'<rect class="box" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>')
        for place, line in enumerate(box.lines):
            parts.append(_text(box.x + 12, box.y + 24 + 18 * place, line, "small" if place else "title"))
    for path, label, x, y in ARROWS:
        parts.append(f'<path class="arrow" d="{path}"/>')
        parts.append(_text(x, y, label, "small") if label else "")
    return _svg(710, 446, parts, "How a run works: tasks, engines, scoring, buffer, trainer, weight sync")


def timeline(trace: Path, *, versions: int) -> str:
    """What every role did over a few versions in the middle of a run; a gap is a wait."""
    text = trace.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    marks = [event for event in events if event["ph"] == "i" and event["name"] != "end"]
    first = _quietest(marks, versions)
    chosen = marks[first : first + versions + 1]
    begin, end = chosen[0]["ts"], chosen[-1]["ts"]
    spans = [event for event in events if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin]
    tracks = [track for track in sorted(names) if any(span["tid"] == track for span in spans)]
    kinds = list(dict.fromkeys(span["name"].split()[0] for span in sorted(spans, key=lambda span: (span["tid"], span["name"]))))
    left, width, row = 140, 760, 34

    def x(moment: float) -> float:
        return left + width * (min(max(moment, begin), end) - begin) / (end - begin)

    parts = []
    for place, track in enumerate(tracks):
        y = 40 + row * place
        parts.append(_text(10, y + 16, names[track], "title"))
        parts.append(f'<rect class="track" x="{left}" y="{y}" width="{width}" height="22"/>')
        for span in (span for span in spans if span["tid"] == track):
            start, stop = x(span["ts"]), x(span["ts"] + span["dur"])
            color = kinds.index(span["name"].split()[0]) % 8
            parts.append(f'<rect class="c{color}" x="{start:.1f}" y="{y}" width="{max(stop - start, 0.3):.1f}" height="22"/>')
    bottom = 40 + row * len(tracks)
    for mark in chosen:
        parts.append(f'<path class="mark" d="M{x(mark["ts"]):.1f} 30V{bottom}"/>')
        parts.append(_text(x(mark["ts"]) - 4, 24, mark["name"].removeprefix("version "), "small"))
    at = float(left)
    for place, kind in enumerate(kinds):
        parts.append(f'<rect class="c{place % 8}" x="{at:.0f}" y="{bottom + 12}" width="11" height="11"/>')
        parts.append(_text(at + 16, bottom + 22, kind, "small"))
        at += 34 + 6 * len(kind)
    parts.append(_text(10, bottom + 22, f"{(end - begin) / 1e6:.2f} s", "small"))
    return _svg(left + width + 20, bottom + 40, parts, "What every role of a run did over time; gaps are waits")


def _quietest(marks: list[dict[str, Any]], versions: int) -> int:
    """Start of the window of `versions` versions with the median time: an evaluation or a checkpoint inside would stretch
    it."""
    lengths = [marks[at + versions]["ts"] - marks[at]["ts"] for at in range(len(marks) - versions)]
    return lengths.index(sorted(lengths)[len(lengths) // 2])


def in_flight() -> str:
    """The launcher's memory for calls in flight over a simulated hour, and what it may be."""
    from headrace.bench.controller import HOUR
    from headrace.bench.controller_in_flight import hour

    moments = hour(**HOUR)
    lines = {
        "resident memory": [[(second, held / 1e6) for second, _, held in moments]],
        "16 bytes for each token in flight": [[(second, 16 * tokens / 1e6) for second, tokens, _ in moments]],
    }
    title = f"{HOUR['calls']:,} calls in flight that report every second, of {HOUR['mean']:,} tokens in the mean"
    return _chart(lines, title, x=(HOUR["seconds"], "{:g} min", 60), unit="{:g} MB")


def learning(bench: Path) -> str:
    """The reward over time of each contestant of `headrace bench trl`, one line per seed."""
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    for row in json.loads(bench.read_text())["rows"]:
        if "curve" in row:
            lines.setdefault(row["name"].rpartition(", ")[2], []).append(row["curve"])
    last = max(second for of_name in lines.values() for line in of_name for second, _ in line)
    return _chart(lines, "Mean reward of each batch over seconds of training", x=(last, "{:.0f} s", 1), unit="{:.2f}", most=1)


def runs(given: list[str]) -> str:
    """The reward of each version over seconds of training, of runs given as NAME=FILE."""
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    for each in given:
        name, _, file = each.partition("=")
        rows = [row for row in map(json.loads, Path(file).read_text().splitlines()) if "reward" in row]
        seconds = itertools.accumulate(row["seconds"] for row in rows)
        lines.setdefault(name, []).append([(second, row["reward"]) for second, row in zip(seconds, rows, strict=True)])
    last = max(second for of_name in lines.values() for line in of_name for second, _ in line)
    return _chart(lines, "Mean reward of each batch over seconds of training", x=(last, "{:.0f} s", 1), unit="{:.2f}", most=1)


def lag(bench: Path) -> str:
    """The area under the reward curve of each loss of `headrace bench lag`, by lag; lags are equally far apart."""
    areas: dict[str, dict[int, float]] = {}
    for row in json.loads(bench.read_text())["rows"]:
        way, _, rest = row["name"].partition(", lag ")
        if rest.endswith(": area"):
            areas.setdefault(way, {})[int(rest.removesuffix(": area"))] = row["value"]
    lags = sorted({each for of_way in areas.values() for each in of_way})
    lines = {way: [[(float(lags.index(each)), area) for each, area in of_way.items()]] for way, of_way in areas.items()}
    ticks = {float(place): f"lag {each}" for place, each in enumerate(lags)}
    title = "Mean reward over all versions of a run, by the lag of every token"
    return _chart(lines, title, x=(len(lags) - 1, "{:g}", 1), unit="{:.2f}", most=1, ticks=ticks)


def presets(bench: Path) -> str:
    """Share of the bound against mean lag, a dot for each preset and a panel for each load of `headrace bench presets`."""
    found = [row for row in json.loads(bench.read_text())["rows"] if len(row.get("peers", ())) > 1]
    rows = {row["name"]: {"default": row["value"], **row["peers"]} for row in found}
    loads = [name.partition(": ")[0] for name in rows if name.endswith(": share of the bound")]
    names = list(rows[f"{loads[0]}: share of the bound"])
    most = max(lag for load in loads for lag in rows[f"{load}: mean lag"].values())
    left, top, width, height, gap = 50, 40, 280, 240, 30
    parts = []
    for place, load in enumerate(loads):
        x, shares, lags = left + place * (width + gap), rows[f"{load}: share of the bound"], rows[f"{load}: mean lag"]
        parts += [f'<rect class="track" x="{x}" y="{top}" width="{width}" height="{height}"/>', _text(x, 26, load, "title")]
        for part in range(5):
            y = top + height - 0.95 * height * part / 4
            parts.append(f'<path class="mark" d="M{x} {y:.0f}h{width}"/>')
            parts.append("" if place else _text(12, y + 4, f"{part / 4:.0%}", "small"))
        for lag in range(int(most) + 1):
            parts.append(_text(x + 10 + (width - 30) * lag / most - 3, top + height + 18, str(lag), "small"))
        spots: dict[tuple[float, float], list[int]] = {}
        for number, name in reversed(list(enumerate(names))):  # ours on top
            at, y = x + 10 + (width - 30) * lags[name] / most, top + height - 0.95 * height * min(shares[name], 1.0)
            parts.append(
                f'<circle class="{"c4" if number == 0 else "c0"}" cx="{at:.1f}" cy="{y:.1f}" r="{4.5 - (number > 0)}"/>'
            )
            near = ((px, py) for px, py in spots if abs(px - at) < 16 and abs(py - y) < 9)
            spots.setdefault(next(near, (at, y)) if number else (at - 50, y - 6), []).append(number)
        for (at, y), numbers in spots.items():  # one label for dots that lie close together
            label = ", ".join(str(each) for each in sorted(numbers)) if any(numbers) else "default"
            parts.append(_text(min(at + 6, x + width - 6 * len(label)), y + 14, label, "small"))
    at, bottom = left, top + height + 42
    parts.append(_text(left, bottom, "share of the bound (up) against mean lag in versions (right)", "small"))
    for number, name in enumerate(names[1:], start=1):
        if at + 28 + 7 * len(name) > left + len(loads) * (width + gap):
            at, bottom = left, bottom + 18
        parts.append(_text(at, bottom + 20, f"{number} {name}", "small"))
        at += 34 + 7 * len(name)
    return _svg(left + len(loads) * (width + gap), bottom + 34, parts, "Every preset: share of the bound against mean lag")


def _chart(
    lines: dict[str, list[list[tuple[float, float]]]],
    title: str,
    *,
    x: tuple[float, str, float],
    unit: str,
    most: float = 0.0,
    ticks: dict[float, str] | None = None,
) -> str:
    """Lines by name. `x`: its end, and how to write a number of it divided by the last; `most`: the top, found if 0; `ticks`:
    what is written at which x, seven numbers if None."""
    left, top, width, height = 60, 40, 800, 220
    end, label, divisor = x
    highest = max(value for of_name in lines.values() for line in of_name for _, value in line)
    most = most or next(step for step in (20, 50, 100, 200, 500, 1000, 2000) if step >= highest)
    parts = [f'<rect class="track" x="{left}" y="{top}" width="{width}" height="{height}"/>']
    for part in range(5):
        y = top + height - height * part / 4
        parts += [f'<path class="mark" d="M{left} {y:.0f}h{width}"/>', _text(10, y + 4, unit.format(most * part / 4), "small")]
    for at, text in (ticks or {end * part / 6: label.format(end * part / 6 / divisor) for part in range(7)}).items():
        parts.append(_text(left + width * at / end - 14, top + height + 18, text, "small"))
    apart = min(300, width // len(lines))
    for place, (name, of_name) in enumerate(lines.items()):
        for line in of_name:
            points = [f"{left + width * at / end:.1f} {top + height - height * value / most:.1f}" for at, value in line]
            parts.append(f'<path class="line l{place}" d="M{" L".join(points)}"/>')
        parts.append(f'<path class="line l{place}" d="M{left + apart * place} 22h24"/>')
        parts.append(_text(left + apart * place + 32, 26, name, "small"))
    return _svg(left + width + 30, top + height + 30, parts, title)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    head = [f"<title>{title}</title>", f"<style>{STYLE}</style>", f"<defs>{HEAD}</defs>"]
    return "\n".join([start, *head, *filter(None, parts), "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=("architecture", "timeline", "in_flight", "learning", "lag", "presets", "runs"))
    parser.add_argument("files", nargs="+", type=Path, help="the SVG to write, after the file it is drawn from if there is one")
    parser.add_argument("--versions", type=int, default=4, help="how many versions a timeline shows")
    options = parser.parse_args()
    if options.picture == "timeline":
        picture = timeline(options.files[0], versions=options.versions)
    elif options.picture in ("learning", "lag", "presets"):
        picture = {"learning": learning, "lag": lag, "presets": presets}[options.picture](options.files[0])
    elif options.picture == "runs":
        picture = runs([str(file) for file in options.files[:-1]])
    else:
        picture = architecture() if options.picture == "architecture" else in_flight()
    options.files[-1].write_text(picture)


if __name__ == "__main__":
    main()
