"""In a swarm of light nodes neither a flood of true experience nor false claims get an author more than its share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from swarm.config import SharingSection
from swarm.network.memory.virtual_clock import run
from swarm.records.codec import encode_header, encode_record
from swarm.records.signing import sign_record
from swarm.sharing.publisher import Publisher
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.simulation import SWARM_ID, Simulation, SimulationSettings
from swarm.types import Header, RolloutGroup
from tests.swarm.light_swarm import assert_bounded

NUM_NODES = 6
ROUNDS = LightRounds(round_s=5.0, groups_per_round=4, swarm_groups=8)
FAIR = 1 / (NUM_NODES - 1)


class LyingPublisher(Publisher):
    """Claims a mean reward of one half for every group, whatever it is."""

    def _pack(self, groups: list[RolloutGroup], beacon: bytes) -> tuple[bytes, bytes, Header]:
        body, _, header = super()._pack(groups, beacon)
        header = replace(header, groups=tuple(replace(summary, mean_reward=0.5) for summary in header.groups))
        return body, encode_record(sign_record(self._context.identity, SWARM_ID, encode_header(header))), header


def simulation_of(choice: str) -> Simulation:
    sharing = SharingSection.model_validate({"swarm_groups": 8, "choice": choice})
    return Simulation(
        SimulationSettings(NUM_NODES, 1, rounds=ROUNDS, sharing=sharing, join_over_s=2.0, verify="cached")
    )


async def settled(simulation: Simulation, duration_s: float) -> None:
    """Let it live so long after a start that counts nowhere: the first to publish is the only one to be read."""
    await simulation.start()
    await simulation.let(40)
    for node in simulation.nodes:
        node.trained_authors.clear()
    await simulation.let(duration_s)
    assert_bounded(simulation.nodes)


def taken_from(nodes: Sequence[LightNode], author: LightNode) -> float:
    """Its share of what the others have trained on."""
    counts = sum((node.trained_authors for node in nodes if node is not author), Counter[str]())
    return counts[author.peer_id] / counts.total()


def test_an_author_that_floods_with_true_experience_gains_nothing_where_usefulness_decides() -> None:
    """Twelve times the groups, in headers three times as long: with `uniform` twice its share or more, with this none."""

    async def main(choice: str) -> float:
        async with simulation_of(choice) as simulation:
            simulation.nodes[0]._rounds = replace(ROUNDS, groups_per_round=48)
            await settled(simulation, 100)
            return taken_from(simulation.nodes, simulation.nodes[0])

    uniform, informative = run(main("uniform")), run(main("informative"))
    assert 0.0 < informative < 1.5 * FAIR
    assert informative < uniform < 0.6  # its share per batch bounds it there too


def test_an_author_that_claims_one_half_everywhere_is_found_out_and_asked_less_and_less() -> None:
    """Not one of its false bodies is trained on, and after a few of them it is banned, whatever decides."""

    async def main(choice: str) -> tuple[float, int]:
        async with simulation_of(choice) as simulation:
            liar = simulation.nodes[0]
            liar._exchange.publisher.__class__ = LyingPublisher
            await settled(simulation, 60)
            return taken_from(simulation.nodes, liar), simulation.rejected()["header_mismatch"]

    uniform, informative = run(main("uniform")), run(main("informative"))
    assert max(uniform[0], informative[0]) < 0.5 * FAIR  # bodies whose mean is ½ indeed
    assert min(informative[1], uniform[1]) > 0 and max(informative[1], uniform[1]) <= 3 * (NUM_NODES - 1)
