"""The recipe of the bundled policy, from its first step to its folder."""

from functools import partial
from pathlib import Path

import pytest

from swarm.assets import recipe
from tests.unit.test_bundled_policy import FOLDER
from tests.unit.tiny_models import of_one_layer


def test_the_recipe_gives_the_same_policy_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "make_model", partial(of_one_layer, recipe.make_model))
    sizes = ["--learn-steps", "1", "--blur-steps", "1", "--examples", "40", "--measured-tasks", "1", "--threads", "1"]
    for name, seed in (("first", "3"), ("second", "3"), ("other", "4")):
        recipe.main(["--out", str(tmp_path / name), "--seed", seed, *sizes])
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second", "other")]
    assert weights[0] == weights[1] != weights[2]
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in (tmp_path / "first").iterdir()}
