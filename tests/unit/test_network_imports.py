"""py-libp2p is imported with stand-ins for packages that it does not need; no other thread may be harmed by that."""

import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
from swarm.config import NetworkSection
from swarm.network.hivemind.transport import HivemindTransport
from swarm.records.identity import Identity
HivemindTransport(NetworkSection(), Identity(b"i" * 32), Path(sys.argv[1]))
print("swarm.network.libp2p.parts" in sys.modules)
"""


def test_a_transport_has_imported_its_gossip_before_it_starts(tmp_path: object) -> None:
    """A node starts its transport while another thread imports and loads the policy."""
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "True", ended.stderr


def test_a_thread_that_looks_for_a_module_meanwhile_passes_over_no_finder() -> None:
    from swarm.network.libp2p.parts import _without

    before = list(sys.meta_path)
    looking = iter(sys.meta_path)  # as the import of a module does
    with _without("no_package_of_this_name"):
        first = next(looking)
    assert [first, *looking] == before == sys.meta_path
