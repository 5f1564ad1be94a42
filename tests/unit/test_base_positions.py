"""The lengths of prompts and answers fit the positions of a base, or what the user set is refused."""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from swarm.config import parse
from swarm.engine.engine import AnswerRequest
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import ConfigError
from swarm.policy.base_folder import fitted_to_base
from swarm.policy.policy import load_policy
from tests.unit.tiny_models import SHAPE, character_tokenizer


def lengths(folder: Path, **settings: int) -> tuple[int, int]:
    policy = {"base": str(folder), **{key: settings.pop(key) for key in ("max_prompt_tokens",) if key in settings}}
    config = fitted_to_base(parse({"policy": policy, "rollouts": settings}))
    return config.policy.max_prompt_tokens, config.rollouts.max_new_tokens


def base_with(folder: Path, positions: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"n_positions": positions}))
    return folder


@pytest.mark.parametrize(
    ("positions", "settings", "fitted"),
    [
        (2048, {}, (1024, 1024)),
        (32_768, {"max_new_tokens": 16_384}, (1024, 16_384)),
        (1024, {}, (512, 512)),
        (257, {}, (129, 128)),
        (2, {}, (1, 1)),
        (1024, {"max_new_tokens": 1000}, (24, 1000)),
        (1024, {"max_new_tokens": 1023}, (1, 1023)),
        (1024, {"max_prompt_tokens": 700}, (700, 324)),
        (1024, {"max_prompt_tokens": 24, "max_new_tokens": 1000}, (24, 1000)),
        (None, {}, (1024, 1024)),
    ],
)
def test_what_is_not_set_fits_the_positions(
    tmp_path: Path, positions: int | None, settings: dict[str, int], fitted: tuple[int, int]
) -> None:
    assert lengths(base_with(tmp_path, positions), **settings) == fitted


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_new_tokens": 1024}, r"got rollouts\.max_new_tokens = 1024; lower it, or leave it out"),
        ({"max_prompt_tokens": 1024}, r"got policy\.max_prompt_tokens = 1024; lower it, or leave it out"),
        (
            {"max_prompt_tokens": 25, "max_new_tokens": 1000},
            r"got policy\.max_prompt_tokens = 25 and rollouts\.max_new_tokens = 1000; lower one, or leave one out",
        ),
    ],
)
def test_what_is_set_and_does_not_fit_is_refused(tmp_path: Path, settings: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=r"must fit into the 1024 positions of .*, " + told):
        lengths(base_with(tmp_path, 1024), **settings)


def test_the_bundled_policy_keeps_its_lengths() -> None:
    config = parse({})
    assert fitted_to_base(config) is config


@pytest.mark.parametrize("positions", [64, 33])
def test_the_longest_prompt_and_answer_run_on_a_base_with_few_positions(tmp_path: Path, positions: int) -> None:
    """GPT-2 has no embedding for a position beyond the last one."""
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=positions, vocab_size=SHAPE["vocab_size"], eos_token_id=2
        )
    )
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    config = fitted_to_base(parse({"policy": {"base": str(tmp_path), "lora": {"rank": 2}}}))
    policy = load_policy(config.policy, device="cpu")
    num_prompt, num_new = config.policy.max_prompt_tokens, config.rollouts.max_new_tokens
    assert num_prompt + num_new == positions
    prompt = [5] * num_prompt
    ((answer,),) = SlotEngine(policy, max_batch_sequences=1).generate(
        [AnswerRequest(prompt, 1, num_new)], Sampling(temperature=1.0), seed=3, stop=()
    )
    whole = (*answer.token_ids, *[6] * (num_new - len(answer.token_ids)))
    assert len(policy.token_logprobs([(tuple(prompt), whole)]).logprobs[0]) == num_new
