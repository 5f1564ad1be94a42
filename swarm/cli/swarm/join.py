"""`swarm join`: takes part in the swarm of a manifest, or checks whether this machine can."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import prepare_imports, split_arguments, stay_off_hubs, take_first
from swarm.errors import ConfigError, ManifestError, PreflightError, SwarmError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.diagnostics.check_result import CheckResult
    from swarm.machine.hardware import Hardware
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import Manifest

_OPTIONS = ("--founder", "--task-file", "--reward-file", "--check", "--dial", "--dry-run", "--fresh", "--resume",
            "--accept-edition", "--end-when-stuck")  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """Copies of the files that the manifest names by their content."""

    tasks: list[str]
    """NAME=PATH"""
    rewards: list[Path]


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
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the resolved configuration and exit."),
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

    Reads: MANIFEST, settings, this machine's hardware.
    Writes: as `swarm run`, in runs/NAME unless node.dir says otherwise, and
    manifest.toml. Nothing with --check or --dry-run, but data sets are
    prepared in the cache of HF_HOME.

    Examples:
      swarm join friends.swarm.toml --check --dial
      swarm join friends.swarm.toml --founder PEER_ID --node.dir runs/mine

    Exit codes: as of `swarm run`; 12 manifest, 13 --check: cannot take part, 17 silo.
    """
    from swarm.machine.hardware import detect
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import check_joined, fetch, write_text
    from swarm.manifest.manifest import check_protocol, parse
    from swarm.records.codec import PROTOCOL_VERSION

    source, settings = take_first(arguments or [])
    if source is None or (dial and not check):
        mistake = "a manifest, got none; name the file or address" if source is None else "--check for --dial; add it"
        raise ConfigError(f"swarm join needs {mistake}")
    data = fetch(source)
    manifest = parse(data, founder)
    is_joined = _is_joined(manifest, settings, source)
    introduce(manifest, is_known=founder is not None or is_joined)
    hardware = detect()
    own_files = OwnFiles(task_file, reward_file)
    if check:
        wanted = (settings, own_files, source, accept_edition)
        _report(manifest, list(_findings(manifest, hardware, *wanted, dial=dial)))
        return
    check_protocol(manifest, PROTOCOL_VERSION)
    config = resolve(manifest, hardware, settings, own_files, source)
    files = NodeFolder(config.node.dir, config.node.identity)
    if not fresh:
        _check_no_other_run(files, _folder(manifest, Path(source)))
    changed = check_joined(files.manifest, manifest, accept_edition)
    for line in changed if is_joined else [f"task {task.source_name}: {task.settings}" for task in manifest.tasks]:
        print(plain(line), file=sys.stderr)
    check_silo(config, files)
    if dry_run:
        from swarm.config import dump_toml

        print(dump_toml(config), end="")
        return
    prepare_imports(config)
    _check_learning(manifest, config)
    files.create()
    write_text(files.manifest, data.decode())
    from swarm.cli.swarm.passphrase import unlock
    from swarm.node.process import run_node

    run_node(config, fresh=fresh, unlock=unlock, end_when_stuck=end_when_stuck)


def introduce(manifest: "Manifest", *, is_known: bool) -> None:
    """On stderr: stdout is for --dry-run."""
    print(f"swarm {manifest.name}, founded by {manifest.founder_name} ({manifest.founder})", file=sys.stderr)
    if manifest.description:
        print(plain(manifest.description, keep="\n"), file=sys.stderr)
    if not is_known:
        print(f"ask the founder whether that is their id, or pin it: --founder {manifest.founder}", file=sys.stderr)


def _is_joined(manifest: "Manifest", settings: list[str], source: str) -> bool:
    """Whether the node's folder has joined this swarm before, and so trusts its founder."""
    from swarm.config import read
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import read_manifest

    try:
        node = read(*split_arguments(settings, _OPTIONS)).get("node")
        chosen = node.get("dir") if isinstance(node, dict) else None
        kept = NodeFolder(Path(chosen) if isinstance(chosen, str) else _folder(manifest, Path(source))).manifest
        return read_manifest(str(kept)).id == manifest.id
    except SwarmError:  # of settings: reported where they are loaded
        return False


def resolve(
    manifest: "Manifest", hardware: "Hardware", settings: list[str], own_files: OwnFiles, source: str
) -> "Config":
    """The node's configuration. Raises SwarmError: contradictions, files that are missing or others."""
    import tomllib

    from swarm.cli.node.init import hardware_config
    from swarm.config import origin_in, read
    from swarm.manifest.joining import choose, compose

    given = split_arguments(settings, _OPTIONS)
    user = read(*given)
    folder = _folder(manifest, Path(source))
    defaults = tomllib.loads(hardware_config(hardware, choose(manifest, user, hardware), folder, manifest.name))
    tasks, rewards = _paths_by_task(own_files.tasks), own_files.rewards
    return compose(manifest, defaults, user, tasks, origin_in(*given), reward_files=rewards)


