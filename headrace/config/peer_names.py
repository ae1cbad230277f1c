"""Where the settings of TRL, verl and prime-rl are found here. Unknown settings of a recipe are answered from the tables of
docs/coming_from_trl.md, to which `coming_from_trl.md` beside this file is a link; wheels hold a copy. Each answer is the key of
a recipe, or a sentence where no single key does the same."""

from __future__ import annotations

import functools
import re
from pathlib import Path

_PAGE = Path(__file__).with_name("coming_from_trl.md")


@functools.cache
def peers() -> dict[str, dict[str, str]]:
    """By the title of a section: their names and our answers. First all that TRL's `GRPOConfig` and `AsyncGRPOConfig` declare
    themselves, then what people set of `TrainingArguments`, TRL's trainers and PEFT, then the main settings of verl and
    prime-rl. Empty in a checkout without links."""
    found = {}
    for section in (_PAGE.read_text(encoding="utf-8") if _PAGE.is_file() else "").split("\n## ")[1:]:
        rows = re.findall(r"^\| (\S+) \| (.+) \|$", section.partition("|---|")[2], flags=re.MULTILINE)
        # Keys are shown as code, which sentences are not as a whole.
        found[section.partition("\n")[0]] = {name: answer if " " in answer else answer.strip("`") for name, answer in rows}
    return found


USUAL = {
    "algorithm = dpo": "DPO learns from pairs without sampling, and is not offered; SFT is ([sft])",
    "clip_high": "train.constants.clip_high",
    "clip_low": "train.constants.clip_low",
    "dynamic_sampling": "filter.max_tied",
    "lr": "train.learning_rate",
    "num_epochs": "train.epochs",
}
"""What people type whatever they come from."""


def peer_answer(name: str) -> str:
    """What to write instead of a peer's setting, given whole or by its last part; "" if no peer has it or they disagree."""
    for of_peer in (USUAL, *peers().values()):
        if name in of_peer:
            return of_peer[name]
    found = {answer for of_peer in peers().values() for key, answer in of_peer.items() if key.rpartition(".")[2] == name}
    if len(found) == 1:
        return found.pop()
    if any(key.startswith(f"{name}.") for of_peer in peers().values() for key in of_peer):
        return "that is a section of verl or prime-rl; docs/coming_from_trl.md has our name for each setting in it"
    return ""
