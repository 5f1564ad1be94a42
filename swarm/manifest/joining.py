"""Builds the configuration with which this machine joins a swarm, and checks what must hold before it does.

    hardware ─ what fits this machine ────────┐
    manifest ─ advice ────────────────────────┤
    user ───── files, environment, overrides ─┼─ later wins ─→ Config
    manifest ─ tasks, id, limits ─────────────┘

The manifest's decisions cannot be overridden: a contradiction is an error, never silently resolved. Its advice can.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.config import (
    BUNDLED_BASES,
    LOCAL_SETTINGS,
    Config,
    Origin,
    TaskSourceSection,
    TasksSection,
    merge,
    parse,
    told_place,
)
from swarm.errors import ConfigError, ManifestError, PolicyError, TaskError
from swarm.machine.hardware import Hardware, PolicyChoice, choose_policy
from swarm.manifest.manifest import Manifest, ManifestTask
from swarm.network.peers.dialling import may_be_named, reach_of
from swarm.network.tcp_address import TcpAddress, parse_setting
from swarm.types import Lineage

logger = logging.getLogger(__name__)

Settings = Mapping[str, Any]
"""Plain data in the shape of a configuration file."""

_READ_BYTES = 1 << 20
_BOUNDS = (
    ("group_size", "max_group_size"),
    ("largest_group", "max_group_size"),
    ("max_new_tokens", "max_answer_tokens"),
)
"""(setting of what a node produces, limit above which others refuse it)."""


def choose(manifest: Manifest, user: Settings, hardware: Hardware) -> PolicyChoice:
    """Choose the policy that fits `hardware`: of the user's base where they set one, else among those of the manifest."""
    wanted = _get(user, "policy", "base")
    return choose_policy(hardware, [str(wanted)] if wanted else list(_revisions_by_base(manifest)))


def compose(
    manifest: Manifest,
    defaults: Settings,
    user: Settings,
    task_files: Mapping[str, Path],
    origin: Origin = lambda location: None,
    *,
    reward_files: Sequence[Path] = (),
) -> Config:
    """Compose the Config of a node: `defaults` and the manifest's advice, `user` settings over them, its decisions over all.

    `task_files` holds paths of JSONL files and data sets by the name of their task, `reward_files` files of reward
    functions, which are known by their content. `origin` says where a user's setting comes from.
    Raises ConfigError where the user contradicts the manifest or gives no base where it names none, TaskError where a
    file is missing or differs.
    """
    if lacking := missing_base(manifest, user):
        raise ConfigError("; ".join([lacking, *missing_files(manifest, task_files, reward_files)]))
    own = merge(merge(defaults, advice(manifest)), user)
    decided = decisions(manifest, task_files, reward_files)
    own_peers = _get(user, "network", "initial_peers")
    peers = [*bootstrap_addresses(manifest), *(own_peers if isinstance(own_peers, list | tuple) else ())]
    settings = merge(merge(own, decided), {"network": {"initial_peers": list(dict.fromkeys(peers))}})
    config = parse(settings, origin)
    _check_agreement(manifest, decided, user, own, config=config, origin=origin)
    config = _within_limits(manifest, user, config, origin)
    if config.network.backend == "off":
        raise ConfigError('network.backend must not be "off" to join a swarm, got "off"; remove it')
    return _with_base(manifest, user, config, origin)


def bootstrap_addresses(manifest: Manifest) -> tuple[str, ...]:
    """Return the bootstrap addresses that a founder may have others dial: at ports and addresses where nodes can be.

    Every newcomer dials them, and dials them again after a later edition, which needs no consent for addresses. So none
    may be at a port of another service, such as mail or shells, nor at an address where no node can be, such as
    169.254.169.254. Raises ConfigError for a malformed one.
    """
    addresses = parse_setting("initial_peers", manifest.bootstrap)
    allowed = tuple(str(address) for address in addresses if _may_be_dialled(address))
    if left_out := [str(address) for address in addresses if str(address) not in allowed]:
        logger.warning(
            "bootstrap addresses must have a port of 1024 or more or 443, at a host where a node can be; left out of the "
            "manifest of %s: %s. Add those that you trust to network.initial_peers", manifest.name, ", ".join(left_out)
        )  # fmt: skip
    return allowed


