"""`swarm join`: takes part in the swarm of a manifest, or checks whether this machine can."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import given_layers, prepare_imports, stay_off_hubs, take_first
from swarm.cli.node.run import GPUS_HELP, run_on_gpus
from swarm.errors import ConfigError, ManifestError, PreflightError, SwarmError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config, Origin
    from swarm.diagnostics.check_result import CheckResult
    from swarm.machine.hardware import Gpu, Hardware
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import Manifest

_OPTIONS = ("--founder", "--task-file", "--reward-file", "--check", "--dial", "--dry-run", "--fresh", "--resume",
            "--accept-edition", "--gpus", "--end-when-stuck")  # fmt: skip


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
    from swarm.records.codec import PROTOCOL_VERSION

    source, settings = take_first(arguments or [])
    if source is None or (dial and not check) or (check and gpus is not None):
        mistake = "--check for --dial; add it" if dial and not check else "--gpus or --check, got both; leave one out"
        mistake = "a manifest, got none; name the file or address" if source is None else mistake
        raise ConfigError(f"swarm join needs {mistake}")
    data = fetch(source)
    manifest = parse(data, founder)
    joining = Joining(manifest, source, settings, OwnFiles(task_file, reward_file), accept_edition)
    is_joined = joining.is_joined()
    introduce(manifest, is_known=founder is not None or is_joined)
    hardware = detect()
    if check:
        _report(manifest, list(_findings(joining, hardware, dial=dial)))
        return
    check_protocol(manifest, PROTOCOL_VERSION)

    def take_up(config: "Config") -> None:
        files = joining.check(config, is_new=fresh, is_joined=is_joined)
        joining.check_learning(config)
        files.create()
        write_text(files.manifest, data.decode())

    if gpus is not None:

        def resolve_for(gpu: "Gpu") -> tuple["Config", "Origin"]:
            return joining.resolve(replace(hardware, gpu_name=gpu.name, gpu_memory_gib=gpu.memory_gib))

        run_on_gpus(gpus, resolve_for, fresh=fresh, dry_run=dry_run, prepare=take_up)
        return
    config, origin = joining.resolve(hardware)
    if dry_run:
        joining.check(config, is_new=fresh, is_joined=is_joined)
        print(dump_toml(config, origin), end="")
        return
    take_up(config)
    from swarm.cli.swarm.passphrase import unlock
    from swarm.node.process import run_node

    run_node(config, fresh=fresh, unlock=unlock, end_when_stuck=end_when_stuck)


@dataclass(frozen=True, slots=True)
class Joining:
    """A manifest, and what its user gave beside it."""

    manifest: "Manifest"
    source: str
    settings: list[str]
    own_files: OwnFiles
    accepted_edition: int | None = None
    told: set[str] = field(default_factory=set[str])
    """Lines that the user has read: several nodes on one machine are told them once."""

    @property
    def folder(self) -> Path:
        """Where the node's folder is unless node.dir says otherwise: a silo's is the one that has the membership."""
        from swarm.silo.silo_files import SiloFiles

        parent = Path(self.source).parent
        is_own = self.manifest.silo is not None and SiloFiles(parent).is_membership
        return parent if is_own else Path("runs") / self.manifest.name

    def is_joined(self) -> bool:
        """Whether the node's folder, or that of a GPU in it, has joined this swarm before, and so trusts its founder."""
        from swarm.config import merged
        from swarm.machine.node_folder import NodeFolder
        from swarm.manifest.files import read_manifest

        try:
            node = merged(given_layers(self.settings, _OPTIONS)).get("node")
            chosen = node.get("dir") if isinstance(node, dict) else None
            folder = Path(chosen) if isinstance(chosen, str) else self.folder
            found = next((one for one in (folder, *folder.glob("gpu-*")) if NodeFolder(one).manifest.exists()), folder)
            return read_manifest(str(NodeFolder(found).manifest)).id == self.manifest.id
        except SwarmError:  # of settings: reported where they are loaded
            return False

    def resolve(self, hardware: "Hardware") -> tuple["Config", "Origin"]:
        """The node's configuration. Raises SwarmError: contradictions, files that are missing or others."""
        import tomllib

        from swarm.cli.node.init import hardware_config
        from swarm.config import Layer, adjusted, merged, origin_in, resolve
        from swarm.manifest.joining import choose, compose, decisions

        user = given_layers(self.settings, _OPTIONS)
        mine = merged(user)
        choice = choose(self.manifest, mine, hardware)
        defaults = tomllib.loads(hardware_config(hardware, choice, self.folder, self.manifest.name))
        tasks, rewards = _paths_by_task(self.own_files.tasks), self.own_files.rewards
        config = compose(self.manifest, defaults, mine, tasks, origin_in(user), reward_files=rewards)
        decided = Layer("manifest", decisions(self.manifest, tasks, rewards))
        layers = [Layer("hardware", defaults), *user, decided]
        return config, adjusted(origin_in(layers), resolve(layers), config, "manifest")

    def check(self, config: "Config", *, is_new: bool, is_joined: bool) -> "NodeFolder":
        """The node's folder, which may join. Tells what is new in the manifest. Raises SwarmError."""
        from swarm.machine.node_folder import NodeFolder
        from swarm.manifest.files import check_joined

        files = NodeFolder(config.node.dir, config.node.identity)
        if not is_new:
            self.check_no_other_run(files)
        changed = check_joined(files.manifest, self.manifest, self.accepted_edition)
        tasks = [f"task {task.source_name}: {task.settings}" for task in self.manifest.tasks]
        for line in changed if is_joined else tasks:
            if line not in self.told:
                print(plain(line), file=sys.stderr)
            self.told.add(line)
        check_silo(config, files)
        return files

    def check_learning(self, config: "Config") -> None:
        """Check what takes seconds: tasks, and the lineage where it decides. Raises SwarmError."""
        from swarm.manifest.joining import check_lineage, check_tasks, needs_lineage

        prepare_imports(config)
        check_tasks(config.tasks)
        if needs_lineage(self.manifest, config):
            check_lineage(self.manifest, config)

    def check_no_other_run(self, files: "NodeFolder") -> None:
        """A founder chooses the swarm's name, and with it the folder: it must not take up a run that has joined no swarm.

        Its adapter would be shared. Raises ManifestError.
        """
        base = files.path.parent if files.path.name.startswith("gpu-") else files.path
        is_named_by_manifest = base == self.folder
        if is_named_by_manifest and files.checkpoints.exists() and not files.manifest.exists():
            raise ManifestError(
                f"a folder that a manifest names must be new or of its swarm, got the run in {files.path}, which has joined "
                "none; set another node.dir, or start anew with --fresh"
            )


