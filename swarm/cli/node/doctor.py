"""`swarm doctor`: checks this machine and its network, and prints a command that fixes each problem."""

import json
import logging
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.errors import DoctorError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.diagnostics.check_result import CheckResult

_SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "problem"}


def doctor(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    network: bool = typer.Option(True, help="Join the swarm briefly if peers are configured or stored."),
) -> None:
    """Check this machine, its software and its connection to the swarm.

    Reads: CONFIG; the peers and ports stored in its node.dir; the network, under
    a temporary identity.
    Writes: nothing.

    Examples:
      swarm doctor
      swarm doctor runs/mine/config.toml --json

    Exit codes: 0 no problem, 3 configuration, 14 a problem.
    """
    import asyncio  # here, as `swarm --help` is to be quick

    from swarm.diagnostics.accelerator import check_accelerator
    from swarm.diagnostics.check_result import Level
    from swarm.diagnostics.machine import check_machine, check_membership
    from swarm.diagnostics.swarm_view import check_swarm

    resolved = load_config(config or [], ("--json", "--network", "--no-network"))
    logging.getLogger("swarm").setLevel(logging.CRITICAL)  # what the network has to say becomes a finding
    findings: list[CheckResult] = []

    def report(found: "CheckResult") -> None:
        findings.append(found)
        if not as_json:
            _print(found)

    for found in check_machine(resolved):
        report(found)
    for found in check_accelerator(resolved):
        report(found)
    if resolved.swarm.silo_owner:
        report(check_membership(resolved))
    if network and resolved.network.backend != "off":
        for found in asyncio.run(check_swarm(resolved.network, resolved.node.dir)):
            report(found)
    if as_json:
        print(json.dumps({"findings": [asdict(found) | {"level": found.level.value} for found in findings]}))
    else:
        count = Counter(found.level for found in findings)
        print(f"{count[Level.OK]} ok, {count[Level.WARNING]} to look at, {count[Level.PROBLEM]} to fix")
    problems = [found.name for found in findings if found.level is Level.PROBLEM]
    if problems:
        raise DoctorError(
            f"a node needs all of these to work, got problems with {', '.join(problems)}; apply the fixes above"
        )


def _print(found: "CheckResult") -> None:
    print(f"{_SIGNS[found.level.value]}  {found.name}: {plain(found.text)}", flush=True)
    if found.fix:
        print(f"           fix: {found.fix}", flush=True)
