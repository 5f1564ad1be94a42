"""`status.json`: the state of a running node, which it rewrites every few seconds.

`judge` derives from it, in one word and one line, whether the node contributes to its swarm.

status.json, the clock ─▶ judge ─▶ contributing · learning alone · paused · starting · stalled · not running
"""

import contextlib
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from swarm.errors import NodeNotRunningError
from swarm.machine.safe_files import read_json, replace_file
from swarm.observability.plain_text import counted, for_how_long, plain

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 30.0
"""After so long without a new file the process is blocked, frozen or gone: it writes one every two seconds."""
_CLOCK_STEP_S = 60.0
"""That the machine's clock may have been set by between two looks."""
_NAME_PART = re.compile(r"(\D*)(\d*)")
_MAX_NAMES = 4
_MAX_FAILURE = 400
_MAX_BYTES = 4 << 20
_MAX_PID = 1 << 31
_MAX_NUMBER = 1e15
_ABSENT = object()
_COPIED = "copied"
"""Phase of what was read from another folder than it was written for."""
_NEEDED = frozenset({"peer_id", "peer_name", "pid", "started_at", "phase", "addresses"})
_NUMBER = (int, float)
_KINDS: dict[str, Any] = {
    "peer_id": str, "peer_name": str, "pid": int, "started_at": _NUMBER, "phase": str, "http_port": (int, type(None)),
    "addresses": list, "round": int, "policy_version": int, "last_round": dict, "final_merge": dict, "peers": list,
    "contribution": dict, "command": str, "stuck": list, "num_connected": (int, type(None)), "last_round_at": _NUMBER,
    "written_at": _NUMBER, "failure": str,
}  # fmt: skip
"""What each field of the file may be in JSON."""
_INNER_KINDS: dict[str, type] = {"addresses": str, "peers": dict, "stuck": str}


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of one node, as its last writing knew it."""

    peer_id: str
    peer_name: str
    pid: int
    started_at: float
    """Seconds since the epoch."""
    phase: str
    """starting, evaluating, learning, merging, serving, ended, or failed, which `failure` explains; of a node that learns also
    sharing paused, training paused, or paused, which is both."""
    http_port: int = 0
    addresses: tuple[str, ...] = ()
    """Multiaddresses that others can pass as initial peers."""
    round: int = 0
    policy_version: int = 0
    last_round: dict[str, Any] = field(default_factory=dict)
    """Last row of metrics.jsonl of kind round."""
    final_merge: dict[str, Any] = field(default_factory=dict)
    """Last row of kind final_merge; empty where there was none."""
    peers: list[dict[str, Any]] = field(default_factory=list)
    """Of each known peer, last seen first, at most 256: peer_id, name, lineage, weight, banned_until, groups_admitted,
    bodies_taken, records_rejected, last_seen_at, reward_mean, policy_version (`sharing.contribution.PeerStanding`)."""
    contribution: dict[str, Any] = field(default_factory=dict)
    """last_taken_at, last_taken_by, bodies_taken, reward_rank, reward_rank_of (`sharing.contribution.Contribution`), and
    advice: lines on what is wrong and what to do about it."""
    stuck: list[str] = field(default_factory=list)
    """Parts of the node that make no progress, each with for how long; the log has their stacks."""
    num_connected: int | None = None
    """Peers with an open connection; None without a network."""
    last_round_at: float = 0.0
    """When the last round ended, in seconds since the epoch; 0 before the first one."""
    written_at: float = 0.0
    """When this was written, in seconds since the epoch. A node writes it every few seconds."""
    failure: str = ""
    """The error that ended it, in one line."""
    command: str = ""
    """Which command it is: stage or bootstrap; empty for a node. Never a whole command line: whoever wrote the file would choose
    what a person types."""

    def write(self, path: Path) -> None:
        """Replace the file at once: a reader sees the old or the new one."""
        replace_file(path, json.dumps({**asdict(self), "folder_inode": path.parent.stat().st_ino}))

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote it exists and has not said that it ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        is_silent = self.written_at and time.time() - self.written_at > SILENT_AFTER_S
        return self.phase not in ("ended", "failed", _COPIED) and not (
            is_silent and _began_after(self.pid, self.started_at)
        )


class StatusFile:
    """The `status.json` of a process that goes on where its disk is full. An outage is logged once, until a write succeeds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_failing = False

    def write(self, status: NodeStatus) -> None:
        try:
            status.write(self._path)
        except OSError as error:
            if not self._is_failing:
                logger.error("the status is not written (%s): free disk space; the process goes on without it", error)
            self._is_failing = True
        else:
            self._is_failing = False


