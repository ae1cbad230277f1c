"""What is good: reward functions, the typed outcomes they end in, and the advantages made of them.

Errors are not zeros. What the policy can cause scores; a reward that raises or returns NaN is `InfraAbort`: dropped,
counted, retried. A reward that says None does not apply; if none applies the rollout is `Invalid` and filtered.
"""

from headrace.score.advantages import advantages
from headrace.score.rewards import RewardError, RewardFunction
from headrace.score.scorer import RewardScorer, Scorer

__all__ = ["RewardError", "RewardFunction", "RewardScorer", "Scorer", "advantages"]
