"""Prints one rendered prompt of every task source, for `swarm sample --show-prompt` and `swarm run --dry-run`."""

from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config, TaskSourceSection

_KEPT = "\n\t"


def show_prompts(config: "Config", folder: Path, stream: TextIO) -> None:
    """Print prompts as the policy of the base in `folder` reads them. It loads the tokenizer and no weights.

    Raises PolicyError, TaskError and ConfigError as the start of a node does.
    """
    from swarm.config import BUNDLED_BASES
    from swarm.policy.base_folder import fitted_to_base
    from swarm.policy.base_model import folder_eos_ids, load_tokenizer
    from swarm.policy.prompts.prompt_encoder import PromptEncoder
    from swarm.policy.quiet import quiet_libraries
    from swarm.rollouts.prompt_check import check_prompts
    from swarm.tasks.task_mixture import TaskMixture

    config = fitted_to_base(config)
    with quiet_libraries():
        tokenizer = load_tokenizer(folder)
        prompts = PromptEncoder(
            tokenizer, folder_eos_ids(folder, tokenizer), is_own=config.policy.base in BUNDLED_BASES
        )
    mixture = TaskMixture(config.tasks)
    try:
        sections = {section.source_name: section for section in config.tasks.sources}
        for rendered in check_prompts(config, mixture, prompts, folder):
            print(
                f"── {plain(rendered.source)}: {rendered.num_tokens} tokens (at most {config.policy.max_prompt_tokens}, "
                f"policy.max_prompt_tokens); answer: {_rule(sections[rendered.source])}",
                file=stream,
            )
            print(plain(rendered.text, keep=_KEPT), file=stream)
        print("──", file=stream)
    finally:
        mixture.close()


def _rule(section: "TaskSourceSection") -> str:
    settings = ", ".join(f"{name} = {plain(str(value))}" for name, value in section.answer_parameters.items())
    return f"{section.answer} ({settings})" if settings else section.answer
