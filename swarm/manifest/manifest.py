"""The manifest: a swarm in one signed file. It names the founder, the tasks, the bases, and the peers to join through.

    founder: content ─ canonical bytes ─ Ed25519 → TOML file → joiner: size, TOML, signature, id, types → Manifest

The signature is over

    "swarm/manifest/1\\0" + msgpack of the content, tables with their keys in order, `signature` left out

The content is the parsed values. So comments, layout and the order of keys do not matter, and any changed, added or
removed value does. The id is a hash over founder and name: nobody else can make a manifest with the same id.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

import msgpack
import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from swarm.config import RewardSignalSection, Section, SwarmName, TaskSourceFacts
from swarm.config.tasks import SMALLEST_HELD_OUT_SHARE
from swarm.errors import ManifestError
from swarm.extensions.points import REWARDS, TASK_SOURCES
from swarm.records.codec import MAX_TOKENS_PER_BODY
from swarm.records.identity import Identity, is_peer_id, peer_name, verify
from swarm.tasks.data_sets.hub import is_commit
from swarm.tasks.parameter_rules import check_shape
from swarm.tasks.signalled_source import package_signals

FORMAT = 1
MAX_BYTES = 64 * 1024
_MAX_LINE_DOTS = 2048  # the parser's time for a dotted key grows with the square of its parts
_MAX_DEPTH = 7
_MAX_SHOWN = 80
_MAX_PACKAGE_PROCESSES = 16
_WITH_SHA256 = ("jsonl", "dataset")
_DEFAULTS = (("answer", "whole"), ("expected", "whole"), ("skip_invalid", False))
"""Defaults of settings that came later: left out, so that older software reads what it can."""
_FILE_FUNCTION = re.compile(r"[A-Za-z0-9_-]{1,64}\.py:[A-Za-z0-9_]{1,64}")
_LATER_OF_SIGNALS = ("function", "weights", "package")
"""Settings of signals that came later, which are left out in the same way."""
_DOMAIN = b"swarm/manifest/1\0"
_HEADER = """# Manifest of the swarm {name}. Take part: swarm join FILE; look first: swarm join FILE --check
# Signed by its founder: a changed value breaks the signature, comments and layout do not.

"""

Count = Annotated[int, Field(ge=1, le=2**31)]
_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"  # a path that leads out of the hub's cache cannot be written with it
BaseName = Annotated[str, Field(pattern=f"^{_NAME}(/{_NAME})?(@{_NAME})?$")]
"""`bundled` or a hub id, with @REVISION where the founder pins one."""
LineageHash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ManifestTask(TaskSourceFacts):
    """One source of tasks. A file is identified by its content, so every node may store it where it likes."""

    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the file of JSONL or code tasks, or of the tasks of a data set."""
    signals: Annotated[tuple[RewardSignalSection, ...], Field(max_length=8)] = ()
    """As for a task source. A reward function of a package takes a process of its own."""

    @model_validator(mode="after")
    def _content_matches_kind(self) -> Self:
        if self.kind != "code" and (self.kind in _WITH_SHA256) != bool(self.sha256):
            kinds = " and ".join(_WITH_SHA256)
            raise ValueError(
                f"sha256 belongs to {kinds} tasks and to all of them, got {self.kind} {self.source_name!r}"
            )
        if self.hub and not is_commit(self.revision):
            raise ValueError(
                f"revision must be a commit of 40 hex digits, got {self.revision or 'none'} for {self.source_name!r}"
            )
        return self

    @model_validator(mode="after")
    def _parameters_are_plain(self) -> Self:
        """The rest is checked where the source is built, which needs the library."""
        if self.kind in _WITH_SHA256 and self.parameters:
            raise ValueError(f"a {self.kind} task has no parameters, got {', '.join(self.parameters)}; remove them")
        is_program = self.kind == "code" and "language" in self.parameters
        numbers = {name: value for name, value in self.parameters.items() if not (is_program and name == "language")}
        check_shape(numbers, with_words=self.kind == "reasoning_gym")
        if is_program:
            check_shape({"language": self.parameters["language"]})
        for tool in self.tools:
            check_shape(tool.parameters)
            if tool.name == "search":
                raise ValueError(
                    f"tools of a manifest must need no files of a node, got search of {self.source_name!r}; remove it"
                )
        for signal in self.signals:
            if not signal.is_judge and (signal.function or not REWARDS.is_built_in(signal.name)):
                check_shape(signal.parameters)
        return self

    @model_validator(mode="after")
    def _functions_are_named_by_content(self) -> Self:
        """A manifest carries no code and no folder: members put the file in place, or install the package, themselves."""
        for signal in self.signals:
            is_named = not signal.is_of_file or _FILE_FUNCTION.fullmatch(signal.function) is not None
            if not is_named or (signal.is_of_file and signal.sha256 is None):
                raise ValueError(
                    "a function of a file must be named in a manifest by its sha256 and a file name of letters, digits, _ and -, "
                    f"got {shown(signal.function)}"
                )
            if signal.function and not signal.is_of_file and not signal.package:
                raise ValueError(
                    f"a function of a module must be named in a manifest with its package, got {shown(signal.function)}"
                )
        return self

    @property
    def settings(self) -> str:
        """Everything that defines the task, in one line for people."""
        facts = [f"{self.kind} {self.name}", *_assigned(self.parameters)]
        facts += [f"sha256 {self.sha256}"] if self.sha256 else []
        facts += [f"verifier {self.verifier}"] if self.kind in _WITH_SHA256 else []
        facts += [f"{name} {_summary(value)}" for name, value in sorted((self.form | self.data_set).items())]
        facts += [" ".join(["signal", one.name, f"×{one.weight:g}", *_signal_facts(one)]) for one in self.signals]
        facts += [" ".join(["tool", one.name, *_assigned(one.parameters), *one.marks]) for one in self.tools]
        facts += [f"at most {self.max_turns} turns"] if self.tools else []
        return ", ".join([*facts, f"weight {self.weight:g}"])


