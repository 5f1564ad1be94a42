"""What a node's page lets a person read, and ask for, once learner and exchange are there."""

import asyncio

from swarm.crew_driver import CrewDriver
from swarm.dashboard.node_page import NodePage
from swarm.learner import Learner
from swarm.node_controls import NodeControls
from swarm.sharing.exchange import Exchange
from swarm.tasks.task_mixture import TaskMixture


def wire_page(
    page: NodePage,
    controls: NodeControls,
    mixture: TaskMixture,
    learner: Learner,
    exchange: Exchange | None,
    crew: CrewDriver | None,
) -> None:
    """Called on the node's loop, before the first round. Without a network there is no `exchange`, with one machine no `crew`."""
    loop, rollouts = asyncio.get_running_loop(), page.rollouts
    rollouts.prompt_of = mixture.prompt_of
    learner.on_groups = rollouts.own
    if crew is not None:
        page.stages = crew.stages
    if exchange is None:
        return
    exchange.reader.on_admitted, exchange.reader.on_refused = rollouts.admitted, rollouts.refused

    def follow(is_paused: bool) -> None:
        loop.call_soon_threadsafe(exchange.set_paused, is_paused)

    controls.on_sharing = follow
    exchange.set_paused(controls.sharing_is_paused())  # asked for while the node came up
