"""`swarm create`: writes the manifest of a new swarm, signed by its founder."""

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import given_layers, prepare_imports, take_first, told_by_flags
from swarm.cli.swarm.passphrase import unlock
from swarm.errors import ConfigError, IdentityError, ManifestError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.manifest.manifest import Manifest
    from swarm.records.identity import Identity

_OPTIONS = ("--key", "--bootstrap", "--base", "--any-base", "--lineage", "--description", "--update", "--force")
_FLAGS = {"network.initial_peers": "--bootstrap"}
_SETTING = {
    "tasks": ("tasks", "sources"),
    "held_out_share": ("tasks", "held_out_share"),
    "common_tasks": ("sharing", "common_tasks"),
    "solved_groups": ("sharing", "solved_groups"),
    "merging": ("merging", "enabled"),
    "gossip": ("network", "gossip"),
}
"""{what a manifest decides: the setting that gives it}."""


def create(
    arguments: list[str] = typer.Argument(
        None,
        metavar="NAME [CONFIG|--section.key VALUE]",
        help="Name of the swarm; then settings as `swarm run` takes them, for tasks, base and limits.",
    ),
    key: Path = typer.Option(
        Path("runs/founder.key"),
        metavar="FILE",
        help="The founder's key, made if there is none. Whoever has it speaks for the swarm.",
    ),
    bootstrap: list[str] = typer.Option([], metavar="ADDRESS", help="Address to join through, ending in /p2p/PEER_ID."),
    base: list[str] = typer.Option(
        [], metavar="BASE", help="Base that nodes may train: BASE, BASE@REVISION or a folder. Default: policy.base."
    ),
    any_base: bool = typer.Option(False, "--any-base", help="Nodes may train any base; unlike ones share text only."),
    lineage: list[str] = typer.Option(
        [], metavar="HEX", help="Policy lineage that is welcome whatever its base is called."
    ),
    description: str = typer.Option(None, help="One line about the swarm."),
    update: Path = typer.Option(
        None,
        metavar="FILE",
        help="Sign the next edition of a manifest of yours, with what is given; all else stays, also its id.",
    ),
    force: bool = typer.Option(False, "--force", help="Overwrite the file."),
) -> None:
    """Found a swarm: write NAME.swarm.toml, which others join with.

    With --update it signs the next edition of that file. Members go on when
    addresses or the description change; what changes beyond that is printed, and
    they must agree to it.

    A base that is a folder is named by its lineage. The last lines say which
    files those who join need from you.

    Reads: settings for tasks, base and limits; with --update the manifest.
    Writes: NAME.swarm.toml, and the founder's key where there is none.

    Examples:
      swarm create friends --description "sums and spelling"
      swarm create --update friends.swarm.toml --bootstrap ADDRESS
      swarm create --update friends.swarm.toml --sharing.max_group_size 16

    Exit codes: 0 done, 3 settings, 4 key, 5 base, 6 tasks, 12 manifest.
    """
    from swarm.records import identity as identities

    name, settings = take_first(arguments or [])
    if update is not None and name is not None and name.endswith(".toml"):  # settings, since no name is needed
        name, settings = None, arguments
    if (name is None) == (update is None):
        raise ConfigError("swarm create needs a name, or --update FILE, and not both; see --help")
    if update is not None:
        if not key.exists():
            raise IdentityError(
                f"only its founder can sign a manifest anew, got no key at {key}; name the founder's key with --key"
            )
        words = {"bootstrap": bootstrap, "bases": base, "lineages": lineage}
        content: dict[str, Any] = {key: given for key, given in words.items() if given}
        content |= {"bases": [], "lineages": lineage} if any_base else {}
        content |= {} if description is None else {"description": description}
        _update(update, identities.load(key, unlock), settings, content)
        return
    assert name is not None
    path = Path(f"{name}.swarm.toml")
    if path.exists() and not force:
        raise ManifestError(f"a manifest must not be overwritten, got {path}; use --force, or --update {path}")
    config = checked_config(name, settings, bootstrap)
    named = [] if any_base else base or ([] if lineage else [own_base(config)])
    content = manifest_content(config) | base_content(config, named, lineage)
    content |= {"bootstrap": bootstrap, "description": description or ""}
    _write_new(path, key, name, content, files_to_send(config, named))


def checked_config(
    name: str, settings: list[str], bootstrap: list[str], options: tuple[str, ...] = _OPTIONS
) -> "Config":
    """Checked as the node of somebody who joins would check it. `options`: of the command, for the hint at a misspelt one.

    Raises ConfigError, TaskError.
    """
    from swarm.config import Layer, resolve
    from swarm.config.tasks import HELD_OUT_SHARE
    from swarm.manifest.joining import check_tasks
    from swarm.network.tcp_address import parse_setting

    with told_by_flags(_FLAGS):
        parse_setting("initial_peers", bootstrap)
    new = Layer("swarm create", {"tasks": {"held_out_share": HELD_OUT_SHARE}})
    decided = Layer("swarm create", {"swarm": {"name": name}, "tasks": {"sandboxed": True}})
    config = resolve([new, *given_layers(settings, options), decided])
    check_tasks(config.tasks)
    return config


