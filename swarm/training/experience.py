"""Converts groups as they were sampled into groups that this policy can train on, by the lineage of their author.

    same lineage     token ids and log-probs of the author are used
    same tokenizer   token ids are used; log-probs do not weigh them, they only show how far the author's policy is
    other            the text is encoded again: no log-probs

Whatever the lineage, an answer that this policy would hardly ever write is left out: it teaches a style, not the task, and
log-probs that its author invents would carry it past every correction.

The prompt is always this node's own: rebuilt from the task's reference, with the own chat template. Text that is encoded again
ends with the own EOS where the author's answer ended with its EOS. An answer that was cut gets no EOS, and the trainer masks
it. One that ended by a stop string gets none either, and is whole, because its text has the string.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

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
_HONEST_BELOW_FLOOR = 0.25
"""Part of a group's answers that may be below the floor although its author is honest: policies of one lineage drift apart."""
_SPOILT = 1 / 16
"""How bad a group counts, on the scale of `hint`, of which nothing is left to learn from once unusable answers are left out."""


class RolloutConverter:
    """Makes training groups, and keeps the likelihoods of own answers, which set the floor for text of others.

    A node ignores groups of others until it has scored 32 answers of its own. It belongs to the compute thread.
    """

    def __init__(
        self,
        policy: TextPolicy,
        likelihood_floor_quantile: float,
        max_new_tokens: int,
        hint: Callable[[str, float], None] = lambda author, bad: None,
        *,
        micro_batch_sequences: int,
    ) -> None:
        """`max_new_tokens`: the trainer masks longer answers, which still count in a baseline; only their beginning is measured.
        `micro_batch_sequences`: number of answers that are measured at once, the same as in the trainer.

        `hint(author, bad)` receives an author of the own lineage whose answers are too unlikely here, and any author of whose
        group nothing is left, with how bad that is, in (0, 1].
        """
        self._hint = hint
        self._policy = policy
        self._quantile = likelihood_floor_quantile
        self._max_new_tokens = max_new_tokens
        self._micro_batch_sequences = micro_batch_sequences
        self._visible = _visible_ids(policy)
        self._own_likelihoods: deque[float] = deque(maxlen=_FLOOR_WINDOW)
        self.num_answers_below_floor = 0
        self.num_answers_text_mismatch = 0
        """Answers left out because their tokens here would spell another text, or hide special tokens."""
        self.dropped: Counter[str] = Counter()
        """Groups that could not be used, by reason."""

    def observe_own(self, likelihoods: Sequence[float]) -> None:
        """Note the mean log-prob per token of own fresh answers, under the plain policy, as for text of others."""
        self._own_likelihoods.extend(likelihoods)

    def own(
        self, prompt: str, group: RolloutGroup, *, is_replay: bool = False, context: PromptContext = PLAIN
    ) -> TrainingGroup:
        ids = tuple(self._policy.encode_prompt(prompt, context))
        return TrainingGroup(prompt_ids=ids, group=group, usable_logprobs=True, is_own=True, is_replay=is_replay)

    def foreign(
        self, prompt: str, group: RolloutGroup, success_level: float = 0.0, *, context: PromptContext = PLAIN
    ) -> TrainingGroup | None:
        """None, and counted, where the prompt is too long here, there is no floor yet, or nothing useful is left.

        Answers with a reward below `success_level` are no good examples; a group without a better one is useless.
        """
        ids = tuple(self._policy.encode_prompt(prompt, context))
        if not 0 < len(ids) <= self._policy.config.max_prompt_tokens:
            self.dropped["long_prompt"] += 1
            return None
        if self._quantile and len(self._own_likelihoods) < _FLOOR_MIN_ANSWERS:
            self.dropped["no_floor_yet"] += 1
            return None
        own = self._policy.lineage
        known = group.lineage.tokenizer == own.tokenizer
        same_lineage = known and group.lineage.policy == own.policy
        spelt = self._as_spelt(group if known else self._re_encoded(group))
        translated = self._above_floor(ids, spelt)
        num_below = len(spelt.rollouts) - len(translated.rollouts) if same_lineage else 0
        has_success = any(rollout.reward >= success_level for rollout in translated.rollouts)
        is_usable = has_success and translated.has_reward_variance
        is_spoilt = not is_usable and len(translated.rollouts) < len(group.rollouts)
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

    def state(self) -> list[float]:
        return list(self._own_likelihoods)

    def restore(self, state: Sequence[float]) -> None:
        self._own_likelihoods.clear()
        self._own_likelihoods.extend(state)

    def _report(self, author: str, part_below: float, is_spoilt: bool) -> None:
        excess = (part_below - _HONEST_BELOW_FLOOR) / (1 - _HONEST_BELOW_FLOOR)
        bad = max(excess, _SPOILT if is_spoilt else 0.0)
        if bad > 0:
            self._hint(author, bad)

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

    def _above_floor(self, prompt_ids: tuple[int, ...], group: RolloutGroup) -> RolloutGroup:
        """The group without answers that this policy would hardly ever write."""
        if not self._quantile or len(self._own_likelihoods) < _FLOOR_MIN_ANSWERS or not group.rollouts:
            return group
        own = sorted(self._own_likelihoods)
        floor = own[int(self._quantile * (len(own) - 1))]
        means = self._mean_logprobs(prompt_ids, [one.token_ids[: self._max_new_tokens] for one in group.rollouts])
        kept = tuple(rollout for rollout, mean in zip(group.rollouts, means, strict=True) if mean >= floor)
        self.num_answers_below_floor += len(group.rollouts) - len(kept)
        return replace(group, rollouts=kept)

    @torch.no_grad()
    def _mean_logprobs(self, prompt_ids: tuple[int, ...], answers: Sequence[tuple[int, ...]]) -> list[float]:
        """[G] mean log-prob per token under the own policy."""
        means: list[float] = []
        size = self._micro_batch_sequences  # what fits into memory; a group of others may be many times larger
        for start in range(0, len(answers), size):
            scored = self._policy.token_logprobs([(prompt_ids, answer) for answer in answers[start : start + size]])
            means += (scored.logprobs.sum(-1) / scored.mask.sum(-1)).tolist()
        return means


def _visible_ids(policy: TextPolicy) -> frozenset[int]:
    """Token ids that a text shows: neither special tokens, of which a tokenizer may name only some as such, nor ids between the
    end of the vocabulary and that of the embedding, which decode to nothing."""
    tokenizer = policy.tokenizer
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = {index for index in tokenizer.get_vocab().values() if index < policy.vocab_size}
    return frozenset(known - special - {*tokenizer.all_special_ids, *policy.eos_token_ids})
