"""Converts groups as they were sampled into groups that this policy can train on, by the lineage of their author.

    same lineage     token ids and log-probs of the author are used
    same tokenizer   token ids are used; log-probs do not weigh them, they only show how far the author's policy is
    other            the text is encoded again: no log-probs

Whatever the lineage, an answer with a passage that this policy would hardly ever write is not trained on: it teaches a style,
not the task, and log-probs that its author invents would carry it past every correction. Its reward still counts in the
baseline of its group, or else the mean would be that of the answers that are like the own ones.

The prompt is always this node's own: rebuilt from the task's reference, with the own chat template. Text that is encoded again
ends with the own EOS where the author's answer ended with its EOS. An answer that was cut gets no EOS, and the trainer masks
it. One that ended by a stop string gets none either, and is whole, because its text has the string.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from swarm.policy.micro_batch_size import TokenSequence, cut
from swarm.policy.policy import TextPolicy
from swarm.types import PLAIN, PromptContext, Rollout, RolloutGroup, Turn


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A rollout group that is ready for the trainer."""

    prompt_ids: tuple[int, ...]
    """The prompt as this node's policy encodes it."""
    group: RolloutGroup
    """Token ids are valid for this node's tokenizer; a rollout without token ids is left out of the loss."""
    usable_logprobs: bool
    """Whether `logprobs` belong to the token ids and may correct for the policy that sampled them."""
    is_own: bool
    """Whether this node sampled it."""
    known_logprobs: bool = False
    """Whether `logprobs` belong to the token ids, whatever the policy; those of another lineage only measure its distance."""
    signal_weights: tuple[tuple[str, float], ...] = ()
    """(name, weight) of each reward signal of the task; empty where its reward is one number."""
    success_level: float = 0.0
    """Answers with a lower reward get no positive advantage; 0 for own groups. See `pool.success_levels`."""
    baseline: float | None = None
    """Reward that this node's own answers to the source usually earn, with which those of others are compared; None: with each
    other."""
    siblings: tuple[float, ...] = ()
    """Rewards of other authors' answers to the same task, which its own are compared with, too. See `training.common_groups`."""
    weight: float = 1.0
    """As how many answers each of its answers counts, in (0, 1]. Below 1 for a group of others that is larger than own ones."""
    is_replay: bool = False
    """Whether it is an own group of an earlier round that is trained on a second time."""

    @property
    def has_signal(self) -> bool:
        """Whether there is something to learn from it: rewards that differ, or a baseline of another kind."""
        rewards = {*(rollout.reward for rollout in self.group.rollouts), *self.siblings}
        return len(rewards) > 1 or self.baseline is not None


_FLOOR_WINDOW = 512
_FLOOR_MIN_ANSWERS = 32
_NEAREST_ANSWERS = 128
"""Number of own answers, those of the most similar length, that an answer is compared with."""
_STRETCH_TOKENS = 16
_SLACK_NATS = 7.0
"""A stretch may be e^7 = 1,100 times less likely than the quantile of own ones: what this policy hardly knows yet is a token or
two that it finds unlikely, while garbage is unlikely token after token."""
_HONEST_BELOW_FLOOR = 0.25
"""Part of a group's answers that may be below the floor although its author is honest: policies of one lineage drift apart."""
_SPOILT = 1 / 16
"""How bad a group counts, on the scale of `report_unlikely`, of which nothing is left to learn from once unusable answers are
left out."""


