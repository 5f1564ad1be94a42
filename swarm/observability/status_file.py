"""`status.json`: what a running node says about itself, rewritten as a whole every few seconds."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swarm.errors import NodeNotRunningError


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of one node, as its last writing knew it."""

    peer_id: str
    peer_name: str
    pid: int
    started_at: float
    """Seconds since the epoch."""
    phase: str
    """starting, evaluating, learning, merging, serving or ended."""
    http_port: int = 0
    addresses: tuple[str, ...] = ()
    """Multiaddresses that others can pass as initial peers."""
    round: int = 0
    policy_version: int = 0
    last_round: dict[str, Any] = field(default_factory=dict)
    """Last row of metrics.jsonl of kind round."""
    final_merge: dict[str, Any] = field(default_factory=dict)
    """Last row of kind final_merge; empty where there was none."""

    def write(self, path: Path) -> None:
        """Replace the file at once: a reader sees the old or the new one."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(path)

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote it exists and has not said that it ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return self.phase != "ended"


def read_status(path: Path) -> NodeStatus:
    """Raises NodeNotRunningError where no node has ever written one, or it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return NodeStatus(**{**data, "addresses": tuple(data["addresses"])})
    except FileNotFoundError:
        raise NodeNotRunningError(
            f"a node's folder must hold status.json, got none in {path.parent}; start it with `swarm run` or name its folder"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise NodeNotRunningError(f"status.json must be readable, got {path}: {error}; restart the node") from None
