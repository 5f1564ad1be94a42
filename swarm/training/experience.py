"""Groups as they were sampled → groups as this policy can train on them, by lineage.

same lineage     token ids and log-probs of the author are used
same tokenizer   token ids are used; log-probs do not weigh them, they only say how far the author's policy is
other            the text is encoded again; EOS is appended where the author's answer had ended
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from swarm.policy.logprobs import token_logprobs
from swarm.policy.policy import Policy
from swarm.training.training_group import TrainingGroup
from swarm.types import Rollout, RolloutGroup

_FLOOR_WINDOW = 512
_FLOOR_MIN_ANSWERS = 64


class ExperienceTranslator:
    """Makes training groups; keeps the running likelihood of own answers for the floor under foreign text."""

    def __init__(self, policy: Policy, likelihood_floor_quantile: float) -> None:
        self._policy = policy
        self._quantile = likelihood_floor_quantile
        self._own_likelihoods: deque[float] = deque(maxlen=_FLOOR_WINDOW)
        self.num_answers_below_floor = 0

    def observe_own(self, likelihoods: Sequence[float]) -> None:
        """Note the mean log-prob per token of own fresh answers, under the plain policy as text of others is measured."""
        self._own_likelihoods.extend(likelihoods)

    def own(self, prompt: str, group: RolloutGroup) -> TrainingGroup:
        ids = tuple(self._policy.encode_prompt(prompt))
        return TrainingGroup(prompt_ids=ids, group=group, usable_logprobs=True, is_own=True)

    def foreign(self, prompt: str, group: RolloutGroup) -> TrainingGroup | None:
        """None where nothing with signal is left after re-encoding and the likelihood floor."""
        ids = tuple(self._policy.encode_prompt(prompt))
        if len(ids) > self._policy.config.max_prompt_tokens:
            return None
        own = self._policy.lineage
        if group.lineage.tokenizer != own.tokenizer:
            group = self._above_floor(ids, self._re_encoded(group))
            if len(group.rollouts) < 2 or not group.has_signal:
                return None
        same_lineage = group.lineage.policy == own.policy
        known = group.lineage.tokenizer == own.tokenizer
        return TrainingGroup(ids, group, usable_logprobs=same_lineage, is_own=False, known_logprobs=known)

    def state(self) -> list[float]:
        return list(self._own_likelihoods)

    def restore(self, state: Sequence[float]) -> None:
        self._own_likelihoods.clear()
        self._own_likelihoods.extend(state)

    def _re_encoded(self, group: RolloutGroup) -> RolloutGroup:
        rollouts = [self._re_encode(rollout) for rollout in group.rollouts]
        return replace(group, rollouts=tuple(rollout for rollout in rollouts if rollout.token_ids))

    def _re_encode(self, rollout: Rollout) -> Rollout:
        ids = list(self._policy.encode_answer(rollout.text))
        if rollout.finished:
            ids.append(self._policy.eos_token_ids[0])
        return replace(rollout, token_ids=tuple(ids), logprobs=(0.0,) * len(ids))

    def _above_floor(self, prompt_ids: tuple[int, ...], group: RolloutGroup) -> RolloutGroup:
        """Answers that this policy would never write teach it another style, not the task: leave them out."""
        if not self._quantile or len(self._own_likelihoods) < _FLOOR_MIN_ANSWERS or not group.rollouts:
            return group
        own = sorted(self._own_likelihoods)
        floor = own[int(self._quantile * (len(own) - 1))]
        means = self._mean_logprobs(prompt_ids, group.rollouts)
        kept = tuple(r for r, mean in zip(group.rollouts, means, strict=True) if mean >= floor)
        self.num_answers_below_floor += len(group.rollouts) - len(kept)
        return replace(group, rollouts=kept)

    @torch.no_grad()
    def _mean_logprobs(self, prompt_ids: tuple[int, ...], rollouts: Sequence[Rollout]) -> list[float]:
        """[G] mean log-prob per token under the own policy."""
        sequences = [(prompt_ids, rollout.token_ids) for rollout in rollouts]
        scored = token_logprobs(self._policy.model, sequences, self._policy.pad_token_id)
        return (scored.logprobs.sum(-1) / scored.mask.sum(-1)).tolist()
