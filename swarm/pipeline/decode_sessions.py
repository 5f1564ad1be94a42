"""Keys and values of answers in the making in one stage, bounded in number and in bytes.

A crew that vanished leaves its sessions behind: those that nobody continues make room once they are idle for long. A commit
ends all of them, since keys and values of two policy versions do not mix.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.errors import PipelineError
from swarm.pipeline.orders import DecodeOrder, StageSettings
from swarm.pipeline.stage_model import StageModel

_REMEMBERED = 256
"""Numbers of sessions that ended."""


@dataclass(slots=True)
class _Session:
    cache: DynamicCache
    left_padding: Tensor  # [B]
    num_columns: int
    last_used_s: float


class DecodeSessions:
    """The sessions of one stage."""

    def __init__(self, model: StageModel, settings: StageSettings, clock: Callable[[], float]) -> None:
        self._model = model
        self._settings = settings
        self._clock = clock
        self._sessions: dict[int, _Session] = {}
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)

    @torch.no_grad()
    def decode(self, order: DecodeOrder) -> Tensor:
        """Hidden states [B, n, W] of the new columns, or logits [B, V] of the last. Raises PipelineError.

        A failed order ends its session: nothing half-extended is continued.
        """
        if order.left_padding is not None:
            self._begin(order, order.left_padding)
        session = self._get(order.session)
        num_rows, num_new = order.states.shape[:2]
        if num_rows != len(session.left_padding):
            raise PipelineError(f"a session must keep its {len(session.left_padding)} rows, got {num_rows}")
        self._check_room(order.session, num_rows, session.num_columns + num_new, self._work_bytes(order, session))
        del self._sessions[order.session]
        hidden = self._model.run(order.states, session.left_padding, session.cache)
        result = self._model.logits(hidden[:, -1]).float() if order.is_last else hidden
        session.num_columns += num_new
        session.last_used_s = self._clock()
        self._sessions[order.session] = session
        return result

    def select(self, number: int, rows: Sequence[int]) -> None:
        """Keep, repeat and reorder rows: row i continues row `rows[i]`. Raises PipelineError."""
        session = self._get(number)
        if not rows or min(rows) < 0 or max(rows) >= len(session.left_padding):
            raise PipelineError(
                f"rows must be among the {len(session.left_padding)} of the session, got {list(rows)[:8]}"
            )
        self._check_room(number, len(rows), session.num_columns)
        index = torch.tensor(rows, device=self._model.device)
        session.cache.reorder_cache(index)  # type: ignore[arg-type]  # any tensor of indices will do
        session.left_padding = session.left_padding[index]

    def end(self, number: int) -> None:
        """Forget a session; one that is not there is no error. Its number is used up.

        An order that was given up may come after the end: it must not leave a session behind that nobody knows of.
        """
        self._sessions.pop(number, None)
        self._ended.append(number)

    def end_all(self) -> None:
        """Forget all of them."""
        self._sessions.clear()

    def num_bytes(self) -> int:
        """Keys and values held."""
        return sum(len(s.left_padding) * s.num_columns for s in self._sessions.values()) * self._model.cache_token_bytes

    def _begin(self, order: DecodeOrder, left_padding: tuple[int, ...]) -> None:
        num_new = order.states.shape[1]
        if len(left_padding) != order.states.shape[0] or not all(0 <= pad < num_new for pad in left_padding):
            raise PipelineError(f"left padding must be in [0, {num_new}) for every row, got {list(left_padding)[:8]}")
        if order.session in self._ended:
            raise PipelineError(
                f"a session that has ended must not begin again, got {order.session}; take a new number"
            )
        self._sessions.pop(order.session, None)
        oldest_s = self._clock() - self._settings.session_idle_s
        self._sessions = {number: s for number, s in self._sessions.items() if s.last_used_s >= oldest_s}
        if len(self._sessions) >= self._settings.max_sessions:
            raise PipelineError(f"a stage must hold at most {self._settings.max_sessions} sessions; end one first")
        self._check_room(order.session, len(left_padding), num_new)
        padding = torch.tensor(left_padding, device=self._model.device)
        self._sessions[order.session] = _Session(self._model.new_cache(), padding, 0, self._clock())

    def _get(self, number: int) -> _Session:
        if number not in self._sessions:
            raise PipelineError(f"a session must be begun before it is continued, got {number}; begin it anew")
        return self._sessions[number]

    def _work_bytes(self, order: DecodeOrder, session: _Session) -> int:
        """What an order takes while it is carried out, in what grows faster than its states: a mask, and logits."""
        num_rows, num_new = order.states.shape[:2]
        is_padded = bool(session.left_padding.any())
        logits_bytes = 4 * num_rows * self._model.vocab_size if order.is_last else 0
        return logits_bytes + self._model.mask_bytes(num_rows, num_new, session.num_columns, is_padded=is_padded)

    def _check_room(self, number: int, num_rows: int, num_columns: int, work_bytes: int = 0) -> None:
        """Before anything is computed: whether the session may become this large, and its order take so much."""
        others = sum(len(s.left_padding) * s.num_columns for n, s in self._sessions.items() if n != number)
        needed = (others + num_rows * num_columns) * self._model.cache_token_bytes + work_bytes
        if needed > self._settings.max_session_bytes:
            raise PipelineError(
                f"sessions of a stage must fit into {self._settings.max_session_bytes} bytes, got {needed}; sample fewer "
                "or shorter answers at a time"
            )
