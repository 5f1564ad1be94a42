"""Every setting of a node: one frozen pydantic section per package, each knob documented beneath it.

`load(paths, overrides)` merges TOML files left to right, then `section.key=value` overrides, and validates once.
An unknown key is an error that names the nearest known one. Nothing here imports torch.
"""

import difflib
import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
SwarmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NodeSection(Section):
    """This process: where it keeps its state and how much of the machine it may take."""

    dir: Path = Path("runs/node")
    """Folder of identity, pool, checkpoints, logs and metrics. One running node per folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds task choice, sampling and adapter training."""
    max_rounds: PositiveInt | None = None
    """Stop after so many rounds, counted from the first start; unset means until interrupted."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the policy runs; auto takes CUDA, then MPS, then CPU."""
    threads: PositiveInt | None = None
    """CPU threads for tensor work; unset leaves the choice to torch."""
    duty_cycle: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of time that the compute thread may work; 0.5 rests as long as it worked, which keeps a laptop usable."""


class SwarmSection(Section):
    """The swarm to take part in."""

    name: SwarmName = "local"
    """Nodes of equal name and tasks find each other's records."""
    id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """32 hex digits that bind the swarm to its founder; `swarm join` takes them from the manifest. Empty: the name decides."""
    silo_owner: Annotated[str, Field(pattern=r"^([1-9A-HJ-NP-Za-km-z]{40,64})?$")] = ""
    """Peer id of the owner of a silo, from its manifest: nothing leaves the node but sealed, to members. Empty: all may join."""


class NetworkSection(Section):
    """How this node reaches others."""

    backend: Literal["hivemind", "libp2p", "off"] = "hivemind"
    """hivemind: DHT and streams by the libp2p daemon (Linux, x86-64). libp2p: all in Python. off: plain RL, no socket."""
    gossip: Literal["libp2p", "daemon", "off"] = "libp2p"
    """libp2p: validates before it passes on. daemon: less CPU, among friends. off: index only. The same on all nodes."""
    gossip_listen: tuple[str, ...] = ()
    """TCP multiaddresses of the libp2p gossip; it works without an open port. Empty: the hosts of `listen`, free ports."""
    gossip_announce: tuple[str, ...] = ()
    """Multiaddresses to tell others, where they differ from `gossip_listen`."""
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """TCP multiaddresses to listen on; port 0 takes a free one. Use /ip4/0.0.0.0/tcp/PORT to be reachable from outside."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to tell others, where they differ from `listen` (port forwarding)."""
    initial_peers: tuple[str, ...] = ()
    """Multiaddresses, each ending in /p2p/PEER_ID, of nodes to join through. Empty: start a swarm of one and wait."""
    reachability: Literal["auto", "public", "private"] = "auto"
    """auto: host none of the index until peers prove that they can dial this node. public, private: take it as given."""
    relays: tuple[str, ...] = ()
    """Multiaddresses, each ending in /p2p/PEER_ID, of relays to be reached through. Empty: the initial peers."""
    serve_gossip: bool = False
    """Pass headers on to all who connect, for nodes that others cannot reach. Bootstrap peers do it by default."""
    serve_relay: bool = False
    """Carry the traffic of others that cannot be reached. Bootstrap peers do it by default."""
    hole_punching: bool = True
    """Try a direct connection where two nodes first met through a relay."""
    startup_timeout_s: PositiveFloat = 60.0
    """Longest wait for the libp2p daemon to come up."""
    request_timeout_s: PositiveFloat = 20.0
    """Longest wait for one small request; transfers get more by size."""
    poll_interval_s: PositiveFloat = 1.0
    """Pause between two reads of the header index."""
    max_connections_inbound: PositiveInt = 64
    """Requests from peers served at the same time; more are refused. One peer gets at most a quarter of the places."""
    requests_per_peer_per_s: PositiveFloat = 100.0
    """Requests of one peer that are served per second, over time; twice as many at once."""
    upload_bytes_per_peer_per_s: PositiveInt = 33_554_432
    """Bytes per second sent to one peer, over time; twice as many at once."""
    max_upload_bytes_per_s: NonNegativeInt = 0
    """Bytes per second sent to all peers together, for a line that is needed for other things too. 0: no limit."""
    response_bytes_in_flight: PositiveInt = 67_108_864
    """Bytes of responses that are being sent at the same time; requests beyond are refused."""


