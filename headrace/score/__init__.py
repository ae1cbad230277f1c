"""Reward functions, and the typed outcomes their results become.

Errors are not zeros. What the policy can cause gets a score; a reward that raises, returns NaN or times out is an
`InfraAbort`: dropped, counted, retried. A reward that returns None does not apply; if none applies, the rollout is `Invalid`
and filtered. `signature` reads a user's function's parameters, `rewards` calls it in either form, `scorer` turns the results
into outcomes, and `workers` are the threads and processes that call plain functions under a timeout. Built-in rewards:
`shaping` for the length and form of completions, `mathematics` for answers that are formulas, `code` for programs, which
`sandbox` runs in cells of their own, `reward_models` and `judging` for what other models say.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.score.code import code_tests
    from headrace.score.judging import JudgeError, judge
    from headrace.score.mathematics import math_verify
    from headrace.score.metric_log import Sums, added
    from headrace.score.reward_models import reward_model
    from headrace.score.rewards import RewardFunction
    from headrace.score.sandbox import CodeResult, Limits, SandboxError, SandboxUnavailable, Verdict, run_code
    from headrace.score.scorer import OVERLONG, RewardScorer, Scorer
    from headrace.score.settings import RewardSettings
    from headrace.score.shaping import cosine_length, length_penalty, repetition_penalty, think_format
    from headrace.score.signature import RESERVED, RewardError, TrainerState, Turn
    from headrace.score.workers import RewardWorkers
else:
    __getattr__ = front_door(__name__)
