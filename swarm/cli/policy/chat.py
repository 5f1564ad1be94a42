"""`swarm chat`: a conversation with the policy of a node, beside its base if that is wished."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import load_config
from swarm.cli.policy.sample import KEPT
from swarm.cli.policy.saved_policy import BEST, config_arguments, load_saved_policy
from swarm.errors import ConfigError, SwarmError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    import asyncio

    from rich.table import Table

    from swarm.serving.served_policy import ServedPolicy

_COMMANDS = "/reset forgets the conversation, /quit ends, Ctrl-C stops an answer"
_MAX_ANSWERS = 2


@dataclass(slots=True)
class _Speaker:
    """The policy or its base, with what was said so far: the answers are its own."""

    name: str
    is_base: bool
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    said: str = ""
    """Of the present answer."""


@dataclass(frozen=True, slots=True)
class _How:
    """How answers are sampled."""

    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int


def chat(
    folder: Path = typer.Argument(Path("runs/node"), metavar="[DIR]", help="A node's folder."),
    system: str = typer.Option("", help="System prompt. Default: that of the node's tasks, if all have the same."),
    compare: bool = typer.Option(False, "--compare", help="Answer with the base, too, beside the policy."),
    best: bool = typer.Option(False, "--best", help=BEST),
    base: bool = typer.Option(False, "--base", help="Answer with the base alone, without its adapter."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 takes the likeliest token each time."),
    top_p: float = typer.Option(1.0, min=0.01, max=1.0, help="Only the likeliest tokens of this probability together."),
    max_tokens: int = typer.Option(None, min=1, help="Longest answer. Default: rollouts.max_new_tokens of the node."),
    seed: int = typer.Option(0, min=0, help="The same seed gives the same answers to the same messages."),
    context: int = typer.Option(4096, min=2, help="Most tokens of a conversation, if the base has as many."),
) -> None:
    """Talk to the trained policy, which answers as it samples.

    /reset forgets the conversation, /quit or Ctrl-D ends. Ctrl-C stops an
    answer, and leaves where there is none. From a pipe, every line is a message.

    Reads: config.toml and the newest checkpoint of DIR; messages.
    Writes: nothing.

    Examples:
      swarm chat runs/mine
      swarm chat runs/mine --compare --temperature 0.7
      echo "What is 3 + 4?" | swarm chat runs/mine --system "Answer briefly."

    Exit codes: 0 done, 3 configuration, 5 policy, 8 no checkpoint, 10 memory.
    """
    if compare and base:
        raise ConfigError("there must be --compare or --base, got both; leave one out")
    config = load_config(config_arguments(None, folder))
    policy, round = load_saved_policy(config, base_only=base, best=best)
    import asyncio

    from swarm.serving.served_policy import ServedPolicy

    name = folder.resolve().name
    speakers = [_Speaker("base" if base else name, is_base=False)]  # a policy without a checkpoint is its base
    if compare:
        speakers.append(_Speaker("base", is_base=True))
    how = _How(temperature, top_p, max_tokens, seed)
    with asyncio.Runner() as runner:
        served = runner.run(
            _start(lambda: ServedPolicy(
                policy, config, round or 0, context=context, max_answers=_MAX_ANSWERS, with_base=compare
            ))
        )  # fmt: skip
        if sys.stdin.isatty():
            print(f"{' and '.join(one.name for one in speakers)}; {_COMMANDS}")
        try:
            _talk(runner, served, speakers, system, how)
        finally:
            runner.run(served.__aexit__())


async def _start(make: "Callable[[], ServedPolicy]") -> "ServedPolicy":
    return await make().__aenter__()


def _talk(
    runner: "asyncio.Runner", served: "ServedPolicy", speakers: Sequence[_Speaker], system: str, how: _How
) -> None:
    """Answer messages until there are no more."""
    is_terminal = sys.stdin.isatty()
    number = 0
    for message in _messages(is_terminal):
        if message == "/quit":
            return
        if message == "/reset" or not number:
            for speaker in speakers:
                speaker.messages = [{"role": "system", "content": system}] if system else []
        if message.startswith("/"):
            if message != "/reset":
                print(f"unknown command {plain(message)}; {_COMMANDS}", file=sys.stderr)
            continue
        number += 1
        for speaker in speakers:
            speaker.messages.append({"role": "user", "content": message})
            speaker.said = ""
        try:
            runner.run(_answer_all(served, speakers, how, number))
        except SwarmError as error:
            if not is_terminal:
                raise
            print(f"error: {plain(str(error))}", file=sys.stderr)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(stopped; Ctrl-C again leaves)", file=sys.stderr)
        for speaker in speakers:
            _remember(speaker)


def _messages(is_terminal: bool) -> Iterator[str]:
    """Lines that are not empty, with editing and a history on a terminal."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _remember(speaker: _Speaker) -> None:
    """Keep what was answered, as far as it got. A question without an answer is forgotten."""
    if speaker.said:
        speaker.messages.append({"role": "assistant", "content": speaker.said})
    else:
        speaker.messages.pop()


async def _answer_all(served: "ServedPolicy", speakers: Sequence[_Speaker], how: _How, number: int) -> None:
    """Show the answers of all speakers as they are sampled: one as text, several beside each other."""
    from rich.console import Console
    from rich.live import Live

    if len(speakers) == 1:
        try:
            await _answer(served, speakers[0], how, number, _print_piece)
        finally:
            print(flush=True)
        return
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        await _together(served, speakers, how, number)
        for speaker in speakers:
            print(f"{plain(speaker.name)}: {plain(speaker.said, keep=KEPT)}", flush=True)
        return
    try:
        with Live(console=console, transient=True, refresh_per_second=12, get_renderable=lambda: _beside(speakers)):
            await _together(served, speakers, how, number)
    finally:
        console.print(_beside(speakers))


async def _together(served: "ServedPolicy", speakers: Sequence[_Speaker], how: _How, number: int) -> None:
    """Sample the answers of all speakers at once. The first failure ends them all."""
    import asyncio

    tasks = [asyncio.create_task(_answer(served, one, how, number, lambda piece: None)) for one in speakers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    served: "ServedPolicy", speaker: _Speaker, how: _How, number: int, show: Callable[[str], None]
) -> None:
    """Sample the answer to a conversation. Raises ConfigError where it has become too long."""
    import asyncio

    from swarm.engine.live_batch import LiveRequest
    from swarm.engine.sampling import Sampling

    prompt = await asyncio.to_thread(served.texts.conversation, speaker.messages)
    room = served.service.max_tokens - len(prompt)
    if not prompt or room < 1:
        raise ConfigError(
            f"a conversation must have less than {served.service.max_tokens} tokens, got {len(prompt)}; "
            "write /reset to begin anew, or raise --context"
        )
    most = min(how.max_tokens or served.config.rollouts.max_new_tokens, room)
    sampling = Sampling(temperature=how.temperature, top_p=how.top_p)
    stop = served.config.rollouts.stop
    asked = served.service.ask(
        [LiveRequest(prompt, 1, most, sampling, how.seed + number - 1, stop)], base=speaker.is_base
    )
    try:
        async for piece in asked.pieces():
            speaker.said += piece.text
            show(piece.text)
    finally:
        asked.close()


def _print_piece(text: str) -> None:
    print(plain(text, keep=KEPT), end="", flush=True)


def _beside(speakers: Sequence[_Speaker]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(*(plain(speaker.name) for speaker in speakers), expand=True)
    table.add_row(*(Text(plain(speaker.said, keep=KEPT)) for speaker in speakers))
    return table
