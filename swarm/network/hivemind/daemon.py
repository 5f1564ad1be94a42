"""The libp2p daemon (a Go program) as a child process, the folder of its sockets, and its start as a relay.

The daemon ends by itself when its last control connection closes, or after an idle timeout without any. So it never
outlives its node, not even one that is killed. Only `session` may import this module, since it imports hivemind.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from swarm.errors import NetworkError
from swarm.network.hivemind.daemon_control import DaemonControl
from swarm.network.own_ports import check_port_is_free
from swarm.network.reach.role import RELAY_MAX_BYTES, Role
from swarm.network.tcp_address import TcpAddress

logger = logging.getLogger(__name__)


PREFIX = "swarm-"
OWNER_FILE = "owner"


class RuntimeFolder:
    """A new folder in /tmp that only its owner can enter. End it with `remove`.

    The owner holds a lock on the file `owner` in it. The kernel releases the lock with the process, however it dies, so
    the next session can remove the folder. This also works when process ids are reused, and across containers that
    share /tmp.
    """

    def __init__(self, parent: Path = Path("/tmp")) -> None:  # noqa: S108 - a socket's path has at most 107 bytes  # nosec B108
        """Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Renamed once it is locked, so nobody finds the file of a live owner unlocked.
        unlocked = self.path / f".{OWNER_FILE}"
        self._descriptor = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.write(self._descriptor, str(os.getpid()).encode())
        unlocked.rename(self.path / OWNER_FILE)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_abandoned(parent: Path = Path("/tmp")) -> int:  # noqa: S108  # nosec B108
    """Remove this user's folders whose owner is dead, and return their number. Folders without an owner file stay."""
    return sum(_remove_if_abandoned(folder) for folder in parent.glob(f"{PREFIX}*"))


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it has just disappeared, or never had an owner
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


_READY_LINE = "Peer ID:"
_GREETING = ("Control socket:", "Peer Addrs:", "/ip4/", "/ip6/")
_CRASH = ("panic:", "fatal error:")
_IDLE_TIMEOUT_S = 30
_MAX_CONNECTIONS = 512
_KEPT_CONNECTIONS = 256
"""Above this many connections, some are closed until _KEPT_CONNECTIONS are left."""
_NEW_CONNECTION_S = 20
"""Younger connections are not closed. With the daemon's own two minutes, new connections could fill the memory."""
_STOP_GRACE_S = 1.0
_NUM_LAST_LINES = 5
_INHERITED = (
    "GOGC",
    "GOMEMLIMIT",
    "GOMAXPROCS",
    "GODEBUG",
    "GOTRACEBACK",
    "GOLOG_LOG_LEVEL",
    "GOLOG_LOG_FMT",
    "PATH",
    "TMPDIR",
)
"""Environment variables that the daemon inherits: how a Go program runs and logs, and no secrets of the operator."""
_MEMORY_SETTINGS = {"GOGC": "50", "GOMEMLIMIT": "256MiB"}
"""Garbage is collected when memory has grown by half, not when it has doubled, which saves some MB under load.

Above the limit it is collected more often, at the cost of up to half of the daemon's processor time."""
MAX_DAEMON_BYTES = 512 << 20
"""Largest memory use. In normal work the daemon takes 40 to 100 MB; the rest is what others make it keep."""
_LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """Where a daemon listens, and its role in the network."""

    role: Role
    listen: Sequence[TcpAddress]
    announce: Sequence[TcpAddress] = ()
    """Addresses that other peers are given in place of `listen`."""


