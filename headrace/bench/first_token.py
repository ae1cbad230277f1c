"""`python -m headrace.bench.first_token FOLDER`: start, load a model, draw one token, say so. Its parent has the clock."""

from __future__ import annotations

import argparse
import json


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    options = parser.parse_args()

    from headrace.bench.engine_loads import Workload
    from headrace.bench.engine_native import generate
    from headrace.engine import EngineCore
    from headrace.model import load_model

    model = load_model(options.folder, dtype=options.dtype, device=options.device)
    core = EngineCore(model, name="bench", slots=options.slots, context=options.context)
    turn = generate(core, Workload(prompts=((1, 2, 3, 4),), lengths=(1,)), seed=0)
    print(json.dumps({"token": int(turn.rollouts[0].token_ids[-1])}), flush=True)


if __name__ == "__main__":
    main()
