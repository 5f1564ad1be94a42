"""A pipeline of real processes: `swarm stage` several times and one `swarm run` that drives them."""

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.config import dump_toml, parse
from swarm.records import identity as identities
from tests.e2e.node_process import NodeProcess, node_settings, wait_for
from tests.swarm_process import SwarmProcess

_DEADLINE_S = 240.0


class StageProcess:
    """One `swarm stage` process."""

    def __init__(self, folder: Path, settings: dict[str, Any], *arguments: str) -> None:
        self.folder = folder
        self.peer_id = settings_identity(folder)
        config = folder.parent / f"{folder.name}.toml"
        config.write_text(dump_toml(parse(settings)))
        self._command = ["stage", str(config), *arguments]
        self.output = folder.parent / f"{folder.name}.out"
        self.process = self.start()

    def start(self) -> SwarmProcess:
        """Start the process, also after it was killed, then at another port."""
        self.process = SwarmProcess(*self._command, output=self.output)
        return self.process

    def kill_9(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill_9()


def settings_identity(folder: Path) -> str:
    """Return the peer id of a node's folder, making an identity where there is none."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return identities.load_or_create(folder / "identity.key").peer_id


@dataclass
class PipelineProcesses:
    """All processes of one pipeline."""

    stages: list[StageProcess]
    driver: NodeProcess

    def step_after(self, version: int, deadline_s: float = _DEADLINE_S) -> dict[str, Any]:
        """Wait for the first step that raises the policy's version above `version`; returns its row."""
        return wait_for(
            lambda: row if (row := self.driver.last_round).get("policy_version", 0) > version else None,
            f"a step after version {version}",
            self.driver,
            deadline_s=deadline_s,
        )

    def holders(self) -> list[StageProcess]:
        """Return who holds which stage, without the driver's own, from the driver's log."""
        log = self.driver.output.read_text()
        peers = re.findall(r"are held by (12D3\w+)", log)
        for stage, peer_id in re.findall(r"stage (\d+) continues at (\w+)", log):
            peers[int(stage)] = peer_id
        return [stage for peer_id in peers for stage in self.stages if stage.peer_id == peer_id]

    def lose(self, victim: StageProcess, *, freeze: bool = False) -> tuple[float, dict[str, Any]]:
        """Kill a stage's process, or stop it where it is (SIGSTOP); it is up to the caller to end that one.

        (seconds to the end of the first step that was begun and applied after that, its row)
        """
        killed_at, num_before = time.time(), len(self.recoveries_s())
        if freeze:
            victim.process.send_signal(signal.SIGSTOP)
        else:
            victim.kill_9()

        early: set[int] = set()  # rounds that were over before the loss was seen; their rows may be written late

        def stepped() -> dict[str, Any] | None:
            later = [row for row in self.driver.rounds if row["time_s"] - row["time/train_s"] > killed_at]
            if len(self.recoveries_s()) == num_before:
                early.update(row["round"] for row in later)
            return next((row for row in later if row["round"] not in early and not row.get("train/skip_reason")), None)

        row = wait_for(stepped, "a step after a loss", self.driver, deadline_s=_DEADLINE_S)
        return row["time_s"] - killed_at, row

    def recoveries_s(self) -> list[float]:
        """Return how long each recovery took, from the moment the driver noticed the loss."""
        return [float(text) for text in re.findall(r"complete again after ([\d.]+) s", self.driver.output.read_text())]


def free_ports(count: int) -> list[int]:
    """Return loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def pipeline_processes(
    folder: Path,
    num_stages: int,
    *,
    backend: str = "libp2p",
    layers: Sequence[str] = (),
    pipeline: dict[str, Any] | None = None,
    **sections: Any,
) -> Iterator[PipelineProcesses]:
    """Run stages and the driver. `layers`: --layers of the first stages."""
    folders = [folder / f"stage-{number}" for number in range(num_stages)]
    listen = [f"/ip4/127.0.0.1/tcp/{port}" for port in free_ports(num_stages)]
    members = [f"{address}/p2p/{settings_identity(one)}" for address, one in zip(listen, folders, strict=True)]
    driver_folder = folder / "driver"
    by_hand = [address.rpartition("/")[2] for address in members[: len(layers)]]
    table = {
        "driver": settings_identity(driver_folder),
        "machines": members,
        "self_assigned": by_hand,
        **(pipeline or {}),
    }
    policy = {**sections.pop("policy", {}), "pipeline": table}
    network = {"backend": backend, "gossip": "off"}
    with contextlib.ExitStack() as stack:
        stages = []
        for number, one in enumerate(folders):
            arguments = ("--layers", layers[number]) if number < len(layers) else ()
            here = {"node": {"dir": str(one), "threads": 1}, "policy": policy}
            stages.append(StageProcess(one, here | {"network": {**network, "listen": [listen[number]]}}, *arguments))
            stack.callback(stages[-1].end)
        settings = node_settings(driver_folder, network=network, policy=policy, **sections)
        yield PipelineProcesses(stages, stack.enter_context(NodeProcess(settings)))