def _folder(manifest: "Manifest", source: Path) -> Path:
    """Where the node's folder is unless node.dir says otherwise: a silo's is the one that has the membership."""
    from swarm.silo.silo_files import SiloFiles

    is_own = manifest.silo is not None and SiloFiles(source.parent).is_membership
    return source.parent if is_own else Path("runs") / manifest.name


def _check_no_other_run(files: "NodeFolder", named_by_manifest: Path) -> None:
    """A founder chooses the swarm's name, and with it the folder: it must not take up a run that has joined no swarm.

    Its adapter would be shared. Raises ManifestError.
    """
    if files.path == named_by_manifest and files.checkpoints.exists() and not files.manifest.exists():
        raise ManifestError(
            f"a folder that a manifest names must be new or of its swarm, got the run in {files.path}, which has joined none; "
            "set another node.dir, or start anew with --fresh"
        )


def _paths_by_task(task_files: list[str]) -> dict[str, Path]:
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
        from swarm.cli.swarm.passphrase import unlock
        from swarm.records.identity import load
        from swarm.silo.silo_transport import check_folder, open_membership

        check_folder(files)
        identity = load(files.identity, unlock)
        open_membership(config.swarm.silo_owner, config.swarm_id, identity, files)
        stay_off_hubs(config)
        check_base_at_hand(config)


def _check_learning(manifest: "Manifest", config: "Config") -> None:
    """What takes seconds: tasks, and the lineage where it decides. Raises SwarmError."""
    from swarm.manifest.joining import check_lineage, check_tasks, needs_lineage

    check_tasks(config.tasks)
    if needs_lineage(manifest, config):
        check_lineage(manifest, config)


def _findings(
    manifest: "Manifest",
    hardware: "Hardware",
    settings: list[str],
    own_files: OwnFiles,
    source: str,
    accepted_edition: int | None,
    *,
    dial: bool,
) -> Iterator["CheckResult"]:
    from swarm.cli.swarm.preflight import dial_findings, hub_findings, machine_findings, task_findings, tried
    from swarm.diagnostics.check_result import note, ok, problem
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import check_joined
    from swarm.manifest.joining import needs_lineage
    from swarm.manifest.manifest import check_protocol
    from swarm.records.codec import PROTOCOL_VERSION

    yield ok("signature", f"edition {manifest.edition}, signed by {manifest.founder_name}")
    speaks = f"version {manifest.protocol}, as this software"
    yield tried("protocol", speaks, lambda: check_protocol(manifest, PROTOCOL_VERSION))
    try:
        config = resolve(manifest, hardware, settings, own_files, source)
    except SwarmError as error:
        yield problem("settings", str(error))
        return
    yield ok("settings", f"{config.policy.base} in {config.node.dir}")
    files = NodeFolder(config.node.dir, config.node.identity)

    def check_folder() -> None:
        files.check_writable()
        _check_no_other_run(files, _folder(manifest, Path(source)))
        check_joined(files.manifest, manifest, accepted_edition)

    yield tried("folder", f"{config.node.dir} is new or of this swarm, and can be written", check_folder)
    if manifest.silo:
        member = "this node is a member, and the base is at hand"
        yield tried("silo", member, lambda: check_silo(config, files))
    for task in manifest.tasks:
        yield note(f"task {task.source_name}", task.settings)
    yield from task_findings(config.tasks)
    if needs_lineage(manifest, config):
        yield note("lineage", f"whether {config.policy.base} is allowed is found out at the start")
    yield from machine_findings(config, hardware)
    if dial and not manifest.silo:
        yield from hub_findings(config.policy)
    if dial and config.network.initial_peers:
        yield from dial_findings(config.network)


def _report(manifest: "Manifest", findings: list["CheckResult"]) -> None:
    """Raises PreflightError where anything stands in the way."""
    from rich.console import Console
    from rich.table import Table

    from swarm.diagnostics.check_result import Level

    table = Table("what", "", "finding", title=f"taking part in {manifest.name}", title_justify="left")
    for finding in findings:
        text = f"{finding.text}; {finding.fix}" if finding.fix else finding.text
        table.add_row(finding.name, finding.level, plain(text))
    Console(markup=False, highlight=False).print(table)
    problems = [finding.name for finding in findings if finding.level is Level.PROBLEM]
    if problems:
        raise PreflightError(f"nothing may stand in the way, got problems with {', '.join(problems)}; see the table")
    print("can join")
