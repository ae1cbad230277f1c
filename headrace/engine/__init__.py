"""What generates: engines behind one small protocol (`protocol`), the embedded one in `native/`.

Generation lengthens a rollout. Tokens go in and tokens come out, each with its logprob under the distribution it was
really drawn from and the policy version that drew it; nobody but the engine writes either.
"""

from headrace.engine.protocol import Engine, EngineState, Increment, InFlight, PromptTooLong, UnusablePrompt

__all__ = ["Engine", "EngineState", "InFlight", "Increment", "PromptTooLong", "UnusablePrompt"]