class Daemon:
    """One process of the daemon, from `start` to its exit. After it has stopped, it may be started again."""

    def __init__(
        self,
        binary: Path,
        control_socket: Path,
        settings: DaemonSettings,
        *,
        key_file: Path | None = None,
        idle_timeout_s: int = _IDLE_TIMEOUT_S,
    ) -> None:
        """`key_file` holds a libp2p private key; without one the daemon draws a new key.

        `idle_timeout_s`: how long it waits for its first control connection before it ends by itself.
        """
        listen, announce = settings.listen, settings.announce
        self.binary = binary
        self.control_socket = control_socket
        self._listen = tuple(listen)
        self._command = [
            str(binary),
            f"-listen=/unix{control_socket}",
            *([f"-id={key_file}"] if key_file is not None else []),
            f"-hostAddrs={','.join(map(str, listen))}",
            *([f"-announceAddrs={','.join(map(str, announce))}"] if announce else []),
            *settings.role.daemon_flags(),
            "-connManager=1",
            f"-connLo={_KEPT_CONNECTIONS}",
            f"-connHi={_MAX_CONNECTIONS}",
            f"-connGrace={_NEW_CONNECTION_S}s",
            "-natPortMap=0",
            f"-idleTimeout={idle_timeout_s}s",
        ]
        self._environment = settings.role.daemon_environment
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)

    async def start(self, timeout_s: float) -> None:
        """Return when the control socket accepts connections. Raises NetworkError with the daemon's output."""
        self._ready.clear()
        for address in self._listen:
            check_port_is_free(address)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_inherited_environment() | self._environment,
                start_new_session=True,  # Ctrl-C is for the node, which then stops the daemon
            )
        except OSError as error:
            raise NetworkError(
                f"the libp2p daemon must run on this machine, got {error}; "
                'set network.backend = "libp2p", which needs no daemon'
            ) from None
        self._output = asyncio.create_task(self._read_output(self._process))
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ready, self._output}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            if not self._ready.is_set():
                await self.stop()
        if not self._ready.is_set():
            raise NetworkError(f"the libp2p daemon must start within {timeout_s:.0f} s, got: {self.last_output}")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def last_output(self) -> str:
        """The last lines that it printed, joined: the cause of its death or failed start."""
        return " / ".join(self._last_lines) or "no output"

    async def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code, negative for a signal."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def outgrown(self, max_bytes: int = MAX_DAEMON_BYTES) -> int:
        """Wait until the process uses more than `max_bytes` of memory, and return how many bytes it uses."""
        assert self._process is not None, "not started"
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):  # `wait` reports the exit
                if (num_bytes := psutil.Process(self._process.pid).memory_info().rss) > max_bytes:
                    return num_bytes
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def stop(self) -> None:
        """End the process, within a second or by force. Idempotent."""
        if self._process is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            async with asyncio.timeout(_STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._output is not None:
            await self._output

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        has_crashed = False
        while line := await _read_line(process.stdout):
            text = line.decode(errors="replace").strip()
            if text.startswith(_READY_LINE):
                self._ready.set()
            elif text and not text.startswith(_GREETING):
                logger.debug("libp2p daemon: %s", text)
                has_crashed = has_crashed or text.startswith(_CRASH)
                if not has_crashed or text.startswith(_CRASH):  # a crash prints hundreds of lines of stack traces
                    self._last_lines.append(text)


def _inherited_environment() -> dict[str, str]:
    return _MEMORY_SETTINGS | {name: os.environ[name] for name in _INHERITED if name in os.environ}


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    while True:
        try:
            return await stream.readline()
        except ValueError:  # a line longer than the stream's limit is dropped; the pipe must not fill up
            continue


_MAX_STARTS = 10
"""Each start gives the relay our limits three times in five, or more often."""
_ASKING_TIMEOUT_S = 5.0
_HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""A HopMessage of type RESERVE, preceded by its length."""
_LIMIT_FIELD, _DATA_FIELD, _STATUS_FIELD = 4, 2, 5
_STATUS_OK = 100
_MAX_ANSWER_BYTES = 4096
"""libp2p's own limit for a message of this protocol."""
_ASKER_LISTENS = TcpAddress.parse("/ip4/127.0.0.1/tcp/0")


async def start_relay(daemon: Daemon, folder: Path, listen: Sequence[TcpAddress], timeout_s: float) -> None:
    """Restart the started `daemon` until it relays with our limits.

    When it is told to be public, the daemon starts two relays that replace each other: ours from its background work,
    and one with libp2p's limits of 128 KiB and 2 minutes per circuit, which end every transfer. The later one stays.
    Only a peer that asks for a reservation is told which one that is. So a second daemon asks, and the first is
    restarted until ours has stayed: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md#reservation.

    `folder` holds the socket of the second daemon. A relay that cannot be asked, or never gets our limits, is logged
    and left as it is. Raises NetworkError where the daemon does not start again.
    """
    control = DaemonControl(daemon.control_socket)
    for num_starts in range(1, _MAX_STARTS + 1):
        try:
            peer_id, addresses = await control.identity()
            nearby = [str(_nearby(one)) for one in listen if one.port]  # an announced address may be beyond a router
            granted = await granted_bytes(daemon.binary, folder, peer_id, addresses=[*nearby, *addresses])
        except NetworkError as error:
            logger.info("could not find out what this relay grants: %s", error)
            return
        if granted is None or granted >= RELAY_MAX_BYTES:
            logger.debug("relay with our limits at start %d", num_starts)
            return
        if num_starts < _MAX_STARTS:
            await daemon.stop()
            await daemon.start(timeout_s)
    logger.warning("this relay ends circuits after %d bytes, too few for bodies; restart it", granted)


async def granted_bytes(binary: Path, folder: Path, peer_id: str, addresses: Sequence[str]) -> int | None:
    """Return how many bytes a circuit through a relay may carry each way; None for no limit.

    `binary` is the program of the daemon that asks, `folder` holds its socket. Raises NetworkError: no answer within
    five seconds, or a refusal.
    """
    control_socket = folder / "asking.sock"
    asker = Daemon(binary, control_socket, DaemonSettings(Role(is_full=False, is_local=True), [_ASKER_LISTENS]))
    try:
        async with asyncio.timeout(_ASKING_TIMEOUT_S):
            await asker.start(_ASKING_TIMEOUT_S)
            control = DaemonControl(control_socket)
            await control.connect(peer_id, addresses)
            reader, writer = await control.open_stream(peer_id, _HOP_PROTOCOL)
            try:
                writer.write(_RESERVE)
                return data_limit(await _read_message(reader))
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise NetworkError(f"a relay must answer within {_ASKING_TIMEOUT_S:.0f} s") from None
    except (OSError, EOFError, DecodeError, ValueError) as error:
        raise NetworkError(f"a relay must grant a reservation, got {error or type(error).__name__}") from None
    finally:
        await asker.stop()


def _nearby(address: TcpAddress) -> TcpAddress:
    """Return the address at which this machine itself reaches the listener."""
    if not address.is_wildcard:
        return address
    return replace(address, host="::1" if address.kind == "ip6" else "127.0.0.1")


def data_limit(answer: bytes) -> int | None:
    """Return the bytes that a HopMessage grants a circuit each way; None for no limit. Raises ValueError for a refusal."""
    fields = _fields(answer)
    if (status := fields.get(_STATUS_FIELD)) != _STATUS_OK:
        raise ValueError(f"status {status}")
    limit = fields.get(_LIMIT_FIELD)
    granted = _fields(limit).get(_DATA_FIELD) if isinstance(limit, bytes) else None
    return granted if isinstance(granted, int) and granted else None


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    length, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > _MAX_ANSWER_BYTES:
            raise ValueError(f"a message of more than {_MAX_ANSWER_BYTES} bytes")
        if not byte & 0x80:
            return await reader.readexactly(length)


def _fields(message: bytes) -> dict[int, int | bytes]:
    """Return {field number: value} of a protobuf message that has no class here. Raises DecodeError."""
    return {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(message))}