def _may_be_dialled(address: TcpAddress) -> bool:
    is_number = address.kind in ("ip4", "ip6")
    return may_be_named(address.port) and not (is_number and reach_of(address.host) is None)


def needs_lineage(manifest: Manifest, config: Config) -> bool:
    """Return whether the base is allowed only if its lineage is: the manifest lists lineages, and does not name the
    base.
    """
    return bool(manifest.lineages) and config.policy.base not in _revisions_by_base(manifest)


def lineage_of(config: Config) -> Lineage:
    """Load the policy for its lineage. Takes as long as starting a node. Raises PolicyError, TaskError, MemoryBudgetError."""
    from swarm.policy.policy import load_policy  # torch
    from swarm.warm_start.start_digest import start_digest

    return load_policy(config.policy, device=config.node.device, start=start_digest(config)).lineage


def check_lineage(manifest: Manifest, config: Config) -> None:
    """Raise ManifestError where the lineage of the policy is not allowed. Raises and takes time as `lineage_of`."""
    check_allowed(manifest, config, lineage_of(config))


def without_downloads(config: Config) -> Config | None:
    """Return the configuration with the folder of its base, for `lineage_of`; None where that has something to download."""
    from swarm.policy.base_folder import base_at_hand

    folder = base_at_hand(config.policy.base, config.policy.revision)
    if folder is None or config.warm_start.steps or config.warm_start.adapter_hub:  # examples may be of a hub
        return None
    return config.model_copy(
        update={"policy": config.policy.model_copy(update={"base": str(folder.absolute()), "revision": None})}
    )


def check_allowed(manifest: Manifest, config: Config, lineage: Lineage) -> None:
    """Raise ManifestError for a lineage that the manifest does not list."""
    if not any(map(lineage.has_name, manifest.lineages)):
        raise ManifestError(
            f"the policy must be of a lineage that {manifest.name} allows, got {lineage.policy} of {config.policy.base}; "
            f"set policy.base to {_allowed_names(manifest)}, and policy.lora as the founder says"
        )


def _allowed_names(manifest: Manifest) -> str:
    return f"one of {', '.join(manifest.bases)}" if manifest.bases else "the base that the founder sent or named"


def check_base_at_hand(config: Config) -> None:
    """Raise PolicyError for a base to download: a node of a silo contacts only its peers, and no model hub."""
    from swarm.policy.base_folder import base_at_hand, names_folder

    base, revision = config.policy.base, config.policy.revision
    if base_at_hand(base, revision) is None:
        fetch = f"fetch it before with `hf download {base}{f' --revision {revision}' if revision else ''}`"
        raise PolicyError(
            f"policy.base must be at hand in a silo, which downloads nothing, got {base}; "
            + ("set it to the folder that the owner sent" if names_folder(base, revision) else fetch)
        )


def check_tasks(tasks: TasksSection) -> None:
    """Build every task source. Raises TaskError where one does not work here: its records would be unknown here."""
    from swarm.tasks.task_mixture import TaskMixture

    mixture = TaskMixture(tasks)
    mixture.close()
    if mixture.broken:
        raise TaskError("every task of the swarm must work here, got " + "; ".join(mixture.broken.values()))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a task file, 64 hex digits. Raises TaskError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise TaskError(f"a task file must be readable, got {path}: {error.strerror}; set its path") from None
    return digest.hexdigest()


def published_task(source: TaskSourceSection, tasks: TasksSection) -> dict[str, Any]:
    """Return a source as a manifest has it: files by their content, modules with their packages. Raises TaskError."""
    from swarm.tasks.rewards.reward_plugin import find_function

    signals: list[dict[str, Any]] = []
    for signal in source.signals:
        facts = signal.model_dump() | {"function": signal.reference}
        if signal.function:
            function = find_function(signal, source.source_name)
            facts |= {"sha256": function.sha256} if signal.is_of_file else {"package": function.origin}
        signals.append(facts)
    return (
        source.model_dump(exclude={*LOCAL_SETTINGS, "sha256", "signals"})
        | {"signals": signals}
        | _content(source, tasks)
    )


