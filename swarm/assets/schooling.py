"""Supervised training of small policies: teaches tasks, then lowers the confidence. Shared by all makers of policies.

    Course (tasks, two phases) ─▶ for each phase: make_corpus ─▶ train ─▶ measure
                               ─▶ save, with a report beside the weights

The examples come from stream SUPERVISED_SEED, which RL and evaluation never draw.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.config import TaskSourceSection, TasksSection
from swarm.policy.prompts.prompt_encoder import PromptEncoder
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import SUPERVISED_SEED, score
from swarm.types import Task

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>", "<|answer|>")
PAD_ID, BEGIN_ID, END_ID, UNKNOWN_ID, ANSWER_ID = range(5)
NUM_SAMPLES = 8
"""Answers per held-out task in the measurement."""
_MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Phase:
    """The settings of one part of the training."""

    name: str
    noise: dict[str, float]
    """By task: fraction of answers taken from another example; 0 where a task is not named."""
    weights: dict[str, float]
    """By task: relative number of examples; 1 where a task is not named."""
    adam_lr: float
    muon_lr: float
    bfloat16: bool = False
    """Compute products of matrices in bfloat16: 1.5 times as fast on processors that have it."""


WriteAnswer = Callable[[Phase, TaskSourceSection, Task, random.Random], str]
"""Writes the answer to a task from which the policy learns in a phase."""


@dataclass(frozen=True, slots=True)
class Course:
    """Tasks and the two phases in which they are taught."""

    tasks: tuple[TaskSourceSection, ...]
    learn: Phase
    """Tasks of weight 0 are measured but not taught."""
    blur: Phase
    write: WriteAnswer | None = None
    """None: the right answer of the task's source."""
    max_answer_tokens: int = 16
    """Longest answer in the measurement."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of steps and examples of a course."""

    learn_steps: int
    blur_steps: int
    batch_size: int
    examples: int
    """Examples per task."""
    measured_tasks: int
    """Held-out tasks per source."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of one task's examples; equal positions belong together."""

    prompts: list[list[int]]
    answers: list[list[int]]


@dataclass(frozen=True, slots=True)
class Ability:
    """What the policy achieves on held-out tasks of one source."""

    greedy_accuracy: float
    sampled_reward: float
    """Mean reward at temperature 1, where RL starts."""
    pass_at_1: float
    """Fraction of sampled answers with full reward."""
    pass_at_8: float
    """Fraction of tasks with full reward among eight samples, which RL can find."""
    sampled_tokens: float
    """Mean length of a sampled answer, its end included."""


Abilities = dict[str, Ability]
"""Abilities by source."""


def make(
    course: Course, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> None:
    """Teach, measure and save to `options.out`, with a report beside the weights. `options` come from `parse`."""
    started = time.monotonic()
    effort = Effort(**{name: getattr(options, name) for name in Effort.__dataclass_fields__})
    after_learning, after_blurring = teach(course, model, tokenizer, effort=effort, rng=random.Random(options.seed))
    save(model.bfloat16() if course.blur.bfloat16 else model, tokenizer, options.out)
    report = {
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "supervised_seed": SUPERVISED_SEED,
        "phases": [asdict(course.learn), asdict(course.blur)],
        "tasks": [task.model_dump(mode="json", include={"name", "label", "parameters"}) for task in course.tasks],
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
        "wall_time_s": round(time.monotonic() - started),
        "held_out": {name: asdict(ability) for name, ability in after_blurring.items()},
        "held_out_before_blur": {name: asdict(ability) for name, ability in after_learning.items()},
    }
    (options.out / "RECIPE.json").write_text(json.dumps(report, indent=2) + "\n")


def teach(
    course: Course, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, effort: Effort, rng: random.Random
) -> tuple[Abilities, Abilities]:
    """Run both phases on the model in place. Returns its abilities after each."""
    mixture = TaskMixture(TasksSection(sources=course.tasks, held_out_share=0))
    encoder = PromptEncoder(tokenizer, (END_ID,), is_own=True)
    abilities = []
    for phase, num_steps in ((course.learn, effort.learn_steps), (course.blur, effort.blur_steps)):
        corpora = {
            section.source_name: make_corpus(course, phase, section, mixture, encoder, count=effort.examples)
            for section in course.tasks
            if course.learn.weights.get(section.source_name, 1.0) > 0
        }
        train(model, corpora, phase, num_steps=num_steps, batch_size=effort.batch_size, rng=rng)
        abilities.append(measure(model, encoder, mixture, effort.measured_tasks, course.max_answer_tokens))
    return abilities[0], abilities[1]


def make_corpus(
    course: Course,
    phase: Phase,
    section: TaskSourceSection,
    mixture: TaskMixture,
    encoder: PromptEncoder,
    *,
    count: int,
) -> Corpus:
    """Build the first `count` examples of the supervised stream."""
    source = mixture.sources[section.source_name]
    rng = random.Random(f"{phase.name}:{source.name}")
    prompts, answers = [], []
    for index in range(count):
        task = source.task(SUPERVISED_SEED, index)
        text = course.write(phase, section, task, rng) if course.write else source.answer(SUPERVISED_SEED, index)
        prompts.append(encoder.render(task.prompt, task.context))
        answers.append(text + SPECIAL_TOKENS[END_ID])
    tokenizer = encoder.tokenizer
    return Corpus(
        prompts=tokenizer(prompts, add_special_tokens=False).input_ids,
        answers=tokenizer(answers, add_special_tokens=False).input_ids,
    )


def train(
    model: LlamaForCausalLM,
    corpora: dict[str, Corpus],
    phase: Phase,
    num_steps: int,
    batch_size: int,
    rng: random.Random,
) -> None:
    """Train with cross-entropy on the answers only; the model is never asked for prompts."""
    started, running = time.monotonic(), math.nan
    optimizers = _optimizers(model, phase)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 50) * max(0.1, 1 - (step + 1) / num_steps)
        )
        for optimizer in optimizers
    ]
    for step in range(1, num_steps + 1):
        loss = _backward(model, _draw(corpora, phase, batch_size, rng=rng), bfloat16=phase.bfloat16)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        running = loss if step == 1 else 0.98 * running + 0.02 * loss
        if step % 100 == 0 or step == num_steps:
            left_min = (time.monotonic() - started) / step * (num_steps - step) / 60
            print(f"{phase.name} {step}/{num_steps}  loss {running:.3f}  {left_min:.1f} min left", flush=True)


