"""One stage: a slice of the model, the micro-batches in flight through it, and its share of the optimizer.

    no batch ─forward─▶ open: gradients add up ─close_batch─▶ closed ─commit─▶ applied once, no batch
                                └──────────────drop─────────────┴────────────▶ no batch

A batch is applied as a whole or leaves no trace. Batch numbers only grow: a command of a newer batch drops an older one that
is still open, which its driver gave up, and commands of older batches are refused. Not thread-safe: one command at a time.

Sessions hold keys and values of answers that are being sampled, bounded in number and in bytes. A driver that vanished
leaves its sessions behind; once they are idle for long, a new session may replace them. A commit ends all sessions, since
keys and values of two policy versions do not mix.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.errors import PipelineError
from swarm.pipeline.commands import (
    Answers,
    BackwardCommand,
    BatchGradient,
    CloseBatchCommand,
    CommitCommand,
    DecodeCommand,
    ForwardCommand,
    StageFacts,
    StageSettings,
)
from swarm.pipeline.stage.stage_model import MAX_SHARING, StageModel
from swarm.pipeline.stage.stage_optimizer import StageOptimizer
from swarm.policy.logprobs import TokenLogprobs, scored_answers

_REMEMBERED = 256
"""How many numbers of ended sessions are remembered."""


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

    @torch.inference_mode()  # faster than no_grad, as for the engine of one process
    def decode(self, command: DecodeCommand) -> Tensor:
        """Return hidden states [B, n, W] of the new columns, or logits [B, V] of the last. Raises PipelineError.

        A command that fails ends its session, so a partly extended session is never continued.
        """
        if command.left_padding is not None:
            self._begin(command, command.left_padding)
        if command.rows is not None:
            self.select(command.session, command.rows)
        session = self._get(command.session)
        num_rows, num_new = command.states.shape[:2]
        if num_rows != len(session.left_padding):
            raise PipelineError(f"a session must keep its {len(session.left_padding)} rows, got {num_rows}")
        self._check_room(
            command.session, num_rows, session.num_columns + num_new, work_bytes=self._work_bytes(command, session)
        )
        del self._sessions[command.session]
        hidden = self._model.run(command.states, session.left_padding, session.cache)
        result = self._model.logits(hidden[:, -1]).float() if command.is_last else hidden
        session.num_columns += num_new
        session.last_used_s = self._clock()
        self._sessions[command.session] = session
        return result

    def select(self, number: int, rows: Sequence[int]) -> None:
        """Keep, repeat and reorder rows: row i continues row `rows[i]`. Raises PipelineError."""
        session = self._get(number)
        if len(rows) > self._settings.max_states:
            raise PipelineError(f"a session must have at most {self._settings.max_states} rows, got {len(rows)}")
        if not rows or min(rows) < 0 or max(rows) >= len(session.left_padding):
            raise PipelineError(
                f"rows must be among the {len(session.left_padding)} of the session, got {list(rows)[:8]}"
            )
        self._check_room(number, len(rows), session.num_columns)
        index = torch.tensor(rows, device=self._model.device)
        session.cache.reorder_cache(index)  # type: ignore[arg-type]  # it takes any tensor of indices
        session.left_padding = session.left_padding[index]

    def end(self, number: int) -> None:
        """End a session, which need not exist. Its number is used up.

        A decode command that the driver gave up may arrive after the end; it must not leave a session that nobody ends.
        """
        self._sessions.pop(number, None)
        self._ended.append(number)

    def end_all(self) -> None:
        """End all sessions, since the weights have changed."""
        self._sessions.clear()
        self._model.weights_changed()

    def num_bytes(self) -> int:
        """Bytes of keys and values of all sessions."""
        return sum(len(s.left_padding) * s.num_columns for s in self._sessions.values()) * self._model.cache_token_bytes

    def _begin(self, command: DecodeCommand, left_padding: tuple[int, ...]) -> None:
        num_new = command.states.shape[1]
        if len(left_padding) != command.states.shape[0] or not all(0 <= pad < num_new for pad in left_padding):
            raise PipelineError(f"left padding must be in [0, {num_new}) for every row, got {list(left_padding)[:8]}")
        if command.session in self._ended:
            raise PipelineError(
                f"a session that has ended must not begin again, got {command.session}; take a new number"
            )
        self._sessions.pop(command.session, None)
        oldest_s = self._clock() - self._settings.session_idle_s
        self._sessions = {number: s for number, s in self._sessions.items() if s.last_used_s >= oldest_s}
        if len(self._sessions) >= self._settings.max_sessions:
            raise PipelineError(f"a stage must hold at most {self._settings.max_sessions} sessions; end one first")
        self._check_room(command.session, len(left_padding), num_new)
        padding = torch.tensor(left_padding, device=self._model.device)
        self._sessions[command.session] = _Session(self._model.new_cache(), padding, 0, last_used_s=self._clock())

    def _get(self, number: int) -> _Session:
        if number not in self._sessions:
            raise PipelineError(f"a session must be begun before it is continued, got {number}; begin it again")
        return self._sessions[number]

    def _work_bytes(self, command: DecodeCommand, session: _Session) -> int:
        """Bytes that a command needs besides its states and that grow faster than these: a mask, and logits."""
        num_rows, num_new = command.states.shape[:2]
        is_padded = bool(session.left_padding.any())
        logits_bytes = 4 * num_rows * self._model.vocab_size if command.is_last else 0
        return logits_bytes + self._model.mask_bytes(num_rows, num_new, session.num_columns, is_padded=is_padded)

    def _check_room(self, number: int, num_rows: int, num_columns: int, work_bytes: int = 0) -> None:
        """Raises PipelineError unless the session may grow to this size with a command that needs `work_bytes`."""
        others = sum(len(s.left_padding) * s.num_columns for n, s in self._sessions.items() if n != number)
        needed = (others + num_rows * num_columns) * self._model.cache_token_bytes + work_bytes
        if needed > self._settings.max_session_bytes:
            raise PipelineError(
                f"sessions of a stage must fit into {self._settings.max_session_bytes} bytes, got {needed}; sample fewer "
                "or shorter answers at a time"
            )


class _InFlight(NamedTuple):
    """What the backward pass of a micro-batch starts from."""

    command: ForwardCommand  # its states are a leaf of the graph where they are floating-point
    result: Tensor | None  # None where it is computed again


class Stage:
    """Carries out the commands of one driver."""

    def __init__(
        self, model: StageModel, settings: StageSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model = model
        self._settings = settings
        self._optimizer = StageOptimizer(
            model.trainable, model.layer_prefix, settings.weight_decay, fused=model.device.type != "mps"
        )
        self._sessions = DecodeSessions(model, settings, clock)
        self._in_flight: dict[int, _InFlight] = {}
        self._batch: int | None = None  # open or closed
        self._done: set[int] = set()  # its micro-batches whose backward pass is complete
        self._shared: frozenset[str] | None = None  # names of its shared parameters, once it is closed
        self._last_batch = 0
        self._committed: int | None = None

    @property
    def version(self) -> int:
        """Number of applied batches."""
        return self._optimizer.version

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches stored for their backward pass."""
        return len(self._in_flight)

    def describe(self) -> StageFacts:
        """Return what the driver must know about this stage."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._model.trainable.items()}
        last = max(self._last_batch, self._batch or 0)
        model = self._model
        return StageFacts(
            model.part,
            model.num_model_layers,
            model.layer_prefix,
            shapes=shapes,
            version=self.version,
            last_batch=last,
            content_hash=model.content_hash,
        )

    def forward(self, command: ForwardCommand) -> Tensor | TokenLogprobs:
        """Return hidden states [B, L, W] for the next stage, or log-probs of the answers. Raises PipelineError."""
        self._check_states(command.states)
        mask_bytes = self._model.masks_bytes(command, max_keys=MAX_SHARING * self._settings.max_states)
        if mask_bytes > self._settings.max_session_bytes:
            raise PipelineError(
                f"a mask of a stage must fit into {self._settings.max_session_bytes} bytes, got {mask_bytes}; send shorter rows"
            )
        if command.answers is not None:
            _check_answers(command.answers, command, self._model.vocab_size)
        if command.batch == 0:
            adapter = self._model.adapter_off() if command.without_adapter else nullcontext()
            with torch.no_grad(), _refused_without_memory(), adapter:
                return _detached(self._compute(command.states, command))
        if not 0 <= command.micro_batch < self._settings.max_micro_batches:
            raise PipelineError(
                f"a micro-batch must be in [0, {self._settings.max_micro_batches}), got {command.micro_batch}; use fewer"
            )
        self._open(command.batch)
        if command.micro_batch in self._in_flight or command.micro_batch in self._done:
            raise PipelineError(f"a micro-batch must be computed once, got {command.micro_batch} again; drop the batch")
        if len(self._in_flight) >= self._settings.max_in_flight:
            raise PipelineError(f"at most {self._settings.max_in_flight} micro-batches may be in flight; use fewer")
        states = command.states.to(self._model.device).detach()
        if states.is_floating_point():
            states.requires_grad_()
        with torch.set_grad_enabled(not self._settings.recompute), _refused_without_memory():
            result = self._compute(states, command)
        output = _differentiable(result)
        self._in_flight[command.micro_batch] = _InFlight(
            replace(command, states=states), None if self._settings.recompute else output
        )
        return _detached(result)

    def backward(self, command: BackwardCommand) -> Tensor | None:
        """Return the gradient [B, L, W] for the previous stage, None where the micro-batch began. Raises PipelineError.

        Parameters accumulate their gradient until the batch is committed or dropped.
        """
        self._check_open(command.batch)
        stored = self._in_flight.get(command.micro_batch)
        if stored is None:
            raise PipelineError(f"a micro-batch must be computed before its backward pass, got {command.micro_batch}")
        output = stored.result
        if output is None:
            with _refused_without_memory():
                output = _differentiable(self._compute(stored.command.states, stored.command))
        if command.gradient.shape != output.shape:
            raise PipelineError(
                f"a gradient must have shape {tuple(output.shape)}, got {tuple(command.gradient.shape)}"
            )
        del self._in_flight[command.micro_batch]
        if output.requires_grad:  # false for a first stage without adapted layers
            with _refused_without_memory():
                output.backward(command.gradient.to(output))
        self._done.add(command.micro_batch)
        return stored.command.states.grad

    def close_batch(self, command: CloseBatchCommand) -> BatchGradient:
        """Close the batch for further micro-batches and return its gradient.

        Raises PipelineError unless exactly the expected micro-batches went forward and backward.
        """
        self._check_open(command.batch)
        # compare the count first: the number in the command may be huge, and the set would be as large
        is_whole = len(self._done) == command.num_micro_batches and self._done == set(range(command.num_micro_batches))
        if self._in_flight or not is_whole:
            raise PipelineError(
                f"a batch must be complete before it is closed, got {len(self._done)} of {command.num_micro_batches} "
                f"micro-batches and {len(self._in_flight)} in flight; drop it"
            )
        gradient = BatchGradient(*self._optimizer.gradient(command.shared))
        self._shared = frozenset(command.shared)
        return gradient

    def commit(self, command: CommitCommand) -> int:
        """Apply the closed batch, once for any number of commits; returns the version. Raises PipelineError."""
        if command.batch == self._committed:
            return self.version
        self._check_open(command.batch)
        if self._shared is None:
            raise PipelineError("a batch must be closed before it is committed; close it first")
        if self._shared != set(command.shared_gradients):
            raise PipelineError(
                f"the sums of all {len(self._shared)} shared gradients must come with the commit, got "
                f"{len(command.shared_gradients)}; drop the batch"
            )
        if not (
            math.isfinite(command.scale) and 0 <= command.scale <= 1 and math.isfinite(command.lr) and command.lr >= 0
        ):
            raise PipelineError(
                f"scale must be in [0, 1] and lr finite, got {command.scale} and {command.lr}; drop the batch"
            )
        self._optimizer.apply(command)
        self._sessions.end_all()
        self._committed = command.batch
        self._close(command.batch)
        return self.version

    def drop(self, batch: int) -> None:
        """Drop a batch. Commands of it that arrive later are refused. A batch that was applied stays applied."""
        if self._batch is None or self._batch <= batch:
            self._close(batch)

    def decode(self, command: DecodeCommand) -> Tensor:
        """See `DecodeSessions.decode`."""
        self._check_states(command.states)
        with _refused_without_memory():
            return self._sessions.decode(command)

    def end(self, session: int) -> None:
        """See `DecodeSessions.end`."""
        self._sessions.end(session)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]:
        """Return weights and optimizer as tensors on the CPU, and values for JSON, as in a single process's checkpoint."""
        return self._optimizer.state()

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None:
        """Continue from a `state`. Raises PipelineError where names, shapes or values do not fit."""
        self._optimizer.restore(tensors, rest)
        self._forget()

    def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None:
        """Write rebuilt weights, with a fresh optimizer and a raised learning rate. Raises PipelineError.

        `moments`, named as in `state`, belong to parameters that other stages hold too: all copies must take equal steps.
        """
        self._optimizer.recover(weights, version, moments)
        self._forget()

    def _compute(self, states: Tensor, command: ForwardCommand) -> Tensor | TokenLogprobs:
        answers, shared = command.answers, command.shared
        hidden = self._model.run(states) if shared is None else self._model.run_shared(states, shared)
        if answers is None:
            return hidden
        device = hidden.device
        lengths = torch.tensor([len(row) for row in answers.token_ids], device=device)
        mask = (torch.arange(int(lengths.max()), device=device) < lengths[:, None]).float()
        rows, steps = mask.nonzero(as_tuple=True)
        columns = torch.tensor(answers.starts, device=device)[rows] + steps
        if shared is not None:
            later = shared.answers_at + rows * shared.columns_per_answer(states.shape[1]) + steps - 1
            columns = columns.where(steps == 0, later)
            rows = torch.zeros_like(rows)
        targets = torch.tensor([token for row in answers.token_ids for token in row], device=device)
        return scored_answers(
            self._model.head(),
            hidden[rows, columns],
            targets,
            mask,
            temperature=answers.temperature,
            with_entropy=answers.with_entropy,
        )

    def _check_states(self, states: Tensor) -> None:
        width, limit = self._model.width, self._settings.max_states
        is_ids = states.dtype == torch.long and states.dim() == 2
        is_hidden = states.is_floating_point() and states.dim() == 3 and states.shape[2] == width
        if not (is_ids or is_hidden) or not 0 < states.shape[0] * states.shape[1] <= limit:
            raise PipelineError(
                f"states must be ids [B, L] or hidden [B, L, {width}] with B·L in [1, {limit}], got "
                f"{tuple(states.shape)} of {states.dtype}; send smaller micro-batches"
            )
        if is_ids and not (int(states.min()) >= 0 and int(states.max()) < self._model.vocab_size):
            raise PipelineError(f"token ids must be in [0, {self._model.vocab_size}), got others")

    def _open(self, batch: int) -> None:
        if batch == self._batch and self._shared is None:
            return
        if batch <= max(self._last_batch, self._batch or 0):
            raise PipelineError(f"a batch must be newer than the last one, got {batch}; begin a new batch")
        if self._batch is not None:
            self._close(self._batch)
        self._batch = batch

    def _check_open(self, batch: int) -> None:
        if batch != self._batch:
            raise PipelineError(f"batch {batch} is not open, {self._batch} is; begin a new one")

    def _close(self, batch: int) -> None:
        self._last_batch = max(self._last_batch, batch)
        self._batch, self._shared = None, None
        self._in_flight.clear()
        self._done.clear()
        self._optimizer.clear()

    def _forget(self) -> None:
        self._sessions.end_all()
        self._close(self._batch or self._last_batch)


