"""`swarm create`: writes the manifest of a new swarm, signed by its founder."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import given_layers, take_first, told_by_flags
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
        [], metavar="BASE", help="Base that nodes may train, or BASE@REVISION. Default: policy.base."
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

    Reads: settings for tasks, base and limits; with --update the manifest.
    Writes: NAME.swarm.toml, and the founder's key where there is none.

    Examples:
      swarm create friends --description "sums and spelling"
      swarm create --update friends.swarm.toml --bootstrap ADDRESS
      swarm create --update friends.swarm.toml --sharing.max_group_size 16

    Exit codes: 0 done, 3 settings, 4 key, 6 tasks, 12 manifest.
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
    bases = [] if any_base else base or ([] if lineage else [config.policy.base + pinned_revision(config)])
    content = manifest_content(config) | {"bases": bases, "lineages": lineage, "bootstrap": bootstrap}
    _write_new(path, key, name, content | {"description": description or ""})


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


def pinned_revision(config: "Config") -> str:
    return f"@{config.policy.revision}" if config.policy.revision else ""


def _write_new(path: Path, key: Path, name: str, content: dict[str, Any]) -> None:
    from swarm.manifest import manifest as manifests
    from swarm.manifest.files import write_text
    from swarm.records import identity as identities
    from swarm.records.codec import PROTOCOL_VERSION

    is_new = not key.exists()
    founder = identities.load_or_create(key, unlock)
    manifest = manifests.create(founder, name, PROTOCOL_VERSION, time.time(), **content)
    write_text(path, manifests.dump(manifest, founder))
    print(f"{'made' if is_new else 'used'} founder key {key}: back it up, whoever has it speaks for the swarm")
    print(f"wrote {path}: swarm {name}, id {manifest.id}, founder {founder.peer_name} ({founder.peer_id})\nnext:")
    if not manifest.bootstrap:
        print(f"  swarm bootstrap --manifest {path} --listen /ip4/0.0.0.0/tcp/28000   # on a machine others can reach")
        print(f"  swarm create --update {path} --key {key} --bootstrap ADDRESS   # the address that it prints")
    print(f"  send {path} to those who join, and tell them your id; they run: swarm join {path}")


def _update(path: Path, founder: "Identity", settings: list[str], content: dict[str, Any]) -> None:
    """Sign the next edition of the manifest in `path`, and print what it changes. `content`: what options give of it."""
    from swarm.manifest.files import read_manifest, write_text
    from swarm.manifest.manifest import changed, changes, check_protocol, dump
    from swarm.records.codec import PROTOCOL_VERSION

    known = read_manifest(str(path))
    if known.protocol > PROTOCOL_VERSION:
        check_protocol(known, PROTOCOL_VERSION)  # an older release would take the swarm back
    if founder.peer_id == known.founder:  # else `dump` refuses, and before that nothing is to be looked up
        content = _content_of(known, settings, content.get("bootstrap", [])) | content
    later = changed(known, protocol=PROTOCOL_VERSION, **content)
    write_text(path, dump(later, founder))
    print(f"signed edition {later.edition} of {later.name} in {path}; send it to those who join")
    if later.protocol > known.protocol:
        print(
            f"it is for protocol version {later.protocol}, was {known.protocol}: members need this release or a later one"
        )
    if found := changes(known, later):
        print("it changes:", *(f"  {plain(line)}" for line in found), sep="\n")
        print(f"members must agree to that: swarm join {path} --accept-edition {later.edition}")
    else:
        print("it changes nothing that members must agree to")


def _content_of(known: "Manifest", settings: list[str], bootstrap: list[str]) -> dict[str, Any]:
    """What `settings` say of the content of the next edition of `known`: nothing of what they leave out."""
    from swarm.config import Layer, origin_in, resolve
    from swarm.manifest.joining import check_tasks, decisions
    from swarm.network.tcp_address import parse_setting

    with told_by_flags(_FLAGS):
        parse_setting("initial_peers", bootstrap)
    layers = given_layers(settings, _OPTIONS)
    says, has = origin_in(layers), decisions(known.model_copy(update={"tasks": ()}), {})
    del has["swarm"], has["tasks"]["sources"]
    config = resolve([Layer("manifest", has), *layers, Layer("swarm create", {"tasks": {"sandboxed": True}})])
    if says(_SETTING["tasks"]):
        check_tasks(config.tasks)
    content = manifest_content(config)
    given = {key: content[key] for key, setting in _SETTING.items() if says(setting)}
    limits = {key: limit for key, limit in content["limits"].items() if says(("sharing", key))}
    if limits:
        given["limits"] = known.limits.model_dump(exclude_none=True) | limits
    if says(("policy", "base")) or says(("policy", "revision")):
        given["bases"] = [config.policy.base + pinned_revision(config)]
    return given