def _content(source: TaskSourceSection, tasks: TasksSection) -> dict[str, str]:
    """Return what a manifest says of the content of a task source in place of its path. Raises TaskError."""
    if source.kind != "dataset":
        return {"sha256": file_sha256(source.path)} if source.path else {}
    from swarm.tasks.data_sets.source import content

    return content(source, tasks)


def decisions(
    manifest: Manifest, task_files: Mapping[str, Path], reward_paths: Sequence[Path] = ()
) -> dict[str, dict[str, Any]]:
    """Return {section: {setting: value}} that the manifest decides. Raises as `compose`, whose files these are."""
    reward_files = {file_sha256(path): path for path in reward_paths}
    wanted = {signal.sha256 for task in manifest.tasks for signal in task.signals}
    if surplus := [f"{path} with SHA-256 {sha256}" for sha256, path in reward_files.items() if sha256 not in wanted]:
        files = ", ".join(sorted(sha256 for sha256 in wanted if sha256)) or "none"
        raise ConfigError(
            f"--reward-file must name a file that {manifest.name} needs, by SHA-256 {files}, got {surplus[0]}; get the file from "
            "the founder, or leave it out"
        )
    unknown = sorted(task_files.keys() - {task.source_name for task in manifest.tasks if task.sha256})
    if unknown:
        raise ConfigError(
            f"--task-file must name a jsonl or dataset task of {manifest.name}, got {unknown[0]!r}; see the manifest"
        )
    if missing := missing_files(manifest, task_files, reward_paths):
        raise TaskError("; ".join(missing))
    owner = {"silo_owner": manifest.founder} if manifest.silo else {}
    return {
        "swarm": {"name": manifest.name, "id": manifest.id} | owner,
        "tasks": {
            "sandboxed": True,
            "held_out_share": manifest.held_out_share or 0.0,
            "sources": [_source(task, task_files.get(task.source_name), reward_files) for task in manifest.tasks],
        },
        "network": {"gossip": manifest.gossip} if manifest.gossip else {},
        "sharing": {
            **manifest.limits.model_dump(exclude_none=True),
            "common_tasks": manifest.common_tasks or 0.0,
            **({"solved_groups": True, "baseline": "reader"} if manifest.solved_groups else {"solved_groups": False}),
        },
    }


def missing_base(manifest: Manifest, user: Settings) -> str:
    """Return what to do where the manifest lists lineages and no base, and the user gave no base; else nothing."""
    if manifest.bases or not manifest.lineages or _get(user, "policy", "base"):
        return ""
    return "this swarm names no base: give --policy.base, as the founder says"


def missing_files(manifest: Manifest, task_files: Mapping[str, Path], reward_paths: Sequence[Path]) -> list[str]:
    """Return which files the manifest names by content and the user did not give, one line each. Raises TaskError."""
    rewards = set(map(file_sha256, reward_paths))
    lines: list[str] = []
    for task in manifest.tasks:
        name = task.source_name
        if task.sha256 and not task.hub and name not in task_files:
            what = "the data set whose tasks have" if task.kind == "dataset" else "a file with"
            lines.append(f"task {name} needs {what} SHA-256 {task.sha256}; give --task-file {name}=PATH")
        for signal in (one for one in task.signals if one.sha256 is not None and one.sha256 not in rewards):
            file, _, function = signal.function.rpartition(":")
            lines.append(
                f"task {name} needs {file} with SHA-256 {signal.sha256} for its reward function {function}; get the file "
                f"from the founder, read what it does, and give --reward-file PATH/{file}"
            )
    return lines


