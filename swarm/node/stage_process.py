"""`swarm stage`: one machine of a pipeline. It trains nothing on its own and waits for the commands of its driver.

asyncio loop (this thread)                      command thread
transport ─ signed commands, from the driver ─▶ StageHost: layers, adapters, copies of neighbours' adapters
status file · a line on the terminal ◀───────── what it holds
"""

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from swarm.config import Config, NetworkSection
from swarm.errors import ConfigError
from swarm.machine.memory import keep_heaps_small
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import close_to_others
from swarm.machine.stop_signals import obey_stop_signals
from swarm.network.commands.envelope import CommandChannel
from swarm.network.commands.service import CommandService
from swarm.network.transport import Transport
from swarm.node.crash_report import crash_reports
from swarm.observability.logging_setup import set_up_logging
from swarm.observability.status_file import NodeStatus, StatusFile
from swarm.records import identity as identities
from swarm.records.identity import Identity, IdentityLock, Unlock, is_peer_id
from swarm.sharing.index import EntryValidator
from swarm.silo.silo_transport import node_transport

if TYPE_CHECKING:
    from swarm.pipeline.stage.stage_host import StageHost

logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 1.0
_SAY_INTERVAL_S = 30.0

Layers = tuple[int, int]
"""Range [start, stop) of layers."""


def run_stage(config: Config, layers: Layers | None = None, unlock: Unlock | None = None) -> None:
    """Serve until a signal. Blocks. Raises SwarmError for whatever the user can fix.

    `unlock` opens an identity that is encrypted on disk.
    """
    keep_heaps_small(computes=True)
    close_to_others()
    folder = NodeFolder(config.node.dir, config.node.identity)
    folder.create()
    with IdentityLock(folder.path) as lock:
        identity = identities.load_or_create(folder.identity, unlock)
        lock.claim(identity)
        if identity.peer_id not in config.policy.pipeline.members:
            raise ConfigError(
                f"a stage must be a machine of the pipeline, got {identity.peer_id}; add it to policy.pipeline.machines"
                " everywhere"
            )
        if layers is not None and identity.peer_id not in config.policy.pipeline.self_assigned:
            raise ConfigError(
                f"a machine with --layers must be named in policy.pipeline.self_assigned, got {identity.peer_id}, "
                "which is not; add it on all machines, above all on the driver, or leave out --layers"
            )
        check_pipeline(config)
        set_up_logging(folder.logs, config.observability.log_level, config.observability.max_log_mib * 2**20)
        with crash_reports(folder):
            asyncio.run(StageProcess(config, folder, identity, layers=layers).run_until_signal())


def check_pipeline(config: Config) -> None:
    """Raises ConfigError unless the settings name a pipeline that can be reached."""
    pipeline = config.policy.pipeline
    for peer_id in (pipeline.driver, *pipeline.members):
        if not is_peer_id(peer_id):
            raise ConfigError(f"policy.pipeline must name peer ids, got {peer_id!r}; see `swarm identity show`")
    if config.network.backend == "off":
        raise ConfigError('a pipeline needs a network, got network.backend = "off"; set network.backend = "hivemind"')


def network_with_stages(config: Config, peer_id: str) -> NetworkSection:
    """Return the network settings of a machine, changed where it belongs to a pipeline.

    It also joins through the other machines, waits long enough for commands, and has no rate limits for them, since each
    sampled token is a request. The limits hold for all other peers.
    """
    pipeline, network = config.policy.pipeline, config.network
    if not pipeline.is_on:
        return network
    others = tuple(address for address in pipeline.addresses if not address.endswith(f"/p2p/{peer_id}"))
    return network.model_copy(
        update={
            "initial_peers": tuple(dict.fromkeys((*network.initial_peers, *others))),
            "request_timeout_s": max(network.request_timeout_s, pipeline.action_timeout_s),
            "unlimited_peers": tuple(dict.fromkeys((*network.unlimited_peers, pipeline.driver, *pipeline.members))),
        }
    )


