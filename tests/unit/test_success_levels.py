"""An author whose rewards are all true teaches nothing wrong by leaving the right answers out."""

from dataclasses import replace

import pytest

from swarm.config import SharingSection, TrainingSection
from swarm.pool.experience_pool import ExperiencePool
from swarm.pool.success_levels import ANY_REWARD, SuccessLevel, SuccessLevels, has_success
from swarm.sharing.peer_tracker import PeerTracker
from swarm.training.advantages import batch_advantages
from swarm.training.experience import TrainingGroup
from swarm.types import Rollout, RolloutGroup
from tests.unit.experience_factory import ALICE, MALLORY, NOW, Clock, context_of, group


def rewarded(*rewards: float, author: str = ALICE.peer_id, source: str = "spelling") -> RolloutGroup:
    made = group(author=author)
    rollouts = tuple(Rollout("a", (i, i + 1), (-0.5, -0.5), True, reward) for i, reward in enumerate(rewards))
    return replace(made, rollouts=rollouts, task=replace(made.task, source=source))


def levels_of(*bests: float, quantile: float = 0.5) -> dict[str, SuccessLevel]:
    levels = SuccessLevels(quantile)
    levels.observe_own(rewarded(best, 0.0) for best in bests)
    return levels.snapshot()


def test_level_by_hand() -> None:
    """Five own groups whose best answers have .2, .6, .8, .8 and 1: three of them reach .8, two do not."""
    assert levels_of(0.8, 0.2, 1.0, 0.6, 0.8) == {"spelling": (0.8, 2 / 5)}
    assert levels_of(0.5, 1.0)["spelling"].reward == 0.5, "between two the lower one"
    assert levels_of(0.0, 0.0, 1.0) == {"spelling": (1.0, 0.0)}, "what found nothing says nothing"
    assert levels_of(0.8, 1.0, quantile=0.0) == {} == levels_of(0.0)


def test_a_level_follows_the_newest_own_groups_and_survives_a_restart() -> None:
    levels = SuccessLevels(0.5)
    levels.observe_own(rewarded(0.2, 0.0) for _ in range(64))
    levels.observe_own(rewarded(1.0, 0.0) for _ in range(33))
    assert levels.snapshot()["spelling"] == (1.0, 31 / 64)
    again = SuccessLevels(0.5)
    again.restore(levels.state())
    assert again.snapshot() == levels.snapshot()


def training_group(level: float, *rewards: float) -> TrainingGroup:
    return TrainingGroup((1, 2), rewarded(*rewards), usable_logprobs=True, is_own=False, success_level=level)


def test_advantages_of_others_by_hand() -> None:
    """Rewards 1, ½, 0, 0: mean .375, standard deviation √(.6875 / 3) = .478714. Only a success has a positive advantage."""
    section = TrainingSection()
    assert batch_advantages([training_group(0.0, 1, 0.5, 0, 0)], section) == pytest.approx(
        [1.305582, 0.261116, -0.783349, -0.783349], abs=1e-5
    )
    first, second, *wrong = batch_advantages([training_group(1.0, 1, 0.5, 0, 0)], section)
    assert first == pytest.approx(1.305582, abs=1e-5) and second is None
    assert wrong == pytest.approx([-0.783349] * 2, abs=1e-5)
    assert batch_advantages([training_group(1.0, 1, 0.5, 0)], section)[1] == 0.0, "it takes part without a direction"


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "median", "gdpo"])
def test_the_least_wrong_answer_is_never_followed(kind: str) -> None:
    values = batch_advantages(
        [training_group(1.0, 0.5, 0.05, 0.01)], TrainingSection.model_validate({"advantage": kind})
    )
    assert all(value is None or value <= 0 for value in values) and any(value for value in values)


def test_groups_without_a_success_are_not_stored() -> None:
    pool = ExperiencePool(":memory:", SharingSection(), Clock())
    offered = [rewarded(0.5, 0.0), rewarded(1.0, 0.0), rewarded(0.1, 0.0, source="unknown here")]
    pool.expect(levels_of(1.0))
    assert pool.success_level("unknown here") == ANY_REWARD
    assert pool.add(b"1" * 32, NOW + 600, NOW, offered) == 2
    assert pool.dropped == {"no_success": 1} and pool.num_fresh() == 2


def test_an_author_that_leaves_out_the_right_answers_loses_its_share_and_one_with_bad_luck_does_not() -> None:
    """Of own groups a quarter lacks a success. So do the groups of Alice; of Mallory's all do."""
    authors = PeerTracker(SharingSection(), context_of())
    expected = SuccessLevel(1.0, 0.25)
    for number in range(16):
        for author, best in ((ALICE.peer_id, float(number % 4 > 0)), (MALLORY.peer_id, 0.5)):
            one = rewarded(best, 0.0, author=author)
            assert has_success(one, expected) == (best == 1.0)
            authors.judged([one], lambda source: expected)
            if number % 4 == 3:  # a body has four groups
                authors.reputation.admitted(author)
    alice, mallory = (authors.reputation.trust(author) for author in (ALICE.peer_id, MALLORY.peer_id))
    assert alice > 0.5 and mallory < 0.1
    assert not authors.reputation.is_banned(MALLORY.peer_id), "nothing is proven"
