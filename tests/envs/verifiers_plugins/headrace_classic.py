"""Environments in the way of verifiers 0.1."""

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", secret: int = 12) -> vf.Environment:
    rows = [{"question": f"Say {number}.", "answer": str(number)} for number in (secret, 7)]

    def exact(completion, answer) -> float:
        return float(completion[-1]["content"].strip() == answer)

    def brief(completion) -> float:
        return float(len(completion[-1]["content"]) < 9)

    async def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    class Dialogue(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            return [{"role": "user", "content": "Again."}]

        @vf.stop
        async def is_right(self, state) -> bool:
            return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    common = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.5])}
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, **common)
    made = {"single": vf.SingleTurnEnv, "dialogue": lambda **more: Dialogue(max_turns=4, **more)}[kind]
    return made(system_prompt="Be brief.", **common)
