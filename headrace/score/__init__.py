"""Reward functions, and the typed outcomes their results become.

Errors are not zeros. What the policy can cause gets a score; a reward that raises, returns NaN or times out is an
`InfraAbort`: dropped, counted, retried. A reward that returns None does not apply; if none applies, the rollout is `Invalid`
and filtered. `rewards` calls a user's function in either form, `scorer` turns the results into outcomes, and `workers` are
the threads that call plain functions under a timeout.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.score.rewards import GIVEN, RewardFunction
    from headrace.score.scorer import RewardScorer, Scorer
    from headrace.score.settings import RewardSettings
    from headrace.score.workers import RewardError, RewardWorkers
else:
    __getattr__ = front_door(__name__)