def manifest_content(config: "Config") -> dict[str, Any]:
    """Tasks, what of them is held out or common, what is shared or merged, limits and gossip of a manifest, in its shape."""
    from swarm.manifest.joining import published_task
    from swarm.manifest.manifest import ManifestLimits

    tasks = [published_task(source, config.tasks) for source in config.tasks.sources]
    limits = {name: getattr(config.sharing, name) for name in ManifestLimits.model_fields}
    shares = {
        "held_out_share": config.tasks.held_out_share or None,
        "common_tasks": config.sharing.common_tasks or None,
        "solved_groups": config.sharing.solved_groups or None,
        "merging": config.merging.enabled or None,
    }
    return {"tasks": tasks, "limits": limits, "gossip": config.network.gossip, **shares}


def own_base(config: "Config") -> str:
    """`policy.base`, with @REVISION where a revision of a model of the hub is set."""
    from swarm.policy.base_folder import names_folder

    policy = config.policy
    is_alone = not policy.revision or names_folder(policy.base, policy.revision)
    return policy.base if is_alone else f"{policy.base}@{policy.revision}"


def base_content(config: "Config", named: list[str], lineages: list[str]) -> dict[str, list[str]]:
    """`bases` and `lineages` of a manifest. Of the bases `named`, folders are in it by their lineage, as `config` adapts them.

    Takes as long as starting a node for each folder. Raises PolicyError, TaskError.
    """
    from swarm.manifest.joining import lineage_of
    from swarm.policy.base_folder import locate_base

    folders = _folders(named)
    for folder in folders:
        locate_base(folder, None)  # a folder that is missing is noticed before torch is loaded
        print(f"computing the lineage of {folder} …", file=sys.stderr)
        prepare_imports(config)
        policy = config.policy.model_copy(update={"base": folder, "revision": None})
        lineages = [*lineages, lineage_of(config.model_copy(update={"policy": policy})).policy]
    bases = [one for one in named if one not in folders]
    return {"bases": bases, "lineages": list(dict.fromkeys(lineages))}


def _folders(named: list[str]) -> list[str]:
    from swarm.policy.base_folder import names_folder

    return [one for one in named if names_folder(one)]


@dataclass(frozen=True, slots=True)
class FilesToSend:
    """What a manifest names by content only, as paths of the founder: those who join need copies, and say where they are."""

    tasks: dict[str, Path]
    """By the name of their task."""
    rewards: tuple[Path, ...]
    bases: tuple[Path, ...]
    settings: tuple[str, ...]
    """Options for settings that belong to the lineage of a base in `bases`."""
    has_warm_start: bool

    def names(self) -> list[str]:
        """The names of files and folders, a folder with / at its end."""
        paths = [*self.tasks.values(), *self.rewards, *self.bases]
        return list(dict.fromkeys(path.name + ("/" if path.is_dir() else "") for path in paths))

    def notes(self) -> list[str]:
        """Lines about bases that are folders."""
        lines = [
            f"the base {folder} is a folder: the manifest has its lineage, neither its name nor its files. "
            "Send the folder to those who join; each of them gives --policy.base PATH"
            for folder in self.bases
        ]
        warm_start = "the lineage covers your settings in [warm_start]: send these, too"
        return [*lines, warm_start] if lines and self.has_warm_start else lines

    def options(self, *, of_founder: bool = False) -> str:
        """Options of `swarm join` with a space before each: with paths of the founder, or of copies in the current folder."""
        words: list[str] = []
        for name, path in self.tasks.items():
            words += ["--task-file", f"{name}={path if of_founder else path.name}"]
        for path in self.rewards:
            words += ["--reward-file", str(path) if of_founder else path.name]
        for path in self.bases[:1]:
            words += ["--policy.base", str(path) if of_founder else f"./{path.name}"]
        return "".join(f" {shlex.quote(word)}" for word in (*words, *self.settings))


def files_to_send(config: "Config", named: list[str]) -> FilesToSend:
    """The files of the tasks and rewards of `config`, and the folders among the bases `named`."""
    from swarm.config import LoraSection

    sources = config.tasks.sources
    functions = [one.function for source in sources for one in source.signals if one.is_of_file]
    rewards = [Path(function.rpartition(":")[0]) for function in functions]
    bases = [Path(folder).expanduser().absolute() for folder in _folders(named)]
    adapter, default = config.policy.lora.model_dump(mode="json"), LoraSection().model_dump(mode="json")
    changed = {key: value for key, value in adapter.items() if bases and key != "dropout" and value != default[key]}
    settings: list[str] = []
    start = config.warm_start
    for key, value in changed.items():
        settings += [f"--policy.lora.{key}", value if isinstance(value, str) else json.dumps(value)]
    return FilesToSend(
        tasks={one.source_name: one.path for one in sources if one.path is not None and not one.hub},
        rewards=tuple(dict.fromkeys(rewards)),
        bases=tuple(bases),
        settings=tuple(settings),
        has_warm_start=bool(start.steps or start.adapter or start.adapter_hub),
    )


