"""Commands as bytes over a network do what commands in one process do, and malformed bytes do nothing."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.errors import PipelineError, RequestError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import CommandChannel
from swarm.network.commands.service import CommandService
from swarm.network.memory.transport import NO_FAULTS, Faults, MemoryNetwork, MemoryTransport
from swarm.pipeline.commands import StageSettings, part_fields
from swarm.pipeline.driver.expected_stage import expected_stages
from swarm.pipeline.driver.pipeline_policy import PipelineModel, greedy
from swarm.pipeline.driver.stage_group import StageGroup, StageGroupSettings
from swarm.pipeline.model_shape import stage_parts
from swarm.pipeline.stage.stage_host import BaseModel, StageHost
from swarm.pipeline.stage_link import RemoteLink, ask
from swarm.pipeline.tensor_bundle import Bundle, WirePrecision, decode_bundle, encode_bundle
from swarm.records.identity import Identity
from tests.unit.pipeline_models import CPU, LORA, PAD, loss_of, made_up_parts, open_stage_group, write_models

SWARM = "0" * 32
DRIVER = Identity(b"d" * 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))["llama"]


class NetworkStageGroup:
    """Hosts on a network in memory, and the driver's caller."""

    def __init__(self, hosts: Sequence[StageHost], faults: Faults) -> None:
        network = MemoryNetwork(random.Random(0), time.time, faults)
        members = [Identity(bytes([number]) * 32).peer_id for number in range(len(hosts))]
        self.transports = [MemoryTransport(network, peer_id) for peer_id in (DRIVER.peer_id, *members)]
        self.members = members
        self.folder = hosts[0]._base.folder
        channel = CommandChannel(SWARM, "crew", DRIVER.peer_id, tuple(members))
        self.caller = CommandCaller(channel, DRIVER, self.transports[0], time.time)
        self.services = [
            CommandService(
                channel,
                transport,
                carry_out=host.carry_out,
                max_payload=host.max_payload_bytes,
                carry_out_relayed=host.carry_out_relayed,
            )
            for transport, host in zip(self.transports[1:], hosts, strict=True)
        ]

    async def give(
        self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, relayed_to: Sequence[str] = ()
    ) -> bytes:
        return await self.caller.send(
            peer_id, kind, payload, max_reply_bytes=max_reply_bytes, deadline_s=30, relayed_to=relayed_to
        )


@asynccontextmanager
async def on_network(hosts: Sequence[StageHost], faults: Faults = NO_FAULTS) -> AsyncIterator[NetworkStageGroup]:
    stage_group = NetworkStageGroup(hosts, faults)
    for transport in stage_group.transports:
        await transport.start()
    try:
        yield stage_group
    finally:
        for service in stage_group.services:
            await service.close()
        for transport in stage_group.transports:
            await transport.stop()


def host(folder: Path) -> StageHost:
    return StageHost(BaseModel(folder, LORA, CPU, torch.float32), StageSettings())


async def loaded(stage_group: NetworkStageGroup, sizes: Sequence[int], precision: WirePrecision = "fp32") -> StageGroup:
    links, expected = [], expected_stages(stage_group.folder, LORA, stage_parts(sizes))
    for peer_id, one in zip(stage_group.members, expected, strict=True):
        await ask(stage_group.give, peer_id, "load", Bundle({**part_fields(one.part), "instead_of": []}))
        links.append(RemoteLink(stage_group.give, peer_id, one, precision))
    started = StageGroup(links, StageGroupSettings(action_timeout_s=30))
    await started.start()
    return started


async def one_step(stage_group: StageGroup) -> tuple[float, dict[str, Tensor], list[list[int]]]:
    """Return (gradient norm, adapter after the step, answers sampled with it)."""
    policy = PipelineModel(stage_group, PAD)
    gradient = await policy.accumulate(made_up_parts(4), loss_of, with_entropy=True)
    await stage_group.commit(lr=0.05, max_grad_norm=1.0)
    states = [await link.state() for link in stage_group.links]
    adapter = {name: value for tensors, _ in states for name, value in tensors["adapter"].items()}
    answers = await policy.generate([[5, 6, 7], [8, 9]], greedy, max_new_tokens=5, eos_token_ids=())
    return gradient.norm, adapter, answers


