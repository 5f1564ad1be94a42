"""A second policy for comparison: Qwen2 instead of Llama, byte pairs instead of characters, trained by a shorter recipe.

Both tokenize numbers by single digits. The bundled policy tokenizes words by letters, this one by pieces of words.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from swarm.assets.recipe import BLUR, CHAT_TEMPLATE, LEARN
from swarm.assets.schooling import BEGIN_ID, END_ID, PAD_ID, SPECIAL_TOKENS, Course, Effort, save, teach
from swarm.config import DEMO_TASKS, TasksSection
from swarm.experiments.cells import Result
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import SUPERVISED_SEED

_VOCABULARY = 400
_TEXTS_PER_SOURCE = 400


def run(settings: Mapping[str, Any]) -> Result:
    """Train it and write it to `folder`. Keys of `settings`: those of `heterogeneous.second_policy_cell`."""
    torch.manual_seed(settings["seed"])
    tokenizer = make_tokenizer(_texts(TaskMixture(TasksSection(sources=DEMO_TASKS))))
    model = make_model(len(tokenizer))
    effort = Effort(**{name: settings[name] for name in Effort.__dataclass_fields__})
    as_llama = cast(LlamaForCausalLM, model)  # the recipe asks for nothing that Qwen2 does not have
    _, abilities = teach(Course(DEMO_TASKS, LEARN, BLUR), as_llama, tokenizer, effort, random.Random(settings["seed"]))
    save(as_llama, tokenizer, Path(settings["folder"]))
    return {"parameters": model.num_parameters(), "sampled_reward": {n: a.sampled_reward for n, a in abilities.items()}}


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level pairs learned from `texts`; every digit is a token of its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        bos_token=SPECIAL_TOKENS[BEGIN_ID],
        eos_token=SPECIAL_TOKENS[END_ID],
        additional_special_tokens=[SPECIAL_TOKENS[-1]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )


def make_model(vocabulary: int) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
        )
    )


def _texts(mixture: TaskMixture) -> list[str]:
    """Prompts and answers of the supervised stream."""
    found = list[str]()
    for source in mixture.sources.values():
        for index in range(_TEXTS_PER_SOURCE):
            found += [source.task(SUPERVISED_SEED, index).prompt, source.answer(SUPERVISED_SEED, index)]
    return found
