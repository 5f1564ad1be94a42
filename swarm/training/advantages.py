"""Advantages of sibling rollouts: how much better each answer is than its group."""

from torch import Tensor


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """[G] -> [G]; zero mean. Formulas by name of `training.advantage`."""
    return {"grpo": grpo, "dr_grpo": dr_grpo}[kind](rewards)


def grpo(rewards: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), with the sample standard deviation (n - 1) as in DeepSeekMath (2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def dr_grpo(rewards: Tensor) -> Tensor:
    """R - mean; without the division hard and easy tasks are not weighted up (Dr. GRPO, 2503.20783)."""
    return rewards - rewards.mean()
