"""Samples answers for many askers at once, on a thread of its own, and passes every piece of text on as it comes.

    ask() ─ orders ─▶ [compute thread: LiveBatch of the policy, one of its base] ─ tokens of a step ─▶ Asked.pieces()
    close() ────────▶ its slots are free again

All of it but the compute thread runs on one event loop.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from swarm.config import Config
from swarm.engine.live_batch import LiveBatch, LiveRequest, SampledToken, open_batch
from swarm.errors import SwarmError
from swarm.policy.policy import Policy
from swarm.policy.prompts.prompt_encoder import decoded
from swarm.serving.texts import TextStream

logger = logging.getLogger(__name__)


class BusyError(SwarmError):
    """As many answers as allowed are open."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What was sampled of one answer since its last piece."""

    index: int
    """Of the answer, over all prompts of the question."""
    text: str
    """May be empty: a character may need several tokens, and a part of a stop string is held back."""
    tokens: tuple[tuple[int, float], ...]
    """(token id, log-prob under the plain policy)."""
    end: Literal["stop", "length"] | None


_Add = tuple[int, LiveRequest, bool]
"""A request with its number, and whether it asks the base."""


class Asked:
    """A question under way. Close it, or its answers are sampled to their ends."""

    def __init__(self, service: "AnswerService", requests: Sequence[LiveRequest], cut: Sequence[str]) -> None:
        self.num_answers = sum(request.num_answers for request in requests)
        self.events: asyncio.Queue[SampledToken | SwarmError] = asyncio.Queue()
        self.numbers = [next(service.numbers) for _ in requests]
        starts = itertools.accumulate((request.num_answers for request in requests), initial=0)
        self._first = dict(zip(self.numbers, starts, strict=False))
        self._texts = [TextStream(service.decode, cut) for _ in range(self.num_answers)]
        self._service = service
        self.num_open = self.num_answers

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what is sampled, until all answers have ended. Raises SwarmError where sampling fails."""
        while self.num_open:
            events = [await self.events.get()]
            while not self.events.empty():  # where the client is slower than the policy: fewer and longer pieces
                events.append(self.events.get_nowait())
            by_answer: dict[int, list[SampledToken]] = {}
            for event in events:
                if isinstance(event, SwarmError):
                    raise event
                by_answer.setdefault(self._first[event.request] + event.sample, []).append(event)
            for index, tokens in by_answer.items():
                yield self._piece(index, tokens)

    def close(self) -> None:
        """Leave the question. Does nothing the second time."""
        self._service.leave(self)

    def _piece(self, index: int, tokens: Sequence[SampledToken]) -> Piece:
        end = tokens[-1].end
        text = self._texts[index].push([one.token_id for one in tokens], is_last=end is not None)
        self.num_open -= end is not None
        reason = None if end is None else "length" if end == "limit" else "stop"
        return Piece(index, text, tuple((one.token_id, one.logprob) for one in tokens), reason)


class AnswerService:
    """The compute thread with its batches. `start` it on the loop that asks."""

    def __init__(
        self, policy: Policy, config: Config, *, max_tokens: int, max_answers: int, with_base: bool = False
    ) -> None:
        """At most `max_answers` are open at a time; a prompt with its answer has at most `max_tokens`."""
        self.max_tokens = max_tokens
        self.max_answers = max_answers
        self.numbers = itertools.count()
        self._policy = policy
        self._config = config.rollouts
        self._with_base = with_base
        self._asked: dict[int, Asked] = {}
        self._num_reserved = 0
        self._orders: queue.SimpleQueue[_Add | int | Callable[[], None] | None] = queue.SimpleQueue()
        """To the compute thread: a request, the number of one to drop, what to do between answers, None to end."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="sampling", daemon=True)
        self._ready: asyncio.Future[int] = self._loop.create_future()
        self.decode = partial(decoded, policy.prompts.copy().tokenizer)  # of this thread

    async def start(self) -> None:
        """Open the batches. Raises SwarmError where the memory holds none."""
        self._thread.start()
        self.max_tokens = await self._ready

    async def stop(self) -> None:
        """End the compute thread after its step."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def num_open(self) -> int:
        """Answers that are sampled or wait."""
        return self._num_reserved

    def ask(self, requests: Sequence[LiveRequest], *, base: bool = False, cut: Sequence[str] = ()) -> Asked:
        """Begin to sample; of texts all is left out that follows a string of `cut`. Raises BusyError."""
        num_answers = sum(request.num_answers for request in requests)
        if self._num_reserved + num_answers > self.max_answers:
            raise BusyError(
                f"at most {self.max_answers} answers may be open, got {self._num_reserved} and {num_answers} more; "
                "try again later"
            )
        asked = Asked(self, requests, cut)
        self._num_reserved += num_answers
        for number, request in zip(asked.numbers, requests, strict=True):
            self._asked[number] = asked
            self._orders.put((number, request, base))
        return asked

    def leave(self, asked: Asked) -> None:
        """See `Asked.close`."""
        for number in asked.numbers:
            if self._asked.pop(number, None) is not None and asked.num_open:
                self._orders.put(number)
        self._num_reserved -= asked.num_answers
        asked.num_answers = 0

    def between_answers(self, change: Callable[[], None]) -> None:
        """Have the compute thread call `change`, which may change weights, once the answers under way have ended.

        Answers that are asked for meanwhile wait for it.
        """
        self._orders.put(change)

    def _deliver(self, events: Sequence[SampledToken]) -> None:
        for event in events:
            if (asked := self._asked.get(event.request)) is not None:
                asked.events.put_nowait(event)

    def _fail(self, error: SwarmError) -> None:
        for asked in set(self._asked.values()):
            asked.events.put_nowait(error)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """From the compute thread."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: the process ends
            self._orders.put(None)

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                work = _Work(self._open)
        except Exception as error:
            failure = error if isinstance(error, SwarmError) else SwarmError(f"sampling must start, got {error}")
            self._tell(self._ready.set_exception, failure)
            return
        self._tell(self._ready.set_result, work.max_tokens)
        while True:
            orders = [self._orders.get()] if work.is_idle else []
            while not self._orders.empty():
                orders.append(self._orders.get())
            if None in orders:
                return
            try:
                with torch.inference_mode():
                    if new := work.go_on([order for order in orders if order is not None]):
                        self._tell(self._deliver, new)
            except Exception as error:  # memory, NaN, or a bug: the next request may do better
                logger.exception("sampling failed")
                failure = error if isinstance(error, SwarmError) else SwarmError(f"sampling failed: {error}")
                work.give_up()
                self._tell(self._fail, failure)

    def _open(self) -> list[LiveBatch]:
        """Return the batch of the policy, and that of its base if that is served, too."""
        return [
            open_batch(self._policy, self._config, self.max_tokens, without_adapter=base)
            for base in ([False, True] if self._with_base else [False])
        ]


