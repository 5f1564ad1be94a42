"""A crew as the policy of a learner: what the compute thread calls, and waits for while the loop drives the stages."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from swarm.adapters.adapter_state import check_adapter
from swarm.config import PolicySection, TrainingSection
from swarm.errors import CheckpointError, PipelineError, StageLostError, TrainingError
from swarm.pipeline.crew_keeper import CrewKeeper
from swarm.pipeline.model_shape import adapter_targets, model_shape
from swarm.pipeline.order_bytes import StageState
from swarm.pipeline.pipelined_policy import LossOf, PipelinedPolicy
from swarm.pipeline.stage_host import BaseModel
from swarm.policy.base_model import folder_eos_ids, load_tokenizer
from swarm.policy.lineage import compute_lineage
from swarm.policy.logprobs import TokenLogprobs, TokenSequence
from swarm.policy.policy import TextPolicy

T = TypeVar("T")
Tensors = dict[str, dict[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class CrewPolicy(TextPolicy):
    """Its weights are in the stages. `token_logprobs` gives no gradients: `CrewSteps` has them."""

    keeper: CrewKeeper
    loop: asyncio.AbstractEventLoop
    """Where the crew is driven; to be called from other threads only."""

    def token_logprobs(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        with_entropy: bool = False,
        *,
        without_adapter: bool = False,
    ) -> TokenLogprobs:
        """See `TextPolicy`."""

        async def score(pipelined: PipelinedPolicy) -> TokenLogprobs:
            (result,) = await pipelined.token_logprobs(
                [sequences], temperature, with_entropy, without_adapter=without_adapter
            )
            return result

        return self.through_crew(score)

    def through_crew(self, call: Callable[[PipelinedPolicy], Awaitable[T]]) -> T:
        """What `call` gives, which changes nothing: it is repeated when a stage was lost and rebuilt."""
        return self.wait_for(self.keeper.persist(lambda: call(self.pipelined)))

    @property
    def pipelined(self) -> PipelinedPolicy:
        """Over the crew as it is now."""
        return PipelinedPolicy(self.keeper.crew, self.pad_token_id)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the loop do it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class CrewSteps:
    """See `PolicySteps`. A batch during which a stage is lost is forgotten; the crew is whole again when that is told."""

    def __init__(self, config: TrainingSection, policy: CrewPolicy) -> None:
        self._max_grad_norm = config.max_grad_norm
        self._policy = policy
        self._norm: float | None = None  # of a batch that is neither applied nor dropped

    def accumulate(self, parts: Sequence[Sequence[TokenSequence]], loss_of: LossOf, temperature: float) -> float:
        """See `PolicySteps`."""

        async def work() -> float:
            try:
                gradient = await self._policy.pipelined.accumulate(parts, loss_of, temperature, with_entropy=True)
                return gradient.norm
            except StageLostError as lost:
                await self._policy.keeper.recover(lost)
                raise

        self._norm = self._policy.wait_for(work())
        return self._norm

    def apply(self, lr: float) -> None:
        """See `PolicySteps`."""
        norm, self._norm = self._norm, None
        if not norm:
            raise TrainingError(
                f"a step with advantages and lr > 0 must move the adapter, got no gradient at lr {lr:g}; "
                "check that nothing froze or detached the adapter"
            )
        self._policy.version = self._policy.wait_for(self._policy.keeper.commit(lr, self._max_grad_norm))

    def drop(self) -> None:
        """See `PolicySteps`."""
        if self._norm is not None:
            self._norm = None
            self._policy.wait_for(self._policy.keeper.crew.drop())

    def adapter_norm(self) -> None:
        """See `PolicySteps`: it would cost as much as a checkpoint."""
        return

    def read(self) -> dict[str, torch.Tensor]:
        """See `PolicySteps`. Moments travel too, so it costs as much as a checkpoint."""
        return self.state()["adapter"]

    def write(self, weights: Mapping[str, torch.Tensor], turned: Iterable[str] = ()) -> None:
        """See `PolicySteps`. Moments travel there and back."""
        odd = set(turned)

        def change(state: StageState) -> StageState:
            tensors, rest = state
            adapter = {name: weights[name] for name in tensors["adapter"]}
            moments = {key: t for key, t in tensors["optimizer"].items() if key.partition(":")[2] not in odd}
            return {"adapter": adapter, "optimizer": moments}, rest

        self._policy.wait_for(self._policy.keeper.rewrite(change))

    def state(self) -> Tensors:
        """See `PolicySteps`: as a single process would save it, with `lr_factors` where a rebuilt stage has another one.

        Raises CheckpointError rather than to give out an adapter that is not whole and finite.
        """
        merged: Tensors = {"adapter": {}, "optimizer": {}}
        factors: dict[str, torch.Tensor] = {}
        for tensors, rest in self._policy.wait_for(self._policy.keeper.states()):
            for kind, group in tensors.items():
                merged[kind] |= group
            if rest["lr_factor"] != 1:
                factors |= {name: torch.tensor(float(rest["lr_factor"])) for name in tensors["adapter"]}
        shapes = {name: torch.Size(s) for facts in self._policy.keeper.crew.facts for name, s in facts.shapes.items()}
        check_adapter(merged["adapter"], shapes)  # once more: what is written to disk is what the next start depends on
        return {**merged, "lr_factors": factors} if factors else merged

    def restore(self, tensors: Tensors, version: int) -> None:
        """See `PolicySteps`."""
        try:
            self._policy.wait_for(self._policy.keeper.restore(tensors, version))
        except StageLostError:
            raise
        except PipelineError as error:
            raise CheckpointError(f"a checkpoint must fit the crew, got: {error}") from None
        self._policy.version = version


def crew_policy(
    config: PolicySection, base: BaseModel, keeper: CrewKeeper, loop: asyncio.AbstractEventLoop, hash_cache: Any
) -> CrewPolicy:
    """Tokenizer, lineage and ends of answers of the base; no weights. Raises PolicyError."""
    tokenizer = load_tokenizer(base.folder)
    lineage = compute_lineage(
        base.folder, tokenizer, config.lora, adapter_targets(base.folder, config.lora), hash_cache
    )
    return CrewPolicy(
        tokenizer=tokenizer, config=config, device=torch.device("cpu"), dtype=base.dtype, lineage=lineage,
        base_folder=base.folder, eos_token_ids=folder_eos_ids(base.folder, tokenizer),
        vocab_size=model_shape(base.folder).vocab, keeper=keeper, loop=loop,
    )  # fmt: skip
