"""Entry point: registers the commands and turns every error a user can cause into one line and an exit code."""

import contextlib
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer
import typer.exceptions

from swarm import __version__
from swarm.cli import config, experiment, tasks, testbed
from swarm.cli.node import dashboard, doctor, init, logs, peers, report, run, stage, status, top
from swarm.cli.policy import chat, evaluate, export, merge, sample, serve
from swarm.cli.swarm import bootstrap, create, identity, join, pull, silo
from swarm.errors import ConfigError, SwarmError
from swarm.machine.child_python import keep_current_folder_off_the_path
from swarm.machine.safe_files import keep_others_from_writing, why_refused
from swarm.observability.plain_text import plain

INTERRUPTED = 130
EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 config, 4 identity, 5 policy, 6 tasks, 7 network, 8 checkpoint, "
    "9 node not running, 10 memory, 11 training, 12 manifest, 13 cannot join, 14 doctor found a problem, "
    "15 cannot merge, 16 pipeline, 17 silo, 18 stuck, 130 interrupted. What to do after each: docs/troubleshooting.md."
)

app = typer.Typer(
    name="swarm",
    help="Post-train a language model together with peers, without a coordinator, a data centre or trust in others.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        print(f"swarm {__version__}")
        raise typer.Exit


app.command("init")(init.init)
app.command("run", context_settings=run.OVERRIDES)(run.run)
app.command("stage", context_settings=run.OVERRIDES)(stage.stage)
app.command("testbed", context_settings=run.OVERRIDES)(testbed.testbed)
app.command("create", context_settings=run.OVERRIDES)(create.create)
app.command("join", context_settings=run.OVERRIDES)(join.join)
app.command("pull", context_settings=run.OVERRIDES)(pull.pull)
app.command("bootstrap")(bootstrap.bootstrap)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("peers")(peers.peers)
app.command("logs")(logs.logs)
app.command("dashboard")(dashboard.dashboard)
app.command("report")(report.report)
app.command("doctor", context_settings=run.OVERRIDES)(doctor.doctor)
app.command("eval", context_settings=run.OVERRIDES)(evaluate.evaluate)
app.command("sample", context_settings=run.OVERRIDES)(sample.sample)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("export", context_settings=run.OVERRIDES)(export.export)
app.command("merge")(merge.merge)
app.add_typer(identity.app, name="identity")
app.add_typer(silo.app, name="silo")
app.add_typer(config.app, name="config")
app.add_typer(tasks.app, name="tasks")
app.add_typer(experiment.app, name="experiment")
_COMMANDS = frozenset(one.name for one in (*app.registered_commands, *app.registered_groups))


def main() -> None:
    """Run the command line; ends the process at once: to take torch apart would be another one or two seconds."""
    keep_current_folder_off_the_path()
    keep_others_from_writing()
    exit_code = _run()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(exit_code)


def _run() -> int:
    try:
        return app(prog_name="swarm", standalone_mode=False) or 0
    except SwarmError as error:
        return _say(str(error), error.exit_code)
    except typer.Exit as error:
        return error.exit_code
    except typer.exceptions.TyperException as error:  # wrong usage
        return _say(told, error.exit_code) if (told := _told_usage(error)) else error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except OSError as error:
        refused = why_refused(error)
        return _say(refused, ConfigError.exit_code) if refused else _say_unexpected(error)
    except Exception as error:
        return _say_unexpected(error)


def _told_usage(error: typer.exceptions.TyperException) -> str:
    """What is wrong with a command line, and where the right one stands; empty where the help was shown instead."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "swarm"
    if found := re.fullmatch(r"No such command '(.*?)'(?:\. Did you mean (.*)\?)?", message, re.S):
        hint = f"did you mean {found[2].replace(', ', ' or ')}?" if found[2] else f"`{command} --help` lists all"
        return f"there is no command `{command} {found[1]}`; {hint}"
    return f"{message[:1].lower()}{message[1:]}; see `{command} --help`" if message else ""


def _say_unexpected(error: Exception) -> int:
    """The last resort: a person gets one line, the details go to a file, or to the terminal where none can be written."""
    try:
        where = f"details in {_write_crash()}"
    except OSError as unwritable:
        traceback.print_exception(error)
        where = f"details above, since no file could be written: {unwritable}"
    return _say(f"unexpected {type(error).__name__}: {error}; {where}", 1)


def _say(message: str, exit_code: int) -> int:
    print("error: " + plain(" ".join(message.split())), file=sys.stderr)  # it may quote a stranger
    return exit_code


def _write_crash() -> Path:
    """A file of its owner alone, under a name that nobody foresees: other users can write to the temporary folder."""
    descriptor, name = tempfile.mkstemp(prefix="swarm-crash-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"swarm {__version__}: {' '.join(_without_values(sys.argv[1:]))}\n\n{traceback.format_exc()}")
    return Path(name)


def _without_values(arguments: Sequence[str]) -> list[str]:
    """Commands and names of options alone: any value may be a password, or an address that holds one."""
    return [
        one.partition("=")[0] if one.startswith("--") else one if place == 0 and one in _COMMANDS else "…"
        for place, one in enumerate(arguments)
    ]


if __name__ == "__main__":
    main()
