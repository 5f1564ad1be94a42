"""How the policy learns from a batch."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swarm.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from swarm.extensions.points import ADVANTAGES, CORRECTIONS, WEIGHS


class TrainingSection(Section):
    """The policy-gradient step."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate of AdamW on the adapter. Unless set, 2e-5 if policy.base is not bundled, and 3e-4 after a warm start if
    it is. On the bundled reasoning policy .0005 learned as well as .001, and .002 unlearned unless adapters were
    merged (benchmarks.md)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Steps of linear warm-up. 10 unless set, if policy.base is not bundled."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of AdamW on the adapter."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    inner_epochs: PositiveInt = 1
    """Number of passes over one batch. A node on its own gained from 4, with a third of the learning rate, where measured with
    short answers; with long ones it needed fewer samples on the way and ended no higher (benchmarks.md)."""
    groups_per_step: NonNegativeInt = 4
    """Most groups of one optimizer step; a larger batch is split into several steps. 0: one step per batch."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens per forward and backward pass, padding included; gradients accumulate to the full batch. None: at the start the
    node measures what fits into half of the free memory, up to 4,096 on the CPU and 32,768 elsewhere."""
    micro_batch_sequences: PositiveInt = 64
    """Most sequences per forward and backward pass."""
    advantage: Annotated[str, ADVANTAGES] = "grpo"
    """How much better an answer is than the others of its group."""
    advantage_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the advantage, for those that take some."""
    signal_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of a task's reward signals by name, for gdpo; other signals have the weight that the task gives them."""
    aggregation: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """dapo: sum over tokens / all tokens. grpo: mean per sequence, then mean. dr_grpo: sum / (sequences x max_new_tokens).
    With ratio sequence always grpo."""
    ratio: Literal["token", "sequence", "minpro"] = "token"
    """token: r per token. sequence: geometric mean of an answer, which then counts once whatever its length (GSPO). minpro: r
    times the smallest r before it."""
    ratio_reference: Literal["start", "sampler"] = "start"
    """Policy in the denominator of the ratio r: at the start of the step, or the one that sampled if its log-probs are usable."""
    sequence_clip_low: PositiveFloat = 3e-4
    """Lower clip range of ratio sequence."""
    sequence_clip_high: PositiveFloat = 4e-4
    """Upper clip range of ratio sequence (GSPO, 2507.18071)."""
    adaptive_clip: bool = False
    """Choose the clip range by the balance of good and bad answers (BAPO), in place of clip_low and clip_high."""
    clip_low: PositiveFloat = 0.2
    """Lower clip range of the ratio."""
    clip_high: PositiveFloat = 0.28
    """Upper clip range of the ratio (DAPO, 2503.14476)."""
    clip_delta: Annotated[float, Field(gt=1)] = 4.0
    """Cap of the ratio where the advantage is negative (two-sided clip, 2505.07291)."""
    correction: Annotated[str, CORRECTIONS] = "shaped+opsm"
    """Factor of the loss for tokens that another policy sampled, an earlier own one included; w is the importance weight."""
    correction_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the correction, for those that take some."""
    correction_cap: Annotated[float, Field(gt=1)] = 2.0
    """C of the correction, and of the weights in ESS and in the KL penalty."""
    opsm_limit_nats: PositiveFloat = 0.5
    """opsm leaves a bad answer out if the policy finds its tokens so much less likely, on average, than its author did."""
    lr_by_ess: bool = True
    """Lower the learning rate by sqrt(ESS / N) where few of the N tokens carry the step (after VCPO, 2602.17616)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty KL(policy || base), weighted by min(policy / sampler, correction_cap) where the sampler's log-probs
    are usable; 0 only watches it, at a few answers."""
    filter_groups: bool = True
    """Leave out own groups whose rewards are all equal. false: as in the SAPO paper (2509.08721), for comparison only."""
    mask_truncated: bool = True
    """Leave answers that were cut, with neither EOS nor a stop string, out of the loss."""
    replay_groups: NonNegativeInt = 0
    """Own groups of earlier steps that a batch has besides the others; each is trained on at most twice. 0 is off.
    A node on its own gained from 8 and 24 where measured (benchmarks.md)."""
    replay_max_versions: PositiveInt = 16
    """Own groups that were sampled more policy versions ago are not replayed."""
    canary_tolerance: PositiveFloat = 1e-3
    """Largest difference between the engine's and the trainer's log-probs of the canary answer."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "TrainingSection":
        moves = self.inner_epochs > 1 or self.ratio_reference == "sampler"
        if (self.ratio != "token" or self.adaptive_clip) and not moves:
            raise ValueError(
                "training.ratio sequence, minpro and training.adaptive_clip need a ratio that moves, got one inner epoch "
                'from its start; set training.inner_epochs = 2 or training.ratio_reference = "sampler"'
            )
        if self.adaptive_clip and self.ratio == "sequence":
            raise ValueError(
                "training.adaptive_clip is made for ratios per token, got training.ratio sequence; "
                'set training.ratio = "token" or training.adaptive_clip = false'
            )
        if self.ratio_reference == "sampler" and CORRECTIONS.has_trait(self.correction, WEIGHS):
            raise ValueError(
                f"training.ratio_reference sampler must not be weighed twice, got training.correction {self.correction}; "
                'set training.correction = "sequence_mask+opsm" or "none"'
            )
        return self
