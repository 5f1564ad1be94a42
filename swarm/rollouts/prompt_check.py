"""Checks before the first rollout that the prompts of all task sources can be asked here, and renders one of each for people."""

import logging
from dataclasses import dataclass
from pathlib import Path

from swarm.config import Config, TaskSourceSection
from swarm.errors import ConfigError
from swarm.policy.base_folder import max_positions
from swarm.policy.prompts.prompt_encoder import PromptEncoder
from swarm.tasks.final_answers import answer_rule
from swarm.tasks.prompted_source import prompt_context
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, TaskFailure
from swarm.types import PLAIN

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The first held-out task of a source as the policy reads it."""

    source: str
    text: str
    num_tokens: int


def check_prompts(
    config: Config, mixture: TaskMixture, prompts: PromptEncoder, base_folder: Path
) -> list[RenderedPrompt]:
    """Render one prompt of every source that works. It may start processes, and takes seconds then.

    Raises PolicyError where the base cannot show a context or find an answer, ConfigError where tokens do not fit.
    """
    sections = [one for one in config.tasks.sources if one.source_name in mixture.sources]
    prompts.prepare(prompt_context(section) for section in sections)
    prompts.prepare_replies(mixture.contexts[name] for name in mixture.episodic)
    _check_episodes(config, mixture)
    for section in sections:
        _check_texts(section, prompts)
    positions = max_positions(base_folder)
    rendered = [one for section in sections if (one := _rendered(section, mixture, prompts))]
    for section in sections:
        if (context := prompt_context(section)) != PLAIN:
            _check_fits(config, section.source_name, len(prompts.encode("", context)), positions)
    for one in rendered:
        if one.num_tokens > config.policy.max_prompt_tokens:
            logger.warning(
                "the first held-out task of %s has %d tokens; those above policy.max_prompt_tokens = %d are left out",
                one.source, one.num_tokens, config.policy.max_prompt_tokens,
            )  # fmt: skip
        elif positions is not None and one.num_tokens + config.rollouts.max_new_tokens > positions:
            raise ConfigError(
                f"prompt and answer must fit into the {positions} positions of {config.policy.base}, got {one.num_tokens} "
                f"tokens of a prompt of {one.source} and rollouts.max_new_tokens = {config.rollouts.max_new_tokens}; lower it"
            )
    return rendered


def _check_episodes(config: Config, mixture: TaskMixture) -> None:
    """Raise ConfigError for settings that only work where one answer is all."""
    rollouts = config.rollouts
    settings = {"rollouts.prune = true": rollouts.prune, "rollouts.over_provision": rollouts.over_provision > 1}
    if mixture.episodic and (chosen := [name for name, is_on in settings.items() if is_on]):
        raise ConfigError(
            f"{chosen[0]} works for tasks of one answer, got environments {', '.join(mixture.episodic)}; remove the setting, "
            "or those sources"
        )


def _check_texts(section: TaskSourceSection, prompts: PromptEncoder) -> None:
    name = section.source_name
    texts = [("system", section.system), ("prompt_template", section.prompt_template)]
    texts += [("examples", text) for one in section.examples for text in (one.prompt, one.answer)]
    for setting, text in texts:
        prompts.check_plain(text, f"tasks.sources.{setting} of {name!r}")
    if marker := answer_rule(section).marker:
        prompts.check_marker(marker)


def _rendered(section: TaskSourceSection, mixture: TaskMixture, prompts: PromptEncoder) -> RenderedPrompt | None:
    try:
        task = mixture.sources[section.source_name].task(EVALUATION_SEED, 0)
    except TaskFailure as failure:
        logger.warning("no prompt of %s can be shown: %s", section.source_name, failure)
        return None
    text = prompts.render(task.prompt, task.context)
    return RenderedPrompt(section.source_name, text, len(prompts.encode(task.prompt, task.context)))


def _check_fits(config: Config, source: str, num_tokens: int, positions: int | None) -> None:
    """Raise ConfigError where system prompt and examples leave no room for any task and its answer."""
    if positions is not None and num_tokens + config.rollouts.max_new_tokens >= positions:
        raise ConfigError(
            f"system and examples of {source!r} must fit into the {positions} positions of {config.policy.base} beside "
            f"rollouts.max_new_tokens = {config.rollouts.max_new_tokens}, got {num_tokens} tokens; shorten them, or lower "
            "rollouts.max_new_tokens"
        )
    if num_tokens >= config.policy.max_prompt_tokens:
        raise ConfigError(
            f"policy.max_prompt_tokens must leave room for a task beside system and examples of {source!r}, which take "
            f"{num_tokens} tokens, got {config.policy.max_prompt_tokens}; raise it, or shorten them"
        )
