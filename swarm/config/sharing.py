"""What is given to others, and what is taken from them."""

from typing import Annotated, Literal

from pydantic import Field

from swarm.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SharingSection(Section):
    """Experience exchange (SAPO, 2509.08721): what is published and what is learned from others."""

    own_groups: PositiveInt = 8
    """I: own groups in a training batch, at most. All of a round's by default: measured better than leaving some out."""
    swarm_groups: Annotated[int, Field(ge=0)] = 8
    """J: groups of others in a training batch, on top of the own ones. 0 is plain RL."""
    publish: bool = True
    """Share own groups. Off: learn from others only."""
    time_to_live_s: Annotated[float, Field(gt=0, le=3600)] = 600.0
    """How long a record is offered to others, at most an hour. Longer than a slow node's round."""
    max_age_s: PositiveFloat = 600.0
    """Older groups of others are not trained on."""
    max_uses: PositiveInt = 1
    """How often one group of another node is trained on."""
    max_share_per_peer: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest part of the J groups of a batch from one author, where others are at hand."""
    max_share_per_lineage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest part of the J groups of a batch from one policy lineage, where others are at hand. 1: no limit."""
    max_staleness: NonNegativeInt = 0
    """Drop groups so many policy versions behind their author's newest, own ones that waited too. 0: age alone decides."""
    choice: Literal["uniform", "informative"] = "uniform"
    """Which groups of others: all alike (as published), or by expected usefulness: p(1 - p), age, reputation of the author."""
    pool_max_groups: PositiveInt = 512
    """Groups kept in the experience pool; the oldest go first."""
    max_group_size: PositiveInt = 64
    """Groups of others with more rollouts are refused."""
    max_answer_tokens: PositiveInt = 4096
    """Answers of others with more tokens are refused."""
    max_records_per_peer_per_minute: PositiveInt = 240
    """Headers beyond this rate are refused."""
    reputation_half_life_s: PositiveFloat = 21_600.0
    """Time in which half of what is known of an author fades, good and bad. See security.md."""
    max_share_of_strangers: Fraction = 0.25
    """Largest part of what is pulled from authors on probation together, while others offer. 1: probation alone weighs."""
    likelihood_floor_quantile: Fraction = 0.02
    """Answers of others below this quantile of own answers' mean log-prob are not trained on. 0 turns it off."""
    success_quantile: Fraction = 0.5
    """Answers of others count as successes from this quantile of the best rewards of own groups on, by source. 0 turns it off."""
