"""An upgrade loses nothing: what every released version left on disk is read by the present code."""

import random
import shutil
import tomllib
from pathlib import Path

import pytest

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import SharingSection, load
from swarm.config.section import RENAMED, with_present_names
from swarm.machine.node_folder import NodeFolder
from swarm.manifest.files import read_manifest
from swarm.node.policy_backend import local_backend
from swarm.node.process import run_node
from swarm.observability.metrics import RENAMED as RENAMED_METRICS
from swarm.observability.metrics import read_rows
from swarm.observability.status_file import read_status
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import load as load_identity
from swarm.records.identity_moves import open_export, read_export
from swarm.sharing.reputation import Reputation
from tests.formats.write import PASSPHRASE
from tests.unit.experience_factory import ALICE, NOW, READER, group

FORMATS = Path(__file__).parents[1] / "formats"
VERSIONS = sorted(path.name for path in FORMATS.iterdir() if (path / "status.json").exists())


@pytest.fixture(params=VERSIONS)
def left(request: pytest.FixtureRequest, tmp_path: Path) -> NodeFolder:
    """A copy of what that version left; git keeps no mode of a key."""
    folder = NodeFolder(tmp_path / "node")
    shutil.copytree(FORMATS / request.param, folder.path)
    folder.identity.chmod(0o600)
    (folder.path / "identity.sealed").chmod(0o600)
    return folder


def test_there_is_a_folder_of_small_files() -> None:
    assert "0.1.0" in VERSIONS
    for version in VERSIONS:
        assert sum(path.stat().st_size for path in (FORMATS / version).rglob("*") if path.is_file()) < 100_000


def test_identity_is_the_same_one(left: NodeFolder) -> None:
    assert load_identity(left.identity).peer_id == READER.peer_id
    sealed = read_export(left.path / "identity.sealed")
    assert open_export(sealed, PASSPHRASE).peer_id == READER.peer_id


def test_every_setting_of_the_old_configuration_keeps_its_value(left: NodeFolder) -> None:
    told = with_present_names(tomllib.loads(left.config.read_text()))
    read = load([left.config]).model_dump(mode="json", exclude_none=True)
    for section, settings in told.items():
        for name, value in settings.items():
            if not isinstance(value, dict | list):
                assert read[section][name] == value, f"{section}.{name}"
    assert load([left.config]).policy.lora.rank == 1


def test_the_first_release_has_settings_under_names_of_then() -> None:
    """So the test above reads renamed settings too, and not only ones that still have their name."""
    told = tomllib.loads((FORMATS / "0.1.0" / "config.toml").read_text())
    old = {f"{section}.{name}" for section, settings in told.items() for name in settings}
    assert len(old & RENAMED.keys()) >= 5
    config = load([FORMATS / "0.1.0" / "config.toml"])
    assert config.rollouts.prune_interval_tokens == told["rollouts"]["prune_after"]
    assert list(config.policy.pipeline.machines) == told["policy"]["pipeline"]["crew"]


def test_pool_gives_the_group_that_was_stored(left: NodeFolder) -> None:
    pool = ExperiencePool(left.pool, SharingSection(), lambda: NOW)
    assert pool.draw(4, random.Random(0)) == [group(index=1)]
    assert pool.knows_body(b"\1" * 32)
    pool.close()


def test_status_reputation_and_manifest_are_read(left: NodeFolder) -> None:
    status = read_status(left.status)
    assert (status.peer_id, status.round, status.phase) == (READER.peer_id, 2, "ended")
    assert Reputation(3600.0, lambda: NOW, left.reputation).weight(ALICE.peer_id) > 0.5
    assert read_manifest(str(left.manifest)).name == "friends"


def test_rows_of_metrics_are_read_under_the_present_names(left: NodeFolder) -> None:
    rounds = [row for row in read_rows(left.metrics) if row["kind"] == "round"]
    assert [row["round"] for row in rounds] == [1, 2]
    assert all("train/answers_text_mismatch_total" in row for row in rounds)
    assert not any(RENAMED_METRICS.keys() & row.keys() for row in rounds)


@pytest.mark.essential
def test_node_goes_on_after_the_last_round_of_the_old_version(left: NodeFolder) -> None:
    config = load([left.config], {"node.dir": f'"{left.path}"', "node.max_rounds": "3", "observability.http": "false"})
    before = CheckpointStore(left.checkpoints, 1).load_newest()
    policy = load_policy(config.policy, device="cpu", hash_cache=left.hash_cache)
    assert before is not None
    assert local_backend(config, policy, "a").policy.lineage.has_name(before.state["lineage"]["policy"])
    run_node(config)
    after = CheckpointStore(left.checkpoints, 1).load_newest()
    assert after is not None
    assert (before.round, after.round) == (2, 3)
    assert load_identity(left.identity).peer_id == READER.peer_id
