"""`swarm join`: takes part in the swarm of a manifest, or checks whether this machine can."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import given_layers, prepare_imports, stay_off_hubs, take_first
from swarm.cli.node.run import GPUS_HELP, run_on_gpus, run_to_the_end
from swarm.errors import ConfigError, PreflightError, SwarmError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config, Origin
    from swarm.diagnostics.check_result import CheckResult
    from swarm.machine.hardware import Gpu, Hardware
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import Manifest
    from swarm.manifest.newcomer import Newcomer

_OPTIONS = ("--founder", "--task-file", "--reward-file", "--check", "--dial", "--dry-run", "--fresh", "--resume",
            "--accept-edition", "--gpus", "--end-when-stuck")  # fmt: skip


def join(
    arguments: list[str] = typer.Argument(
        None,
        metavar="MANIFEST [CONFIG|--section.key VALUE]",
        help="The swarm's manifest, a file or an http(s) address; then settings as `swarm run` takes them.",
    ),
    founder: str = typer.Option(None, metavar="PEER_ID", help="Accept only a manifest that this founder has signed."),
    task_file: list[str] = typer.Option([], metavar="NAME=PATH", help="Your copy of the file or folder of a task."),
    reward_file: list[Path] = typer.Option(
        [],
        metavar="PATH",
        help="Your copy of the file of a reward function, which you have read: it runs in a sandbox.",
    ),
    check: bool = typer.Option(False, "--check", help="Only check whether and how this machine can take part."),
    dial: bool = typer.Option(
        False,
        "--dial",
        help="With --check: connect to the bootstrap peers, and hang up; ask the hub for the size of the base.",
    ),
    accept_edition: int = typer.Option(
        None, metavar="N", help="Accept the changes of edition N of the manifest, such as its tasks."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the resolved configuration with the origin of each value, and exit."
    ),
    gpus: str = typer.Option(None, metavar="all|N,...", help=GPUS_HELP),
    fresh: bool = typer.Option(
        False,
        "--fresh/--resume",
        help="Start a new run; the earlier run is moved aside. Default: resume the earlier run.",
    ),
    end_when_stuck: bool = typer.Option(
        False, "--end-when-stuck", help="End with code 18 when the node is stuck, so that a supervisor can restart it."
    ),
) -> None:
    """Take part in a swarm: check its manifest, run a node.

    The configuration is chosen for this machine. Nothing is sent to anyone
    before signature, protocol version, base and tasks have been checked. A later
    edition that changes more than addresses and description needs your consent.

    Reads: MANIFEST, settings, variables SWARM_SECTION__KEY, this machine's
    hardware.
    Writes: as `swarm run`, in runs/NAME unless node.dir says otherwise, and
    manifest.toml. Nothing with --check or --dry-run, but data sets are
    prepared in the cache of HF_HOME.

    Examples:
      swarm join friends.swarm.toml --check --dial
      swarm join friends.swarm.toml --founder PEER_ID --node.dir runs/mine

    Exit codes: as of `swarm run`; 12 manifest, 13 --check: cannot take part, 17 silo.
    """
    from swarm.config import dump_toml
    from swarm.machine.hardware import detect
    from swarm.manifest.files import fetch, write_text
    from swarm.manifest.manifest import check_protocol, parse
    from swarm.manifest.newcomer import Newcomer, OwnFiles
    from swarm.records.codec import PROTOCOL_VERSION
    from swarm.silo.silo_files import folder_to_join

    source, settings = take_first(arguments or [])
    if source is None or (dial and not check) or (check and gpus is not None):
        mistake = "--check for --dial; add it" if dial and not check else "--gpus or --check, got both; leave one out"
        mistake = "a manifest, got none; name the file or address" if source is None else mistake
        raise ConfigError(f"swarm join needs {mistake}")
    data = fetch(source)
    manifest = parse(data, founder)
    user = given_layers(settings, _OPTIONS)
    own_files = OwnFiles(paths_by_task(task_file), reward_file)
    newcomer = Newcomer(manifest, folder_to_join(manifest, source), user, own_files, accept_edition)
    introduce(manifest, is_known=founder is not None or newcomer.is_joined())
    hardware = detect()
    if check:
        downloads: list[str] = []
        _report(manifest, list(_findings(newcomer, hardware, downloads, dial=dial)), downloads)
        return
    check_protocol(manifest, PROTOCOL_VERSION)
    told: set[str] = set()

    def check_folder(config: "Config") -> "NodeFolder":
        """Several nodes on one machine are told each line once."""
        files, lines = newcomer.check_folder(config, is_new=fresh)
        for line in lines:
            if line not in told:
                print(line, file=sys.stderr)
            told.add(line)
        check_silo(config, files)
        return files

    def take_up(config: "Config") -> None:
        files = check_folder(config)
        prepare_imports(config)
        newcomer.check_learning(config)
        files.create()
        write_text(files.manifest, data.decode())

    if gpus is not None:

        def resolve_for(gpu: "Gpu") -> tuple["Config", "Origin"]:
            return newcomer.resolve(replace(hardware, gpu_name=gpu.name, gpu_memory_gib=gpu.memory_gib))

        run_on_gpus(gpus, resolve_for, fresh=fresh, dry_run=dry_run, prepare=take_up)
        return
    config, origin = newcomer.resolve(hardware)
    if dry_run:
        check_folder(config)
        print(dump_toml(config, origin), end="")
        return
    take_up(config)
    run_to_the_end(config, origin, fresh=fresh, end_when_stuck=end_when_stuck)


def introduce(manifest: "Manifest", *, is_known: bool) -> None:
    """On stderr: stdout is for --dry-run."""
    print(f"swarm {manifest.name}, founded by {manifest.founder_name} ({manifest.founder})", file=sys.stderr)
    if manifest.description:
        print(plain(manifest.description, keep="\n"), file=sys.stderr)
    if not is_known:
        print(f"ask the founder whether that is their id, or pin it: --founder {manifest.founder}", file=sys.stderr)


def paths_by_task(task_files: list[str]) -> dict[str, Path]:
    """{task: path} of words NAME=PATH. Raises ConfigError for another form."""
    paths: dict[str, Path] = {}
    for text in task_files:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--task-file must be NAME=PATH, got {text!r}; write the task's name, = and its file")
        paths[name] = Path(path)
    return paths


def check_silo(config: "Config", files: "NodeFolder") -> None:
    """Nothing in a public swarm. Raises SiloError for a node that is no member, PolicyError for a base to download."""
    from swarm.manifest.joining import check_base_at_hand

    if config.swarm.silo_owner:
        check_member(config, files)
        check_base_at_hand(config)


def check_member(config: "Config", files: "NodeFolder") -> None:
    """Raises SiloError for a node that is no member of the silo. From here on the hub's libraries are offline."""
    from swarm.cli.swarm.passphrase import unlock
    from swarm.records.identity import load
    from swarm.silo.silo_transport import check_folder, open_membership

    check_folder(files)
    open_membership(config.swarm.silo_owner, config.swarm_id, load(files.identity, unlock), files)
    stay_off_hubs(config)


