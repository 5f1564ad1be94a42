"""Steps the environments of one engine call in threads, beside sampling.

    engine ─ answer ended ─▶ thread: decode, Episode.step ─▶ reply ─▶ token ids ─ engine samples the next answer
                                                      └▶ done, cut or failed: the rollout is complete

The token ids of an answer are never encoded again. Only the environment's reply is encoded, with what the chat template writes
around it.
"""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from swarm.engine.engine import AnswerRequest, Completion
from swarm.engine.pruning import AnswerKey
from swarm.policy.policy import TextPolicy
from swarm.tasks.environments.episodes import Play, state_digests
from swarm.types import Rollout, Step, Task, Turn

_WHOLE = ("eos", "stop")
"""Ends of an answer to which the environment may reply."""


@dataclass(slots=True)
class _Run:
    """One episode as far as it got."""

    play: Play
    turns: list[Turn] = field(default_factory=list)
    start: int = 0
    """Index of the first token of the present answer."""
    text: str = ""
    """The present answer."""
    completion: Completion | None = None
    failure: BaseException | None = None


class EpisodeRunner(AbstractContextManager["EpisodeRunner"]):
    """The `Turns` of one call of an engine. Requests whose tasks take one answer are none of its business.

    It is a context manager that belongs to the thread of the engine. Each episode is stepped by one thread at a time.
    """

    def __init__(
        self, policy: TextPolicy, tasks: Sequence[Task], requests: Sequence[AnswerRequest], num_threads: int
    ) -> None:
        """`tasks` are those of `requests`. At most `num_threads` environments step at a time."""
        self._policy = policy
        self._tasks = tasks
        self._requests = requests
        self._runs: dict[AnswerKey, _Run] = {}
        self._stepped: queue.SimpleQueue[AnswerKey] = queue.SimpleQueue()
        self._num_stepping = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="environment")
        self.num_reply_tokens = 0
        """Tokens of the replies so far, of all episodes."""

    def __exit__(self, *exc_info: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    @property
    def has_episodes(self) -> bool:
        """Whether any task has an environment."""
        return any(task.begin is not None for task in self._tasks)

    def ended(self, key: AnswerKey, completion: Completion) -> bool:
        """See `Turns.ended`."""
        task = self._tasks[key[0]]
        if task.begin is None:
            return False
        run = self._runs.setdefault(key, _Run(Play.of(task)))
        run.completion = completion
        run.text = self._policy.decode(completion.token_ids[run.start :])
        self._num_stepping += 1
        self._threads.submit(self._step, key, run)
        return completion.end in _WHOLE  # one that was cut is the last answer, and its reward is still computed

    def replies(self, *, wait: bool) -> list[tuple[AnswerKey, Sequence[int]]]:
        """See `Turns.replies`."""
        found: list[tuple[AnswerKey, Sequence[int]]] = []
        while self._num_stepping and (not self._stepped.empty() or (wait and not found)):
            key = self._stepped.get()
            self._num_stepping -= 1
            run = self._runs[key]
            assert run.completion is not None
            if run.completion.end in _WHOLE:
                found.append((key, self._reply(key, run)))
        return found

    def rollouts(self, request: int, completions: Sequence[Completion]) -> list[Rollout]:
        """Return the rollouts of the answers to a request. Raises what an environment raised, TaskFailure as a rule."""
        while self._num_stepping:
            self._stepped.get()
            self._num_stepping -= 1
        return [self._rollout(self._runs[request, sample], one) for sample, one in enumerate(completions)]

    def _step(self, key: AnswerKey, run: _Run) -> None:
        try:
            run.play.step(run.text)
        except BaseException as error:  # it is raised again in the thread of the engine
            run.failure = error
        self._stepped.put(key)

    def _reply(self, key: AnswerKey, run: _Run) -> Sequence[int]:
        """Return the token ids of the environment's reply; none where the episode is over, failed or has no room left."""
        if run.failure is not None or not run.play.may_go_on:
            return ()
        assert run.completion is not None
        step: Step = run.play.steps[-1]
        start = len(run.completion.token_ids)
        context = self._tasks[key[0]].context
        token_ids = self._policy.encode_reply(
            step.reply, step.role, context, after_eos=run.completion.end == "eos"
        )  # fmt: skip
        stop = start + len(token_ids)
        if not token_ids or stop >= self._requests[key[0]].max_new_tokens:
            return ()
        run.turns.append(Turn(run.text, step.reply, step.role, start, stop))
        run.start = stop
        self.num_reply_tokens += len(token_ids)
        return token_ids

    def _rollout(self, run: _Run, completion: Completion) -> Rollout:
        if run.failure is not None:
            raise run.failure
        token_ids, logprobs, finished = completion.token_ids, completion.logprobs, completion.finished
        if finished and not run.play.is_done and len(token_ids) - run.start > 1:
            token_ids, logprobs, finished = token_ids[:-1], logprobs[:-1], False  # cut: the trainer masks it
        return Rollout(
            run.text,
            token_ids,
            logprobs,
            finished,
            run.play.reward,
            turns=tuple(run.turns),
            turn_rewards=tuple(step.reward for step in run.play.steps),
            states=state_digests(run.play.steps),
            is_cut=not run.play.is_done,
        )
