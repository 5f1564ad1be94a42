"""`swarm pull`: fetches what a swarm has merged, without training."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import given_layers, prepare_imports, take_first
from swarm.cli.swarm.join import check_silo, introduce, paths_by_task
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import Config, Layer
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import Manifest
    from swarm.merging.node_merging import PulledAdapter
    from swarm.policy.policy import Policy
    from swarm.records.identity import Identity

_OPTIONS = ("--founder", "--task-file", "--reward-file", "--wait", "--least")
_TRUSTED = 3


def pull(
    arguments: list[str] = typer.Argument(
        None,
        metavar="MANIFEST OUT [CONFIG|--section.key VALUE]",
        help="The swarm's manifest, a file or an http(s) address; a new or empty folder; settings as `swarm join` takes them.",
    ),
    founder: str = typer.Option(None, metavar="PEER_ID", help="Accept only a manifest that this founder has signed."),
    task_file: list[str] = typer.Option(
        [], metavar="NAME=PATH", help="As of `swarm join`; needed for a warm start only."
    ),
    reward_file: list[Path] = typer.Option(
        [], metavar="PATH", help="As of `swarm join`; needed for a warm start only."
    ),
    wait: float = typer.Option(
        60.0, "--wait", min=1.0, max=86400.0, metavar="SECONDS", help="How long to look for donors."
    ),
    least: int = typer.Option(
        _TRUSTED, "--least", min=1, max=5, help="Fewest donors. Of fewer than three, one that lies decides the result."
    ),
) -> None:
    """Fetch a swarm's merged adapter: the median of several nodes' adapters.

    Nodes that merge give their newest adapter to whoever asks, as a newcomer's
    start. The base and policy.lora must be theirs; so pass the settings that
    they share. With --node.dir the identity of that node is used, which must not
    run; otherwise one that is thrown away.

    Reads: MANIFEST, settings, this machine's hardware, the base.
    Writes: the folder OUT, an adapter for peft, completely or not at all.

    Examples:
      swarm pull friends.swarm.toml out
      swarm pull friends.swarm.toml out --least 1 --wait 20 --policy.lora.rank 8

    Exit codes: 0 done, 3 configuration, 5 policy or folder, 7 too few donors, 12 manifest, 17 silo.
    """
    from swarm.machine.hardware import detect
    from swarm.manifest.files import read_manifest
    from swarm.manifest.manifest import check_protocol
    from swarm.manifest.newcomer import Newcomer, OwnFiles
    from swarm.records.codec import PROTOCOL_VERSION
    from swarm.silo.silo_files import folder_to_join

    source, rest = take_first(arguments or [])
    out, settings = take_first(rest)
    if source is None or out is None:
        raise ConfigError("swarm pull needs a manifest and a folder to write to; write swarm pull MANIFEST OUT")
    manifest = read_manifest(source, founder)
    introduce(manifest, is_known=founder is not None)
    check_protocol(manifest, PROTOCOL_VERSION)
    user = given_layers(settings, _OPTIONS)
    with tempfile.TemporaryDirectory(prefix="swarm-pull-") as scratch:
        user, is_own = _placed(user, manifest, Path(scratch) / "node")
        own_files = OwnFiles(paths_by_task(task_file), reward_file)
        folder = folder_to_join(manifest, source)
        config, _ = Newcomer(_without_files(manifest, user), folder, user, own_files).resolve(detect())
        _pull(config, manifest, Path(out), is_own=is_own, least=least, wait_s=wait)


def _placed(user: list["Layer"], manifest: "Manifest", scratch: Path) -> tuple[list["Layer"], bool]:
    """Settings with a folder, and whether it is the user's: a silo answers its members alone."""
    from swarm.config import Layer, merged

    node = merged(user).get("node")
    is_own = manifest.silo is not None or (isinstance(node, dict) and "dir" in node)
    return (user if is_own else [*user, Layer("scratch", {"node": {"dir": str(scratch)}})]), is_own


def _without_files(manifest: "Manifest", user: list["Layer"]) -> "Manifest":
    """The manifest without tasks of files that this machine need not have: nothing is trained, unless a warm start is."""
    from swarm.config import TasksSection, merged
    from swarm.manifest.manifest import ManifestTask

    if "warm_start" in merged(user):
        return manifest
    kept = tuple(task for task in manifest.tasks if not task.sha256 and not any(one.sha256 for one in task.signals))
    any_task = (ManifestTask(kind=TasksSection().sources[0].kind, name=TasksSection().sources[0].name),)
    return manifest.model_copy(update={"tasks": kept or any_task})


