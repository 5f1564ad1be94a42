"""Several replicas of one adapter on one frozen base, trained side by side in one process: their factors are stacked.

A batch holds the sequences of all replicas, one replica after the other; every adapted layer multiplies each replica's rows
with its own factors. It computes what training one replica after the other would, in fewer and larger operations.

`Population` is what a merge run needs of them, whatever way they learn.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from swarm.adapters.adapter_state import read_adapter
from swarm.policy.lora import adapted_layers
from swarm.policy.policy import Policy

Adapter = dict[str, Tensor]


class Population(Protocol):
    """Replicas of one lineage, by number."""

    num: int
    start: Adapter
    """What all of them begin from."""
    scaling: float
    """alpha / rank."""

    def train(self, active: Sequence[int], progress: float, average_gradients: bool) -> list[float]:
        """One inner step of each that is active; `progress` in [0, 1) is how far the run is. Returns loss or reward of each.

        `average_gradients`: all step on the mean gradient.
        """
        ...

    def weights(self, replica: int) -> Adapter:
        """Copies."""
        ...

    def set_weights(self, replica: int, weights: Mapping[str, Tensor]) -> None: ...

    def reset_moments(self, replica: int, names: Sequence[str]) -> None:
        """Forget what the inner optimizer knows of these tensors."""
        ...

    def gate_score(self, replica: int, candidate: Adapter) -> Sequence[float]:
        """On the tasks that this replica keeps private, one by one; larger is better."""
        ...

    def measure(self, adapters: Sequence[Adapter]) -> list[dict[str, float]]:
        """{task: held-out loss or reward} of each."""
        ...


Example = tuple[list[int], list[int]]
"""Prompt ids, answer ids with EOS."""
Stack = dict[str, Tensor]
"""Name → factors of n replicas, [n, …]."""


class Replicas:
    """`num` copies of the policy's adapter, each with its own AdamW (without decay)."""

    def __init__(self, policy: Policy, num: int, lr: float) -> None:
        self.start: Adapter = read_adapter(policy.model)
        self.num = num
        self._lr = lr
        self._pad_id = policy.pad_token_id
        self._causal = policy.model.base_model.model
        self._stack = {name: t.expand(num, *t.shape).clone().requires_grad_() for name, t in self.start.items()}
        self._in_use: Stack = {}
        self._first = {name: torch.zeros_like(t) for name, t in self._stack.items()}
        self._second = {name: torch.zeros_like(t) for name, t in self._stack.items()}
        self._num_steps = torch.zeros(num)
        for name, layer in adapted_layers(policy.model):
            layer.forward = partial(self._layer, name, layer, layer.scaling["default"])

    def weights(self, replica: int) -> Adapter:
        return {name: tensor[replica].detach().clone() for name, tensor in self._stack.items()}

    @torch.no_grad()
    def set_weights(self, replica: int, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._stack.items():
            tensor[replica] = weights[name]

    def reset_moments(self, replica: int, names: Sequence[str]) -> None:
        """Of these tensors; the count of steps is that of all tensors and stays."""
        for name in names:
            self._first[name][replica] = 0.0
            self._second[name][replica] = 0.0

    def train(
        self, batches: Mapping[int, Sequence[Example]], lr_factor: float = 1.0, average_gradients: bool = False
    ) -> list[float]:
        """One AdamW step of the replicas named, each on its own batch, or all on the mean gradient. Returns their losses."""
        active = sorted(batches)
        for tensor in self._stack.values():
            tensor.grad = None
        stack = self._stack if len(active) == self.num else {n: t[active] for n, t in self._stack.items()}
        losses = self._losses(stack, [batches[replica] for replica in active])
        losses.sum().backward()
        mask = torch.zeros(self.num)
        mask[active] = 1.0
        self._apply(mask, self._lr * lr_factor, average_gradients)
        return losses.tolist()

    @torch.no_grad()
    def loss(self, adapters: Sequence[Mapping[str, Tensor]], examples: Sequence[Sequence[Example]]) -> list[float]:
        """Mean loss per answer token of each adapter on its own examples."""
        stack = {name: torch.stack([one[name] for one in adapters]) for name in self.start}
        return self._losses(stack, examples).tolist()

    @torch.no_grad()
    def reward(self, adapters: Sequence[Mapping[str, Tensor]], examples: Sequence[Sequence[Example]]) -> list[float]:
        """Part of its own examples that each adapter answers right when every token is the most likely one."""
        stack = {name: torch.stack([one[name] for one in adapters]) for name in self.start}
        logits, targets, rows = self._answer_logits(stack, examples)
        wrong = torch.zeros(len(adapters) * len(examples[0])).index_add(0, rows, (logits.argmax(-1) != targets).float())
        return (wrong == 0).view(len(adapters), -1).float().mean(1).tolist()

    def _layer(self, name: str, layer: Any, scaling: float, x: Tensor) -> Tensor:
        factor_a, factor_b = self._in_use[f"{name}.lora_A"], self._in_use[f"{name}.lora_B"]
        rows = x.reshape(len(factor_a), -1, x.shape[-1])  # [n, sequences · length, inputs]
        added = torch.bmm(torch.bmm(rows, factor_a.mT), factor_b.mT)
        return layer.base_layer(x) + scaling * added.view(*x.shape[:-1], -1)

    def _losses(self, stack: Stack, examples: Sequence[Sequence[Example]]) -> Tensor:
        """[n] for n lists of equally many examples."""
        logits, targets, rows = self._answer_logits(stack, examples)
        by_token = functional.cross_entropy(logits, targets, reduction="none")
        owner = rows // len(examples[0])
        sums = torch.zeros(len(examples)).index_add(0, owner, by_token)
        return sums / torch.bincount(owner, minlength=len(examples))

    def _answer_logits(self, stack: Stack, examples: Sequence[Sequence[Example]]) -> tuple[Tensor, Tensor, Tensor]:
        """Of all answer tokens: logits [tokens, vocabulary], the right tokens, and the number of the example in all lists."""
        self._in_use = stack
        flat = [example for some in examples for example in some]
        length = max(len(prompt) + len(answer) for prompt, answer in flat)
        token_ids = torch.full((len(flat), length), self._pad_id)
        is_answer = torch.zeros(len(flat), length, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(flat):
            end = len(prompt) + len(answer)
            token_ids[row, :end] = torch.tensor(prompt + answer)
            is_answer[row, len(prompt) : end] = True
        hidden = self._causal.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
        chosen = is_answer[:, 1:]
        return self._causal.lm_head(hidden[chosen]), token_ids[:, 1:][chosen], chosen.nonzero(as_tuple=True)[0]

    @torch.no_grad()
    def _apply(self, mask: Tensor, lr: float, average_gradients: bool) -> None:
        gradients: Stack = {}
        for name, tensor in self._stack.items():
            assert tensor.grad is not None
            gradients[name] = tensor.grad.mean(0, keepdim=True).expand_as(tensor) if average_gradients else tensor.grad
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)  # [n]
        scale = (1.0 / norms.clamp_min(1e-12)).clamp_max(1.0)
        self._num_steps += mask
        steps = self._num_steps.clamp_min(1)
        for name, tensor in self._stack.items():
            shape = (-1, *[1] * (tensor.dim() - 1))
            keep = mask.view(shape)
            gradient = gradients[name] * scale.view(shape)
            self._first[name].add_(0.1 * keep * (gradient - self._first[name]))
            self._second[name].add_(0.001 * keep * (gradient.square() - self._second[name]))
            mean = self._first[name] / (1 - 0.9**steps).view(shape)
            square = self._second[name] / (1 - 0.999**steps).view(shape)
            tensor.sub_(lr * keep * mean / (square.sqrt() + 1e-8))
