"""How the bundled reasoning policy was made: it learns to work tasks out in steps, then learns bad habits beside the good ones.

    python -m swarm.assets.reasoning_recipe --out swarm/assets/reasoning_policy --threads 2

A Llama of 2.7 M parameters over byte pairs is trained on reasoning-gym tasks (`config.REASONING_TASKS`) from stream
SUPERVISED_SEED, which RL and evaluation never draw, in two phases:

    learn   right answers with all their steps (`worked_steps`); the skills form
    blur    many answers have slips, a wrong method, or no steps at all; the skills stay, but are no longer what comes first

The policy then resembles a real base model that reasons: it writes its steps, and what RL can raise is how often it does so
carefully. The abilities that remain are measured on held-out tasks and written to RECIPE.json beside the weights.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.assets.schooling import BEGIN_ID, END_ID, PAD_ID, Course, Effort, Phase, make, parse
from swarm.assets.worked_steps import Habits, StepWriter
from swarm.config import REASONING_TASKS, TaskSourceSection, TasksSection
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import SUPERVISED_SEED
from swarm.types import Task

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_VOCABULARY = 768
_TEXTS_PER_SOURCE = 2000
_MAX_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class ReasoningPhase(Phase):
    """A phase whose answers have steps."""

    habits: Mapping[str, Habits] = field(default_factory=dict)
    """By task; right answers with all their steps where a task is not named."""


LEARN = ReasoningPhase(
    name="learn",
    weights={"long_products": 2.0, "long_sums": 1.5, "sorting": 0.7},  # the first two take longest to learn
    adam_lr=3e-3,
    muon_lr=0.02,
    habits={},
    noise={},
    bfloat16=True,
)
BLUR = ReasoningPhase(
    name="blur",
    weights={
        "long_sums": 0.5,
        "long_products": 0.5,
        "chains": 1.5,
        "sorting": 2.0,
        "legs": 3.0,
    },  # the last need more time
    adam_lr=1e-3,
    muon_lr=0.006,
    habits={
        "long_sums": Habits(slip=0.06, careless=0.3, skip=0.2),
        "long_products": Habits(slip=0.04, careless=0.3, skip=0.2),
        "chains": Habits(slip=0.05, careless=0.2, skip=0.1),
        "sorting": Habits(slip=0.02, careless=0.2, skip=0.1),
        "legs": Habits(slip=0.01, careless=0.1, skip=0.1),
    },
    noise={},
    bfloat16=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save as the command line says."""
    options = parse(arguments, __doc__, Effort(1200, 400, 48, examples=12_000, measured_tasks=64))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    make(COURSE, make_model(), make_tokenizer(_texts(min(_TEXTS_PER_SOURCE, options.examples))), options=options)


def write_answer(phase: Phase, section: TaskSourceSection, task: Task, rng: random.Random) -> str:
    """The answer from which the policy learns in `phase`."""
    habits = phase.habits if isinstance(phase, ReasoningPhase) else {}
    return StepWriter(rng, habits.get(section.source_name, Habits())).write(section.name, task.prompt)


COURSE = Course(REASONING_TASKS, LEARN, BLUR, write=write_answer, max_answer_tokens=256)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level pairs learned from `texts`. Every digit is a token of its own, and so is every tag, which stays in the text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[*_SPECIAL, *_TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in _TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_SPECIAL[PAD_ID],
        bos_token=_SPECIAL[BEGIN_ID],
        eos_token=_SPECIAL[END_ID],
        additional_special_tokens=list(_SPECIAL[END_ID + 1 :]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=_MAX_POSITIONS,
    )


def make_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            max_position_embeddings=_MAX_POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
        )
    )


def _texts(count: int) -> list[str]:
    """Prompts and answers of the first tasks of each source in the supervised stream."""
    mixture = TaskMixture(TasksSection(sources=REASONING_TASKS))
    rng = random.Random(0)
    found = list[str]()
    for section in REASONING_TASKS:
        for index in range(count):
            task = mixture.sources[section.source_name].task(SUPERVISED_SEED, index)
            found += [task.context.system, task.prompt, write_answer(LEARN, section, task, rng)]
    return found


if __name__ == "__main__":
    main()
