"""A crew of real processes: `swarm stage` several times and one `swarm run` that drives them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.config import dump_toml, parse
from swarm.errors import NodeNotRunningError
from swarm.observability.status_file import read_status
from swarm.records import identity as identities
from tests.e2e.node_process import NodeProcess, node_settings, wait_for


class StageProcess:
    """One `swarm stage`; killed on exit if it still runs."""

    def __init__(self, folder: Path, settings: dict[str, Any], *arguments: str) -> None:
        self.folder = folder
        self.peer_id = settings_identity(folder)
        config = folder.parent / f"{folder.name}.toml"
        config.write_text(dump_toml(parse(settings)))
        self.output = folder.parent / f"{folder.name}.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swarm.cli.main", "stage", str(config), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def address(self) -> str:
        """Waits until it serves."""

        def announced() -> str | None:
            try:
                status = read_status(self.folder / "status.json")
            except NodeNotRunningError:
                return None
            return status.addresses[0] if status.pid == self.process.pid and status.addresses else None

        return wait_for(announced, "an address", self)

    def kill_9(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill_9()


def settings_identity(folder: Path) -> str:
    """Peer id of a node's folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return identities.load_or_create(folder / "identity.key").peer_id


@dataclass
class CrewProcesses:
    """All processes of one crew."""

    stages: list[StageProcess]
    driver: NodeProcess

    def step_after(self, version: int) -> tuple[int, float]:
        """(policy version, when it was seen) once it is above `version`; seconds of `time.monotonic`."""
        reached = wait_for(
            lambda: v if (v := self.driver.last_round.get("policy_version", 0)) > version else None,
            f"a step after version {version}",
            self.driver,
        )
        return reached, time.monotonic()

    def held_by(self, start: int, stop: int) -> list[StageProcess]:
        """Processes of which the driver has said that they got these layers, the latest last."""
        lines = [line for line in self.driver.output.read_text().splitlines() if f"layers [{start}, {stop})" in line]
        ids = [line.rpartition("held by ")[2].strip() for line in lines if "held by" in line]
        return [stage for peer_id in ids for stage in self.stages if stage.peer_id == peer_id]


@contextlib.contextmanager
def crew_processes(
    folder: Path,
    num_stages: int,
    *,
    layers: Sequence[str] = (),
    pipeline: dict[str, Any] | None = None,
    **sections: Any,
) -> Iterator[CrewProcesses]:
    """Stages first, then the driver that is told where they are. `layers`: --layers of the first ones."""
    folders = [folder / f"stage-{number}" for number in range(num_stages)]
    crew = [settings_identity(one) for one in folders]
    table = {"driver": settings_identity(folder / "driver"), "crew": crew, **(pipeline or {})}
    network, common = {"backend": "libp2p", "gossip": "off"}, dict[str, Any](policy={**sections.pop("policy", {})})

    def settings(one: Path, members: Sequence[str]) -> dict[str, Any]:
        policy = {**common["policy"], "pipeline": {**table, "crew": list(members)}}
        return {"node": {"dir": str(one), "threads": 1}, "network": network, "policy": policy}

    with contextlib.ExitStack() as stack:
        stages = []
        for number, one in enumerate(folders):
            by_hand = ("--layers", layers[number]) if number < len(layers) else ()
            stages.append(StageProcess(one, settings(one, crew), *by_hand))
            stack.callback(stages[-1].end)
        addresses = [stage.address() for stage in stages]
        driver_folder = folder / "driver"
        driver = node_settings(driver_folder, **sections)
        for name, section in settings(driver_folder, addresses).items():
            driver[name] = driver.get(name, {}) | section
        yield CrewProcesses(stages, stack.enter_context(NodeProcess(driver)))
