"""The simulation counts what it says, and taking verdicts from a cache changes nothing but processor time."""

import math
from dataclasses import replace

import pytest

from swarm.network.memory.virtual_clock import run
from swarm.records.identity import Identity
from swarm.records.signing import sign_record, signature_is_valid, verified_by
from swarm.simulation.signature_cache import SignatureCache
from swarm.simulation.simulation import SWARM_ID, Simulation, SimulationSettings, SpreadLog, quantile


async def trace_of(settings: SimulationSettings) -> list[tuple[str, str, str, int]]:
    trace: list[tuple[str, str, str, int]] = []
    async with Simulation(settings) as simulation:
        simulation.network.observer = lambda *what: trace.append(what)
        await simulation.start()
        await simulation.let(40)
        assert all(node.num_groups_trained > 0 for node in simulation.nodes)
    return trace


def test_cached_signatures_give_the_same_run() -> None:
    settings = SimulationSettings(num_nodes=6, seed=3)
    assert run(trace_of(settings)) == run(trace_of(replace(settings, verify="cached")))


def test_a_grown_swarm_has_found_its_shards() -> None:
    async def main() -> None:
        async with Simulation(SimulationSettings(num_nodes=200, verify="cached")) as simulation:
            await simulation.start_grown()
            await simulation.let(2)
            shards = {node.directory.shard for node in simulation.nodes}
            assert {shard.level for shard in shards} == {2} and len(shards) == 4
            assert sum(node.directory.num_members for node in simulation.nodes) == sum(
                sum(other.directory.shard == node.directory.shard for other in simulation.nodes)
                for node in simulation.nodes
            )

    run(main())


def test_the_cache_tells_forged_from_signed_and_stays_bounded() -> None:
    cache, alice = SignatureCache(max_verdicts=2), Identity(b"a" * 32)
    records = [sign_record(alice, SWARM_ID, b"%d" % number) for number in range(4)]
    forged = replace(records[0], payload=b"other")
    with verified_by(cache.verify):
        for _ in range(2):
            assert [signature_is_valid(record, SWARM_ID) for record in (*records, forged)] == [True] * 4 + [False]
    assert len(cache) == 2


def test_the_cache_asks_a_validator_once_per_entry() -> None:
    asked: list[str] = []

    def is_valid(key: str, subkey: str, value: bytes) -> bool:
        asked.append(subkey)
        return subkey == "good"

    cached = SignatureCache().validator(is_valid)
    assert [cached("key", name, b"") for name in ("good", "bad", "good", "bad")] == [True, False, True, False]
    assert asked == ["good", "bad"]


def test_spread_counts_readers_and_those_that_never_heard() -> None:
    log = SpreadLog()
    log.note("before", 9.0, 9.5, 1)
    log.begin(10.0)
    log.note("before", 9.0, 10.5, 1)
    for delay_s in (0.4, 0.1, 0.2, 0.3):
        log.note("whole", 10.0, 10.0 + delay_s, 4)
    log.note("half", 11.0, 11.5, 2)
    assert len(log) == 2 and log.num_arrivals() == 5
    assert log.times_s(0.5, 12.0) == [pytest.approx(0.2), pytest.approx(0.5)]
    assert log.times_s(0.95, 12.0) == [pytest.approx(0.4), math.inf]
    assert log.times_s(0.95, 11.0) == [pytest.approx(0.4)]
    assert log.coverage(12.0) == 0.75
    assert math.isnan(log.coverage(10.0))


def test_quantile_is_the_value_that_the_share_does_not_exceed() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [quantile(values, share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert math.isnan(quantile([], 0.5))
