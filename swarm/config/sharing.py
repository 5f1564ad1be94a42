"""Settings of experience exchange: what is published, and what is learned from peers."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from swarm.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from swarm.types import USUAL_ANSWER_TOKENS


class SharingSection(Section):
    """Experience exchange (SAPO, 2509.08721): what is published, and what is learned from peers."""

    own_groups: PositiveInt = 8
    """Most own groups in a training batch (I). The default is all of a round: measured better than leaving some out."""
    swarm_groups: Annotated[int, Field(ge=0)] = 24
    """Most groups of peers in a training batch (J), added to the own ones. Three times the own ones save most of the time where
    sampling is the main cost; where training is, fewer cost less. 0: the node trains on its own groups only."""
    publish: bool = True
    """Publish own groups to peers. Off: only learn from peers."""
    time_to_live_s: Annotated[float, Field(gt=0, le=3600)] = 600.0
    """Seconds for which a record is offered to peers, at most an hour. Choose more than a slow node's round takes."""
    max_age_s: PositiveFloat = 600.0
    """Groups of peers that are older than this many seconds are not trained on."""
    max_uses: PositiveInt = 1
    """How many times one group of a peer is trained on."""
    max_share_per_peer: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest fraction of the J groups of a batch that comes from one author, if there are other authors."""
    max_share_per_lineage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest fraction of the J groups of a batch that comes from one policy lineage, if there are others. 1: no limit."""
    max_staleness: NonNegativeInt = 0
    """Groups more than this many policy versions behind their author's newest are dropped, also own ones that waited. 0:
    only their age counts."""
    choice: Literal["uniform", "informative"] = "uniform"
    """How groups of peers are chosen. uniform: all alike (as published). informative: by p(1 - p), age and reputation of
    the author, which was no better where measured."""
    baseline: Literal["author", "reader"] = "author"
    """What answers of peers are compared with. author: with the mean of their group, as their author does. reader: with what own
    answers to that source usually earn, so that successes of a better policy count more."""
    common_tasks: Fraction = 0.0
    """Share of the tasks of a round that all nodes of the swarm draw alike, so that answers of several nodes to one prompt are
    compared with each other. All nodes of a swarm must have it above 0, or none. 0: off."""
    solved_groups: bool = False
    """Publish and take groups in which every answer is right, too. With baseline = "reader" a node that seldom succeeds learns
    from them; compared with their own group they teach nothing. All nodes of a swarm must have it, or none."""
    pool_max_groups: PositiveInt = 512
    """Largest number of groups in the experience pool. The oldest are removed first."""
    max_group_size: PositiveInt = 64
    """Groups of peers with more rollouts than this are refused."""
    max_answer_tokens: PositiveInt = USUAL_ANSWER_TOKENS
    """Answers of peers with more tokens than this are refused. Unless set, rollouts.max_new_tokens where that is more. Memory
    for bodies grows with it."""
    max_records_per_peer_per_minute: PositiveInt = 240
    """Headers of one peer beyond this number per minute are refused."""
    reputation_half_life_s: PositiveFloat = 21_600.0
    """Seconds after which an observation about an author, good or bad, counts half. See security.md."""
    max_share_of_strangers: Fraction = 0.25
    """Largest fraction of downloads that all authors on probation get together, while known authors offer bodies. 1: no
    limit."""
    likelihood_floor_quantile: Fraction = 0.02
    """Answers of peers are not trained on if their least likely stretch of 16 tokens is e^7 times less likely than this quantile
    of own answers of similar length. Their rewards still count in the baseline. 0: off."""
    success_quantile: Fraction = 0.5
    """An answer of a peer counts as a success from this quantile of the best rewards of own groups on, per task source. 0:
    off."""

    @model_validator(mode="after")
    def _solved_groups_have_a_baseline(self) -> "SharingSection":
        if self.solved_groups and self.baseline != "reader":
            raise ValueError(
                f'sharing.solved_groups needs sharing.baseline = "reader", got {self.baseline}: beside each other, right answers '
                "teach nothing; set that too, or remove solved_groups"
            )
        return self
