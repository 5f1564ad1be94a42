"""A manifest says what its founder signed, or nothing: round trip, every change, every kind of hostile file."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import DEMO_TASKS, LOCAL_SETTINGS, SharingSection
from swarm.errors import ManifestError
from swarm.manifest import manifest as manifests
from swarm.manifest.files import check_joined, read_manifest
from swarm.manifest.manifest import (
    MAX_BYTES,
    Manifest,
    ManifestLimits,
    changed,
    check_protocol,
    create,
    dump,
    manifest_id,
    parse,
)
from swarm.records.identity import Identity

FOUNDER, MALLORY = Identity(b"f" * 32), Identity(b"m" * 32)
ADDRESS = f"/ip4/10.0.0.1/tcp/28000/p2p/{MALLORY.peer_id}"
TASKS = [task.model_dump(exclude=LOCAL_SETTINGS) for task in DEMO_TASKS[:2]]
FILE_TASK = {"kind": "jsonl", "name": "own", "verifier": "numeric", "sha256": "ab" * 32}


def make(founder: Identity = FOUNDER, name: str = "friends", **content: Any) -> Manifest:
    content = {
        "tasks": [*TASKS, FILE_TASK],
        "bases": ["bundled", "Qwen/Qwen2.5-0.5B-Instruct@7ae5576"],
        "lineages": ["cd" * 16],
        "bootstrap": [ADDRESS],
        "limits": {"time_to_live_s": 300, "max_group_size": 16},
        "gossip": "libp2p",
        "description": "sums, größer",
    } | content
    return create(founder, name, 1, 1.8e9, **content)


MANIFEST = make()
TEXT = dump(MANIFEST, FOUNDER)
DATA = TEXT.encode()


def signed_by(identity: Identity, content: dict[str, Any]) -> bytes:
    """A well signed file of any content, valid or not."""
    content = {key: value for key, value in content.items() if key != "signature"}
    return tomli_w.dumps(content | {"signature": identity.sign(manifests._signed_bytes(content)).hex()}).encode()


def refused(data: bytes, founder: str | None = None) -> str:
    with pytest.raises(ManifestError) as caught:
        parse(data, founder)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


def test_round_trip() -> None:
    assert parse(DATA) == parse(DATA, FOUNDER.peer_id) == MANIFEST
    assert MANIFEST.id == manifest_id(FOUNDER.peer_id, "friends")
    assert MANIFEST.limits.time_to_live_s == 300.0
    assert MANIFEST.limits.max_answer_tokens is None
    assert MANIFEST.tasks[0].parameters == TASKS[0]["parameters"]
    assert MANIFEST.created_at.isoformat() == "2027-01-15T08:00:00+00:00"
    assert dump(make(), FOUNDER) == TEXT, "signing is deterministic"


def test_id_is_bound_to_founder_and_name() -> None:
    assert FOUNDER.peer_id == "12D3KooWDN7K2vo9rDBdpWGjDwMsQJaWvSqJxKZKg5ywyS42P8aq"
    assert MANIFEST.id == "8cde3423badcc3017a44ef1ac8d96244"  # printf 'swarm-id:PEER_ID/friends' | sha256sum
    ids = {make(founder, name).id for founder in (FOUNDER, MALLORY) for name in ("friends", "others")}
    assert len(ids) == 4


def test_comments_layout_and_order_do_not_matter() -> None:
    content = tomllib.loads(TEXT)
    reordered = dict(reversed(content.items()))
    text = tomli_w.dumps(reordered, multiline_strings=True).replace(
        "\n[limits]", "\n# a comment\n\n  [limits]  # another"
    )
    assert text != TEXT
    assert parse(text.replace("\n", "\r\n").encode()) == MANIFEST


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def altered(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value.replace(year=2028) if hasattr(value, "year") else value[:-1] + ("a" if value[-1] != "a" else "b")


@pytest.mark.parametrize("path", leaves(tomllib.loads(TEXT)), ids=lambda path: ".".join(map(str, path)))
def test_every_altered_or_removed_value_breaks_the_signature(path: tuple[Any, ...]) -> None:
    for change in (altered, None):
        content = tomllib.loads(TEXT)
        *parents, last = path
        target: Any = content
        for key in parents:
            target = target[key]
        if change is None:
            del target[last]
        else:
            target[last] = change(target[last])
        message = refused(tomli_w.dumps(content).encode())
        assert "signature" in message


@pytest.mark.parametrize("extra", [{"gossip": "daemon"}, {"more": 1}, {"limits": {"max_group_size": 16.0}}])
def test_added_value_or_changed_type_breaks_the_signature(extra: dict[str, Any]) -> None:
    content = tomllib.loads(TEXT)
    content = content | extra | ({"limits": content["limits"] | extra["limits"]} if "limits" in extra else {})
    assert "signature" in refused(tomli_w.dumps(content).encode())


def test_nobody_else_can_make_a_manifest_of_the_same_id() -> None:
    content = tomllib.loads(TEXT)
    assert "changed after it was signed" in refused(signed_by(MALLORY, content))
    taken = signed_by(MALLORY, content | {"founder": MALLORY.peer_id})
    assert "another founder's swarm" in refused(taken)
    with pytest.raises(ManifestError, match="signed by its founder"):
        dump(MANIFEST, MALLORY)
    own = dump(make(MALLORY), MALLORY).encode()
    assert parse(own).founder == MALLORY.peer_id
    assert FOUNDER.peer_id in refused(own, FOUNDER.peer_id)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "signature"),
        (b"x" * (MAX_BYTES + 1), "bytes"),
        (b"a" + b".a" * 5000 + b" = 1", "lines"),
        (b"\xff\xfe", "TOML in UTF-8"),
        (b"not toml", "TOML"),
        (b"\x89PNG\r\n\x1a\n", "TOML"),
        (b"a = " + b"[" * 4000, "TOML"),
        (b"a = " + b"{b = " * 800, "TOML"),
        (b".".join([b"a"] * 2000) + b" = 1", "levels"),
        (b"a = " + b"9" * 4000, "64-bit"),
        (b"a = 0x" + b"f" * 4000, "64-bit"),
        (b"a = nan", "finite"),
        (b"a = 0001-01-01T00:00:00+23:59", "UTC"),
        (b"a = 12:00:00", "UTC"),
        (b"founder = 1\nsignature = 2", "signature"),
        (b'founder = "x"\nsignature = "' + b"zz" * 64 + b'"', "signature of its founder"),
        (b'founder = "\\u001b[31m"\nsignature = "' + b"00" * 64 + b'"', "signature of its founder"),
    ],
)
def test_hostile_file_is_refused_in_one_line(data: bytes, told: str) -> None:
    assert told in refused(data)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format"),
        ({"protocol": 0}, "protocol"),
        ({"protocol": "one"}, "protocol"),
        ({"name": "../up"}, "name"),
        ({"name": "friends\n"}, "name"),
        ({"founder": ["x"]}, "founder"),
        ({"id": "00" * 16}, "id must be"),
        ({"created_at": "now"}, "created_at"),
        ({"edition": 0}, "edition"),
        ({"description": "\x1b[2J"}, "description"),
        ({"description": "x" * 501}, "description"),
        ({"bases": ["../../etc"]}, "bases"),
        ({"bases": ["a/b/c"]}, "bases"),
        ({"bases": ["a/b@../../x"]}, "bases"),
        ({"bases": "bundled"}, "bases"),
        ({"lineages": ["zz"]}, "lineages"),
        ({"bootstrap": ["/ip4/1.2.3.4/tcp/1"]}, "end in /p2p/PEER_ID"),
        ({"bootstrap": [f"http://x/p2p/{MALLORY.peer_id}"]}, "end in /p2p/PEER_ID"),
        ({"bootstrap": [ADDRESS] * 65}, "bootstrap"),
        ({"gossip": "pigeons"}, "gossip"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [TASKS[0], TASKS[0]]}, "different names"),
        ({"tasks": [{**TASKS[0], "sha256": "ab" * 32}]}, "sha256"),
        ({"tasks": [{"kind": "jsonl", "name": "own"}]}, "sha256"),
        ({"tasks": [{**FILE_TASK, "path": "/etc/passwd"}]}, "path"),
        ({"tasks": [{"kind": "shell", "name": "x"}]}, "kind"),
        ({"limits": {"time_to_live_s": 1e9}}, "time_to_live_s"),
        ({"limits": {"max_group_size": 1}}, "max_group_size"),
        ({"limits": {"lr": 1.0}}, "lr"),
        ({"\x1b[31m": 1}, "x1b"),
    ],
)
def test_well_signed_nonsense_is_refused(change: dict[str, Any], told: str) -> None:
    content = tomllib.loads(TEXT) | change
    identity = FOUNDER
    if change.keys() & {"name"}:  # the id follows
        content["id"] = manifest_id(FOUNDER.peer_id, content["name"])
    assert told in refused(signed_by(identity, content))


def test_other_protocol_version_is_told_with_what_to_do() -> None:
    check_protocol(MANIFEST, 1)
    with pytest.raises(ManifestError, match="must speak protocol version 2, got 1; ask the founder"):
        check_protocol(MANIFEST, 2)
    with pytest.raises(ManifestError, match="got 1; update this software"):
        check_protocol(MANIFEST, 0)


def test_next_edition_keeps_the_id_and_the_day() -> None:
    later = changed(MANIFEST, bootstrap=[])
    assert (later.id, later.created_at, later.edition, later.bootstrap) == (MANIFEST.id, MANIFEST.created_at, 2, ())
    assert parse(dump(later, FOUNDER).encode()) == later


def test_folder_stays_with_its_swarm_and_its_latest_edition(tmp_path: Path) -> None:
    kept = tmp_path / "manifest.toml"
    check_joined(kept, MANIFEST)  # the first is trusted
    later = changed(MANIFEST, bootstrap=[])
    kept.write_text(dump(later, FOUNDER))
    check_joined(kept, later)
    check_joined(kept, changed(later))
    with pytest.raises(ManifestError, match="older than edition 2"):
        check_joined(kept, MANIFEST)
    with pytest.raises(ManifestError) as caught:
        check_joined(kept, make(MALLORY))
    assert FOUNDER.peer_id in str(caught.value)
    assert MALLORY.peer_id in str(caught.value)
    with pytest.raises(ManifestError, match=r"another node\.dir"):
        check_joined(kept, make(name="others"))


def test_limits_are_settings_of_the_same_names() -> None:
    assert set(ManifestLimits.model_fields) <= set(SharingSection.model_fields)
    defaults = {name: getattr(SharingSection(), name) for name in ManifestLimits.model_fields}
    assert ManifestLimits(**defaults).model_dump() == defaults


@pytest.mark.parametrize(
    ("source", "told"),
    [("nowhere.toml", "an existing file"), ("ftp://x/y", "http"), ("file:///etc/passwd", "http"), (".", "readable")],
)
def test_source_that_cannot_be_read(source: str, told: str) -> None:
    with pytest.raises(ManifestError, match=told):
        read_manifest(source)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_file_is_the_same_manifest_or_a_manifest_error(data: st.DataObject) -> None:
    mutated = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 4))):
        at, length = data.draw(st.integers(0, len(mutated))), data.draw(st.integers(0, 40))
        mutated[at : at + length] = data.draw(st.binary(max_size=40))
    try:
        assert parse(bytes(mutated)) == MANIFEST
    except ManifestError as error:
        assert str(error).isprintable()


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(alphabet="ab.=\"[]{}'\n#0x:-T", max_size=120).map(str.encode)))
def test_arbitrary_bytes_are_a_manifest_error(data: bytes) -> None:
    refused(data)
