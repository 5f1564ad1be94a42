"""Hidden states that pass from stage to stage: the numbers are the same, and whatever fails goes through the driver again."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import StageRefusedError
from swarm.pipeline.commands import DecodeCommand, StageSettings, decode_command_bundle, part_fields
from swarm.pipeline.driver.expected_stage import expected_stages
from swarm.pipeline.driver.pipeline_policy import PipelineModel, greedy
from swarm.pipeline.driver.stage_group import StageGroup, StageGroupSettings
from swarm.pipeline.driver.stage_relay import StageRelay
from swarm.pipeline.model_shape import stage_parts
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_host import StageHost
from swarm.pipeline.stage_link import InProcessLink, RemoteLink, ask
from swarm.pipeline.tensor_bundle import Bundle, decode_bundle, encode_bundle
from tests.unit.pipeline_models import LORA, PAD, load_stages, made_up_parts, open_stage_group, write_models
from tests.unit.test_pipeline_network import NetworkStageGroup, host, on_network

SIZES = [2, 1, 1, 1]
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))["llama"]


@asynccontextmanager
async def relayed_group(
    folder: Path, hosts: Sequence[StageHost]
) -> AsyncIterator[tuple[NetworkStageGroup, StageGroup, StageRelay]]:
    """Three stages on machines of a network, and the last one here, as a driver has it."""
    expected = expected_stages(folder, LORA, stage_parts(SIZES))
    own = InProcessLink(Stage(load_stages(folder, SIZES, LORA)[-1], StageSettings()), precision=None)
    async with on_network(hosts) as network:
        for peer_id, one in zip(network.members, expected, strict=False):
            await ask(network.give, peer_id, "load", Bundle({**part_fields(one.part), "instead_of": []}))
        links = [
            RemoteLink(network.give, peer_id, one, "fp32")
            for peer_id, one in zip(network.members, expected, strict=False)
        ]
        group = StageGroup([*links, own], StageGroupSettings(action_timeout_s=30))
        await group.start()
        relay = StageRelay(network.give, network.members, expected, precision="fp32", timeout_s=30)
        await relay.connect()
        group.relay = relay
        try:
            yield network, group, relay
        finally:
            own.close()


async def sampled_and_scored(group: StageGroup) -> tuple[list[list[int]], list[torch.Tensor]]:
    model = PipelineModel(group, PAD)
    answers = await model.generate(PROMPTS, greedy, max_new_tokens=5, eos_token_ids=())
    return answers, [result.logprobs for result in await model.token_logprobs(made_up_parts(3))]


async def test_relayed_states_give_the_same_numbers(folder: Path) -> None:
    async with open_stage_group(folder, SIZES, LORA) as local:
        wanted = await sampled_and_scored(local.stage_group)
    async with relayed_group(folder, [host(folder) for _ in range(3)]) as (network, group, relay):
        kinds: list[tuple[str, int]] = []
        send = network.give

        async def counted(peer_id: str, kind: str, payload: bytes, **rest: Any) -> bytes:
            kinds.append((kind, network.members.index(peer_id)))
            return await send(peer_id, kind, payload, **rest)

        relay._send = counted
        for link in group.links[:-1]:
            assert isinstance(link, RemoteLink)
            link._send = counted
        answers, logprobs = await sampled_and_scored(group)
        assert answers == wanted[0]
        assert all(torch.equal(one, other) for one, other in zip(logprobs, wanted[1], strict=True))
        assert {place for kind, place in kinds if kind in ("decode", "forward")} == {0}, "only the first one is sent to"
        assert relay.is_on


async def test_a_relay_that_fails_costs_one_repeat_and_no_machine(folder: Path) -> None:
    class Forgetful(StageHost):
        def carry_out_relayed(self, sender: str, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
            return encode_bundle(Bundle({"refused": "a false claim about the stage before"}))

    base = host(folder)._base
    hosts = [host(folder), Forgetful(base, StageSettings()), host(folder)]
    async with open_stage_group(folder, SIZES, LORA) as local:
        wanted = await sampled_and_scored(local.stage_group)
    async with relayed_group(folder, hosts) as (_, group, relay):
        with pytest.raises(StageRefusedError, match="they go through this node now"):
            await sampled_and_scored(group)
        assert not relay.is_on
        assert not group.dishonest_stages
        assert (await sampled_and_scored(group))[0] == wanted[0]
        assert all(neighbours.before is None for one in hosts for neighbours in one._neighbours.values())


async def test_a_machine_that_dies_in_a_relay_is_noticed_at_once(folder: Path) -> None:
    async with relayed_group(folder, [host(folder) for _ in range(3)]) as (network, group, relay):
        await sampled_and_scored(group)
        network.transports[0]._network.crash(network.members[1])
        started = time.monotonic()
        with pytest.raises(StageRefusedError):
            await sampled_and_scored(group)
        assert time.monotonic() - started < 5
        assert not relay.is_on


def test_a_stage_takes_states_from_the_one_before_it_alone(folder: Path) -> None:
    machine, part = host(folder), stage_parts(SIZES)[1]
    machine.carry_out("load", encode_bundle(Bundle({**part_fields(part), "instead_of": []})))
    command = decode_command_bundle(DecodeCommand(1, torch.ones(1, 2, 32), (0,)))
    payload = encode_bundle(Bundle({**command.fields, "slot": 2, "precision": "fp32"}, command.tensors))

    def reply(sender: str, kind: str = "decode", data: bytes = payload) -> Bundle:
        outcome = machine.carry_out_relayed(sender, kind, data)
        assert isinstance(outcome, bytes)
        return decode_bundle(outcome)

    assert "must come from the stage before" in reply("a").fields["refused"], "before the driver named any"
    machine.carry_out("route", encode_bundle(Bundle({"slot": 2, "before": "a", "after": None, "after_slot": 2})))
    assert "must come from the stage before" in reply("b").fields["refused"]
    assert reply("a").tensors["states"].shape == (1, 2, 32)
    for kind in ("commit", "backward", "state", "load", "route"):
        assert "refused" in reply("a", kind).fields
    rng = random.Random(0)
    for data in (b"", rng.randbytes(100), payload[:40]):
        assert "refused" in reply("a", data=data).fields
    machine.carry_out("load", encode_bundle(Bundle({**part_fields(part), "instead_of": []})))
    assert "refused" in reply("a").fields, "a stage that was loaded anew has no neighbours"


def test_only_states_without_gradients_are_passed_on(folder: Path) -> None:
    machine, part = host(folder), stage_parts(SIZES)[1]
    machine.carry_out("load", encode_bundle(Bundle({**part_fields(part), "instead_of": []})))
    machine.carry_out("route", encode_bundle(Bundle({"slot": 2, "before": "a", "after": "b", "after_slot": 3})))
    for batch in (0, 1):
        fields = {
            "slot": 2,
            "precision": "bf16",
            "relayed": True,
            "batch": batch,
            "micro_batch": 0,
            "without_adapter": False,
        }
        outcome = machine.carry_out("forward", encode_bundle(Bundle(fields, {"states": torch.ones(1, 2, 32)})))
        if batch:
            assert isinstance(outcome, bytes) and "passed on" in decode_bundle(outcome).fields["refused"]
        else:
            assert isinstance(outcome, tuple) and outcome[0] == "b"
            assert decode_bundle(outcome[1]).fields["slot"] == 3
