"""Algorithms by name: what the paper of each chose, as settings that hold unless the user writes others.

Sizes (batch, group, lengths) and learning rates are not here: they go with a model and a machine. A paper's split of a batch
into optimizer steps is, because the clip constants were chosen for it.
"""

from __future__ import annotations

from typing import Any


def _train(loss: str, clip: tuple[float, float] | None = None, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Settings of `[train]`; `clip` are the lower and the upper clip of the loss."""
    constants = {} if clip is None else {"constants.clip_low": clip[0], "constants.clip_high": clip[1]}
    return {f"train.{name}": value for name, value in {"loss": loss, **constants, **settings}.items()}


_GROUP = {"advantage": "group", "scale_rewards": "group"}

NAMED: dict[str, dict[str, Any]] = {
    # DeepSeekMath (arXiv:2402.03300), eq. 3 and 4 and section 4.2: β = 0.04, one update per exploration
    "grpo": _train("grpo", (0.2, 0.2), **_GROUP, loss_mean="sequence", kl=0.04, kl_estimator="k3", mini_batches=1),
    # Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2: neither 1/|o| nor std, β = 0
    "dr_grpo": _train("grpo", (0.2, 0.2), advantage="group", scale_rewards="none", loss_mean="constant", kl=0.0),
    # DAPO (arXiv:2503.14476), eq. 8 to 13 and section 4.1: 16 updates per rollout step, no KL, truncated samples masked, the
    # last 4,096 of at most 20,480 tokens punished
    "dapo": {
        **_train("grpo", (0.2, 0.28), **_GROUP, loss_mean="token", kl=0.0, mini_batches=16, mask_truncated=True),
        "filter.max_tied": 0.0,
        "reward.overlong_buffer": 0.2,
    },
    # REINFORCE++ (arXiv:2501.03262): PPO's clip on tokens, rewards less the KL of the tokens to come (β = 0.01), advantages
    # normalised over the whole batch
    "reinforce++": _train(
        "grpo", (0.2, 0.2), advantage="global", scale_rewards="batch", loss_mean="token", kl=0.01, kl_in_reward=True
    ),
    # Back to Basics (arXiv:2402.14740), section 3: a whole completion is one action, log π its sum over tokens; no clip; the KL
    # is taken off the reward (β = 0.03)
    "rloo": _train(
        "reinforce",
        advantage="leave_one_out",
        scale_rewards="none",
        loss_mean="sum",
        kl=0.03,
        kl_in_reward=True,
        mini_batches=1,
    ),
    # GSPO (arXiv:2507.18071), eq. 5 and section 5.1: four mini-batches, these clipping ranges
    "gspo": _train("gspo", (3e-4, 4e-4), **_GROUP, loss_mean="sequence", kl=0.0, mini_batches=4),
    # MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5: no lower clip, no KL, 16 updates per batch. It does not print its upper clip;
    # 5 is that of ScaleRL (arXiv:2510.13786)
    "cispo": {
        **_train("cispo", (1.0, 4.0), **_GROUP, loss_mean="token", kl=0.0, mini_batches=16),
        "filter.max_tied": 0.0,
    },
    # PPO (arXiv:1707.06347), eq. 7, 9 and 11, as InstructGPT (arXiv:2203.02155, appendix C.4) has it: eight mini-batches of one
    # epoch, no discount, β = 0.02 in the reward
    "ppo": _train(
        "ppo",
        (0.2, 0.2),
        advantage="gae",
        scale_rewards="batch",
        discount=1.0,
        gae_lambda=0.95,
        loss_mean="token",
        kl=0.02,
        kl_in_reward=True,
        mini_batches=8,
    ),
}
"""Name → settings by dotted key."""