def advice(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return {section: {setting: value}} that the manifest sets for members who do not: none whose partners are strangers."""
    return {"merging": {"enabled": True}} if manifest.merging and manifest.silo else {}


def _source(task: ManifestTask, path: Path | None, reward_files: Mapping[str, Path]) -> dict[str, Any]:
    source = task.model_dump(exclude={"sha256"})
    for facts, signal in zip(source["signals"], task.signals, strict=True):
        if signal.sha256 is not None:
            facts["function"] = f"{reward_files[signal.sha256].resolve()}:{signal.function.rpartition(':')[2]}"
    if not task.sha256:
        return source
    name = task.source_name
    if task.kind == "dataset" and (path is not None or task.hub):  # its content is compared when the source is built
        return source | {"sha256": task.sha256} | ({} if path is None else {"path": str(path.resolve())})
    assert path is not None, "`decisions` has looked for missing files"
    if (found := file_sha256(path)) != task.sha256:
        raise TaskError(
            f"the file of task {name} must have SHA-256 {task.sha256}, got {found} of {path}; ask the founder"
        )
    return source | {"path": str(path.resolve())}


def _check_agreement(
    manifest: Manifest, decided: Settings, user: Settings, own: Settings, *, config: Config, origin: Origin
) -> None:
    """`own`: the settings of `user`, with those that they rest on."""
    wanted = parse(merge(own, {"network": {"backend": "hivemind"}}))
    for section, settings in decided.items():
        for key in settings:
            if _get(user, section, key) is None:
                continue
            mine, theirs = (getattr(getattr(side, section), key) for side in (wanted, config))
            if mine != theirs:
                values = (_names(value) if key == "sources" else value for value in (theirs, mine))
                raise _contradiction(manifest, f"{section}.{key}", *values, origin=origin)


def _within_limits(manifest: Manifest, user: Settings, config: Config, origin: Origin) -> Config:
    """Lower defaults to the limits of the manifest. A user's setting above them is an error."""
    lowered: dict[str, int] = {}
    for key, bound in _BOUNDS:
        value, limit = getattr(config.rollouts, key), getattr(config.sharing, bound)
        if value > limit and _get(user, "rollouts", key) is not None:
            raise _contradiction(manifest, f"rollouts.{key}", f"<= {limit} (sharing.{bound})", value, origin)
        if value > limit:
            lowered[key] = limit
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update=lowered)})


def _with_base(manifest: Manifest, user: Settings, config: Config, origin: Origin) -> Config:
    """Set the revision that the manifest pins. Raises ConfigError for a base that it does not allow."""
    allowed = _revisions_by_base(manifest)
    is_folder = config.policy.base not in BUNDLED_BASES and Path(config.policy.base).is_dir()
    if is_folder and _get(user, "policy", "base") is None:
        raise ConfigError(
            f"a base of the manifest of {manifest.name} must come from the hub, got {config.policy.base}, which is a folder "
            f"here; give --policy.base {config.policy.base} to use that, or start from another folder"
        )
    if not allowed or config.policy.base not in allowed:
        if allowed and not manifest.lineages:
            wanted = "one of " + ", ".join(manifest.bases)
            raise _contradiction(manifest, "policy.base", wanted, config.policy.base, origin)
        return config
    revisions = allowed[config.policy.base]
    if not revisions or config.policy.revision in revisions:
        return config
    if _get(user, "policy", "revision") is not None:
        wanted = "one of " + ", ".join(revisions)
        raise _contradiction(manifest, "policy.revision", wanted, config.policy.revision, origin)
    return config.model_copy(update={"policy": config.policy.model_copy(update={"revision": revisions[0]})})


def _revisions_by_base(manifest: Manifest) -> dict[str, Sequence[str]]:
    """Return {base: pinned revisions}, empty where any revision is allowed."""
    found: dict[str, list[str]] = {}
    free: set[str] = set()
    for entry in manifest.bases:
        base, _, revision = entry.partition("@")
        found.setdefault(base, []).append(revision)
        if not revision:
            free.add(base)
    return {base: () if base in free else revisions for base, revisions in found.items()}


def _contradiction(manifest: Manifest, key: str, theirs: object, mine: object, origin: Origin) -> ConfigError:
    return ConfigError(
        f"{key} is decided by the manifest of {manifest.name}: must be {theirs}, got {mine}"
        f"{told_place(origin(key.split('.')))}; remove your setting"
    )


def _names(sources: Sequence[TaskSourceSection]) -> str:
    return " + ".join(f"{source.source_name} {source.parameters or ''}".strip() for source in sources)


def _get(settings: Settings, section: str, key: str) -> Any:
    table = settings.get(section)
    return table.get(key) if isinstance(table, Mapping) else None