class LikelihoodFloor:
    """Bound on how unlikely an answer may be, set by the newest 512 own answers. It belongs to the compute thread.

    An answer is judged by its least likely stretch of 16 tokens. A mean over the whole answer hides a passage of junk in a long
    one, and refuses long answers in a slightly different style, since the means of own answers hardly differ.
    """

    def __init__(self, quantile: float) -> None:
        """`quantile` of own answers below which the floor lies; 0 is off."""
        self.is_on = quantile > 0
        self._quantile = quantile
        self._own: deque[tuple[int, float]] = deque(maxlen=_FLOOR_WINDOW)  # (number of tokens, least likely stretch)

    @property
    def is_known(self) -> bool:
        """Whether there are own answers enough to judge others by, or nothing is to be judged."""
        return not self.is_on or len(self._own) >= _FLOOR_MIN_ANSWERS

    def observe_own(self, answers: Sequence[Sequence[float]]) -> None:
        """Note own answers by the log-probs of their tokens under the plain policy."""
        self._own.extend((len(logprobs), least_likely_stretch(logprobs)) for logprobs in answers if len(logprobs))

    def admits(self, logprobs: Sequence[float]) -> bool:
        """Whether an answer with these log-probs is likely enough here."""
        return least_likely_stretch(logprobs) >= self.bound(len(logprobs))

    def bound(self, num_tokens: int) -> float:
        """Least mean log-prob of the least likely stretch of an answer of `num_tokens` tokens, in nats per token."""
        nearest = heapq.nsmallest(
            _NEAREST_ANSWERS, reversed(self._own), key=lambda own: abs(math.log(own[0] / num_tokens))
        )
        stretches = sorted(stretch for _, stretch in nearest)
        lowest = stretches[int(self._quantile * (len(stretches) - 1))]
        return lowest - _SLACK_NATS / min(num_tokens, _STRETCH_TOKENS)

    def state(self) -> list[tuple[int, float]]:
        return list(self._own)

    def restore(self, state: Sequence[float | Sequence[float]]) -> None:
        """Continue from a `state`. Versions up to 0.1.0 wrote means of whole answers, which are ignored."""
        pairs = [entry for entry in state if isinstance(entry, Sequence)]
        self._own = deque(((int(num_tokens), stretch) for num_tokens, stretch in pairs), maxlen=_FLOOR_WINDOW)


def least_likely_stretch(logprobs: Sequence[float]) -> float:
    """Smallest mean log-prob of 16 tokens in a row; that of all tokens where there are fewer."""
    values = torch.tensor(logprobs, dtype=torch.float64)
    return values.unfold(0, min(_STRETCH_TOKENS, len(values)), 1).mean(-1).min().item()


@dataclass(frozen=True, slots=True)
class ForeignGroup:
    """A group of another node, and what this node knows of its task; see `RolloutConverter.foreign`."""

    prompt: str
    group: RolloutGroup
    success_level: float = 0.0
    context: PromptContext = PLAIN
    baseline: float | None = None
    siblings: tuple[float, ...] = ()


class _Spelt(NamedTuple):
    """A group in own tokens, with its prompt."""

    prompt_ids: tuple[int, ...]
    group: RolloutGroup


