"""One cell of the recovery experiment: a toy trained with one way of recovery, once for each rate of failures.

The toy is a model of six stages with one layer each, trained as one model and lost and rebuilt stage by stage. A pipeline
computes exactly what the whole model computes (the tests of `swarm.pipeline` show that), so the toy runs without links and
threads. It rebuilds a lost stage with the functions of the pipeline.

The toy learns generated text: a language of made-up words, each of which is followed by one of a few. One character is one
token. Predicting a character takes the word so far and, at its beginning, the word before: something to learn at each depth.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from swarm.adapters.adapter_state import adapter_parameters
from swarm.adapters.load_pretrained import load_pretrained
from swarm.config import LoraSection
from swarm.experiments.cells import Result
from swarm.experiments.recovery.clocks import lost_stages
from swarm.experiments.recovery.plan import ADAPTER, FULL, NUM_STAGES, Strategy
from swarm.pipeline.driver.recovery import checkfree_average, twin_copy
from swarm.pipeline.driver.schedule import swapped_route
from swarm.pipeline.stage.stage_optimizer import RECOVERED_LR_FACTOR
from swarm.policy.lora import attach_adapter

ALPHABET = " abcdefghijklmnop"
NUM_WORDS = 96
_FOLLOWERS = 3


@dataclass(frozen=True, slots=True)
class Language:
    """Words, and which words may follow each."""

    words: Sequence[str]
    followers: Mapping[str, Sequence[str]]

    def text(self, rng: random.Random, num_chars: int) -> str:
        """Return random text that begins with a whole word."""
        word = rng.choice(self.words)
        text = word
        while len(text) < num_chars:
            word = rng.choice(self.followers[word])
            text += f" {word}"
        return text[:num_chars]


def language(name: str) -> Language:
    """Return the language of a name; always the same one."""
    rng = random.Random(f"language/{name}")
    letters = ALPHABET.strip()
    words = sorted({"".join(rng.choices(letters, k=rng.randint(3, 7))) for _ in range(NUM_WORDS)})
    return Language(words, {word: rng.sample(words, _FOLLOWERS) for word in words})


def token_ids(text: str) -> list[int]:
    """Return the places of the characters in `ALPHABET`."""
    return [ALPHABET.index(character) for character in text]


PREFIX = "model.layers."
_LORA = LoraSection(rank=4, alpha=8.0)
_COLUMNS, _ROWS, _HELD_OUT_ROWS = 48, 8, 24
_MAX_GRAD_NORM = 1.0
_WARMUP_STEPS = 20
_LR: Mapping[str, float] = {"full": 4e-3, "adapter": 1e-2}
Weights = dict[str, Tensor]


class Toy:
    """Model, optimizer, and the text that the model learns."""

    def __init__(self, training: str, seed: int, base: Path | None = None) -> None:
        """Makes all weights from `seed`, or an adapter over the toy in `base`."""
        torch.manual_seed(seed)
        self._language = language("first" if base is None else "second")
        if base is None:
            self._model: Any = _new_model()
            self._causal = self._model
            self.parameters: dict[str, nn.Parameter] = dict(self._model.named_parameters())
        else:
            self._causal = load_pretrained(AutoModelForCausalLM, base).requires_grad_(False)
            self._model = attach_adapter(self._causal, _LORA)
            self.parameters = dict(adapter_parameters(self._model))
        layers = list(self._causal.model.layers)
        self._routes = [nn.ModuleList(layers), nn.ModuleList([layers[i] for i in swapped_route(NUM_STAGES)])]
        self._lr, self._factors = _LR[training], [1.0] * NUM_STAGES
        named = [
            [p for name, p in self.parameters.items() if name.startswith(f"{PREFIX}{i}.")] for i in range(NUM_STAGES)
        ]
        ends = [p for name, p in self.parameters.items() if not name.startswith(PREFIX)]
        self._groups = [*named, ends]
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in self._groups if group], lr=self._lr, weight_decay=0.01
        )
        self._text = random.Random(f"{seed}/text")
        self._held_out = _batch(self._language, random.Random("held out"), _HELD_OUT_ROWS)
        self._start = self.stage_weights(range(NUM_STAGES))
        self.norms = [1.0] * NUM_STAGES
        """Gradient norm of each stage in the last step, before clipping."""
        self.num_steps = 0

    def step(self, *, swaps: bool) -> None:
        """Train on one micro-batch; with `swaps` every other one takes the swapped order."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(_batch(self._language, self._text, _ROWS), self.num_steps % 2 if swaps else 0).backward()
        self.norms = [float(torch.stack([_norm(p) for p in group]).norm()) for group in self._groups[:NUM_STAGES]]
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_GRAD_NORM)
        lr = self._lr * min(1.0, (self.num_steps + 1) / _WARMUP_STEPS)
        for group, factor in zip(self._optimizer.param_groups, (*self._factors, 1.0), strict=False):
            group["lr"] = lr * factor
        self._optimizer.step()
        self.num_steps += 1

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the held-out loss in nats per character, in straight order."""
        return self._loss(self._held_out, 0).item()

    def stage_weights(self, stages: Sequence[int]) -> Weights:
        """Return copies of the weights of some stages."""
        prefixes = tuple(f"{PREFIX}{stage}." for stage in stages)
        return {name: p.detach().clone() for name, p in self.parameters.items() if name.startswith(prefixes)}

    def rebuild(self, stage: int, weights: Weights) -> None:
        """Rebuild a stage as a pipeline does: fresh moments, a raised learning rate for the stage, no rollback."""
        with torch.no_grad():
            for name, value in weights.items():
                self.parameters[name].copy_(value)
                self._optimizer.state.pop(self.parameters[name], None)
        self._factors[stage] = RECOVERED_LR_FACTOR

    def average(self, stage: int) -> Weights:
        """Rebuild weights by CheckFree; an edge stage becomes a copy of its only neighbour."""
        if stage in (0, NUM_STAGES - 1):
            return self.copy_of_next(stage)
        before, after = self.stage_weights([stage - 1]), self.stage_weights([stage + 1])
        norms = self.norms[stage - 1], self.norms[stage + 1]
        return checkfree_average(
            self._shapes(stage), before, after, norm_before=norms[0], norm_after=norms[1], layer_prefix=PREFIX
        )

    def copy_of_next(self, stage: int) -> Weights:
        """Copy the stage before, for the first stage the one behind. With swapped order that is an edge stage's twin."""
        return twin_copy(self._shapes(stage), self.stage_weights([stage - 1 if stage else 1]), layer_prefix=PREFIX)

    def start_of(self, stage: int) -> Weights:
        """Return a stage's weights before training."""
        return {name: self._start[name] for name in self._shapes(stage)}

    def save(self, folder: Path) -> None:
        """Save the whole model as a base."""
        self._model.save_pretrained(folder)

    def _shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.stage_weights([stage]).items()}

    def _loss(self, ids: Tensor, route: int) -> Tensor:
        self._causal.model.layers = self._routes[route]
        return self._causal(input_ids=ids, labels=ids, use_cache=False).loss


