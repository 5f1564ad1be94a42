"""A toy in six stages of one layer each: trained as one model, lost and rebuilt stage by stage.

What a crew computes over its stages is what the whole model computes (the tests of `swarm.pipeline` hold that), so the toy
runs without links and threads. Weights of a lost stage come from the very functions that a crew uses.

Text made on the spot: a language of made-up words, each of which is followed by one of a few. One character is one token.

To foresee a character takes the word so far and, at its beginning, the word before: something to learn at every depth.
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
from swarm.experiments.recovery.plan import NUM_STAGES
from swarm.pipeline.driver.recovery import checkfree_average, twin_copy
from swarm.pipeline.driver.schedule import swapped_route
from swarm.pipeline.stage.stage_optimizer import RECOVERED_LR_FACTOR
from swarm.policy.lora import attach_adapter

ALPHABET = " abcdefghijklmnop"
NUM_WORDS = 96
_FOLLOWERS = 3


@dataclass(frozen=True, slots=True)
class Language:
    """Words, and which may come after each."""

    words: Sequence[str]
    followers: Mapping[str, Sequence[str]]

    def text(self, rng: random.Random, num_chars: int) -> str:
        """A stretch of it, which begins with a whole word."""
        word = rng.choice(self.words)
        text = word
        while len(text) < num_chars:
            word = rng.choice(self.followers[word])
            text += f" {word}"
        return text[:num_chars]


def language(name: str) -> Language:
    """The same for the same name."""
    rng = random.Random(f"language/{name}")
    letters = ALPHABET.strip()
    words = sorted({"".join(rng.choices(letters, k=rng.randint(3, 7))) for _ in range(NUM_WORDS)})
    return Language(words, {word: rng.sample(words, _FOLLOWERS) for word in words})


def token_ids(text: str) -> list[int]:
    """Places in `ALPHABET`."""
    return [ALPHABET.index(character) for character in text]


PREFIX = "model.layers."
_LORA = LoraSection(rank=4, alpha=8.0)
_COLUMNS, _ROWS, _HELD_OUT_ROWS = 48, 8, 24
_MAX_GRAD_NORM = 1.0
_WARMUP_STEPS = 20
_LR: Mapping[str, float] = {"full": 4e-3, "adapter": 1e-2}
Weights = dict[str, Tensor]


class Toy:
    """Model, optimizer, and the text it learns from."""

    def __init__(self, training: str, seed: int, base: Path | None = None) -> None:
        """All weights from `seed`, or an adapter over the toy in `base`."""
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
        self._orders = [nn.ModuleList(layers), nn.ModuleList([layers[i] for i in swapped_route(NUM_STAGES)])]
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
        """One micro-batch; with `swaps` every other one takes the swapped order."""
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
        """Nats per character, in straight order."""
        return self._loss(self._held_out, 0).item()

    def stage_weights(self, stages: Sequence[int]) -> Weights:
        """Copies of what stages hold."""
        prefixes = tuple(f"{PREFIX}{stage}." for stage in stages)
        return {name: p.detach().clone() for name, p in self.parameters.items() if name.startswith(prefixes)}

    def rebuild(self, stage: int, weights: Weights) -> None:
        """As a crew does it: fresh moments, a raised learning rate for the stage, and nothing rolled back."""
        with torch.no_grad():
            for name, value in weights.items():
                self.parameters[name].copy_(value)
                self._optimizer.state.pop(self.parameters[name], None)
        self._factors[stage] = RECOVERED_LR_FACTOR

    def average(self, stage: int) -> Weights:
        """CheckFree; an edge stage has one neighbour only and becomes its copy."""
        if stage in (0, NUM_STAGES - 1):
            return self.copy_of_next(stage)
        before, after = self.stage_weights([stage - 1]), self.stage_weights([stage + 1])
        norms = self.norms[stage - 1], self.norms[stage + 1]
        return checkfree_average(
            self._shapes(stage), before, after, norm_before=norms[0], norm_after=norms[1], layer_prefix=PREFIX
        )

    def copy_of_next(self, stage: int) -> Weights:
        """Of the stage before; of the one behind for the first. With swapped order that is an edge stage's twin."""
        return twin_copy(self._shapes(stage), self.stage_weights([stage - 1 if stage else 1]), layer_prefix=PREFIX)

    def start_of(self, stage: int) -> Weights:
        """Weights before any training."""
        return {name: self._start[name] for name in self._shapes(stage)}

    def save(self, folder: Path) -> None:
        """The whole model, as a base."""
        self._model.save_pretrained(folder)

    def _shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.stage_weights([stage]).items()}

    def _loss(self, ids: Tensor, order: int) -> Tensor:
        self._causal.model.layers = self._orders[order]
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
    """Token ids [num_rows, columns]."""
    return torch.tensor([token_ids(language.text(rng, _COLUMNS)) for _ in range(num_rows)])


def _norm(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad.norm()
