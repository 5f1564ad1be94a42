"""What of a foreign group is usable, by lineage."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.policy.policy import Policy
from swarm.training.experience import ExperienceTranslator
from swarm.types import Lineage
from tests.unit.tiny_models import sampled_groups


@pytest.mark.parametrize(
    ("same_policy", "same_tokenizer", "usable", "known"),
    [(True, True, True, True), (False, True, False, True), (False, False, False, False)],
)
def test_logprobs_weigh_within_a_lineage_and_measure_within_a_tokenizer(
    make_policy: Callable[..., Policy], same_policy: bool, same_tokenizer: bool, usable: bool, known: bool
):
    policy = make_policy()
    (sampled,) = sampled_groups(policy, ("Hi",))
    own = policy.lineage
    lineage = Lineage(own.policy if same_policy else "1" * 32, own.tokenizer if same_tokenizer else "2" * 32)
    got = ExperienceTranslator(policy, 0.0).foreign("Hi", replace(sampled.group, lineage=lineage))
    assert got is not None
    assert (got.usable_logprobs, got.known_logprobs, got.is_own) == (usable, known, False)
