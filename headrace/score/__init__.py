"""What is good: reward functions, the typed outcomes they end in, and the advantages made of them.

Errors are not zeros. What the policy can cause scores; a reward that raises, returns NaN or does not answer in time is
`InfraAbort`: dropped, counted, retried. A reward that says None does not apply; if none applies the rollout is `Invalid`
and filtered. `workers` are the threads that call plain rewards under a deadline.
"""

from headrace.score.advantages import advantages, batch_advantages, gae, normalised, token_rewards
from headrace.score.errors import RewardError
from headrace.score.rewards import RewardFunction
from headrace.score.scorer import RewardScorer, Scorer
from headrace.score.workers import RewardWorkers

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardScorer",
    "RewardWorkers",
    "Scorer",
    "advantages",
    "batch_advantages",
    "gae",
    "normalised",
    "token_rewards",
]