def _began_after(pid: int, time_s: float) -> bool:
    """Whether the number of the process belongs to a later one by now, as after a power loss."""
    import psutil  # only where it is needed: `swarm status` is to be quick

    try:
        return psutil.Process(pid).create_time() > time_s + _CLOCK_STEP_S
    except psutil.Error:
        return False


def inner_folders(folder: Path) -> list[Path]:
    """Those of nodes inside a testbed's folder, by name, numbers in it by their value."""
    found = [path.parent for path in folder.glob("*/status.json")]
    return sorted(found, key=lambda path: [(int(part or -1), text) for text, part in _NAME_PART.findall(path.name)])


def way_to_a_node(folder: Path) -> str:
    """What follows "a folder must hold …, got none in FOLDER": which nodes there are inside it or beside it, and what to do."""
    where, inner = "inside it", inner_folders(folder)
    if not inner:
        where, inner, folder = "beside it", inner_folders(folder.parent), folder.parent
    if not inner:
        return "; start it with `swarm run` or name its folder"
    names = ", ".join(path.name for path in inner[:_MAX_NAMES]) + (", …" if len(inner) > _MAX_NAMES else "")
    every = f"`swarm top {shlex.quote(str(folder))}`"
    return f" but {counted(len(inner), 'node')} {where}: {names}; name one of these, or see all with {every}"


@contextlib.contextmanager
def shown_from(path: Path) -> Iterator[None]:
    """Around what shows the content of a status file: NodeNotRunningError where that is not as a node writes it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise NodeNotRunningError(
            f"status.json must be one that a node wrote, got {path}: {cause}; restart it"
        ) from error


def read_status(path: Path) -> NodeStatus:
    """That of a node of another version, too: what it does not say has its default, what is unknown here is left out.

    Raises NodeNotRunningError where no node has ever written one, or it is damaged.
    """
    try:
        data = read_json(path, _MAX_BYTES)
        status = _checked(data)
        is_copy = data.get("folder_inode", inode := path.parent.stat().st_ino) != inode
        return replace(status, phase=_COPIED) if is_copy else status
    except FileNotFoundError:
        raise NodeNotRunningError(
            f"a node's folder must hold status.json, got none in {path.parent}{way_to_a_node(path.parent)}"
        ) from None
    except (OSError, ValueError) as error:
        raise NodeNotRunningError(f"status.json must be readable, got {path}: {error}; restart the node") from None


def _checked(data: Any) -> NodeStatus:
    """Raises ValueError for what no node writes, such as text in place of a number: the file may be somebody else's."""
    if not isinstance(data, dict):
        raise ValueError("it must be a JSON object")
    known = {one.name: data[one.name] for one in fields(NodeStatus) if one.name in data}
    for name, kinds in _KINDS.items():
        value = known.get(name, _ABSENT)
        is_fine = isinstance(value, kinds) and not isinstance(value, bool)
        inner = _INNER_KINDS.get(name, object)
        if value is _ABSENT and name not in _NEEDED:
            continue
        if is_fine and isinstance(value, int | float) and not abs(value) < _MAX_NUMBER:
            raise ValueError(f"{name} must be a number below {_MAX_NUMBER:g}")
        if not is_fine or (isinstance(value, list) and not all(isinstance(part, inner) for part in value)):
            raise ValueError(f"{name} must be of another type")
    advice = known.get("contribution", {}).get("advice", [])
    if not isinstance(advice, list) or not all(isinstance(line, str) for line in advice):
        raise ValueError("advice must be lines")
    if not 0 < known["pid"] < _MAX_PID:
        raise ValueError("pid must be the number of a process")
    return NodeStatus(**{**known, "addresses": tuple(known["addresses"])})


_TAKEN_LATELY_S = 600.0
_GONE_AFTER_S = 60.0
"""Connections are closed and opened again all the time; for so long none is nothing."""
_ROUNDS_UNTAKEN = 10
_LONGEST_ROUND_S = 600.0
_LONGEST_ROUNDS = 20