class SignalSection(Section):
    """One of several signals that make up a reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
    """correct, format, length, tests (code tasks), or a reward function that an installed package offers; see rewards.md."""
    weight: PositiveFloat = 1.0
    """Share of the reward, relative to the other signals'."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the signal, such as {pattern = "..."} or {tags = ["answer"]} of format, {max_chars = 200} of length."""


class TaskSourceFacts(Section):
    """What all nodes know of one source of tasks."""

    kind: Literal["reasoning_gym", "jsonl", "code"] = "reasoning_gym"
    """A procedural data set of reasoning-gym, a file of your own, or functions to write that are run in a sandbox."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    """Name of a reasoning-gym data set, `list_functions` for made-up code tasks, or a name of your own for a JSONL file."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """Name in tables and records; defaults to `name`. Needed when one data set appears twice at different difficulty."""
    weight: PositiveFloat = 1.0
    """Relative share of the tasks drawn."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the data set, such as {max_digits = 2}; of code tasks also the limits {cpu_s = 2, memory_mib = 256}."""
    verifier: Literal["exact", "numeric", "regex"] = "exact"
    """Verifier for lines of a JSONL file that name none."""
    signals: tuple[SignalSection, ...] = ()
    """Signals whose weighted sum is the reward. Empty: correctness alone."""

    @property
    def source_name(self) -> str:
        return self.label or self.name


class TaskSourceSection(TaskSourceFacts):
    """One source of tasks."""

    path: Path | None = None
    """JSONL file with one {"prompt", "answer", "verifier"} object per line; code: {"prompt", "entry", "tests", "answer"}."""

    @model_validator(mode="after")
    def _path_matches_kind(self) -> "TaskSourceSection":
        if self.kind == "jsonl" and self.path is None:
            raise ValueError(f"a jsonl source needs a path, got none; set path for source {self.name!r}")
        if self.kind == "reasoning_gym" and self.path is not None:
            raise ValueError(f"path belongs to jsonl sources, got kind reasoning_gym; remove path of {self.name!r}")
        return self

    @model_validator(mode="after")
    def _signals_are_unique(self) -> "TaskSourceSection":
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals of a source must have different names, got {names}; remove one of {self.name!r}")
        return self


