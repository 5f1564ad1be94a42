"""How unlikely an answer of another node may be: the bound by hand, and what it makes of styles, junk and length."""

import json
import math
from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest

from swarm.training.experience import LikelihoodFloor, least_likely_stretch


def test_an_answer_is_judged_by_its_least_likely_stretch() -> None:
    assert least_likely_stretch([-1.0, -3.0, -2.0]) == -2.0
    assert least_likely_stretch([-0.5] * 40 + [-8.0, -2.0] + [-0.5] * 40) == pytest.approx((-10 - 14 * 0.5) / 16)
    assert least_likely_stretch([-1.0] * 15 + [-17.0]) == pytest.approx(-2.0)


def test_the_bound_is_the_quantile_of_own_answers_of_similar_length_less_the_slack() -> None:
    floor = LikelihoodFloor(0.25)
    floor.observe_own(
        [(-1.0 - number / 100,) * 4 for number in range(128)] + [(-0.2 - number / 100,) * 64 for number in range(128)]
    )
    # of 128, the one at place int(.25 · 127) = 31 from below: number 96
    assert floor.bound(3) == pytest.approx(-1.96 - 7 / 3)
    assert floor.bound(5) == pytest.approx(-1.96 - 7 / 5)
    assert floor.bound(60) == floor.bound(1000) == pytest.approx(-1.16 - 7 / 16)
    assert floor.admits([-1.96 - 7 / 5 + 1e-9] * 5) and not floor.admits([-1.96 - 7 / 5 - 1e-9] * 5)


def written(rng: np.random.Generator, num_tokens: int, style: float = 1.0) -> list[float]:
    """Log-probs as those of a language model: most tokens are nearly certain, three of ten are not. `style`: how much more
    surprising each is here; prompts differ by a fifth."""
    surprise = np.where(rng.random(num_tokens) < 0.3, rng.exponential(1.0, num_tokens), 0.02)
    return (-surprise * style * np.exp(rng.normal(0, 0.2))).tolist()


@pytest.mark.parametrize("num_tokens", [24, 768, 8192])
def test_answers_in_another_style_survive_and_junk_does_not_at_any_length(num_tokens: int) -> None:
    """What a quantile of mean log-probs, which this floor replaced, made of the same answers stands beside."""
    rng = np.random.default_rng(num_tokens)
    own = [written(rng, int(num_tokens * np.exp(rng.normal(0, 0.3))) + 2) for _ in range(128)]
    floor = LikelihoodFloor(0.02)
    floor.observe_own(own)
    of_means = sorted(map(fmean, own))[int(0.02 * 127)]

    def admitted(make: Callable[[], list[float]]) -> tuple[float, float]:
        """(by this floor, by the mean)"""
        made = [make() for _ in range(24)]
        return fmean(map(floor.admits, made)), fmean(fmean(row) >= of_means for row in made)

    def with_junk() -> list[float]:
        row, place = written(rng, num_tokens), int(rng.integers(num_tokens - 8))
        return row[:place] + [-6.0] * 8 + row[place + 8 :]

    assert min(admitted(lambda: written(rng, num_tokens))) > 0.9
    here, by_mean = admitted(lambda: written(rng, num_tokens, style=1.5))
    assert here > 0.75 and here > by_mean + 0.1
    here, by_mean = admitted(with_junk)
    assert here == 0 and (by_mean > 0.5 or num_tokens == 24)
    assert admitted(lambda: rng.normal(-6, 2, num_tokens).tolist()) == (0, 0), "random text"
    assert admitted(lambda: (-rng.exponential(3.0, num_tokens)).tolist())[0] < 0.1, "another language"


def test_an_answer_with_one_token_that_this_policy_hardly_knows_survives() -> None:
    """A right answer of two tokens to a prompt that the policy answers wrongly: p = 1/400 for its first token."""
    floor = LikelihoodFloor(0.02)
    floor.observe_own([(-0.3, -0.1)] * 64)
    assert floor.admits([math.log(1 / 400), -0.1]) and not floor.admits([math.log(1 / 2000), -0.1])
    assert fmean([math.log(1 / 400), -0.1]) < -0.2, "the mean of own answers"


def test_the_floor_of_a_checkpoint_continues_and_one_of_means_begins_anew() -> None:
    floor, again = LikelihoodFloor(0.02), LikelihoodFloor(0.02)
    floor.observe_own([(-0.3, -number / 10) for number in range(40)])
    again.restore(json.loads(json.dumps(floor.state())))
    assert again.is_known and again.bound(7) == floor.bound(7)
    again.restore([-0.3] * 64)
    assert not again.is_known