def _optimizers(model: LlamaForCausalLM, phase: Phase) -> list[torch.optim.Optimizer]:
    """Use Muon for the matrices of the blocks, which needs half the steps of AdamW here, and AdamW for the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.AdamW(others, lr=phase.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=phase.muon_lr, weight_decay=0.01),
    ]


def _draw(
    corpora: dict[str, Corpus], phase: Phase, count: int, rng: random.Random
) -> list[tuple[list[int], list[int]]]:
    """Draw `count` pairs of a prompt and its answer, or another example's answer."""
    pairs = []
    for name in rng.choices(list(corpora), [phase.weights.get(name, 1.0) for name in corpora], k=count):
        corpus = corpora[name]
        position = rng.randrange(len(corpus.prompts))
        is_mixed_up = rng.random() < phase.noise.get(name, 0.0)
        answer = corpus.answers[rng.randrange(len(corpus.answers)) if is_mixed_up else position]
        pairs.append((corpus.prompts[position], answer))
    return pairs


def _backward(model: LlamaForCausalLM, pairs: list[tuple[list[int], list[int]]], *, bfloat16: bool) -> float:
    """Accumulate the gradient of the mean loss per answer token. Parts of similar length save a third of the padding."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    num_targets = sum(len(answer) for _, answer in pairs)
    num_tokens = sum(len(prompt) + len(answer) for prompt, answer in pairs)
    size = math.ceil(len(pairs) / max(2, num_tokens // _MICRO_BATCH_TOKENS))
    total = 0.0
    for start in range(0, len(pairs), size):
        token_ids, is_answer = _pad(pairs[start : start + size])
        chosen = is_answer[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]  # [B, L-1, D]
            logits = model.lm_head(hidden[chosen])  # [targets, V]; prompts need no logits
        loss = functional.cross_entropy(logits.float(), token_ids[:, 1:][chosen], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    return total


def _pad(pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Return token ids [B, L], padded on the right, and which of them are answers [B, L]."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    token_ids = torch.full((len(pairs), length), PAD_ID)
    is_answer = torch.zeros(len(pairs), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : end] = True
    return token_ids, is_answer


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    encoder: PromptEncoder,
    mixture: TaskMixture,
    tasks_per_source: int,
    max_answer_tokens: int,
) -> Abilities:
    """Measure abilities by source on the evaluation stream."""
    model.eval()
    held_out = mixture.held_out(tasks_per_source)
    abilities: Abilities = {}
    for name in mixture.sources:
        tasks = [task for task in held_out if task.ref.source == name]
        inputs = encoder.tokenizer(
            [encoder.render(task.prompt, task.context) for task in tasks],
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
        )
        rewards = []
        for sampling in ({"do_sample": False}, {"do_sample": True, "num_return_sequences": NUM_SAMPLES, "top_k": 0}):
            output = cast(Any, model).generate(
                **inputs, max_new_tokens=max_answer_tokens, eos_token_id=END_ID, pad_token_id=PAD_ID, **sampling
            )
            answers = output[:, inputs.input_ids.shape[1] :]
            texts = encoder.tokenizer.batch_decode(answers, skip_special_tokens=True)
            copies = len(texts) // len(tasks)
            rewards.append(torch.tensor([score(tasks[i // copies], text) for i, text in enumerate(texts)]))
        greedy, sampled = rewards[0], rewards[1].view(len(tasks), NUM_SAMPLES)
        abilities[name] = Ability(
            greedy_accuracy=round((greedy == 1).float().mean().item(), 3),
            sampled_reward=round(sampled.mean().item(), 3),
            pass_at_1=round((sampled == 1).float().mean().item(), 3),
            pass_at_8=round((sampled == 1).any(1).float().mean().item(), 3),
            sampled_tokens=round((answers != PAD_ID).sum(1).float().mean().item(), 1),
        )
        print(f"{name:>16}  {abilities[name]}", flush=True)
    model.train()
    return abilities


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the policy so that `AutoModelForCausalLM` and `AutoTokenizer` load it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=BEGIN_ID, eos_token_id=END_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # the safetensors writer makes its file readable for the owner alone


def parse(arguments: Sequence[str] | None, description: str | None, effort: Effort) -> argparse.Namespace:
    """Parse the options of a maker of policies. `effort` is the default; `--quick` takes a minute, for tests."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learn-steps", type=int, default=effort.learn_steps)
    parser.add_argument("--blur-steps", type=int, default=effort.blur_steps)
    parser.add_argument("--batch-size", type=int, default=effort.batch_size)
    parser.add_argument("--examples", type=int, default=effort.examples, help="examples per task")
    parser.add_argument("--measured-tasks", type=int, default=effort.measured_tasks, help="held-out tasks per source")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a minute instead of half an hour; weak, for tests")
    options = parser.parse_args(arguments)
    if options.quick:
        options.learn_steps, options.blur_steps, options.examples, options.measured_tasks = 40, 10, 500, 8
    return options