class Word(StrEnum):
    """Of a verdict."""

    contributing = "contributing"
    """Other nodes fetch what it shares."""
    learning_alone = "learning alone"
    paused = "paused"
    """By a person, on the node's page."""
    starting = "starting"
    serving = "serving"
    """A pipeline stage or a bootstrap peer."""
    stalled = "stalled"
    not_running = "not running"


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What a person wants to know first."""

    word: Word
    why: str
    """A line in plain words. It may hold names, which are harmless, and nothing else of peers."""


def judge(status: NodeStatus, now: float) -> NodeHealth:
    """`now`: seconds since the epoch."""
    if not status.is_alive:
        return NodeHealth(Word.not_running, _how_it_ended(status, now))
    if stalled := _why_stalled(status, now):
        return NodeHealth(Word.stalled, stalled)
    if status.phase == "serving":
        return NodeHealth(Word.serving, "it works for others and trains nothing of its own")
    if status.phase == "starting" or (status.phase == "evaluating" and not status.last_round):
        doing = "loading the policy" if status.phase == "starting" else "evaluating it before the first round"
        return NodeHealth(Word.starting, f"{doing}, for {for_how_long(now - status.started_at)}")
    if "paused" in status.phase:
        what = "training and sharing wait" if status.phase == "paused" else status.phase
        return NodeHealth(Word.paused, f"{what} until somebody resumes on its page: swarm dashboard DIR")
    return _part_in_swarm(status, now)


def _how_it_ended(status: NodeStatus, now: float) -> str:
    ago = f", {for_how_long(now - status.written_at)} ago" if status.written_at else ""
    at = "" if status.command else f" after round {status.round}"  # a stage or bootstrap peer has no rounds
    if status.phase == _COPIED:
        return "this folder is a copy of a node's, and nothing has run in it"
    if status.phase == "ended":
        return f"it ended{at}{ago}"
    if status.phase == "failed":
        return f"it ended with an error{at}{ago}: {plain(status.failure)[:_MAX_FAILURE]}"
    return f"process {status.pid} was killed or crashed{at}{ago}"


def _why_stalled(status: NodeStatus, now: float) -> str:
    """Empty where it is not."""
    if status.stuck:
        return status.stuck[0]
    silent_s = now - status.written_at
    if status.written_at and silent_s > SILENT_AFTER_S and status.phase != "starting":  # which writes nothing meanwhile
        since = for_how_long(silent_s)
        return f"process {status.pid} has not written its state for {since}: it is blocked or frozen, or cannot write"
    if status.phase != "learning" or not status.last_round_at:
        return ""
    patience_s = max(_LONGEST_ROUND_S, _LONGEST_ROUNDS * _round_s(status))
    quiet_s = now - status.last_round_at
    return f"no round has ended for {for_how_long(quiet_s)}" if quiet_s > patience_s else ""


def _part_in_swarm(status: NodeStatus, now: float) -> NodeHealth:
    facts = status.contribution
    taken_at = facts.get("last_taken_at")
    patience_s = max(_TAKEN_LATELY_S, _ROUNDS_UNTAKEN * _round_s(status))
    if taken_at is not None and now - taken_at <= patience_s:
        taken = f"{name_of(status, facts['last_taken_by'])} fetched our rollouts {for_how_long(now - taken_at)} ago"
        if status.num_connected != 0 or now - taken_at <= _GONE_AFTER_S:
            return NodeHealth(Word.contributing, taken)
        return NodeHealth(Word.learning_alone, f"no peer is connected any more; {taken}")
    return NodeHealth(Word.learning_alone, _why_alone(status, taken_at, now))


def _why_alone(status: NodeStatus, taken_at: float | None, now: float) -> str:
    if status.num_connected is None:
        return "its network is off"
    if taken_at is not None:
        return f"no peer has fetched our rollouts for {for_how_long(now - taken_at)}"
    if status.num_connected == 0:
        return "no peer is connected"
    if not status.last_round.get("exchange/records_published", 0):
        return "nothing was shared yet"
    return "no peer has fetched our rollouts yet"


def name_of(status: NodeStatus, peer_id: str | None) -> str:
    """As in the list of peers; else the end of the peer id."""
    names = (peer["name"] for peer in status.peers if peer["peer_id"] == peer_id)
    return next(names, f"…{peer_id[-8:]}" if peer_id else "somebody")


def _round_s(status: NodeStatus) -> float:
    return float(status.last_round.get("time/round_s", 0.0))