class _Work:
    """What the compute thread has to do."""

    def __init__(self, open_batches: Callable[[], list[LiveBatch]]) -> None:
        self._open = open_batches
        self._batches = open_batches()
        self.max_tokens = min(batch.max_tokens for batch in self._batches)
        self._waiting: list[_Add] = []
        self._changes: list[Callable[[], None]] = []
        self._running: Counter[int] = Counter()
        """Open answers by request."""

    @property
    def is_idle(self) -> bool:
        return not (self._running or self._waiting or self._changes)

    def go_on(self, orders: Sequence[_Add | int | Callable[[], None]]) -> list[SampledToken]:
        """Take orders, then sample a token of every open answer. Raises what sampling raises, and MemoryBudgetError."""
        self._batches = self._batches or self._open()
        for order in orders:
            if isinstance(order, int):
                self._drop(order)
            elif isinstance(order, tuple):
                self._waiting.append(order)
            else:
                self._changes.append(order)
        if self._changes and not self._running:
            self._change()
        if not self._changes:
            for number, request, base in self._waiting:
                self._batches[base].add(number, request)
                self._running[number] = request.num_answers
            self._waiting = []
        new = [token for batch in self._batches for token in batch.step()]
        for token in new:
            if token.end is not None:
                self._running[token.request] -= 1
                if not self._running[token.request]:
                    del self._running[token.request]
        return new

    def give_up(self) -> None:
        """Forget all answers after a failure. The next order opens the batches anew."""
        self._waiting, self._changes, self._running, self._batches = [], [], Counter(), []

    def _drop(self, number: int) -> None:
        self._waiting = [one for one in self._waiting if one[0] != number]
        if self._running.pop(number, 0):
            for batch in self._batches:
                batch.drop(number)

    def _change(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            with torch.inference_mode(False):
                change()
        self._batches = self._open()
