"""`swarm sample`: talk to the policy."""

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.cli.saved_policy import config_arguments, load_saved_policy
from swarm.observability.plain_text import plain


def sample(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="A node's folder: use its configuration and newest checkpoint."
    ),
    prompt: str = typer.Option(None, help="Ask this and end; without it, prompts are read line by line."),
    num: int = typer.Option(1, min=1, help="Answers per prompt."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 decodes greedily."),
    seed: int = typer.Option(0, min=0, help="The same seed gives the same answers."),
    base: bool = typer.Option(False, "--base", help="Talk to the base without its adapter."),
) -> None:
    """Ask the policy, once or line by line until Ctrl-D.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint; prompts.
    Writes: nothing.

    Examples:
      swarm sample --dir runs/mine --prompt "1 + 1 =" --num 4 --temperature 1
      swarm sample --dir runs/mine < prompts.txt

    Exit codes: 0 done, 3 configuration, 5 policy, 8 no checkpoint.
    """
    resolved = load_config(
        config_arguments(config, folder), ("--dir", "--prompt", "--num", "--temperature", "--seed", "--base")
    )
    from swarm.engine.engine import AnswerRequest
    from swarm.engine.make_engine import make_engine
    from swarm.engine.sampling import Sampling

    policy, _ = load_saved_policy(resolved, base_only=base)
    engine = make_engine(policy, resolved.rollouts)
    for number, text in enumerate([prompt] if prompt else _lines()):
        (answers,) = engine.generate(
            [AnswerRequest(policy.encode_prompt(text), num, resolved.rollouts.max_new_tokens)],
            Sampling(temperature=temperature),
            seed=seed + number,
            stop=resolved.rollouts.stop,
        )
        for answer in answers:
            cut = " …" if answer.end == "limit" else ""
            print(plain(policy.decode(answer.token_ids), keep="\n\t") + cut, flush=True)


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