class ManifestLimits(Section):
    """Limits that all nodes share: settings of the same names in [sharing]. Each node chooses what is left out."""

    time_to_live_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    max_group_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    max_answer_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_PER_BODY)] | None = None
    max_records_per_peer_per_minute: Annotated[int, Field(ge=1, le=6000)] | None = None


class Manifest(Section):
    """A manifest whose signature was checked, or that was just made."""

    format: Literal[1]
    """Format of this file."""
    protocol: Annotated[int, Field(ge=1, le=2**31)]
    """Version of the wire protocol that the swarm speaks."""
    name: SwarmName
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """`manifest_id` of founder and name."""
    founder: str
    """Peer id of the key that signs."""
    created_at: datetime
    """UTC."""
    edition: Count = 1
    """Counts the founder's changes. A node that knows an edition refuses earlier ones."""
    description: Annotated[str, Field(max_length=500)] = ""
    bases: Annotated[tuple[BaseName, ...], Field(max_length=64)] = ()
    """Bases that nodes may train. Any, if `lineages` is empty, too."""
    lineages: Annotated[tuple[LineageHash, ...], Field(max_length=64)] = ()
    """Policy lineages that are allowed whatever their base is called, such as one in a local folder."""
    bootstrap: Annotated[tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=64)] = ()
    """Addresses through which nodes join."""
    gossip: Literal["libp2p", "daemon", "off"] | None = None
    """How all nodes spread headers: network.gossip."""
    silo: Literal[True] | None = None
    """For members only. The founder is the owner and decides who they are. Older software without silos refuses it."""
    limits: ManifestLimits = ManifestLimits()
    held_out_share: Annotated[float, Field(ge=SMALLEST_HELD_OUT_SHARE, le=0.25)] | None = None
    """As `tasks.held_out_share`. Without it nothing is held out but streams and rows, as older software does."""
    common_tasks: Annotated[float, Field(gt=0, le=1)] | None = None
    """As `sharing.common_tasks`. Without it there are none. Older software, which would take them for copies, refuses it."""
    solved_groups: Literal[True] | None = None
    """As `sharing.solved_groups`. Older software, in which such groups count against their author, refuses it."""
    merging: Literal[True] | None = None
    """Members of a silo merge adapters unless they set `merging.enabled`; elsewhere, where partners are strangers, they are told.
    Older software refuses it."""
    tasks: Annotated[tuple[ManifestTask, ...], Field(min_length=1, max_length=64)]

    @field_validator("founder")
    @classmethod
    def _founder_is_a_peer(cls, founder: str) -> str:
        if not is_peer_id(founder):
            raise ValueError("founder must be a peer id (12D3KooW...)")
        return founder

    @field_validator("description")
    @classmethod
    def _description_is_one_printable_line(cls, text: str) -> str:
        if not text.isprintable():
            raise ValueError("description must be one line of printable text")
        return text

    @field_validator("bootstrap")
    @classmethod
    def _addresses_name_peers(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            head, _, peer_id = address.rpartition("/p2p/")
            if not (head.startswith("/") and head.isascii() and head.isprintable() and is_peer_id(peer_id)):
                raise ValueError(f"bootstrap addresses must end in /p2p/PEER_ID, got {shown(address)}")
        return addresses

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.id != manifest_id(self.founder, self.name):
            raise ValueError("id must be the hash of founder and name: this is another founder's swarm")
        names = [task.source_name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("tasks must have different names; set a different label")
        if self.silo is None and any(signal.is_judge for task in self.tasks for signal in task.signals):
            raise ValueError("signal judge must be in a silo, as strangers cannot compute its reward again; remove it")
        sources = sum(not TASK_SOURCES.is_built_in(task.kind) for task in self.tasks)
        processes = sources + sum(len(package_signals(task)) for task in self.tasks)
        if processes > _MAX_PACKAGE_PROCESSES:
            raise ValueError(
                f"tasks must have at most {_MAX_PACKAGE_PROCESSES} signals of packages and sources of packages together, which "
                f"take a process each, got {processes}"
            )
        return self

    @property
    def founder_name(self) -> str:
        """Readable name for display only. Compare peer ids to be sure."""
        return peer_name(self.founder)


def manifest_id(founder: str, name: str) -> str:
    """Swarm id: the first 16 bytes, in hex, of SHA-256 over "swarm-id:" + founder + "/" + name."""
    return hashlib.sha256(f"swarm-id:{founder}/{name}".encode()).hexdigest()[:32]


def create(identity: Identity, name: str, protocol: int, now: float, **content: Any) -> Manifest:
    """Create a manifest of `identity`. `now` is in seconds since the epoch. Raises ManifestError for invalid content."""
    facts = {
        "format": FORMAT,
        "protocol": protocol,
        "name": name,
        "id": manifest_id(identity.peer_id, name),
        "founder": identity.peer_id,
        "created_at": datetime.fromtimestamp(int(now), UTC),
    }
    return _validated(facts | content, "correct what you gave")


def changed(manifest: Manifest, **content: Any) -> Manifest:
    """Return the next edition. Raises ManifestError for invalid content."""
    content = _content(manifest) | content | {"edition": manifest.edition + 1}
    return _validated(content, "correct what you gave")


def dump(manifest: Manifest, identity: Identity) -> str:
    """Return the signed file. Raises ManifestError unless `identity` is the founder's and the file is within MAX_BYTES."""
    if identity.peer_id != manifest.founder:
        raise ManifestError(
            f"a manifest must be signed by its founder {manifest.founder}, got the key of {identity.peer_id}; set --key"
        )
    content = _content(manifest)
    signature = identity.sign(_signed_bytes(content)).hex()
    text = _HEADER.format(name=manifest.name) + tomli_w.dumps({"signature": signature, **content})
    parse(text.encode())
    return text


def parse(data: bytes, expected_founder: str | None = None) -> Manifest:
    """Parse the bytes of a file, which may be anybody's. Raises ManifestError and nothing else."""
    content = dict(_table(data))
    signature, founder = content.pop("signature", None), content.get("founder")
    if not isinstance(founder, str) or not isinstance(signature, str) or len(signature) != 128:
        raise ManifestError(
            "a manifest must have a founder and a signature of 128 hex digits; ask its founder for the file"
        )
    if expected_founder is not None and founder != expected_founder:
        raise ManifestError(
            f"the manifest must be of founder {expected_founder}, got {shown(founder)}; ask the founder for the file"
        )
    if not _is_signed(founder, _signed_bytes(content), signature):
        raise ManifestError(
            f"a manifest must carry the signature of its founder, got another for {shown(founder)}: "
            "the file was changed after it was signed; fetch it again"
        )
    return _validated(content)


def check_protocol(manifest: Manifest, protocol: int) -> None:
    """Raise ManifestError where the swarm speaks another protocol version than this software."""
    if manifest.protocol != protocol:
        older = "update this software" if manifest.protocol > protocol else "ask the founder for a newer manifest"
        raise ManifestError(f"the swarm must speak protocol version {protocol}, got {manifest.protocol}; {older}")


def changes(known: Manifest, later: Manifest) -> list[str]:
    """Return what a later edition changes, one line each.

    Bootstrap addresses and the description are left out: they keep a swarm alive, but nothing reads, runs or trains on
    them.
    """
    old, new = ({task.source_name: task.settings for task in one.tasks} for one in (known, later))
    lines = [f"task {name} is new: {new[name]}" for name in new if name not in old]
    lines += [f"task {name} is removed" for name in old if name not in new]
    lines += [f"task {name}: {old[name]} → {new[name]}" for name in new if name in old and old[name] != new[name]]
    for name in ("bases", "lineages", "gossip", "silo", "held_out_share", "common_tasks", "solved_groups", "merging"):
        lines += _change(name, *(getattr(one, name) for one in (known, later)))
    for name in ManifestLimits.model_fields:
        lines += _change(f"limit {name}", *(getattr(one.limits, name) for one in (known, later)))
    return lines


def _change(name: str, before: object, after: object) -> list[str]:
    return [] if before == after else [f"{name}: {_described(before)} → {_described(after)}"]


def _summary(value: object) -> str:
    """Return a setting of prompts for people: its beginning, and for a long one a hash, so that any change shows."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}… ({len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _signal_facts(signal: RewardSignalSection) -> list[str]:
    """Return what else defines a signal, for people."""
    facts = ["function", signal.reference, f"sha256 {signal.sha256}" if signal.sha256 else f"of {signal.package}"]
    weights = ["weights", *_assigned(signal.weights)] if signal.weights else []
    return [*(facts if signal.function else ()), *weights, *_assigned(signal.parameters)]


def _assigned(parameters: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value!r}" for key, value in sorted(parameters.items())]


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "any"
    return "not set" if value is None else str(value)


def _content(manifest: Manifest) -> dict[str, Any]:
    """Return the content as plain values in the shape of the file. Empty values are left out."""
    content = manifest.model_dump(exclude_none=True)
    content["tasks"] = [
        {
            key: value
            for key, value in task.items()
            if value not in ("", {}, ()) and (key, value) not in _DEFAULTS and (key != "max_turns" or task["tools"])
        }
        for task in content["tasks"]
    ]
    for signal in (signal for task in content["tasks"] for signal in task.get("signals", ())):
        for key in [key for key in _LATER_OF_SIGNALS if not signal[key]]:
            del signal[key]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in content.items() if value != {}}


def _table(data: bytes) -> Mapping[str, Any]:
    """Parse TOML that is bounded in size, nesting and kinds of values before anything reads it."""
    if len(data) > MAX_BYTES:
        raise ManifestError(f"a manifest must be <= {MAX_BYTES} bytes, got {len(data)} or more; this is another file")
    if max(line.count(b".") for line in data.split(b"\n")) > _MAX_LINE_DOTS:
        raise ManifestError(f"a manifest must have lines of <= {_MAX_LINE_DOTS} dots, got more in one; break it")
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or beyond the parser's limits
        raise ManifestError(f"a manifest must be TOML in UTF-8, got {shown(error)}; this is another file") from None
    return _canonical(table)


def _signed_bytes(content: Mapping[str, Any]) -> bytes:
    return _DOMAIN + msgpack.packb(_canonical(content), datetime=True)


def _is_signed(founder: str, data: bytes, signature: str) -> bool:
    try:
        return verify(founder, data, bytes.fromhex(signature))
    except ValueError:
        return False


def _canonical(value: Any, depth: int = 0) -> Any:
    """Return the value with the keys of all tables in order. Raises ManifestError for anything not allowed in a
    manifest.
    """
    if depth > _MAX_DEPTH:
        raise ManifestError(f"a manifest must nest at most {_MAX_DEPTH} levels, got more; this is another file")
    if isinstance(value, Mapping):
        return {key: _canonical(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1) for item in value]
    if isinstance(value, datetime) and value.utcoffset() == timedelta(0):
        return value
    is_number = isinstance(value, int) and -(2**63) <= value < 2**63
    if is_number or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ManifestError(
        f"a manifest must hold texts, 64-bit and finite numbers, and times in UTC, got {shown(value)}; correct it"
    )


def _validated(content: Mapping[str, Any], fix: str = "ask its founder to correct it") -> Manifest:
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        rule = first["msg"].removeprefix("Value error, ")
        where = f"{shown(key)}: " if key else ""
        raise ManifestError(f"a manifest must be valid, got {where}{rule}; {fix}") from None


def shown(value: object) -> str:
    """Return text of strangers, short and without control characters."""
    try:
        text = ascii(str(value))
    except ValueError:  # an integer too long to print
        return "a giant number"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