def _pull(config: "Config", manifest: "Manifest", out: Path, *, is_own: bool, least: int, wait_s: float) -> None:
    import asyncio

    from swarm.adapters.export import check_new_folder
    from swarm.cli.swarm.passphrase import unlock
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import check_joined
    from swarm.records import identity as identities
    from swarm.records.identity import IdentityLock

    check_new_folder(out)
    files = NodeFolder(config.node.dir, config.node.identity)
    if is_own:
        check_joined(files.manifest, manifest)
    check_silo(config, files)
    prepare_imports(config)
    policy = _policy(config, manifest)
    umask = os.umask(0o077)
    files.create()
    with IdentityLock(files.path) as lock:
        identity = identities.load_or_create(files.identity, unlock)
        lock.claim(identity)
        print("looking for donors …", file=sys.stderr)
        pulled, now = asyncio.run(_fetch(config, files, identity, policy, least=least, wait_s=wait_s))
    os.umask(umask)
    _write(config, manifest, policy, pulled, now, out)


def _policy(config: "Config", manifest: "Manifest") -> "Policy":
    """The untrained policy, whose lineage the donors have. Raises ManifestError for one that the manifest does not allow."""
    from swarm.manifest.joining import check_allowed, needs_lineage
    from swarm.policy.policy import load_policy
    from swarm.warm_start.start_digest import start_digest

    print(f"loading policy {config.policy.base} …", file=sys.stderr)
    policy = load_policy(config.policy, device=config.node.device, start=start_digest(config))
    if needs_lineage(manifest, config):
        check_allowed(manifest, config, policy.lineage)
    return policy


async def _fetch(
    config: "Config", files: "NodeFolder", identity: "Identity", policy: "Policy", *, least: int, wait_s: float
) -> tuple["PulledAdapter", float]:
    """The adapter, and the swarm's time."""
    from swarm.adapters.adapter_state import read_adapter
    from swarm.merging.node_merging import pull_adapter
    from swarm.merging.outer_optimizer import AdapterOrigin
    from swarm.network.context import NodeContext
    from swarm.sharing.index import EntryValidator
    from swarm.sharing.reputation import AddressGroups, AuthorShares, Reputation
    from swarm.silo.silo_transport import node_transport

    transport = node_transport(config, identity, files, EntryValidator(config.swarm_id))
    if transport is None:
        raise ConfigError('network.backend must not be "off" to pull, got "off"; remove it')
    lora = config.policy.lora
    origin = AdapterOrigin(policy.lineage.policy, lora.alpha / lora.rank, read_adapter(policy.model))
    context = NodeContext.of(identity, config.swarm_id, transport)
    nobody = Reputation(config.sharing.reputation_half_life_s, context.clock, None)
    shares = AuthorShares(nobody, config.sharing.max_share_of_strangers, AddressGroups(transport.seen_at))
    try:
        await transport.start()
        pulled = await pull_adapter(
            config.merging, context, origin, network_of=shares.public_group, least=least, wait_s=wait_s
        )
        return pulled, context.clock()
    finally:
        await transport.stop()


def _write(
    config: "Config", manifest: "Manifest", policy: "Policy", pulled: "PulledAdapter", now: float, out: Path
) -> None:
    from swarm import __version__
    from swarm.adapters.adapter_state import write_adapter
    from swarm.adapters.export import export_adapter, published_base
    from swarm.adapters.load_pretrained import quiet_libraries
    from swarm.integrations.model_card import CardFacts, licence_in, model_card
    from swarm.policy.lineage import hash_weights

    donors = pulled.donors
    ages = sorted(max(0.0, now - one.offered_at) for one in donors)
    rounds = sorted(one.snapshot.outer_round for one in donors)
    base = published_base(config.policy.base, config.policy.revision, policy.base_folder)
    middle = "median" if len(donors) >= _TRUSTED else "mean"
    facts = CardFacts(
        form="adapter", base=base, lineage=policy.lineage.policy, swarm_name=manifest.name, swarm_id=manifest.id,
        tasks=tuple(task.source_name for task in manifest.tasks),
        made=f"The {middle} of the adapters of {len(donors)} nodes of the swarm `{manifest.name}`, fetched with swarm-rl "
        f"{__version__}. The nodes trained and merged them; they were not evaluated again.",
        rows={"donors": f"{len(donors)}", "outer rounds": f"{rounds[0]} to {rounds[-1]}"},
        licence=licence_in(policy.base_folder),
    )  # fmt: skip
    write_adapter(policy.model, pulled.weights)
    with quiet_libraries():
        base_hash = hash_weights(policy.base_folder)
        export_adapter(policy.model, policy.tokenizer, out, base_hash, base=base, card=model_card(facts))
    for one in donors:
        print(f"{one.peer_id}: outer round {one.snapshot.outer_round}, {max(0.0, now - one.offered_at):.0f} s old")
    if len(donors) < _TRUSTED:
        print(f"of {len(donors)} donors, one that lies decides the result; evaluate it before use", file=sys.stderr)
    print(
        f"{middle} of {len(donors)} donors, offered {ages[0]:.0f} to {ages[-1]:.0f} s ago, after {rounds[0]} to {rounds[-1]} "
        f"outer rounds, written to {out}"
    )
