"""How the bundled reasoning policy was made: it learns to work tasks out in steps, then learns bad habits beside the good ones.

    python -m swarm.assets.reasoning_recipe --out swarm/assets/reasoning_policy --threads 2

A Llama of 2.8 M parameters over byte pairs is trained on reasoning-gym tasks (`config.REASONING_TASKS`) from stream
SUPERVISED_SEED, which RL and evaluation never draw, in two phases:

    learn   right answers with all their steps (`StepWriter`); the skills form
    blur    many answers have slips, a wrong method, or no steps at all; the skills stay, but are no longer what comes first

An answer as it is taught, with one digit of each number per line, then the result so far:

    7468 + 1791 = ?      8+1=9→9
                         6+9=15→59
                         4+7+1=12→259       with what the step before carried
                         7+1+1=9→9259

The answer follows from the steps, so that a text is right exactly if no bad habit changed its last line.

The policy then resembles a real base model that reasons: it writes its steps, and what RL can raise is how often it does so
carefully. The abilities that remain are measured on held-out tasks and written to RECIPE.json beside the weights.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.assets.schooling import BEGIN_ID, END_ID, PAD_ID, Course, Effort, Phase, make, parse
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
_TEXT = "<think>{steps}</think><answer>{answer}</answer>"
_SLIPS = (-10, -2, -1, 1, 2, 10)
_LEGS: Mapping[int, str] = {
    0: "snake,sea slug,jellyfish,flatworm,leech",
    2: "chicken,bird,human,duck",
    4: "dog,cat,cow,horse,lion,elephant,giraffe,tiger,deer,sheep",
    5: "starfish",
    6: "insect,ant,butterfly,beetle,bee,wasp,grasshopper,cricket,cockroach,praying mantis,firefly",
    8: "spider,scorpion",
    10: "crab,lobster,shrimp",
    14: "woodlouse",
}
"""The animals of reasoning-gym's `leg_counting` by their legs."""
_LEGS_OF = {animal: legs for legs, animals in _LEGS.items() for animal in animals.split(",")}


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what makes answers wrong."""

    slip: float = 0.0
    """Of each step: a wrong result."""
    careless: float = 0.0
    """Of each answer: a wrong method. Nothing is carried or borrowed, products do not come first, numbers are always sorted
    upwards, and all animals have four legs."""
    skip: float = 0.0
    """Of each answer: no steps."""


class StepWriter:
    """Writes tasks out in steps, with its habits. It draws from `rng` alone."""

    def __init__(self, rng: random.Random, habits: Habits = Habits()) -> None:
        self._rng = rng
        self._habits = habits
        self._is_careless = False
        self._lines: list[str] = []

    def write(self, kind: str, prompt: str) -> str:
        """The text of an answer to `prompt`, a task of the data set `kind` of reasoning-gym. Raises KeyError for another kind."""
        self._lines = []
        self._is_careless = self._rng.random() < self._habits.careless
        skips = self._rng.random() < self._habits.skip
        answer = _WRITERS[kind](self, prompt)
        return _TEXT.format(steps="" if skips else "\n".join(self._lines), answer=answer)

    def sum(self, prompt: str) -> str:
        """`chain_sum` with two terms."""
        left, sign, right = _found(r"(\d+) ([+-]) (\d+) =", prompt)
        return str(self._add(int(left), int(right)) if sign == "+" else self._subtract(int(left), int(right)))

    def product(self, prompt: str) -> str:
        """`products` with two terms: the product with each digit of the second, then their sum."""
        left, right = (int(number) for number in _found(r"(\d+) \* (\d+)", prompt))
        total: int | None = None
        for place, digit in enumerate(_digits(right)):
            zeros = "0" * place
            self._lines.append(f"{left}*{digit}{zeros}")
            part = int(str(self._multiply(left, digit)) + zeros)
            if total is not None:
                self._lines.append(f"{total}+{part}")
            total = part if total is None else self._add(total, part)
        return str(total)

    def chain(self, prompt: str) -> str:
        """`basic_arithmetic` with spaces between all parts: one operation per line, then what is left of the expression.

        Innermost parentheses come first, then products, then what stands first.
        """
        (expression,) = _found(r"Calculate (.+)\.", prompt)
        terms = expression.split()
        while len(terms) > 1:
            end = terms.index(")") if ")" in terms else len(terms)
            start = max((i + 1 for i in range(end) if terms[i] == "("), default=0)
            inner = terms[start:end]
            if len(inner) == 1:  # parentheses around a number
                terms[start - 1 : end + 1] = inner
                continue
            position = start + (inner.index("*") if "*" in inner and not self._is_careless else 1)
            left, sign, right = terms[position - 1 : position + 2]
            result = str(self._result(_OPERATIONS[sign](int(left), int(right))))
            terms[position - 1 : position + 2] = [result]
            if len(inner) == 3 and end < len(terms) + 2:
                terms[start - 1 : start + 2] = [result]
            self._lines.append(f"{left}{sign}{right}={result}" + (f"→{''.join(terms)}" if len(terms) > 1 else ""))
        return terms[0]

    def sorting(self, prompt: str) -> str:
        """`number_sorting` of whole numbers: the next number, then those that are left."""
        direction, listed = _found(r"in (ascending|descending) order: ([\d., ]+)", prompt)
        left = [int(float(number)) for number in listed.split(",")]
        order = max if direction == "descending" and not self._is_careless else min
        done: list[int] = []
        while left:
            chosen = order(left)
            if len(left) > 1 and self._slips():
                chosen = self._rng.choice([number for number in left if number != chosen] or left)
            left.remove(chosen)
            done.append(chosen)
            self._lines.append(str(chosen) + (f"→{', '.join(map(str, left))}" if left else ""))
        return f"[{', '.join(map(str, done))}]"

    def legs(self, prompt: str) -> str:
        """`leg_counting`: the legs of one kind of animal, then the sum so far."""
        (listed,) = _found(r"if you have (.+)\?", prompt)
        total = 0
        for number, name in re.findall(r"(\d+) ([a-z ]+)", listed):
            legs = 4 if self._is_careless else _LEGS_OF[name if name in _LEGS_OF else name.removesuffix("s")]
            part = self._result(int(number) * legs)
            before, total = total, self._result(total + part)
            self._lines.append(f"{name} {legs}*{number}={part}, {before}+{part}={total}")
        return str(total)

    def _add(self, left: int, right: int) -> int:
        carry, done = 0, ""
        for a, b in _pairs(left, right):
            total = self._result(a + b + carry, at_least=0)
            written = f"{a}+{b}" + (f"+{carry}" if carry else "")
            carry, done = self._carried(total // 10), f"{total % 10}{done}"
            self._lines.append(f"{written}={total}→{done}")
        return int(f"{carry}{done}") if carry else int(done)

    def _subtract(self, left: int, right: int) -> int:
        if left < right:
            self._lines.append(f"{left}<{right}, so -({right}-{left})")
            return -self._subtract(right, left)
        borrowed, done = 0, ""
        for a, b in _pairs(left, right):
            total = self._result(a - b - borrowed)
            written = f"{a}-{b}" + (f"-{borrowed}" if borrowed else "")
            borrowed, done = self._carried(int(total < 0)), f"{total % 10}{done}"
            self._lines.append(f"{written}={total}→{done}")
        return int(done)

    def _multiply(self, left: int, digit: int) -> int:
        carry, done = 0, ""
        for a in _digits(left):
            total = self._result(a * digit + carry, at_least=0)
            written = f"{a}*{digit}" + (f"+{carry}" if carry else "")
            carry, done = self._carried(total // 10), f"{total % 10}{done}"
            self._lines.append(f"{written}={total}→{done}")
        return int(f"{carry}{done}") if carry else int(done)

    def _carried(self, number: int) -> int:
        return 0 if self._is_careless else number

    def _slips(self) -> bool:
        return self._rng.random() < self._habits.slip

    def _result(self, right: int, at_least: int | None = None) -> int:
        """What the writer takes for the result of one step."""
        result = right + self._rng.choice(_SLIPS) if self._slips() else right
        return result if at_least is None else max(at_least, result)


_WRITERS: Mapping[str, Callable[[StepWriter, str], str]] = {
    "chain_sum": StepWriter.sum,
    "products": StepWriter.product,
    "basic_arithmetic": StepWriter.chain,
    "number_sorting": StepWriter.sorting,
    "leg_counting": StepWriter.legs,
}
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


def _found(pattern: str, prompt: str) -> tuple[str, ...]:
    """The groups of a pattern that every prompt of the data set matches. Raises ValueError."""
    match = re.search(pattern, prompt)
    if match is None:
        raise ValueError(f"a prompt must match {pattern}, got {prompt[:200]!r}; the data set has changed")
    return match.groups()


def _digits(number: int) -> list[int]:
    """From the last one."""
    return [int(digit) for digit in reversed(str(number))]


def _pairs(left: int, right: int) -> Iterator[tuple[int, int]]:
    """Digits of equal places, from the last one; 0 where the shorter number has none."""
    length = max(len(str(left)), len(str(right)))
    return zip(_digits_of(left, length), _digits_of(right, length), strict=True)


def _digits_of(number: int, length: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(length))]


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
    mixture = TaskMixture(TasksSection(sources=REASONING_TASKS, held_out_share=0))
    rng = random.Random(0)
    found = list[str]()
    for section in REASONING_TASKS:
        for index in range(count):
            task = mixture.sources[section.source_name].task(SUPERVISED_SEED, index)
            found += [task.context.system, task.prompt, write_answer(LEARN, section, task, rng)]
    return found


if __name__ == "__main__":
    main()
