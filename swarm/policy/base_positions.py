"""Fits the lengths of prompts and answers to a base that was made for fewer positions than the defaults ask for."""

import logging

from swarm.config import Config
from swarm.errors import ConfigError
from swarm.policy.base_folder import locate_base, max_positions

logger = logging.getLogger(__name__)


def fitted_to_base(config: Config) -> Config:
    """Return the configuration with defaults of lengths that fit into the positions of its base; downloads the base first.

    Lengths that the user set stay as they are: the other one gets the rest. Raises ConfigError where they do not fit,
    PolicyError where there is no such base.
    """
    policy, rollouts = config.policy, config.rollouts
    if policy.base == "bundled":
        return config
    positions = max_positions(locate_base(policy.base, policy.revision, policy.max_download_gib))
    if positions is None or policy.max_prompt_tokens + rollouts.max_new_tokens <= positions:
        return config
    prompt, answer = _lengths(config, positions)
    logger.info(
        "%s has %d positions: policy.max_prompt_tokens = %d, rollouts.max_new_tokens = %d",
        policy.base, positions, prompt, answer,
    )  # fmt: skip
    return config.model_copy(
        update={
            "policy": policy.model_copy(update={"max_prompt_tokens": prompt}),
            "rollouts": rollouts.model_copy(update={"max_new_tokens": answer}),
        }
    )


def _lengths(config: Config, positions: int) -> tuple[int, int]:
    """Return the most tokens of a prompt and of an answer."""
    lengths = {
        "policy.max_prompt_tokens": config.policy.max_prompt_tokens,
        "rollouts.max_new_tokens": config.rollouts.max_new_tokens,
    }
    are_set = (
        "max_prompt_tokens" in config.policy.model_fields_set,
        "max_new_tokens" in config.rollouts.model_fields_set,
    )
    chosen = {name: tokens for (name, tokens), is_set in zip(lengths.items(), are_set, strict=True) if is_set}
    rest = positions - sum(chosen.values())
    if rest < 2 - len(chosen):  # one position at least for each that is not set
        raise ConfigError(
            f"prompt and answer must fit into the {positions} positions of {config.policy.base}, got "
            + " and ".join(f"{name} = {tokens}" for name, tokens in chosen.items())
            + ("; lower it, or leave it out" if len(chosen) == 1 else "; lower one, or leave one out")
        )
    prompt = chosen.get("policy.max_prompt_tokens", rest if chosen else rest - rest // 2)
    return prompt, positions - prompt if "rollouts.max_new_tokens" not in chosen else config.rollouts.max_new_tokens