DEMO_TASKS = (
    TaskSourceSection(
        name="chain_sum", label="sums", parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    ),
    TaskSourceSection(
        name="chain_sum",
        label="longer_sums",
        parameters={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    TaskSourceSection(name="spell_backward", label="spelling", parameters={"min_word_len": 3, "max_word_len": 5}),
    TaskSourceSection(
        name="spell_backward", label="longer_spelling", parameters={"min_word_len": 6, "max_word_len": 8}
    ),
    TaskSourceSection(name="lcm", parameters={"min_value": 2, "max_value": 15}),
    TaskSourceSection(name="products", parameters={"min_digits": 1, "max_digits": 1}),
)
"""What the bundled policy was made for, easy settings and harder ones."""


class TasksSection(Section):
    """What the policy is trained on."""

    sources: Annotated[tuple[TaskSourceSection, ...], Field(min_length=1)] = DEMO_TASKS
    """Weighted mixture of task sources. All nodes of a swarm use the same list."""
    run_code_unfenced: bool = False
    """Run code of strangers even where no sandbox can be set up: it may then read your files, and outside Linux do more."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "TasksSection":
        names = [source.source_name for source in self.sources]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"source names must be unique, got {doubled} twice; set a different label")
        return self


class LoraSection(Section):
    """The adapter (peft)."""

    rank: PositiveInt = 16
    """Rank of every factor pair."""
    alpha: PositiveFloat = 32.0
    """Scale is alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout before A, in training only."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers to adapt, or all of them but the head."""
    init_seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds A. Nodes of equal base, shape and init_seed are one lineage: they share log-probs and can merge."""


class PipelineSection(Section):
    """One policy over several machines: the same table on all of them. For models that no single one holds."""

    name: SwarmName = "crew"
    """Tells crews of one swarm apart."""
    driver: str = ""
    """Peer id of the node that runs `swarm run`: the only one whose orders the stages take."""
    crew: tuple[str, ...] = ()
    """Peer ids, or multiaddresses that end in /p2p/PEER_ID, of the machines that run `swarm stage`. Empty: no pipeline."""
    spares: NonNegativeInt = 0
    """Machines of the crew that are left without layers until one is lost."""
    driver_layers: PositiveInt | None = None
    """Last layers of the model, which the driver holds with norm and head. Unset: by speed and memory, like the others'."""
    precision: Literal["fp32", "bf16", "int8"] = "bf16"
    """Of hidden states and their gradients on the line; see algorithms.md for what each costs."""
    action_timeout_s: PositiveFloat = 60.0
    """A stage that takes longer for one order is lost."""
    silence_timeout_s: PositiveFloat = 8.0
    """So is a machine that gives no sign of life for so long while it works on one: frozen, or cut off."""
    startup_timeout_s: PositiveFloat = 300.0
    """How long the driver waits for its crew to come up."""
    copy_interval_steps: NonNegativeInt = 5
    """Steps between two copies of every stage's adapter to a neighbour, from which a lost one is rebuilt. 0: none."""
    max_copy_age: PositiveInt = 10
    """Steps that such a copy may be behind; beyond that a lost stage starts from the average of its neighbours, or the base."""
    max_states: PositiveInt = 65_536
    """Rows times columns of one micro-batch, which bounds what a stage reads from the line."""

    @property
    def is_on(self) -> bool:
        return bool(self.crew)

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the crew, the driver excluded."""
        return tuple(member.rpartition("/")[2] for member in self.crew)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where members can be reached, as far as the settings say."""
        return tuple(member for member in self.crew if "/p2p/" in member)

    @model_validator(mode="after")
    def _crew_is_whole(self) -> "PipelineSection":
        if len(set(self.members)) < len(self.crew) or self.driver in self.members:
            raise ValueError("policy.pipeline.crew must name every machine once and not the driver; remove doubles")
        if self.crew and not self.driver:
            raise ValueError("policy.pipeline.driver must be the driver's peer id, got none; see `swarm identity show`")
        if self.crew and self.spares >= len(self.crew):
            raise ValueError(
                f"policy.pipeline.spares must leave a machine that works, got {self.spares} of {len(self.crew)}; lower it"
            )
        return self


class PolicySection(Section):
    """Base model and adapter."""

    base: str = "bundled"
    """`bundled` (the tiny policy of this package), a folder, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; pin a commit in production."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on CUDA devices that have it, float32 elsewhere."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Load the frozen base with bitsandbytes; the adapter stays in full precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    max_prompt_tokens: PositiveInt = 512
    """Tasks with a longer prompt are skipped and counted."""
    lora: LoraSection = LoraSection()
    pipeline: PipelineSection = PipelineSection()

    @model_validator(mode="after")
    def _stages_can_hold_it(self) -> "PolicySection":
        if self.pipeline.is_on and (self.quantization != "none" or self.lora.dropout or self.gradient_checkpointing):
            raise ValueError(
                "a pipelined policy goes without policy.quantization, policy.gradient_checkpointing and policy.lora.dropout; "
                "set them to none, false and 0"
            )
        return self


class RolloutsSection(Section):
    """How answers are sampled."""

    groups_per_round: PositiveInt = 8
    """Tasks drawn per round; each gives one group."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per group (G). Below 4 the advantage is noisy and a warning is logged."""
    task_choice: Literal["weighted", "thompson"] = "weighted"
    """weighted: sources by their weight. thompson: rather those that are neither solved nor hopeless (VADE, 2511.18902)."""
    difficulty_memory: Fraction = 0.9
    """What one group of a source leaves of what was known of its difficulty before."""
    group_sizes: Literal["equal", "variance"] = "equal"
    """equal: group_size each. variance: more for sources whose reward varies and whose answers are short, at equal tokens."""
    second_round: Literal["off", "hard", "equal"] = "off"
    """More answers to tasks whose first ones earned less than half (DARS, 2508.13755), up to largest_group."""
    smallest_group: Annotated[int, Field(ge=2)] = 4
    """Where sizes differ, no group is smaller (but where group_size is)."""
    largest_group: Annotated[int, Field(ge=2)] = 32
    """Where sizes differ, no group is larger. Others refuse groups beyond their sharing.max_group_size."""
    refill_draws: NonNegativeInt = 0
    """How often a round draws further tasks while fewer than groups_per_round groups have signal (DAPO, 2503.14476)."""
    over_provision: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Begin so many times groups_per_round groups, stop when that many are complete, continue the rest later (APRIL)."""
    prune: bool = False
    """Drop answers early whose end is foreseeable, so that groups are rather half right, half wrong (ARRoL, 2603.24840)."""
    prune_after: PositiveInt = 4
    """Tokens between two looks at an answer, of which there are 16 at most."""
    prune_certainty: Annotated[float, Field(gt=0.5, lt=1)] = 0.8
    """An answer may be dropped once it is so sure to end like most of its group."""
    max_new_tokens: PositiveInt = 24
    """Longest answer in tokens; longer ones are cut and masked from the loss."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_k: NonNegativeInt = 0
    """Draw among the k likeliest tokens only; 0 is all. A filter hides from training what it cuts off: see algorithms."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the likeliest tokens that together have this probability only; 1 is all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw among tokens at least this fraction as likely as the likeliest only; 0 is all."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=16)] = ()
    """Strings that end an answer, themselves included. The same on all nodes."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: slots that refill as answers end. transformers: a batch waits for its longest. vllm: an extra."""
    max_batch_sequences: PositiveInt = 64
    """Answers decoded at the same time, at most."""
    cache_mib: PositiveInt | None = None
    """Memory for keys and values of answers; fewer are decoded at once if need be. Unset: half of what is free."""

    @model_validator(mode="after")
    def _sizes_are_in_order(self) -> "RolloutsSection":
        if self.sizes_differ and self.largest_group < self.group_size:
            raise ValueError(
                f"largest_group must be at least group_size, got {self.largest_group} < {self.group_size}; raise it"
            )
        return self

    @model_validator(mode="after")
    def _pruning_misleads_nobody(self) -> "RolloutsSection":
        """Rewards of what is left of a group say little of how hard its task is; and a look needs the whole group."""
        plain = {"task_choice": "weighted", "group_sizes": "equal", "second_round": "off", "over_provision": 1.0}
        for name, value in plain.items():
            if self.prune and getattr(self, name) != value:
                raise ValueError(
                    f"prune goes with {name} = {value} only, got {getattr(self, name)}: what is left of a group does not "
                    "tell how hard its task is, nor can it wait for a later round; set prune = false, or that"
                )
        return self

    @property
    def sizes_differ(self) -> bool:
        """Whether groups may have more or fewer answers than group_size."""
        return self.group_sizes != "equal" or self.second_round != "off"

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_mib is None else self.cache_mib * 2**20


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


WEIGHING_CORRECTIONS = ("tis", "tis+opsm", "icepop")
"""Values of `training.correction` that multiply by w, beside leaving answers out."""


class TrainingSection(Section):
    """The policy-gradient step."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate of AdamW on the adapter."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of AdamW on the adapter."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    inner_epochs: PositiveInt = 1
    """Passes over one batch."""
    groups_per_step: NonNegativeInt = 4
    """Groups of one optimizer step at most: a larger batch is split into several steps. 0: one step per batch."""
    micro_batch_sequences: PositiveInt = 64
    """Sequences per forward and backward pass; gradients accumulate to the full batch."""
    advantage: Literal["grpo", "dr_grpo", "median", "gdpo"] = "grpo"
    """grpo: (R - mean) / std. dr_grpo: R - mean. median: R - median, odd group_size. gdpo: by signal, then by batch."""
    signal_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of a task's reward signals by name, for gdpo; those not named here have the weight that the task gives them."""
    aggregation: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """dapo: sum over tokens / all tokens. grpo: mean per sequence, then mean. dr_grpo: sum / (sequences x max_new_tokens)."""
    ratio: Literal["token", "sequence", "minpro"] = "token"
    """token: r per token. sequence: geometric mean of an answer (GSPO). minpro: r times the smallest r before it."""
    ratio_reference: Literal["start", "sampler"] = "start"
    """Of what r is the ratio: policy at the start of the step, or the one that sampled, where its log-probs are usable."""
    sequence_clip_low: PositiveFloat = 3e-4
    """Lower clip range of ratio sequence."""
    sequence_clip_high: PositiveFloat = 4e-4
    """Upper clip range of ratio sequence (GSPO, 2507.18071)."""
    adaptive_clip: bool = False
    """Choose the range by the balance of good and bad answers (BAPO), in place of clip_low and clip_high."""
    clip_low: PositiveFloat = 0.2
    """Lower clip range of the ratio."""
    clip_high: PositiveFloat = 0.28
    """Upper clip range of the ratio (DAPO, 2503.14476)."""
    clip_delta: Annotated[float, Field(gt=1)] = 4.0
    """Cap of the ratio where the advantage is negative (two-sided clip, 2505.07291)."""
    correction: Literal["none", "tis", "icepop", "sequence_mask", "opsm", "tis+opsm", "sequence_mask+opsm"] = "tis+opsm"
    """Correction for answers that another policy sampled, an earlier own one included; see algorithms.md."""
    correction_cap: Annotated[float, Field(gt=1)] = 2.0
    """C of the correction, and of the weights in ESS."""
    opsm_limit_nats: PositiveFloat = 0.5
    """opsm leaves a bad answer out if the policy finds its tokens so much less likely, on average, than its author did."""
    lr_by_ess: bool = True
    """Lower the learning rate by sqrt(ESS / B) where few answers carry the step (VCPO, 2602.17616)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty towards the base policy (k3 estimator); 0 only watches it, at a few answers."""
    filter_groups: bool = True
    """Leave out own groups whose rewards are all equal. Off: as SAPO (2509.08721) was published, for comparison only."""
    mask_truncated: bool = True
    """Leave answers that were cut, with neither EOS nor a stop string, out of the loss."""
    replay_groups: NonNegativeInt = 0
    """Own groups of earlier steps in a batch, on top of the others, each at most once more. 0 is off."""
    replay_max_versions: PositiveInt = 16
    """Own groups sampled more policy versions ago are not replayed."""
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
        if self.ratio_reference == "sampler" and self.correction in WEIGHING_CORRECTIONS:
            raise ValueError(
                f"training.ratio_reference sampler must not be weighed twice, got training.correction {self.correction}; "
                'set training.correction = "sequence_mask+opsm" or "none"'
            )
        return self


def largest_stable_beta(alpha: float) -> float:
    """2(1 − α²): from here on the distances between replicas that merge in random pairs grow without end."""
    return 2 * (1 - alpha * alpha)


class MergingSection(Section):
    """Merging adapters with partners of the same lineage while training, without an all-reduce (NoLoCo, 2506.10911)."""

    enabled: bool = False
    """Merge with partners. Off: only experience is shared."""
    inner_steps: PositiveInt = 32
    """H: optimizer steps between two outer steps."""
    interval_s: Annotated[float, Field(ge=0)] = 0.0
    """Take outer steps at multiples of so many seconds of the swarm's clock, whatever inner steps were taken; 0: by inner_steps.
    Nodes of unlike speed then meet, and the fast ones need not wait for the slow ones."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Outer momentum."""
    beta: PositiveFloat = 0.7
    """Outer learning rate, and the pull towards the partner; below 2(1 - alpha^2), beyond which replicas drift apart."""
    precision: Literal["bf16", "int8", "int4"] = "bf16"
    """Of the weights that are sent. int8 halves the bytes, int4 quarters them; see benchmarks.md for what they cost."""
    schedule: Literal["fixed", "late"] = "fixed"
    """fixed: every inner_steps. late: of those one in five, and all in the last quarter of node.max_rounds."""
    clip_factor: PositiveFloat = 4.0
    """A partner's tensor may lie so many times the median of our own last changes of it away from ours; the rest is cut off."""
    gate_tasks: NonNegativeInt = 24
    """Private tasks on which a merge must do no harm before it is taken; 0 trusts the partner."""
    drift_threshold: PositiveFloat = 1.0
    """Layers whose factors average to more than this error, relative to their products, are merged as products instead. Up to .6
    averaging was no worse where measured."""
    search_s: PositiveFloat = 30.0
    """Longest search for a partner. About as long as an outer round nearly all find one; training goes on meanwhile."""
    request_timeout_s: PositiveFloat = 10.0
    """For one small request to a partner; a piece of an adapter gets more, by its size."""
    min_bytes_per_s: PositiveFloat = 131072.0
    """A partner whose adapter comes in more slowly than this is left. One megabit by default."""
    final: bool = False
    """With enabled: end with a merge of all nodes of the lineage that end at the same time, at node.max_rounds or final_at."""
    final_at: Annotated[float, Field(ge=0)] = 0.0
    """Swarm time (seconds since 1970) at which training ends for the final merge, if not before; 0: at node.max_rounds only.
    Best a multiple of final_interval_s: then all whose round in flight ends within nine tenths of it are in one merge."""
    final_interval_s: Annotated[float, Field(gt=0, le=1200)] = 120.0
    """Final merges begin at multiples of so many seconds of the swarm's clock. The same on all nodes."""
    final_tries: PositiveInt = 2
    """Final merges that a node waits for while it is the only one there: others may end a little later."""
    final_window_s: PositiveFloat = 60.0
    """Longest time of one of its log2 N + 2 exchanges, the gate's of the one before included. The same on all nodes."""
    final_export: bool = False
    """Write the adapter to final-adapter/round-N in the node's folder after it, in peft format. Not for a pipelined policy."""

    @model_validator(mode="after")
    def _settings_have_an_effect_and_replicas_stay_together(self) -> "MergingSection":
        if not self.enabled and (self.final or self.final_at):
            name = "merging.final" if self.final else "merging.final_at"
            raise ValueError(f"{name} needs merging.enabled = true, got false; set that too, or remove {name}")
        if self.final_at and not self.final:
            raise ValueError("merging.final_at needs merging.final = true, got false; set that too, or remove final_at")
        bound = largest_stable_beta(self.alpha)
        if self.beta >= bound:
            raise ValueError(
                f"merging.beta must be below 2(1 - alpha^2) = {bound:.3g} with merging.alpha {self.alpha:g}, got "
                f"{self.beta:g}: replicas would drift apart; lower merging.alpha or merging.beta"
            )
        return self


class CheckpointSection(Section):
    """What survives a crash."""

    interval_rounds: PositiveInt = 10
    """Rounds between two checkpoints."""
    keep: PositiveInt = 3
    """Checkpoints kept; the newest damaged one falls back to the one before."""


class EvaluationSection(Section):
    """Held-out tasks, never trained on by anyone."""

    tasks_per_source: Annotated[int, Field(ge=0)] = 32
    """Tasks per source in one evaluation; 0 turns it off."""
    interval_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds between two evaluations; 0 evaluates at the start and the end only."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """1 measures the policy as it is trained, the mean reward of a sampled answer; 0 decodes greedily."""


class ObservabilitySection(Section):
    """What a person and a monitor can see."""

    http: bool = True
    """Serve /metrics (Prometheus) and /health."""
    http_host: str = "127.0.0.1"
    """Address to bind; keep it on loopback unless a firewall guards it."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port; the node's status file names it."""
    max_log_mib: PositiveInt = 64
    """Size at which metrics.jsonl and the log each begin anew; one older file of each is kept, ending in .1."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged; debug names every rejected record."""


class Config(Section):
    """All settings of one node."""

    node: NodeSection = NodeSection()
    swarm: SwarmSection = SwarmSection()
    network: NetworkSection = NetworkSection()
    tasks: TasksSection = TasksSection()
    policy: PolicySection = PolicySection()
    rollouts: RolloutsSection = RolloutsSection()
    sharing: SharingSection = SharingSection()
    training: TrainingSection = TrainingSection()
    merging: MergingSection = MergingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observability: ObservabilitySection = ObservabilitySection()

    @model_validator(mode="after")
    def _batch_comes_from_somewhere(self) -> "Config":
        if self.network.backend == "off" and self.sharing.swarm_groups > 0:
            raise ValueError(
                f"sharing.swarm_groups must be 0 with network.backend off, got {self.sharing.swarm_groups}; "
                'set sharing.swarm_groups = 0 or network.backend = "hivemind"'
            )
        return self

    @model_validator(mode="after")
    def _groups_are_taken_by_others(self) -> "Config":
        largest, limit = self.rollouts.largest_group, self.sharing.max_group_size
        if self.rollouts.sizes_differ and self.sharing.publish and largest > limit:
            raise ValueError(
                f"rollouts.largest_group must be at most sharing.max_group_size, got {largest} > {limit}: "
                "others would refuse such groups; lower it"
            )
        return self

    @model_validator(mode="after")
    def _median_is_a_rollout(self) -> "Config":
        size = self.rollouts.group_size
        if self.training.advantage == "median" and size % 2 == 0:
            raise ValueError(
                f"rollouts.group_size must be odd with training.advantage median, got {size}: the median rollout is "
                f"left out; set rollouts.group_size = {size + 1}"
            )
        if self.training.advantage == "median" and self.rollouts.prune:
            raise ValueError(
                "training.advantage median needs groups of an odd size, got rollouts.prune = true: what is left of them "
                "has any size; set one of the two otherwise"
            )
        return self

    @model_validator(mode="after")
    def _crew_samples_plainly(self) -> "Config":
        rollouts = self.rollouts
        if self.policy.pipeline.is_on and (rollouts.prune or rollouts.over_provision > 1 or rollouts.engine != "auto"):
            raise ValueError(
                "a pipelined policy goes without rollouts.prune, rollouts.over_provision and another rollouts.engine; set "
                "them to false, 1 and auto"
            )
        if self.policy.pipeline.is_on and self.merging.final_export:
            raise ValueError(
                "a pipelined policy goes without merging.final_export: no machine holds all of it; set it to false, and use "
                "`swarm export` where the base fits"
            )
        return self

    @property
    def max_batch_groups(self) -> int:
        """Groups in a training batch, at most."""
        fresh = min(self.sharing.own_groups, self.rollouts.groups_per_round) + self.sharing.swarm_groups
        return fresh + self.training.replay_groups

    @property
    def swarm_id(self) -> str:
        """32 hex digits, over the swarm's name unless `swarm.id` says them; part of every signature and index key."""
        return self.swarm.id or hashlib.sha256(b"swarm-id:" + self.swarm.name.encode()).hexdigest()[:32]


def load(paths: Iterable[Path | str] = (), overrides: Mapping[str, str] | None = None) -> Config:
    """Merge TOML files left to right (tables merge, other values replace), apply overrides, validate.

    `overrides` maps dotted keys to TOML literals; text that is no TOML literal is taken as a string.
    Relative `tasks.sources.path` entries are resolved against the file that names them.
    Raises ConfigError, one line per mistake, each with rule, value and fix.
    """
    return parse(read(paths, overrides))


def read(paths: Iterable[Path | str] = (), overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What files and overrides say, merged as `load` does, before defaults and validation. Raises ConfigError."""
    merged: dict[str, Any] = {}
    for path in paths:
        merged = merge(merged, _read_toml(Path(path)))
    for key, text in (overrides or {}).items():
        merged = merge(merged, _nest(key, _literal(text)))
    return merged


def parse(data: Mapping[str, Any]) -> Config:
    """Validate plain data. Raises ConfigError."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from None


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML that `load` reads back to an equal Config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"a config must be an existing TOML file, got {path}; see node_configs/ for ready ones"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a config must be readable UTF-8 text, got {path}: {error}; check the file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"a config must be valid TOML, got {path}: {error}; mend that line") from None
    _resolve_paths(data, path.parent)
    return data


def _resolve_paths(data: dict[str, Any], folder: Path) -> None:
    tasks = data.get("tasks")
    sources = tasks.get("sources") if isinstance(tasks, dict) else None
    for source in sources if isinstance(sources, list) else ():
        if isinstance(source, dict) and isinstance(source.get("path"), str):
            source["path"] = str((folder / source["path"]).resolve())


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`: tables merge, other values replace."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _nest(dotted: str, value: Any) -> dict[str, Any]:
    head, _, rest = dotted.partition(".")
    return {head: _nest(rest, value) if rest else value}


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _explain(item: Any) -> str:
    location = [part for part in item["loc"] if isinstance(part, str | int)]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        nearest = _nearest_key(location)
        fix = f"did you mean {nearest}?" if nearest else "see `swarm config schema`"
        return f"unknown setting {key}; {fix}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    rule = item["msg"][0].lower() + item["msg"][1:]
    return f"{key}: {rule}, got {item['input']!r}; set {key}"


def _nearest_key(location: list[Any]) -> str | None:
    known = _known_keys(Config)
    wanted = ".".join(str(part) for part in location)
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if not close:  # right name, wrong section
        close = [key for key in known if key.rsplit(".", 1)[-1] == str(location[-1])][:1]
    return close[0] if close else None


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys += _known_keys(inner, f"{prefix}{name}.")
    return keys
