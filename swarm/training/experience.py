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
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from swarm.policy.micro_batch_size import cut
from swarm.policy.policy import TextPolicy
from swarm.types import PLAIN, PromptContext, Rollout, RolloutGroup


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
    weight: float = 1.0
    """As how many answers each of its answers counts, in (0, 1]. Below 1 for a group of others that is larger than own ones."""
    is_replay: bool = False
    """Whether it is an own group of an earlier round that is trained on a second time."""


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

    def observe_own(self, answers: Sequence[Sequence[float]]) -> None:
        """Note own fresh answers by the log-probs of their tokens under the plain policy, as for text of others."""
        self._floor.observe_own(answers)

    def own(
        self, prompt: str, group: RolloutGroup, *, is_replay: bool = False, context: PromptContext = PLAIN
    ) -> TrainingGroup:
        ids = tuple(self._policy.encode_prompt(prompt, context))
        return TrainingGroup(prompt_ids=ids, group=group, usable_logprobs=True, is_own=True, is_replay=is_replay)

    def foreign(
        self, prompt: str, group: RolloutGroup, success_level: float = 0.0, *, context: PromptContext = PLAIN
    ) -> TrainingGroup | None:
        """None, and counted, where the prompt is too long here, there is no floor yet, or nothing useful is left.

        Answers with a reward below `success_level` are no good examples. A group is useless where no answer that is likely
        enough reaches this level and is better than the mean. Answers below the floor stay in the group without tokens.
        """
        ids = tuple(self._policy.encode_prompt(prompt, context))
        if not 0 < len(ids) <= self._policy.config.max_prompt_tokens:
            self.dropped["long_prompt"] += 1
            return None
        if not self._floor.is_known:
            self.dropped["no_floor_yet"] += 1
            return None
        own = self._policy.lineage
        known = group.lineage.tokenizer == own.tokenizer
        same_lineage = known and group.lineage.policy == own.policy
        spelt = self._as_spelt(group if known else self._re_encoded(group))
        translated = self._without_unlikely(ids, spelt)
        likely = [rollout.reward for rollout in translated.rollouts if rollout.token_ids]
        num_below = len(spelt.rollouts) - len(likely) if same_lineage else 0
        best = max(likely, default=-math.inf)
        is_usable = translated.has_reward_variance and best >= success_level and best > translated.mean_reward
        is_spoilt = not is_usable and len(likely) < len(group.rollouts)
        self._report(group.author, num_below / len(group.rollouts), is_spoilt)
        if not is_usable:
            self.dropped["nothing_usable"] += 1
            return None
        return TrainingGroup(
            ids,
            translated,
            usable_logprobs=same_lineage,
            is_own=False,
            known_logprobs=known,
            success_level=success_level,
        )

    def state(self) -> list[tuple[int, float]]:
        return self._floor.state()

    def restore(self, state: Sequence[float | Sequence[float]]) -> None:
        self._floor.restore(state)

    def _report(self, author: str, part_below: float, is_spoilt: bool) -> None:
        excess = (part_below - _HONEST_BELOW_FLOOR) / (1 - _HONEST_BELOW_FLOOR)
        bad = max(excess, _SPOILT if is_spoilt else 0.0)
        if bad > 0:
            self._report_unlikely(author, bad)

    def _re_encoded(self, group: RolloutGroup) -> RolloutGroup:
        rollouts = [self._re_encode(rollout) for rollout in group.rollouts]
        return replace(group, rollouts=tuple(rollout for rollout in rollouts if rollout.token_ids))

    def _re_encode(self, rollout: Rollout) -> Rollout:
        ids = list(self._policy.encode_answer(rollout.text))
        if rollout.finished and (ids or not rollout.text):
            ids.append(self._policy.eos_token_ids[0])
        return replace(rollout, token_ids=tuple(ids), logprobs=(0.0,) * len(ids))

    def _as_spelt(self, group: RolloutGroup) -> RolloutGroup:
        """The group without answers whose ids hide tokens that no text shows, or spell another text than was rewarded."""
        kept = tuple(rollout for rollout in group.rollouts if self._is_spelt(rollout))
        self.num_answers_text_mismatch += len(group.rollouts) - len(kept)
        return group if len(kept) == len(group.rollouts) else replace(group, rollouts=kept)

    def _is_spelt(self, rollout: Rollout) -> bool:
        inner = rollout.token_ids[:-1] if rollout.finished else rollout.token_ids
        return self._visible.issuperset(inner) and self._policy.decode(rollout.token_ids) == rollout.text

    def _without_unlikely(self, prompt_ids: tuple[int, ...], group: RolloutGroup) -> RolloutGroup:
        """The group, in which answers that this policy would hardly ever write have no tokens: only their reward counts."""
        if not self._floor.is_on or not group.rollouts:
            return group
        scored = self._logprobs(prompt_ids, [one.token_ids[: self._max_new_tokens] for one in group.rollouts])
        rollouts = tuple(
            rollout if self._floor.admits(logprobs) else replace(rollout, token_ids=(), logprobs=(), segments=())
            for rollout, logprobs in zip(group.rollouts, scored, strict=True)
        )
        self.num_answers_below_floor += sum(not rollout.token_ids for rollout in rollouts)
        return replace(group, rollouts=rollouts)

    @torch.no_grad()
    def _logprobs(self, prompt_ids: tuple[int, ...], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """[G][T] log-probs of the tokens under the own policy."""
        rows: list[list[float]] = [[] for _ in answers]
        sequences = [
            (prompt_ids, answer) for answer in answers
        ]  # a group of others may be larger than what fits into memory
        policy = self._policy
        parts = cut(
            sequences,
            max_sequences=len(answers),
            max_tokens=policy.micro_batch_tokens,
            shares_prompts=policy.shares_prompts,
        )
        for part in parts:
            scored = self._policy.token_logprobs([sequences[index] for index in part]).logprobs
            for row, index in zip(scored, part, strict=True):
                rows[index] = [float(value) for value in row[: len(answers[index])]]
        return rows


def _visible_ids(policy: TextPolicy) -> frozenset[int]:
    """Token ids that a text shows: neither special tokens, of which a tokenizer may name only some as such, nor ids between the
    end of the vocabulary and that of the embedding, which decode to nothing."""
    tokenizer = policy.tokenizer
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = {index for index in tokenizer.get_vocab().values() if index < policy.vocab_size}
    return frozenset(known - special - {*tokenizer.all_special_ids, *policy.eos_token_ids})