def _write_new(path: Path, key: Path, name: str, content: dict[str, Any], files: FilesToSend) -> None:
    from swarm.manifest import manifest as manifests
    from swarm.manifest.files import write_text
    from swarm.records import identity as identities
    from swarm.records.codec import PROTOCOL_VERSION

    is_new = not key.exists()
    founder = identities.load_or_create(key, unlock)
    manifest = manifests.create(founder, name, PROTOCOL_VERSION, time.time(), **content)
    write_text(path, manifests.dump(manifest, founder))
    print(f"{'made' if is_new else 'used'} founder key {key}: back it up, whoever has it speaks for the swarm")
    print(f"wrote {path}: swarm {name}, id {manifest.id}, founder {founder.peer_name} ({founder.peer_id})")
    print(*files.notes(), "next:", sep="\n")
    if not manifest.bootstrap:
        print(f"  swarm bootstrap --manifest {path} --listen /ip4/0.0.0.0/tcp/28000   # on a machine others can reach")
        print(f"  swarm create --update {path} --key {key} --bootstrap ADDRESS   # the address that it prints")
    print("  send these to those who join, and tell them your id:", ", ".join([path.name, *files.names()]))
    print(f"  they run: swarm join {shlex.quote(path.name)}{files.options()}")


def _update(path: Path, founder: "Identity", settings: list[str], content: dict[str, Any]) -> None:
    """Sign the next edition of the manifest in `path`, and print what it changes. `content`: what options give of it."""
    from swarm.manifest.files import read_manifest, write_text
    from swarm.manifest.manifest import changed, changes, check_protocol, dump
    from swarm.records.codec import PROTOCOL_VERSION

    known = read_manifest(str(path))
    if known.protocol > PROTOCOL_VERSION:
        check_protocol(known, PROTOCOL_VERSION)  # an older release would take the swarm back
    files: FilesToSend | None = None
    if founder.peer_id == known.founder:  # else `dump` refuses, and before that nothing is to be looked up
        content, files = _content_of(known, settings, content)
    later = changed(known, protocol=PROTOCOL_VERSION, **content)
    write_text(path, dump(later, founder))
    print(f"signed edition {later.edition} of {later.name} in {path}; send it to those who join")
    if files and files.names():
        print(*files.notes(), f"send with it: {', '.join(files.names())}; they give{files.options()}", sep="\n")
    if later.protocol > known.protocol:
        print(
            f"it is for protocol version {later.protocol}, was {known.protocol}: members need this release or a later one"
        )
    if found := changes(known, later):
        print("it changes:", *(f"  {plain(line)}" for line in found), sep="\n")
        print(f"members must agree to that: swarm join {path} --accept-edition {later.edition}")
    else:
        print("it changes nothing that members must agree to")


def _content_of(known: "Manifest", settings: list[str], given: dict[str, Any]) -> tuple[dict[str, Any], FilesToSend]:
    """What `settings` and `given`, which wins, say of the content of the next edition of `known`: nothing of what they leave
    out. Then the files that they name.
    """
    from swarm.config import Layer, TasksSection, origin_in, resolve
    from swarm.manifest.joining import check_tasks, decisions
    from swarm.network.tcp_address import parse_setting

    with told_by_flags(_FLAGS):
        parse_setting("initial_peers", given.get("bootstrap", []))
    layers = given_layers(settings, _OPTIONS)
    says, has = origin_in(layers), decisions(known.model_copy(update={"tasks": ()}), {})
    del has["swarm"], has["tasks"]["sources"]
    config = resolve([Layer("manifest", has), *layers, Layer("swarm create", {"tasks": {"sandboxed": True}})])
    if says(_SETTING["tasks"]):
        check_tasks(config.tasks)
    content = manifest_content(config)
    said = {key: content[key] for key, setting in _SETTING.items() if says(setting)}
    limits = {key: limit for key, limit in content["limits"].items() if says(("sharing", key))}
    if limits:
        said["limits"] = known.limits.model_dump(exclude_none=True) | limits
    is_of_settings = says(("policy", "base")) or says(("policy", "revision"))
    named: list[str] = given.get("bases", [own_base(config)] if is_of_settings else [])
    of_bases = base_content(config, named, given.get("lineages", [])) if named else {}
    if not of_bases.get("lineages"):
        of_bases.pop("lineages", None)  # those that the manifest has stay
    with_files = config if says(_SETTING["tasks"]) else config.model_copy(update={"tasks": TasksSection()})
    return said | given | of_bases, files_to_send(with_files, named)
