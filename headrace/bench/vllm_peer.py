"""vLLM in a process of its own: `python -m headrace.bench.vllm_peer FOLDER --context N --slots N ...`.

It reads one workload a line from its input, as JSON, and answers each with one line: how many seconds vLLM took, and the
tokens and logprobs where they were asked for. The model stays loaded between them, so that turns can alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    """Answer until the input ends."""
    answers = _own_the_output()
    options = _parse()
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    settings = {
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "gpu_memory_utilization": options.memory,
        "max_model_len": options.context,
        "max_num_seqs": options.slots,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    # No min_tokens: with ignore_eos nothing but the length ends a request, and a floor would cost a mask at every step.
    sampling = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "flat_logprobs": True, "detokenize": False}
    model = LLM(model=options.folder, **settings)
    _answer(answers, {"settings": {"version": vllm.__version__, **settings, **sampling}})
    for line in sys.stdin:
        workload = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in workload["prompts"]]
        parameters = [SamplingParams(max_tokens=length, **sampling) for length in workload["lengths"]]
        started = time.perf_counter()
        outputs = model.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - started
        drawn = [output.outputs[0] for output in outputs]
        answer: dict[str, Any] = {"seconds": seconds, "lengths": [len(one.token_ids) for one in drawn]}
        if workload["wants_tokens"]:
            answer["token_ids"] = [list(one.token_ids) for one in drawn]
            answer["logprobs"] = [
                [one.logprobs[place][token].logprob for place, token in enumerate(one.token_ids)] for one in drawn
            ]
        _answer(answers, answer)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--memory", type=float, required=True, help="share of the GPU's memory")
    return parser.parse_args()


def _own_the_output() -> TextIO:
    """The answers' stream. What vLLM and its processes print goes to the log with the errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
