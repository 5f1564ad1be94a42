"""Will an unfinished answer succeed? A small head on the policy's last hidden state that learns as answers end.

    hidden state [D] ─▶ divided by its root mean square ─▶ tanh layer [16] ─▶ logit ─▶ chance of success

It is this node's own: never shared, part of its checkpoint. All of it is float32 on the CPU, whatever the policy runs on.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from swarm.adapters.adam_moments import moments_of, placed
from swarm.adapters.adapter_state import check_adapter
from swarm.errors import CheckpointError
from swarm.policy.counter_noise import uniform

_WIDTH = 16
_LR = 1e-2
_WEIGHT_DECAY = 1e-2
_PASSES = 4
"""Steps over the states of one round: they come once, and nothing of them is kept."""
_ROWS_PER_STEP = 1024


class SuccessHead:
    """P(success) of hidden states; a half for every state until it has learned."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        noise = torch.from_numpy(uniform(_WIDTH * hidden_size, "success head", seed)).view(_WIDTH, hidden_size)
        self._parameters = {
            "inner.weight": (2 * noise - 1) / hidden_size**0.5,
            "inner.bias": torch.zeros(_WIDTH),
            "outer.weight": torch.zeros(1, _WIDTH),
            "outer.bias": torch.zeros(1),
        }
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=_LR, weight_decay=_WEIGHT_DECAY)

    @torch.no_grad()
    def chances(self, states: Tensor) -> Tensor:
        """[N, D] -> [N] in (0, 1)."""
        return self._logits(states).sigmoid()

    def learn(self, states: Tensor, successes: Tensor, weights: Tensor) -> None:
        """A few steps of weighted cross entropy on states [N, D] whose answers have ended; successes [N] are 0 or 1."""
        for _ in range(_PASSES):
            for start in range(0, len(states), _ROWS_PER_STEP):
                part = slice(start, start + _ROWS_PER_STEP)
                loss = functional.binary_cross_entropy_with_logits(
                    self._logits(states[part]), successes[part], weights[part], reduction="sum"
                )
                self._optimizer.zero_grad(set_to_none=True)
                (loss / weights[part].sum()).backward()
                self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments of the optimizer: all of it."""
        tensors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}:{name}"] = value.detach().clone()
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Continue from what `state` gave; False, and nothing done, where it is none of this size of hidden state."""
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        moments = {key: value for key, value in tensors.items() if key not in shapes}
        try:
            check_adapter({name: tensors[name] for name in shapes if name in tensors}, shapes)
            placed_moments = moments_of(moments, shapes)
        except (CheckpointError, ValueError):
            return False
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
            if name in placed_moments:
                self._optimizer.state[parameter] = placed(placed_moments[name], parameter)
        return True

    def _logits(self, states: Tensor) -> Tensor:
        own = self._parameters
        scaled = functional.rms_norm(states, states.shape[-1:])
        inner = functional.linear(scaled, own["inner.weight"], own["inner.bias"]).tanh()
        return functional.linear(inner, own["outer.weight"], own["outer.bias"])[:, 0]