def _findings(
    newcomer: "Newcomer", hardware: "Hardware", downloads: list[str], *, dial: bool
) -> Iterator["CheckResult"]:
    """Adds to `downloads` what the start would fetch, and what no hub was asked for."""
    from swarm.cli.swarm.preflight import (
        dial_findings,
        hub_findings,
        machine_findings,
        task_findings,
        tried,
        unchecked_downloads,
    )
    from swarm.diagnostics.check_result import note, ok, problem
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import check_protocol
    from swarm.records.codec import PROTOCOL_VERSION

    manifest = newcomer.manifest
    yield ok("signature", f"edition {manifest.edition}, signed by {manifest.founder_name}")
    speaks = f"version {manifest.protocol}, as this software"
    yield tried("protocol", speaks, lambda: check_protocol(manifest, PROTOCOL_VERSION))
    try:
        if missing := newcomer.missing():
            yield from (problem("missing", line) for line in missing)
            return
        config, _ = newcomer.resolve(hardware)
    except SwarmError as error:
        yield problem("settings", str(error))
        return
    yield ok("settings", f"{config.policy.base} in {config.node.dir}")
    files = NodeFolder(config.node.dir, config.node.identity)

    def check_folder() -> None:
        files.check_writable()
        newcomer.check_folder(config)

    yield tried("folder", f"{config.node.dir} is new or of this swarm, and can be written", check_folder)
    if manifest.silo:
        yield tried("silo", "this node is a member", lambda: check_member(config, files))
    if said := newcomer.said_of_merging(config):
        yield note("merging", said)
    for task in manifest.tasks:
        yield note(f"task {task.source_name}", task.settings)
    yield from task_findings(config.tasks, is_silo=bool(manifest.silo))
    yield from _lineage(manifest, config)
    yield from machine_findings(config, hardware)
    downloads += unchecked_downloads(config, has_asked_hub=dial)
    if dial and not manifest.silo:
        yield from hub_findings(config.policy)
    if dial and config.network.initial_peers:
        yield from dial_findings(config.network)


def _lineage(manifest: "Manifest", config: "Config") -> Iterator["CheckResult"]:
    """Whether the swarm allows the lineage of the base, where it names no such base. Loads the policy; downloads nothing."""
    from swarm.cli.swarm.preflight import tried
    from swarm.diagnostics.check_result import note
    from swarm.manifest.joining import check_allowed, lineage_of, needs_lineage, without_downloads

    if not needs_lineage(manifest, config):
        return
    local = without_downloads(config)
    if local is None:
        yield note("lineage", f"whether {config.policy.base} is allowed is found out at the start")
        return
    prepare_imports(config)
    allowed = f"{config.policy.base} has a lineage that {manifest.name} allows"
    yield tried("lineage", allowed, lambda: check_allowed(manifest, config, lineage_of(local)))


def _report(manifest: "Manifest", findings: list["CheckResult"], downloads: list[str]) -> None:
    """Raises PreflightError where anything stands in the way. `downloads`: what the start fetches and nobody has asked for."""
    from rich.console import Console
    from rich.table import Table

    from swarm.diagnostics.check_result import Level

    table = Table("what", "", "finding", title=f"taking part in {manifest.name}", title_justify="left")
    for finding in findings:
        text = f"{finding.text}; {finding.fix}" if finding.fix else finding.text
        table.add_row(finding.name, finding.level, plain(text))
    Console(markup=False, highlight=False).print(table)
    problems = dict.fromkeys(finding.name for finding in findings if finding.level is Level.PROBLEM)
    if problems:
        raise PreflightError(f"nothing may stand in the way, got problems with {', '.join(problems)}; see the table")
    print(f"can join, if {' and '.join(downloads)} can be downloaded" if downloads else "can join")
