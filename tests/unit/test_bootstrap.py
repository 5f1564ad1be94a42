"""What `swarm bootstrap` takes from the folder of its last start, and what it refuses."""

from pathlib import Path

import pytest

from swarm.cli.swarm.bootstrap import BootstrapStart, join_through
from swarm.errors import ConfigError, ManifestError
from swarm.machine.node_folder import NodeFolder
from swarm.manifest.manifest import Manifest, changed, create, dump
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity

FOUNDER, STRANGER = Identity(b"f" * 32), Identity(b"s" * 32)
PEER = Identity(b"p" * 32).peer_id
ADDRESS, OTHER = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in (30009, 30010))
LISTEN = {"network.listen": ["/ip4/127.0.0.1/tcp/28000"]}


def manifest_of(founder: Identity, path: Path, edition: int = 1, **content: object) -> str:
    task = {"tasks": [{"name": "lcm"}], "bases": ["bundled"]}
    manifest: Manifest = create(founder, "friends", PROTOCOL_VERSION, 1.8e9, **(task | content))
    for _ in range(edition - 1):
        manifest = changed(manifest)
    path.write_text(dump(manifest, founder))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> NodeFolder:
    found = NodeFolder(tmp_path / "entry")
    found.create()
    return found


def started(files: NodeFolder, source: str | None = None, **given: object) -> BootstrapStart:
    start = BootstrapStart.of(files, {key.replace("__", "."): value for key, value in given.items()}, source, None)
    start.keep(files)
    return start


def test_options_of_the_last_start_count_and_given_ones_win(files: NodeFolder, tmp_path: Path) -> None:
    source = manifest_of(FOUNDER, tmp_path / "m.toml", 2, bootstrap=[ADDRESS], limits={"time_to_live_s": 60.0})
    first = started(files, source, **LISTEN, network__gossip="off", network__initial_peers=[OTHER])
    again = started(files)
    assert again.config == first.config
    assert again.config.network.initial_peers == (OTHER, ADDRESS) and again.config.sharing.time_to_live_s == 60.0
    assert (again.config.swarm_id, again.source) == (again.manifest and again.manifest.id, None)
    other = started(files, network__gossip="libp2p", observability__http_port=9100)
    assert (other.config.network.gossip, other.config.observability.http_port) == ("libp2p", 9100)
    assert other.config.network.listen == first.config.network.listen
    assert started(files).config == other.config
    manifest_of(FOUNDER, tmp_path / "m.toml", 3, bootstrap=[])
    assert started(files, source).config.network.initial_peers == (OTHER,), "addresses of an earlier edition are gone"


def test_nothing_is_written_where_nothing_has_changed(files: NodeFolder, tmp_path: Path) -> None:
    started(files, manifest_of(FOUNDER, tmp_path / "m.toml"), **LISTEN)
    before = {path: path.stat().st_ino for path in (files.bootstrap, files.manifest)}
    started(files, str(tmp_path / "m.toml"), **LISTEN)
    assert {path: path.stat().st_ino for path in before} == before


def test_older_editions_other_swarms_and_another_name_are_refused(files: NodeFolder, tmp_path: Path) -> None:
    started(files, manifest_of(FOUNDER, tmp_path / "m.toml", 2))
    older, foreign = manifest_of(FOUNDER, tmp_path / "old.toml"), manifest_of(STRANGER, tmp_path / "x.toml")
    with pytest.raises(ManifestError, match="must not be older than edition 2, which this node knows, got 1; ask the"):
        started(files, older)
    with pytest.raises(ManifestError, match=r"must stay with its swarm, .*; set another node\.dir"):
        started(files, foreign)
    with pytest.raises(ConfigError, match="leave --name out"):
        started(files, swarm__name="foes")
    files.bootstrap.write_text("network = 3\n")
    with pytest.raises(ConfigError, match=r"got 3 in .*bootstrap\.toml"):
        started(files)


def test_it_tells_what_is_left_to_do() -> None:
    def make(**content: object) -> Manifest:
        return create(FOUNDER, "friends", PROTOCOL_VERSION, 1.8e9, tasks=[{"name": "lcm"}], **content)

    here, there = f"/ip4/10.0.0.1/tcp/28000/p2p/{PEER}", ADDRESS.replace(PEER, FOUNDER.peer_id)
    told = join_through([here], "f.swarm.toml", make(bootstrap=[there]))
    assert told[1].strip() == f"swarm create --update f.swarm.toml --bootstrap {here} --bootstrap {there}"
    of_last_start = join_through([here], None, make(bootstrap=[there]))
    assert "--update friends.swarm.toml" in of_last_start[1]
    assert "edition 1" in of_last_start[0] and "--manifest FILE" in of_last_start[0], "a later edition may have it"
    old = here.replace("28000", "1")
    assert old not in join_through([here], "f.swarm.toml", make(bootstrap=[old, there]))[1], "it has moved"
    assert join_through([here], "f.swarm.toml", make(bootstrap=[here.replace("10.0.0.1", "1.2.3.4")])) == []
    assert here in join_through([here], None, None)[1]
    assert "--key silo-owner.key" in join_through([here], "f.swarm.toml", make(silo=True))[1]
