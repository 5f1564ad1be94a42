"""The policy: what a node samples from and trains.

On the data path it stands between task and rollout (text → token ids → engine) and again at the end (batch → loss →
adapter). `load_policy` is the only way to make one: base → quantization → adapter → lineage.
"""

import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from swarm.adapters.load_pretrained import quiet_libraries
from swarm.config import BUNDLED_BASES, PolicySection
from swarm.errors import PolicyError
from swarm.policy.base_folder import locate_base, weight_files
from swarm.policy.base_model import check_is_causal, eos_token_ids, load_base, load_tokenizer
from swarm.policy.device import resolve_device, resolve_dtype
from swarm.policy.lineage import compute_lineage
from swarm.policy.logprobs import TokenLogprobs, token_logprobs
from swarm.policy.lora import adapter_shape, attach_adapter, check_adapter_runs
from swarm.policy.micro_batch_size import DEFAULT_TOKENS, TokenSequence
from swarm.policy.prompts.prompt_encoder import PromptEncoder, decoded, encoded
from swarm.types import PLAIN, Lineage, PromptContext, Role

logger = logging.getLogger(__name__)

_LOADING = threading.Lock()
"""transformers patches torch while it builds a model: two loads at once in one process would leave weights out."""


@dataclass(slots=True, kw_only=True)
class TextPolicy(ABC):
    """A policy as rollouts and training see it: text, token ids and log-probs. Subclasses decide where its weights are."""

    tokenizer: Any
    config: PolicySection
    device: torch.device
    """The device of log-probs and losses."""
    dtype: torch.dtype
    """Number format of the frozen base's activations; the adapter is float32."""
    lineage: Lineage
    base_folder: Path
    eos_token_ids: tuple[int, ...]
    """Each of these ends an answer."""
    vocab_size: int
    """Token ids are below it."""
    version: int = 0
    """Number of optimizer steps taken."""
    micro_batch_tokens: int = DEFAULT_TOKENS
    """Most tokens of one forward and backward pass; the memory probe sets it."""
    max_separate_tokens: int | None = None
    """Most tokens of one pass, counted with a prompt for each answer, where copies of the keys of shared prompts are bounded."""
    pad_token_id: int = field(init=False)
    prompts: PromptEncoder = field(init=False)
    """Encodes prompts through the base's chat template."""

    def __post_init__(self) -> None:
        """Raises PolicyError for a chat template that is refused."""
        self.prompts = PromptEncoder(self.tokenizer, self.eos_token_ids, is_own=self.config.base in BUNDLED_BASES)
        pad = self.tokenizer.pad_token_id
        self.pad_token_id = pad if pad is not None and pad < self.vocab_size else self.eos_token_ids[0]

    @abstractmethod
    def token_logprobs(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        with_entropy: bool = False,
        *,
        without_adapter: bool = False,
    ) -> TokenLogprobs:
        """Compute log-probs of all answer tokens as `swarm.policy.logprobs`, with `without_adapter` of the frozen base."""

    @property
    def end_token_id(self) -> int:
        """The one of `eos_token_ids` that is appended to answers which are encoded from text."""
        return self.prompts.end_token_id

    def for_another_thread(self) -> Self:
        """Return this policy with a version and a tokenizer of its own, as a tokenizer may encode for one thread at a time."""
        other = copy.copy(self)
        other.prompts = self.prompts.copy()
        other.tokenizer = other.prompts.tokenizer
        return other

    def encode_prompt(self, text: str, context: PromptContext = PLAIN) -> list[int]:
        """Return the token ids that an answer follows, through the chat template where there is one, as a user's message.

        Empty where the tokenizer cannot encode the text.
        """
        return self.prompts.encode(text, context)

    def encode_reply(self, text: str, role: Role, context: PromptContext = PLAIN, *, after_eos: bool) -> list[int]:
        """Return the token ids of an environment's reply; see `PromptEncoder.encode_reply`."""
        return self.prompts.encode_reply(text, role, context, after_eos=after_eos)

    def encode_answer(self, text: str) -> list[int]:
        """Return token ids of an answer's text without EOS, which belongs to it only if the answer was finished.

        The name of a special token stays text: `</s>` written in an answer must not end it. Empty where the tokenizer
        cannot encode the text.
        """
        return encoded(self.tokenizer, text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer without special tokens. Empty where the tokenizer cannot decode the ids."""
        return decoded(self.tokenizer, token_ids)


@dataclass(slots=True, kw_only=True)
class Policy(TextPolicy):
    """A frozen base with a trainable adapter, in this process."""

    model: Any
    """The peft model; only its LoRA factors require gradients."""

    def token_logprobs(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        with_entropy: bool = False,
        *,
        without_adapter: bool = False,
    ) -> TokenLogprobs:
        """See `TextPolicy`. Differentiable where grad is enabled."""
        with self.model.disable_adapter() if without_adapter else nullcontext():
            return token_logprobs(
                self.model,
                sequences,
                self.pad_token_id,
                temperature=temperature,
                with_entropy=with_entropy,
                recompute_layers=self.config.gradient_checkpointing,
            )


def load_policy(
    config: PolicySection, *, device: str = "auto", hash_cache: Path | None = None, start: str = ""
) -> Policy:
    """Load base and tokenizer, attach a fresh adapter, and compute the lineage, of which `start` is a part.

    `hash_cache` is a JSON file that saves hashing unchanged weight files again. Torch's random state stays as it was.
    Raises PolicyError (missing, incompatible or damaged base; unknown layer; no network) and MemoryBudgetError.
    """
    target = resolve_device(device)
    dtype = resolve_dtype(config.dtype, target)
    with _LOADING, quiet_libraries(), torch.random.fork_rng(devices=[]):
        folder = locate_base(config.base, config.revision, config.max_download_gib)
        check_is_causal(folder)
        weight_files(folder)
        tokenizer = load_tokenizer(folder)
        base = load_base(config, folder, target, dtype=dtype)
        eos_ids = eos_token_ids(base, tokenizer)
        model = attach_adapter(base, config.lora).eval()
        check_adapter_runs(model)
    lineage = compute_lineage(
        folder, tokenizer, config.lora, adapted=adapter_shape(model), cache=hash_cache, start=start
    )
    policy = Policy(
        model=model, tokenizer=tokenizer, config=config, device=target, dtype=dtype, lineage=lineage,
        base_folder=folder, eos_token_ids=eos_ids, vocab_size=model.get_input_embeddings().num_embeddings,
    )  # fmt: skip
    if not policy.encode_prompt("1 + 1 ="):
        raise PolicyError(
            f"policy.base must have a tokenizer that encodes text, got none from {folder}; check its tokenizer files"
        )
    return policy
