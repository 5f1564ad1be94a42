"""Write what the present code leaves on disk: `python -m tests.formats.write tests/formats/VERSION`, once per release.

A node of two rounds with the smallest adapter, its identity in the clear and sealed, the pool with one group of another
author, that author's standing, and a manifest. Under 100 kB; never rewritten once released.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from swarm.config import LOCAL_SETTINGS, SharingSection, load
from swarm.manifest.manifest import create, dump
from swarm.node.process import run_node
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity, write_seed
from swarm.records.identity_moves import write_export
from swarm.sharing.reputation import Reputation
from tests.unit.experience_factory import ALICE, NOW, READER, group

PASSPHRASE = "correct horse battery"
SETTINGS = {
    "node.max_rounds": "2",
    "node.threads": "1",
    "network.backend": '"off"',
    "sharing.swarm_groups": "0",
    "policy.lora.rank": "1",
    "policy.lora.targets": '["q_proj"]',
    "rollouts.groups_per_round": "2",
    "evaluation.tasks_per_source": "1",
    "checkpoint.keep": "1",
}
LEFT_OUT = ("lock", "logs", "weight_hashes.json", "metrics.jsonl.1")


def write(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "node"
        folder.mkdir()
        write_seed(READER, folder / "identity.key")
        run_node(load([], SETTINGS | {"node.dir": f'"{folder}"'}))
        fill(folder)
        text = (folder / "config.toml").read_text().replace(str(folder), "runs/node")
        (folder / "config.toml").write_text(text)
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*LEFT_OUT))


def fill(folder: Path) -> None:
    """What a node alone does not come by: others."""
    pool = ExperiencePool(folder / "pool.sqlite", SharingSection(), lambda: NOW)
    pool.add(b"\1" * 32, NOW + 600, NOW, [group(index=1)])
    pool.close()
    reputation = Reputation(3600.0, lambda: NOW, folder / "reputation.json")
    reputation.admitted(ALICE.peer_id)
    reputation.save()
    write_export(READER, folder / "identity.sealed", PASSPHRASE)
    founder = Identity(b"f" * 32)
    tasks = [load().tasks.sources[0].model_dump(exclude=LOCAL_SETTINGS)]
    manifest = create(founder, "friends", PROTOCOL_VERSION, NOW, tasks=tasks, bases=["bundled"])
    (folder / "manifest.toml").write_text(dump(manifest, founder))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
