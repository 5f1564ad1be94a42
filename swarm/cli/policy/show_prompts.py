"""Prints one rendered prompt of every task source, for `swarm sample --show-prompt` and `swarm run --dry-run`."""

from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config, TaskSourceSection, TasksSection

_KEPT = "\n\t"


def show_prompts(config: "Config", folder: Path, stream: TextIO) -> None:
    """Print prompts as the policy of the base in `folder` reads them. It loads the tokenizer and no weights.

    Raises PolicyError, TaskError and ConfigError as the start of a node does.
    """
    from swarm.adapters.load_pretrained import quiet_libraries
    from swarm.config import BUNDLED_BASES
    from swarm.policy.base_folder import fitted_to_base
    from swarm.policy.base_model import folder_eos_ids, load_tokenizer
    from swarm.policy.prompts.prompt_encoder import PromptEncoder
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
            section = sections[rendered.source]
            if held_out := _held_out(section, config.tasks, mixture.sources[rendered.source].num_held_out):
                print(f"── {plain(rendered.source)}: {held_out}", file=stream)
        print("──", file=stream)
    finally:
        mixture.close()


def _held_out(section: "TaskSourceSection", tasks: "TasksSection", num_held_out: int) -> str:
    """What is trained on and what is held out; empty for tasks that are made up."""
    if section.kind == "dataset":
        from swarm.tasks.data_sets.source import prepared, summary

        return summary(section, prepared(section, tasks).facts)
    return f"every tenth line held out ({num_held_out})" if section.path else ""


def _rule(section: "TaskSourceSection") -> str:
    settings = ", ".join(f"{name} = {plain(str(value))}" for name, value in section.answer_parameters.items())
    return f"{section.answer} ({settings})" if settings else section.answer