def introduce(manifest: "Manifest", *, is_known: bool) -> None:
    """On stderr: stdout is for --dry-run."""
    print(f"swarm {manifest.name}, founded by {manifest.founder_name} ({manifest.founder})", file=sys.stderr)
    if manifest.description:
        print(plain(manifest.description, keep="\n"), file=sys.stderr)
    if not is_known:
        print(f"ask the founder whether that is their id, or pin it: --founder {manifest.founder}", file=sys.stderr)


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


def _findings(joining: Joining, hardware: "Hardware", *, dial: bool) -> Iterator["CheckResult"]:
    from swarm.cli.swarm.preflight import dial_findings, hub_findings, machine_findings, task_findings, tried
    from swarm.diagnostics.check_result import note, ok, problem
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import check_joined
    from swarm.manifest.joining import needs_lineage
    from swarm.manifest.manifest import check_protocol
    from swarm.records.codec import PROTOCOL_VERSION

    manifest = joining.manifest
    yield ok("signature", f"edition {manifest.edition}, signed by {manifest.founder_name}")
    speaks = f"version {manifest.protocol}, as this software"
    yield tried("protocol", speaks, lambda: check_protocol(manifest, PROTOCOL_VERSION))
    try:
        config, _ = joining.resolve(hardware)
    except SwarmError as error:
        yield problem("settings", str(error))
        return
    yield ok("settings", f"{config.policy.base} in {config.node.dir}")
    files = NodeFolder(config.node.dir, config.node.identity)

    def check_folder() -> None:
        files.check_writable()
        joining.check_no_other_run(files)
        check_joined(files.manifest, manifest, joining.accepted_edition)

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
