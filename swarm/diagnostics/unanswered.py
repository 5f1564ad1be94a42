"""Why no peer answers: a plain TCP connection to each address tells more than libp2p does."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

from swarm.diagnostics.finding import Finding, problem
from swarm.network.peers.surroundings import local_addresses
from swarm.network.reach.dial_back import answers_as
from swarm.network.tcp_address import TcpAddress

_TIMEOUT_S = 5.0
_NUM_ADDRESSES = 3
_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_NEWER = "ask the swarm's founder for newer addresses and put them into network.initial_peers"


async def check_unanswered(
    initial: Sequence[TcpAddress],
    hosts: Callable[[], frozenset[str]] = local_addresses,
    *,
    stored: Sequence[TcpAddress] = (),
) -> Finding:
    """The finding "peers" for peers none of which answers. `hosts`: addresses of this machine besides loopback.

    `stored`: where those listened that the node met before.
    """
    addresses = (*initial, *stored)
    kinds = ((len(initial), "initial"), (len(stored), "stored"))
    count = " and ".join(f"{number} {kind}" for number, kind in kinds if number)
    if not hosts() and not any(address.is_loopback for address in addresses):
        fix = "connect this machine to a network; `ip -brief address` shows its interfaces"
        return problem("peers", f"none of {count} peers can be reached: this machine has no network", fix)
    causes = await asyncio.gather(*(_cause(address) for address in addresses[:_NUM_ADDRESSES]))
    told = "; ".join(
        f"{address.host}:{address.port} {what}" for address, (what, _) in zip(addresses, causes, strict=False)
    )
    return problem("peers", f"none of {count} peers answers: {told}", causes[0][1])


async def _cause(address: TcpAddress) -> tuple[str, str]:
    """(what is wrong there, what mends it)"""
    host, port = address.host, address.port
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port, family=_FAMILIES.get(address.kind, socket.AF_UNSPEC))
        writer.transport.abort()
    except ConnectionRefusedError:
        return "refuses the connection: nobody listens there", f"start that peer again, or {_NEWER}"
    except TimeoutError:
        fix = f"let TCP out to port {port} in your firewall (sudo ufw allow out {port}/tcp), or {_NEWER}"
        return f"is silent for {_TIMEOUT_S:.0f} s: it is gone, or a firewall is in between", fix
    except socket.gaierror as error:
        return f"is no name that is known here: {error.strerror}", f"getent hosts {host}  (does DNS work?), or {_NEWER}"
    except OSError as error:
        if error.errno in _NO_WAY:
            return "is in a network that this machine has no way to", f"ip route get {host}  (shows the missing route)"
        return f"cannot be connected to: {error.strerror or error}", _NEWER
    if address.peer_id and not await answers_as(address.peer_id, host, port, timeout_s=_TIMEOUT_S):
        return f"is open, but it is not {address.peer_id} who answers", _NEWER
    return "answers as itself, but does not take part", "start that peer again; its swarm software may be too old"
