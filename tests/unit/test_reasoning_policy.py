"""The bundled reasoning policy: small, writes its steps before the answer, able but unsure, and made by the recipe beside it."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from swarm.assets import reasoning_recipe as recipe
from swarm.assets.schooling import END_ID
from swarm.config import REASONING_TASKS, PolicySection, TasksSection
from swarm.config.policy import BUNDLED_REASONING
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.policy.base_folder import locate_base
from swarm.policy.policy import load_policy
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import score
from tests.unit.tiny_models import of_one_layer, requests

FOLDER = locate_base(BUNDLED_REASONING, None)
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((FOLDER / "RECIPE.json").read_text())


@pytest.fixture(scope="module")
def policy() -> Any:
    torch.set_num_threads(1)
    return load_policy(PolicySection(base=BUNDLED_REASONING), device="cpu")


def test_it_is_small(policy: Any) -> None:
    assert sum(one.numel() for one in policy.model.parameters() if not one.requires_grad) <= 4_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_its_template_shows_the_system_prompt_and_leaves_the_answer_to_the_policy(policy: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    text = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|system|>Be brief.<|user|>1 + 1 =<|assistant|>"


def test_digits_are_single_tokens_and_tags_stay_in_the_text(policy: Any) -> None:
    text = "<think>12+3=15→5</think><answer>15</answer>"
    ids = policy.tokenizer(text, add_special_tokens=False).input_ids
    tokens = policy.tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:4] == ["<think>", "1", "2", "+"] and tokens[-4:] == ["<answer>", "1", "5", "</answer>"]
    assert policy.decode([*ids, END_ID]) == text


@given(st.text(max_size=50))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False, split_special_tokens=True).input_ids) == text


def test_the_report_is_that_of_the_recipe(report: dict[str, Any]) -> None:
    assert report["tasks"] == [
        task.model_dump(mode="json", include={"name", "label", "parameters"}) for task in REASONING_TASKS
    ]
    assert report["phases"] == json.loads(json.dumps([asdict(recipe.LEARN), asdict(recipe.BLUR)]))
    assert set(recipe.BLUR.habits) == {task.source_name for task in REASONING_TASKS} == set(report["held_out"])


def test_it_leaves_ground_and_room(report: dict[str, Any]) -> None:
    abilities = report["held_out"].values()
    assert 0.2 <= fmean(ability["sampled_reward"] for ability in abilities) <= 0.4
    assert 60 <= fmean(ability["sampled_tokens"] for ability in abilities) <= 250
    assert all(ability["pass_at_8"] >= ability["pass_at_1"] + 0.2 for ability in abilities)


def test_the_recorded_abilities_are_those_of_the_weights(report: dict[str, Any], policy: Any) -> None:
    mixture = TaskMixture(TasksSection(sources=REASONING_TASKS))
    tasks = mixture.held_out(4)
    prompts = [policy.encode_prompt(task.prompt, task.context) for task in tasks]
    answers = SlotEngine(policy, 256).generate(requests(prompts, 8, 128), Sampling(), seed=0)
    rewards: dict[str, list[float]] = {name: [] for name in mixture.sources}
    for task, group in zip(tasks, answers, strict=True):
        rewards[task.ref.source] += [score(task, policy.decode(one.token_ids)) for one in group]
    mixture.close()
    for name, sampled in rewards.items():
        assert fmean(sampled) == pytest.approx(report["held_out"][name]["sampled_reward"], abs=0.3)


def test_the_recipe_gives_the_same_policy_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "COURSE", replace(recipe.COURSE, max_answer_tokens=2))
    monkeypatch.setattr(recipe, "make_model", partial(of_one_layer, recipe.make_model))
    sizes = ["--learn-steps", "1", "--blur-steps", "1", "--examples", "8", "--measured-tasks", "1", "--batch-size", "4"]
    for name, seed in (("first", "3"), ("second", "3"), ("other", "4")):
        recipe.main(["--out", str(tmp_path / name), "--seed", seed, *sizes])
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second", "other")]
    assert weights[0] == weights[1] != weights[2]
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in (tmp_path / "first").iterdir()}