@pytest.mark.parametrize("lossy", [False, True], ids=["calm", "with messages doubled"])
async def test_a_pipeline_on_a_network_computes_what_one_process_does(folder: Path, lossy: bool) -> None:
    async with open_stage_group(folder, [2, 2, 1], LORA) as local:
        wanted = await one_step(local.stage_group)
    async with on_network(
        [host(folder) for _ in range(3)], Faults(duplication=1.0) if lossy else NO_FAULTS
    ) as stage_group:
        norm, adapter, answers = await one_step(await loaded(stage_group, [2, 2, 1]))
    assert norm == wanted[0]
    assert adapter.keys() == wanted[1].keys()
    assert all(torch.equal(adapter[name], wanted[1][name]) for name in adapter)
    assert answers == wanted[2]


async def test_rounded_activations_stay_near(folder: Path) -> None:
    async with open_stage_group(folder, [3, 2], LORA) as local:
        wanted, _, _ = await one_step(local.stage_group)
    async with on_network([host(folder), host(folder)]) as stage_group:
        norm, _, _ = await one_step(await loaded(stage_group, [3, 2], "bf16"))
    assert norm != wanted
    assert norm == pytest.approx(wanted, rel=0.02)


async def test_one_machine_holds_two_stages_and_refusals_are_reported(folder: Path) -> None:
    both = host(folder)
    async with on_network([both]) as stage_group:
        parts = expected_stages(folder, LORA, stage_parts([3, 2]))
        for one in parts:
            await ask(
                stage_group.give, stage_group.members[0], "load", Bundle({**part_fields(one.part), "instead_of": []})
            )
        links = [RemoteLink(stage_group.give, stage_group.members[0], one, "fp32") for one in parts]
        two = StageGroup(links, StageGroupSettings(action_timeout_s=30))
        await two.start()
        norm, _, _ = await one_step(two)
        assert norm > 0
        assert both.status().versions == (1, 1)
        with pytest.raises(PipelineError, match="must hold some of 5 layers"):
            bad = {"start": 4, "stop": 9, "has_embedding": False, "has_head": False, "instead_of": []}
            await ask(stage_group.give, stage_group.members[0], "load", Bundle(bad))
        with pytest.raises(RequestError, match="got none at layer 1"):
            elsewhere = expected_stages(folder, LORA, stage_parts([1, 4]))[1]
            await RemoteLink(stage_group.give, stage_group.members[0], elsewhere, "fp32").describe()


async def test_copies_come_back_as_they_were_given(folder: Path) -> None:
    async with on_network([host(folder)]) as stage_group:
        peer_id = stage_group.members[0]
        weights = torch.randn(3, 4)
        kept = Bundle({"of": 2, "version": 7}, {"adapter/x": weights})
        await ask(stage_group.give, peer_id, "keep", kept)
        fields = await ask(stage_group.give, peer_id, "kept", Bundle({"of": 2}), max_reply_bytes=1 << 16)
        assert fields.integer("version") == 7
        assert torch.equal(fields.tensor("adapter/x"), weights)
        with pytest.raises(PipelineError, match="no copy of the stage at layer 3"):
            await ask(stage_group.give, peer_id, "kept", Bundle({"of": 3}))


async def test_a_machine_says_what_layers_are_assigned_by(folder: Path) -> None:
    async with on_network([host(folder)]) as stage_group:
        fields = await ask(stage_group.give, stage_group.members[0], "machine", Bundle({"measure": True}))
        assert fields.number("layers_per_s") > 0
        assert fields.integer("memory_bytes") > 0
        assert fields.integers("slots") == ()


def test_damaged_bundles_are_refused_and_nothing_else() -> None:
    tensors = {"a": torch.randn(2, 3), "ids": torch.tensor([[1, 2]]), "h": torch.randn(1, 2, 4), "s": torch.tensor(2.0)}
    whole = encode_bundle(Bundle({"n": 1, "t": "x"}, tensors), {"h": "int8"})
    again = decode_bundle(whole)
    assert again.fields == {"n": 1, "t": "x"}
    assert all(torch.equal(again.tensors[name], tensors[name]) for name in ("a", "ids", "s"))
    rng, refused = random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(90)] = rng.randrange(256)
        try:
            decode_bundle(bytes(damaged[: rng.choice([len(whole), rng.randrange(len(whole))])]))
        except PipelineError:
            refused += 1
    assert refused > 300


def test_hosts_answer_any_bytes(folder: Path) -> None:
    machine = host(folder)
    rng = random.Random(1)
    for kind in ("forward", "load", "keep", "kept", "machine", "nonsense", "commit", "recover"):
        for payload in (b"", b"\x00" * 50, rng.randbytes(200), encode_bundle(Bundle({"slot": 0, "start": -1}))):
            reply = decode_bundle(machine.carry_out(kind, payload))
            assert {"refused", "gone"} & set(reply.fields)
    assert machine.max_payload_bytes("nonsense") == 0