def _new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ALPHABET),
            hidden_size=48,
            intermediate_size=128,
            num_hidden_layers=NUM_STAGES,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=_COLUMNS,
            tie_word_embeddings=False,
        )
    )


def _batch(language: Language, rng: random.Random, num_rows: int) -> Tensor:
    """Return token ids [num_rows, columns]."""
    return torch.tensor([token_ids(language.text(rng, _COLUMNS)) for _ in range(num_rows)])


def _norm(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad.norm()


_COPY_INTERVAL_STEPS = 10


def run(settings: Mapping[str, Any]) -> Result:
    """Train the toy. Returns {"runs": one for each rate}. The keys of `settings` are those of `plan.RecoveryPlan`."""
    return {"runs": [_run(settings, rate) for rate in settings["rates"]]}


def _run(settings: Mapping[str, Any], rate: float) -> Result:
    is_full = settings["training"] == "full"
    arm = (FULL if is_full else ADAPTER)[settings["arm"]]
    toy = Toy(settings["training"], settings["seed"], None if is_full else Path(settings["folder"]))
    lost = lost_stages(settings["seed"], rate, settings["num_steps"])
    curve, jumps, copies = [toy.held_out_loss()], list[dict[str, float]](), Weights()
    for step in range(settings["num_steps"]):
        if arm.strategy == "own_copy" and step % _COPY_INTERVAL_STEPS == 0:
            copies = toy.stage_weights(range(NUM_STAGES))
        if step in lost:
            jumps.append(_lose(toy, step, lost[step], strategy=arm.strategy, copies=copies))
        toy.step(swaps=arm.swaps)
        if (step + 1) % settings["check_interval"] == 0:
            curve.append(toy.held_out_loss())
    if "write_to" in settings:
        toy.save(Path(settings["write_to"]))
    keys = ("training", "arm", "seed", "check_interval", "num_steps")
    return {**{key: settings[key] for key in keys}, "rate": rate, "curve": curve, "jumps": jumps}


def _lose(toy: Toy, step: int, stage: int, strategy: Strategy, copies: Weights) -> dict[str, float]:
    before = toy.held_out_loss()
    toy.rebuild(stage, _weights(toy, stage, strategy, copies=copies))
    return {"step": step, "stage": stage, "before": before, "after": toy.held_out_loss()}


def _weights(toy: Toy, stage: int, strategy: Strategy, copies: Weights) -> Weights:
    if strategy == "own_copy":
        return {name: copies[name] for name in toy.stage_weights([stage])}
    if strategy == "base":
        return toy.start_of(stage)
    if strategy == "copy":
        return toy.copy_of_next(stage)
    return toy.average(stage)  # CheckFree+ differs only in training, which makes an edge's neighbour its twin
