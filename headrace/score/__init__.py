"""What is good: reward functions, the typed outcomes they end in, and the advantages made of them.

Errors are not zeros. What the policy can cause scores; a reward that raises, returns NaN or does not answer in time is
`InfraAbort`: dropped, counted, retried. A reward that says None does not apply; if none applies the rollout is `Invalid`
and filtered. `workers` are the threads that call plain rewards under a deadline.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.score.errors import RewardError as RewardError
    from headrace.score.rewards import GIVEN as GIVEN, RewardFunction as RewardFunction
    from headrace.score.scorer import RewardScorer as RewardScorer, Scorer as Scorer
    from headrace.score.settings import RewardSettings as RewardSettings
    from headrace.score.workers import RewardWorkers as RewardWorkers
else:
    __getattr__ = front_door(__name__)
