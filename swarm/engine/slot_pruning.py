"""Shows the rule that drops answers the hidden states of the last forward pass over slots."""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor

from swarm.engine.engine import AnswerSlot
from swarm.engine.pruning import PruneCall
from swarm.errors import ConfigError
from swarm.policy.policy import Policy


class SlotPruning:
    """A context manager within which it records the input of the output head of `policy.model`."""

    def __init__(self, policy: Policy, call: PruneCall, prompt_lengths: Sequence[int]) -> None:
        self._policy = policy
        self._call = call
        self._lengths = prompt_lengths
        self._hidden: Tensor | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        head = self._policy.model.get_base_model().get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hook.remove()
        self._hidden = None

    def saw_piece(self, starts: Sequence[tuple[int, int]], first: int) -> None:
        """Report a forward pass over a piece of prompts [D, P, hidden] that begins at position `first`."""
        width = 0 if self._hidden is None else self._hidden.shape[1]
        columns = [self._lengths[prompt] - 1 - first for prompt, _ in starts]
        rows = [row for row, column in enumerate(columns) if 0 <= column < width or self._hidden is None]
        if rows:
            states = self._states(rows, [columns[row] for row in rows])
            self._call.saw_prompts([starts[row][0] for row in rows], states)

    def slots_to_drop(self, rows: Sequence[AnswerSlot | None], lengths: Sequence[int]) -> list[int]:
        """Ask which slots to drop after a pass over one token of every slot [n, 1, hidden]; ascending.

        `lengths` counts the tokens of prompt and answer so far.
        """
        due = [
            (slot, (row.prompt, row.sample))
            for slot, (row, length) in enumerate(zip(rows, lengths, strict=True))
            if row is not None and self._call.is_due(length - self._lengths[row.prompt])
        ]
        if not due:
            return []
        slots, keys = zip(*due, strict=True)
        decisions = self._call.dropped(keys, self._states(list(slots), [0] * len(slots)))
        return [slot for slot, is_dropped in zip(slots, decisions, strict=True) if is_dropped]

    def _states(self, rows: list[int], columns: list[int]) -> Tensor:
        if self._hidden is None:
            raise ConfigError(
                "rollouts.prune needs a base that calls its output head on the last hidden state, got "
                f"{type(self._policy.model.get_base_model()).__name__}; set rollouts.prune = false"
            )
        return self._hidden[rows, columns].float().cpu()

    def _record(self, _: Any, arguments: tuple[Tensor, ...]) -> None:
        self._hidden = arguments[0]


def hidden_size(policy: Policy) -> int:
    """Width of the input of the output head."""
    return policy.model.get_base_model().get_output_embeddings().in_features