@contextmanager
def _refused_without_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise PipelineError(
            "a micro-batch must fit into the stage's memory, got too large a one; send smaller ones"
        ) from None


def _check_answers(answers: Answers, command: ForwardCommand, vocab_size: int) -> None:
    num_rows, num_columns = command.states.shape[:2]
    lengths, longest = [len(row) for row in answers.token_ids], num_columns
    if (shared := command.shared) is not None:  # its first token follows a prompt, the others are in its own columns
        longest = shared.columns_per_answer(num_columns) + 1
        num_rows, num_columns = len(shared.prompt_of), shared.answers_at
    ends = [start + (length if shared is None else 1) for start, length in zip(answers.starts, lengths, strict=False)]
    if len(answers.starts) != num_rows or len(answers.token_ids) != num_rows or not all(answers.token_ids):
        raise PipelineError(f"each of the {num_rows} rows must have a start and an answer; the command lacks some")
    is_within = min(answers.starts) >= 0 and max(ends) <= num_columns and max(lengths) <= longest
    if not is_within or not answers.temperature > 0:
        raise PipelineError(f"answers must lie within {num_columns} columns at a temperature above 0; these do not")
    if not all(0 <= token < vocab_size for row in answers.token_ids for token in row):
        raise PipelineError(f"answer tokens must be in [0, {vocab_size}), got others")


def _differentiable(result: Tensor | TokenLogprobs) -> Tensor:
    return result.logprobs if isinstance(result, TokenLogprobs) else result


def _detached(result: Tensor | TokenLogprobs) -> Tensor | TokenLogprobs:
    if isinstance(result, TokenLogprobs):
        # move it to where the loss is computed, which need not be the device of this stage
        entropy = None if result.entropy is None else result.entropy.cpu()
        return TokenLogprobs(result.logprobs.detach().cpu(), result.mask.cpu(), entropy)
    return result.detach()
