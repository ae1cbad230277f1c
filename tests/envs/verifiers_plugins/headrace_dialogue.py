"""An environment of verifiers that plays the user over several turns."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Dialogue"]


class DialogueConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class Dialogue(vf.Env[DialogueConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            for _ in range(3):
                if str(task.data.secret) in reply.last_reply:
                    break
                reply = await talk.turn("No. Again.")
