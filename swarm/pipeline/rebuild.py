"""Carrying out a recovery plan: weights from where the plan says, into the stage that takes the lost one's place."""

from collections.abc import Mapping

from torch import Tensor

from swarm.errors import PipelineError
from swarm.pipeline.crew import Crew
from swarm.pipeline.recovery import NeighbourCopy, Recovery, checkfree_average, twin_copy
from swarm.pipeline.stage_link import StageLink


async def take_copies(crew: Crew) -> tuple[NeighbourCopy, ...]:
    """A copy of every stage's weights, each meant for the stage behind it; the last one's for the stage before it.

    With a frozen base that is the adapter alone, small enough to be sent every few batches. Raises as the links do.
    """
    last = crew.num_stages - 1
    copies: list[NeighbourCopy] = []
    for stage in range(crew.num_stages):
        tensors, rest = await crew.state(stage)
        holder = stage + 1 if stage < last else last - 1
        copies.append(NeighbourCopy(stage, holder, int(rest["policy_version"]), tensors["adapter"]))
    return tuple(copies)


async def rebuild_stage(crew: Crew, plan: Recovery, link: StageLink, copies: tuple[NeighbourCopy, ...] = ()) -> None:
    """Fill the stage behind `link`, which has just loaded its part of the base, and let the crew go on with it.

    The other stages keep their weights, moments and version. Raises PipelineError where the plan is to go back to a
    checkpoint, which all stages must do together, and where sources do not fit; the crew is then as it was.
    """
    shapes = crew.facts[plan.stage].shapes
    weights: Mapping[str, Tensor]
    if plan.strategy == "checkpoint":
        raise PipelineError(f"all stages must go back to a checkpoint, got only stage {plan.stage}; restore every one")
    if plan.strategy == "base":
        tensors, _ = await link.state()
        weights = tensors["adapter"]
        crew.check_weights(weights)  # the machine has chosen them: they are to be as small as fresh ones
    elif plan.strategy == "neighbour_copy":
        usable = [copy for copy in copies if copy.stage == plan.stage and copy.holder in plan.sources]
        if not usable:
            raise PipelineError(f"a copy of stage {plan.stage} must be given, got none; pass those of the plan")
        weights = max(usable, key=lambda copy: copy.version).weights
    else:
        weights = await _from_neighbours(crew, plan, shapes)
    await crew.recover(plan.stage, link, weights)


async def _from_neighbours(crew: Crew, plan: Recovery, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    sources = [(await crew.state(source))[0]["adapter"] for source in plan.sources]
    prefix = crew.facts[plan.stage].layer_prefix
    if plan.strategy == "twin_copy":
        return twin_copy(shapes, sources[0], layer_prefix=prefix)
    norms = [crew.stage_norms[source] if crew.stage_norms else 1.0 for source in plan.sources]
    return checkfree_average(shapes, *sources, norm_before=norms[0], norm_after=norms[1], layer_prefix=prefix)
