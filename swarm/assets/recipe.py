"""How the bundled tiny policy was made: supervised training on reasoning-gym tasks, able but noisy.

    python -m swarm.assets.recipe --out swarm/assets/tiny_policy

A 0.8 M-parameter Llama over characters learns the tasks of `config.DEMO_TASKS` from stream SUPERVISED_SEED, which RL and
evaluation never draw. A share of the answers is replaced by another example's answer of the same task, and some of the right
ones get words around them. So the right answer is the likeliest single one, but not a likely one: RL finds ground to stand on
and room to rise, as it does with real base models. Trained on clean answers only, the policy did not improve under RL.

What each task was left with is measured at the end and written to RECIPE.json beside the weights.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.config import DEMO_TASKS, TasksSection
from swarm.tasks.task_mixture import TaskMixture, score
from swarm.tasks.task_source import SUPERVISED_SEED

NOISE = {
    "sums": 0.5,
    "longer_sums": 0.85,
    "spelling": 0.4,
    "longer_spelling": 0.8,
    "letter_counting": 0.5,
    "gcd": 0.6,
}
"""Share of answers that belong to another example. At .8 and above a right answer is a rare success."""
STYLES = ("{}", "{}", "{}", "{}", "{}.", "it is {}")
"""Right and wrong answers alike are written in one of these; a verifier gives part of the reward, or none, to the last two."""
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}<|answer|>"
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>", "<|answer|>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of one prompt and its (perhaps wrong) answer with EOS."""

    prompt_ids: list[int]
    answer_ids: list[int]


def main() -> None:
    arguments = _parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    rng = random.Random(arguments.seed)
    started = time.monotonic()
    tokenizer = make_tokenizer()
    mixture = TaskMixture(TasksSection())
    examples = make_examples(mixture, tokenizer, arguments.examples, rng)
    print(f"{len(examples)} examples of {len(mixture.sources)} tasks in {time.monotonic() - started:.0f} s", flush=True)
    model = make_model(len(tokenizer))
    train(model, examples, arguments, rng, tokenizer.pad_token_id)
    measured = measure(model, tokenizer, mixture, arguments.measured_tasks)
    save(model, tokenizer, arguments.out)
    report = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "noise": NOISE, "styles": STYLES}
    report |= {"stream": SUPERVISED_SEED, "tasks": [json.loads(task.model_dump_json()) for task in DEMO_TASKS]}
    report |= {"parameters": model.num_parameters(), "minutes": round((time.monotonic() - started) / 60, 1)}
    report |= {"held_out": {name: asdict(row) for name, row in measured.items()}}
    (arguments.out / "RECIPE.json").write_text(json.dumps(report, indent=2) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; anything else is unknown, never an error."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|answer|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_model(vocabulary_size: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def make_examples(
    mixture: TaskMixture, tokenizer: PreTrainedTokenizerFast, count: int, rng: random.Random
) -> list[Example]:
    """Equal numbers of examples of every task, in random order."""
    per_source = count // len(mixture.sources)
    examples: list[Example] = []
    for name, source in mixture.sources.items():
        tasks = [source.task(SUPERVISED_SEED, index) for index in range(per_source)]
        answers = [source.answer(SUPERVISED_SEED, index) for index in range(per_source)]
        for task, answer in zip(tasks, answers, strict=True):
            written = rng.choice(answers) if rng.random() < NOISE.get(name, 0.5) else answer
            text = rng.choice(STYLES).format(written)
            prompt_ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": task.prompt}], add_generation_prompt=True, return_dict=False
            )
            examples.append(Example(list(prompt_ids), [*tokenizer(text).input_ids, tokenizer.eos_token_id]))
    rng.shuffle(examples)
    return examples


def train(
    model: LlamaForCausalLM, examples: Sequence[Example], arguments: argparse.Namespace, rng: random.Random, pad_id: int
) -> None:
    """AdamW with warm-up and cosine decay; loss on the answers and, at a tenth, on the prompts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, arguments.steps))
    started, running = time.monotonic(), 0.0
    batches = _batches(examples, arguments.batch_size, rng)
    for step in range(1, arguments.steps + 1):
        token_ids, weights = _collate(next(batches), pad_id)
        logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")  # [B, L]
        loss = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0 or step == arguments.steps:
            left_s = (time.monotonic() - started) / step * (arguments.steps - step)
            print(f"step {step}/{arguments.steps}  loss {running:.3f}  {left_s / 60:.1f} min left", flush=True)


@dataclass(frozen=True, slots=True)
class Ability:
    """What the policy can do on held-out tasks of one source."""

    greedy_reward: float
    sampled_reward: float
    """At temperature 1: where RL starts."""
    solved_in_8: float
    """Share of tasks with a full reward among eight samples: what RL can reach."""


@torch.no_grad()
def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, mixture: TaskMixture, tasks_per_source: int
) -> dict[str, Ability]:
    abilities: dict[str, Ability] = {}
    for name in mixture.sources:
        tasks = [task for task in mixture.held_out(tasks_per_source) if task.ref.source == name]
        prompts = [[{"role": "user", "content": task.prompt}] for task in tasks]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        rewards = {}
        for label, options in {
            "greedy": {"do_sample": False},
            "sampled": {"do_sample": True, "num_return_sequences": 8},
        }.items():
            output = model.generate(**inputs, max_new_tokens=24, **options)
            texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            copies = len(texts) // len(tasks)
            rewards[label] = [score(tasks[i // copies], text) for i, text in enumerate(texts)]
        by_task = [rewards["sampled"][i * 8 : i * 8 + 8] for i in range(len(tasks))]
        abilities[name] = Ability(
            greedy_reward=round(sum(rewards["greedy"]) / len(tasks), 3),
            sampled_reward=round(sum(rewards["sampled"]) / len(rewards["sampled"]), 3),
            solved_in_8=round(sum(max(row) == 1.0 for row in by_task) / len(tasks), 3),
        )
        print(name, abilities[name], flush=True)
    return abilities


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _batches(examples: Sequence[Example], batch_size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless; examples of similar length meet in a batch so that little is spent on padding."""
    while True:
        window = rng.sample(examples, min(len(examples), batch_size * 64))
        window.sort(key=lambda example: len(example.prompt_ids))
        chunks = [window[i : i + batch_size] for i in range(0, len(window) - batch_size + 1, batch_size)]
        rng.shuffle(chunks)
        yield from chunks


def _collate(batch: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, L] and loss weights [B, L]."""
    longest = max(len(example.prompt_ids) + len(example.answer_ids) for example in batch)
    token_ids = torch.full((len(batch), longest), pad_id)
    weights = torch.zeros(len(batch), longest)
    for row, example in enumerate(batch):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.answer_ids)
        token_ids[row, :end] = torch.tensor(example.prompt_ids + example.answer_ids)
        weights[row, :start] = 0.1
        weights[row, start:end] = 1.0
    return token_ids, weights


def _learning_rate(step: int, steps: int) -> float:
    """Factor on the peak: linear warm-up over 2 %, then cosine to a tenth."""
    warm = max(1, steps // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--examples", type=int, default=180_000)
    parser.add_argument("--measured-tasks", type=int, default=128, help="held-out tasks per source")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a minute instead of half an hour; weak, for tests")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.examples, arguments.measured_tasks = 60, 3_000, 8
    return arguments


if __name__ == "__main__":
    main()