class RolloutConverter:
    """Makes training groups, and keeps the likelihood floor that own answers set for those of others.

    A node ignores groups of others until it has scored 32 answers of its own. It belongs to the compute thread.
    """

    def __init__(
        self,
        policy: TextPolicy,
        likelihood_floor_quantile: float,
        max_new_tokens: int,
        report_unlikely: Callable[[str, float], None] = lambda author, bad: None,
    ) -> None:
        """`max_new_tokens`: the trainer masks longer answers, which still count in a baseline; only their beginning is measured.

        `report_unlikely(author, bad)` receives an author of the own lineage whose answers are too unlikely here, and any
        author of whose group nothing is left, with how bad that is, in (0, 1].
        """
        self._report_unlikely = report_unlikely
        self._policy = policy
        self._floor = LikelihoodFloor(likelihood_floor_quantile)
        self._max_new_tokens = max_new_tokens
        self._visible = _visible_ids(policy)
        self.num_answers_below_floor = 0
        self.num_answers_text_mismatch = 0
        """Answers left out because their tokens here would spell another text, or hide special tokens."""
        self.dropped: Counter[str] = Counter()
        """Groups that could not be used, by reason."""

    @property
    def tokenizer(self) -> str:
        """What `Lineage.tokenizer` of own groups is."""
        return self._policy.lineage.tokenizer

    def observe_own(self, answers: Sequence[Sequence[float]]) -> None:
        """Note own fresh answers by the log-probs of their tokens under the plain policy, as for text of others."""
        self._floor.observe_own(answers)

    def own(
        self, prompt: str, group: RolloutGroup, *, is_replay: bool = False, context: PromptContext = PLAIN
    ) -> TrainingGroup:
        ids = tuple(self._policy.encode_prompt(prompt, context))
        return TrainingGroup(prompt_ids=ids, group=group, usable_logprobs=True, is_own=True, is_replay=is_replay)

    def foreign(
        self,
        prompt: str,
        group: RolloutGroup,
        success_level: float = 0.0,
        *,
        context: PromptContext = PLAIN,
        baseline: float | None = None,
    ) -> TrainingGroup | None:
        """None, and counted, where the prompt is too long here, there is no floor yet, or nothing useful is left.

        Answers with a reward below `success_level` are no good examples. A group is useless where no answer that is likely
        enough reaches this level and is better than `baseline`, or than the mean without one. Answers below the floor stay in
        the group without tokens.
        """
        (found,) = self.foreign_groups([ForeignGroup(prompt, group, success_level, context, baseline)])
        return found

    def foreign_groups(self, offered: Sequence[ForeignGroup]) -> list[TrainingGroup | None]:
        """As `foreign`, for several groups, whose answers are measured in as few passes as memory allows."""
        spelt = [self._spelt(one) for one in offered]
        likely = iter(self._without_unlikely([one for one in spelt if one is not None]))
        return [
            None if mine is None else self._useful(one, mine, next(likely))
            for one, mine in zip(offered, spelt, strict=True)
        ]

    def _spelt(self, offered: ForeignGroup) -> _Spelt | None:
        """The group in own tokens; None, and counted, where it cannot be judged here."""
        ids = tuple(self._policy.encode_prompt(offered.prompt, offered.context))
        if not 0 < len(ids) <= self._policy.config.max_prompt_tokens:
            self.dropped["long_prompt"] += 1
            return None
        if not self._floor.is_known:
            self.dropped["no_floor_yet"] += 1
            return None
        known = offered.group.lineage.tokenizer == self._policy.lineage.tokenizer
        return _Spelt(ids, self._as_spelt(offered.group if known else self._re_encoded(offered.group, offered.context)))

    def _useful(self, offered: ForeignGroup, spelt: _Spelt, translated: RolloutGroup) -> TrainingGroup | None:
        """`translated`: without tokens of answers below the floor. None, and counted, where nothing useful is left."""
        group, own = offered.group, self._policy.lineage
        known = group.lineage.tokenizer == own.tokenizer
        same_lineage = known and group.lineage.policy == own.policy
        likely = [rollout.reward for rollout in translated.rollouts if rollout.token_ids]
        num_below = len(spelt.group.rollouts) - len(likely) if same_lineage else 0
        best = max(likely, default=-math.inf)
        if offered.baseline is None:
            pooled = [*(rollout.reward for rollout in translated.rollouts), *offered.siblings]
            is_better = len(set(pooled)) > 1 and best > sum(pooled) / len(pooled)
        else:
            is_better = best > offered.baseline
        is_usable = is_better and best >= offered.success_level
        is_spoilt = not is_usable and len(likely) < len(group.rollouts)
        self._report(group.author, num_below / len(group.rollouts), is_spoilt)
        if not is_usable:
            self.dropped["nothing_usable"] += 1
            return None
        return TrainingGroup(
            spelt.prompt_ids,
            translated,
            usable_logprobs=same_lineage,
            is_own=False,
            known_logprobs=known,
            success_level=offered.success_level,
            baseline=offered.baseline,
            siblings=offered.siblings,
        )

    def may_be_hint(self, prompt: str, rollout: Rollout, context: PromptContext = PLAIN) -> bool:
        """Whether own answers may begin as this answer of a peer with the own tokenizer does: its tokens spell its text, and
        as a whole it is above the floor.

        Nothing is counted or reported, because the answer is judged again where it is trained on.
        """
        ids = tuple(self._policy.encode_prompt(prompt, context))
        fits = 0 < len(ids) <= self._policy.config.max_prompt_tokens and bool(rollout.token_ids)
        if not fits or not self._is_spelt(rollout):
            return False
        if not self._floor.is_on or not self._floor.is_known:
            return self._floor.is_known
        (logprobs,) = self._logprobs([(ids, rollout.token_ids[: self._max_new_tokens])])
        return self._floor.admits(logprobs)

    def state(self) -> list[tuple[int, float]]:
        return self._floor.state()

    def restore(self, state: Sequence[float | Sequence[float]]) -> None:
        self._floor.restore(state)

    def _report(self, author: str, part_below: float, is_spoilt: bool) -> None:
        excess = (part_below - _HONEST_BELOW_FLOOR) / (1 - _HONEST_BELOW_FLOOR)
        bad = max(excess, _SPOILT if is_spoilt else 0.0)
        if bad > 0:
            self._report_unlikely(author, bad)

    def _re_encoded(self, group: RolloutGroup, context: PromptContext) -> RolloutGroup:
        rollouts = [self._re_encode(rollout, context) for rollout in group.rollouts]
        return replace(group, rollouts=tuple(rollout for rollout in rollouts if rollout.token_ids))

    def _re_encode(self, rollout: Rollout, context: PromptContext) -> Rollout:
        """The rollout in own tokens; without any where a text cannot be encoded."""
        ids: list[int] = []
        turns: list[Turn] = []
        for turn in rollout.turns:
            answer = self._encode_answer(turn.text, finished=True)
            reply = self._policy.encode_reply(turn.reply, turn.role, context, after_eos=True)
            if not answer or not reply:
                return replace(rollout, token_ids=(), logprobs=(), turns=())
            start = len(ids) + len(answer)
            ids += [*answer, *reply]
            turns.append(replace(turn, start=start, stop=len(ids)))
        last = self._encode_answer(rollout.text, finished=rollout.finished)
        if turns and not last:
            return replace(rollout, token_ids=(), logprobs=(), turns=())
        ids += last
        return replace(rollout, token_ids=tuple(ids), logprobs=(0.0,) * len(ids), turns=tuple(turns))

    def _encode_answer(self, text: str, *, finished: bool) -> list[int]:
        ids = list(self._policy.encode_answer(text))
        return [*ids, self._policy.end_token_id] if finished and (ids or not text) else ids

    def _as_spelt(self, group: RolloutGroup) -> RolloutGroup:
        """The group without answers whose ids hide tokens that no text shows, or spell another text than was rewarded."""
        kept = tuple(rollout for rollout in group.rollouts if self._is_spelt(rollout))
        self.num_answers_text_mismatch += len(group.rollouts) - len(kept)
        return group if len(kept) == len(group.rollouts) else replace(group, rollouts=kept)

    def _is_spelt(self, rollout: Rollout) -> bool:
        starts = [0, *(turn.stop for turn in rollout.turns)]
        stops = [*(turn.start for turn in rollout.turns), len(rollout.token_ids)]
        for start, stop, text in zip(starts, stops, rollout.answers, strict=True):
            ids = rollout.token_ids[start:stop]
            has_eos = rollout.finished if stop == len(rollout.token_ids) else ids[-1] in self._policy.eos_token_ids
            if not self._visible.issuperset(ids[:-1] if has_eos else ids) or self._policy.decode(ids) != text:
                return False
        return True

    def _without_unlikely(self, groups: Sequence[_Spelt]) -> list[RolloutGroup]:
        """The groups, in which answers that this policy would hardly ever write have no tokens: only their reward counts."""
        if not self._floor.is_on:
            return [one.group for one in groups]
        answers = [
            (one.prompt_ids, rollout.token_ids[: self._max_new_tokens])
            for one in groups
            for rollout in one.group.rollouts
        ]
        scored = iter(self._logprobs(answers))
        return [
            replace(one.group, rollouts=tuple(self._if_likely(rollout, next(scored)) for rollout in one.group.rollouts))
            for one in groups
        ]

    def _if_likely(self, rollout: Rollout, logprobs: Sequence[float]) -> Rollout:
        """The rollout, without tokens where they are below the floor."""
        if self._floor.admits(list(itertools.compress(logprobs, rollout.written))):
            return rollout
        self.num_answers_below_floor += 1
        return replace(rollout, token_ids=(), logprobs=(), segments=(), turns=())

    @torch.no_grad()
    def _logprobs(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """[B][T] log-probs of the answers' tokens under the own policy."""
        rows: list[list[float]] = [[] for _ in sequences]
        policy = self._policy
        parts = cut(
            sequences,
            max_sequences=len(sequences),
            max_tokens=policy.micro_batch_tokens,
            max_separate_tokens=policy.max_separate_tokens,
        )
        for part in parts if sequences else ():
            scored = policy.token_logprobs([sequences[index] for index in part]).logprobs
            for row, index in zip(scored, part, strict=True):
                rows[index] = [float(value) for value in row[: len(sequences[index][1])]]
        return rows


def _visible_ids(policy: TextPolicy) -> frozenset[int]:
    """Token ids that a text shows: neither special tokens, of which a tokenizer may name only some as such, nor ids between the
    end of the vocabulary and that of the embedding, which decode to nothing."""
    tokenizer = policy.tokenizer
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = {index for index in tokenizer.get_vocab().values() if index < policy.vocab_size}
    return frozenset(known - special - {*tokenizer.all_special_ids, *policy.eos_token_ids})
