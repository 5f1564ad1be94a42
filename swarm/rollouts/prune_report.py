"""What pruning did to the answers of one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.engine.engine import Completion
from swarm.engine.pruning import AnswerKey, PruneCall


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Sums over answers, so that those of several calls add up."""

    num_pruned: int = 0
    saved_tokens: float = 0.0
    """Estimate: what answers that got as far had still to come, in the mean."""
    reward_sum: float = 0.0
    """Of the answers that were scored, each times those it stands for."""
    weight_sum: float = 0.0

    @property
    def reward_mean(self) -> float:
        """Estimate of what the mean reward would be without pruning; 0 where nothing was scored."""
        return self.reward_sum / self.weight_sum if self.weight_sum else 0.0

    def and_also(self, other: "PruneReport") -> "PruneReport":
        return PruneReport(
            self.num_pruned + other.num_pruned,
            self.saved_tokens + other.saved_tokens,
            self.reward_sum + other.reward_sum,
            self.weight_sum + other.weight_sum,
        )


NOTHING_PRUNED = PruneReport()


def prune_report(
    answers: Sequence[Sequence[Completion]], call: PruneCall, rewards: Mapping[AnswerKey, float]
) -> PruneReport:
    """`answers` as the engine gave them, the pruned ones too; `rewards` of those that were scored."""
    lengths = {
        (prompt, sample): (len(answer.token_ids), answer.end == "pruned")
        for prompt, siblings in enumerate(answers)
        for sample, answer in enumerate(siblings)
    }
    ended = {key: length for key, (length, is_pruned) in lengths.items() if not is_pruned}
    pruned = [length for length, is_pruned in lengths.values() if is_pruned]
    to_come = {length: _mean_rest(ended, call, length) for length in set(pruned)}
    return PruneReport(
        num_pruned=len(pruned),
        saved_tokens=sum(to_come[length] for length in pruned),
        reward_sum=sum(call.weight(key) * reward for key, reward in rewards.items()),
        weight_sum=sum(call.weight(key) for key in rewards),
    )


def _mean_rest(ended: Mapping[AnswerKey, int], call: PruneCall, length: int) -> float:
    rests = [(call.weight(key), total - length) for key, total in ended.items() if total > length]
    return sum(weight * rest for weight, rest in rests) / sum(weight for weight, _ in rests) if rests else 0.0
