"""An agent of your own, written with the unmodified openai client, trained without a change.

The agent guesses a digit and is told "higher" or "lower", turn by turn. It knows nothing of Headrace: it gets an address and a
key. Each episode is one rollout, whose sampled tokens are the engine's own, and its reward is what the function returns.

    python examples/agent.py --steps 60
"""

import argparse
import random
from typing import Any

import openai

import headrace

TURNS = 3
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")  # making one takes longer than an episode: share it


@headrace.agent
async def guess(session: headrace.Session) -> float:
    """1 for the right digit, less for each turn it took; a wrong guess at the end earns what it is near."""
    secret = int(str(session.row["secret"]))
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [{"role": "user", "content": session.row["prompt"]}]
    for turn in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        said = answer.choices[0].message.content or ""
        if not said[:1].isdigit():
            return -0.5 / (turn + 1)
        if int(said[0]) == secret:
            return 1.0 - 0.1 * turn
        hint = "higher" if int(said[0]) < secret else "lower"
        messages += [answer.choices[0].message, {"role": "user", "content": hint}]
    return 0.3 * (1 - abs(int(said[0]) - secret) / 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", default=None)
    given = parser.parse_args()
    rng = random.Random(0)
    tasks = [{"prompt": "0-9?", "secret": rng.randrange(10)} for _ in range(200)]
    run = headrace.train(
        model={"path": "builtin:tiny", "hidden_size": 64, "num_layers": 2, "context": 96},
        tasks=tasks,
        environment=guess,
        steps=given.steps,
        run_dir=given.run_dir,
        sampling={"max_tokens": 2},
        train={"batch": 64, "group_size": 8, "learning_rate": 2e-3},
    )
    print(f"reward {run.summary['reward_first']:.2f} -> {run.summary['reward_last']:.2f}")


if __name__ == "__main__":
    main()
