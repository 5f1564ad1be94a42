"""Names that people can tell apart, for peer ids that they cannot."""

import hashlib

_ADJECTIVES = (
    "amber", "bold", "brave", "breezy", "bright", "brisk", "calm", "candid", "cheerful", "clever", "cosmic", "cosy",
    "curious", "daring", "dapper", "eager", "early", "earnest", "fabled", "fair", "fearless", "festive", "fleet",
    "fond", "frank", "gentle", "gifted", "glad", "golden", "graceful", "happy", "hardy", "honest", "humble", "jolly",
    "keen", "kind", "lively", "loyal", "lucid", "lucky", "mellow", "merry", "mighty", "modest", "neat", "nimble",
    "noble", "patient", "placid", "plucky", "polite", "proud", "quick", "quiet", "ready", "serene", "silver",
    "sincere", "spry", "steady", "sunny", "swift", "wise",
)  # fmt: skip
_ANIMALS = (
    "alpaca", "badger", "beaver", "bee", "bison", "bobcat", "camel", "caribou", "cheetah", "condor", "coyote", "crane",
    "cricket", "dolphin", "dove", "eagle", "egret", "elk", "falcon", "ferret", "finch", "firefly", "fox", "gazelle",
    "gecko", "gibbon", "hare", "hawk", "heron", "hummingbird", "ibex", "ibis", "jackdaw", "jaguar", "kestrel", "kiwi",
    "koala", "lark", "lemur", "lynx", "magpie", "manatee", "marmot", "marten", "meerkat", "mole", "moose", "newt",
    "octopus", "osprey", "otter", "owl", "panda", "pelican", "penguin", "puffin", "quail", "raven", "robin", "salmon",
    "seal", "sparrow", "turtle", "walrus",
)  # fmt: skip


def peer_name(peer_id: str) -> str:
    """Such as `brave-otter-3f`: one of 2**20 names, the same for a peer id everywhere. For the eye, never for trust."""
    digest = hashlib.sha256(b"peer-name:" + peer_id.encode()).digest()
    return f"{_ADJECTIVES[digest[0] % len(_ADJECTIVES)]}-{_ANIMALS[digest[1] % len(_ANIMALS)]}-{digest[2]:02x}"
