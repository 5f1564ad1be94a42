"""The bundled tiny policy: small, loadable, able but unsure, and made by the recipe beside it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.assets import recipe
from swarm.assets.schooling import measure
from swarm.config import DEMO_TASKS, TasksSection
from swarm.policy.prompts.prompt_encoder import PromptEncoder
from swarm.tasks.task_mixture import TaskMixture

FOLDER = Path(recipe.__file__).parent / "tiny_policy"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((FOLDER / "RECIPE.json").read_text())


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_it_is_small(model: Any) -> None:
    assert model.num_parameters() <= 2_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 5_000_000
    assert model.config.model_type == "llama"


def test_its_chat_template_frames_the_prompt_and_leaves_the_answer_to_the_policy() -> None:
    ids = TOKENIZER.apply_chat_template([{"role": "user", "content": "1 + 1 ="}], return_dict=False)
    assert ids[0] == TOKENIZER.bos_token_id
    assert ids[-1] == TOKENIZER.convert_tokens_to_ids("<|answer|>")
    assert TOKENIZER.decode(ids[1:-1]) == "1 + 1 ="
    assert TOKENIZER.eos_token_id not in ids


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=50))
def test_printable_text_is_one_token_per_character_and_comes_back(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_unknown_characters_are_unknown_tokens() -> None:
    ids = TOKENIZER("a×\N{SNOWMAN}\tb", add_special_tokens=False).input_ids
    assert ids[1:4] == [TOKENIZER.unk_token_id] * 3
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "ab"


def test_the_recipe_names_the_demo_tasks_and_its_noise(report: dict[str, Any]) -> None:
    tasks = [task.model_dump(mode="json", include={"name", "label", "parameters"}) for task in DEMO_TASKS]
    assert report["tasks"] == tasks
    assert report["phases"] == [asdict(recipe.LEARN), asdict(recipe.BLUR)]
    assert set(recipe.BLUR.noise) == {task.source_name for task in DEMO_TASKS} == set(report["held_out"])


def test_it_leaves_ground_and_room(report: dict[str, Any]) -> None:
    abilities = report["held_out"].values()
    rare = [ability for ability in abilities if ability["pass_at_1"] <= 0.15]
    assert len(rare) >= 2
    assert all(ability["pass_at_8"] >= 2 * ability["pass_at_1"] for ability in rare)
    assert all(ability["sampled_reward"] >= 0.05 for ability in rare), "a way up, in whole or partial rewards"
    assert any(ability["sampled_reward"] >= 0.3 for ability in abilities)
    assert all(ability["sampled_reward"] <= 0.75 for ability in abilities)


def test_the_recorded_abilities_are_those_of_the_weights(report: dict[str, Any], model: Any) -> None:
    torch.manual_seed(0)
    measured = measure(
        model, PromptEncoder(TOKENIZER, (TOKENIZER.eos_token_id,), is_own=True), TaskMixture(TasksSection()), 16, 16
    )
    for name, ability in measured.items():
        assert ability.sampled_reward == pytest.approx(report["held_out"][name]["sampled_reward"], abs=0.15)
