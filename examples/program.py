"""An external program as the agent: any language would do, and nothing of it knows Headrace. This file is both sides.

As the agent (`python program.py play`) it is started for each episode: it finds its row on standard input and the model in
OPENAI_BASE_URL and OPENAI_API_KEY, guesses a digit with hints, and posts its reward. The other side trains with that command.

    python examples/program.py --steps 2
"""

import argparse
import json
import os
import sys
import urllib.request
from typing import Any

TURNS = 3


def post(path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def play(row: dict[str, Any]) -> float:
    """1 for the right digit, less for each turn it took, and 0 if it is not found."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(TURNS):
        said = post("/chat/completions", {"model": "policy", "messages": messages, "max_tokens": 2})
        guess = said["choices"][0]["message"]["content"][:1]
        if guess == str(row["secret"]):
            return 1.0 - 0.1 * turn
        hint = "a digit" if not guess.isdigit() else "higher" if int(guess) < row["secret"] else "lower"
        messages += [said["choices"][0]["message"], {"role": "user", "content": hint}]
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["play", "train"], default="train")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--run-dir", default=None)
    given = parser.parse_args()
    if given.role == "play":
        post("/reward", {"found": play(json.load(sys.stdin))})
        return
    import headrace

    run = headrace.train(
        model={"path": "builtin:tiny", "hidden_size": 64, "num_layers": 2, "context": 96},
        tasks=[{"prompt": "0-9?", "secret": digit} for digit in range(10)],
        environment={"command": [sys.executable, __file__, "play"], "concurrency": 8},
        steps=given.steps,
        run_dir=given.run_dir,
        sampling={"max_tokens": 2},
        train={"batch": given.batch, "group_size": 8, "learning_rate": 2e-3},
        orchestrate="inline",
        threads=1,
    )
    print(f"trained {run.summary['accounting']['trained']} episodes, mean reward {run.summary['reward_last']:.2f}")


if __name__ == "__main__":
    main()