class StageProcess:
    """Owns every part of one stage for one run of the process."""

    def __init__(self, config: Config, folder: NodeFolder, identity: Identity, layers: Layers | None) -> None:
        self._config = config
        self._folder = folder
        self._identity = identity
        self._layers = layers
        self._stop = asyncio.Event()
        self._started_at = time.time()
        self._status_file = StatusFile(folder.status)
        self._said = ""
        self._said_at = 0.0

    async def run_until_signal(self) -> None:
        """Stop cleanly on SIGINT and SIGTERM, whatever the command thread does; a second signal ends the process at once."""
        obey_stop_signals(self._on_signal)
        await self.run()
        logging.shutdown()
        os._exit(0)  # a command may still be computing; nobody waits for it

    async def run(self) -> None:
        """Load, serve until stopped, and stop."""
        self._say(f"{self._identity.peer_name} ({self._identity.peer_id}) loads")
        loading = asyncio.create_task(asyncio.to_thread(self._build_host))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                await self._serve(loading.result())
        finally:
            stopping.cancel()

    async def _serve(self, host: "StageHost") -> None:
        network = network_with_stages(self._config, self._identity.peer_id).model_copy(update={"gossip": "off"})
        validator = EntryValidator(self._config.swarm_id)
        config = self._config.model_copy(update={"network": network})
        transport = node_transport(config, self._identity, self._folder, validator=validator)
        assert transport is not None, "checked by check_pipeline"
        pipeline = self._config.policy.pipeline
        channel = CommandChannel(config.swarm_id, pipeline.name, driver=pipeline.driver, members=pipeline.members)
        service = CommandService(
            channel,
            transport,
            carry_out=host.carry_out,
            max_payload=host.max_payload_bytes,
            carry_out_relayed=host.carry_out_relayed,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(transport.stop)
            stack.push_async_callback(service.close)
            stack.callback(self._write_status, None, "ended")
            await transport.start()
            while not self._stop.is_set():
                self._write_status(transport, "serving")
                held = _held(host)
                self._say(f"{held} · {_doing(host, service)}", held)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _STATUS_INTERVAL_S)
        self._say("stopped")

    def _build_host(self) -> "StageHost":
        """Do everything that imports or loads for seconds."""
        import torch

        from swarm.pipeline.commands import StageSettings
        from swarm.pipeline.stage.stage_host import StageHost, base_model, part_by_hand

        if self._config.node.threads:
            torch.set_num_threads(self._config.node.threads)
        base = base_model(self._config.policy, self._config.node.device)
        pipeline = self._config.policy.pipeline
        settings = StageSettings(
            weight_decay=self._config.training.weight_decay,
            max_states=pipeline.max_states,
            max_in_flight=len(pipeline.members) + 1,  # a pipeline has no more stages than machines and the driver
        )
        fixed = None if self._layers is None else part_by_hand(base, *self._layers)
        return StageHost(base, settings, fixed=fixed)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            os._exit(130)
        self._stop.set()

    def _say(self, line: str, what: str = "") -> None:
        """Print a line at once when `what` it reports has changed, otherwise at intervals."""
        what, now = what or line, time.monotonic()
        if what != self._said or now - self._said_at > _SAY_INTERVAL_S:
            self._said, self._said_at = what, now
            with contextlib.suppress(OSError):  # its output may go to a file on a full disk
                print(time.strftime("%H:%M:%S"), line, flush=True)

    def _write_status(self, transport: Transport | None, phase: str) -> None:
        status = NodeStatus(
            peer_id=self._identity.peer_id,
            peer_name=self._identity.peer_name,
            pid=os.getpid(),
            started_at=self._started_at,
            phase=phase,
            addresses=transport.addresses() if transport else (),
            written_at=time.time(),
            command="stage",
        )
        self._status_file.write(status)


def _held(host: "StageHost") -> str:
    return ", ".join(f"layers [{part.start}, {part.stop})" for part in host.status().parts) or "no layers"


def _doing(host: "StageHost", service: CommandService) -> str:
    status = host.status()
    version = f"version {max(status.versions)} · " if status.versions else ""
    return f"{version}{status.num_copies} copies · {service.num_commands} commands"
