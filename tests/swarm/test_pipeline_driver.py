"""A pipeline as a learner's policy: it does what one process does, and it continues when machines are lost."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import PipelineSection, PolicySection, TrainingSection, parse
from swarm.engine.engine import AnswerRequest
from swarm.engine.sampling import Sampling
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import ConfigError, PipelineError, StageLostError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import CommandChannel
from swarm.network.commands.service import CommandService
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.node.pipeline_driver import micro_batch_tokens
from swarm.pipeline.commands import StageSettings
from swarm.pipeline.driver.assignment import Machine, ModelCost
from swarm.pipeline.driver.machines import Member, places
from swarm.pipeline.driver.pipeline_engine import PipelineEngine
from swarm.pipeline.driver.pipeline_policy import PipelineModel, PipelineOptimizer, PipelinePolicy, pipeline_policy
from swarm.pipeline.driver.pipeline_supervisor import PipelineSupervisor
from swarm.pipeline.model_shape import model_cost
from swarm.pipeline.stage.stage_host import BaseModel, StageHost, base_model, part_by_hand
from swarm.pipeline.stage.stage_model import MAX_SHARING
from swarm.policy.logprobs import TokenLogprobs
from swarm.policy.micro_batch_size import cut
from swarm.policy.policy import load_policy
from swarm.records.identity import Identity
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from tests.unit.tiny_models import sampled_groups

SWARM = "0" * 32
DRIVER = Identity(b"d" * 32)
MEMBERS = [Identity(bytes([number]) * 32).peer_id for number in range(4)]
POLICY = PolicySection()
TRAINING = TrainingSection(lr=1e-3, warmup_steps=0, micro_batch_sequences=4, lr_by_ess=False)


@dataclass
class Driven:
    """A pipeline of four machines, one of them a spare, and its driver."""

    supervisor: PipelineSupervisor
    policy: PipelinePolicy
    network: MemoryNetwork
    transports: dict[str, MemoryTransport]
    hosts: dict[str, StageHost]
    lost: list[str] = field(default_factory=list)

    async def lose(self, stage: int) -> None:
        peer_id = self.supervisor._peers[stage]
        self.lost.append(peer_id)
        await self.transports[peer_id].stop()

    def trainer(self) -> Trainer:
        return Trainer(
            TRAINING, self.policy, PipelineOptimizer(TRAINING, self.policy), temperature=1.0, max_new_tokens=6
        )


@asynccontextmanager
async def driven_pipeline(
    tmp_path: Path,
    layers: Sequence[tuple[int, int]] = (),
    host_of: Callable[..., StageHost] = lambda number, *args, **kwargs: StageHost(*args, **kwargs),
    **settings: Any,
) -> AsyncIterator[Driven]:
    """Start a pipeline; `host_of(number, …)` makes the machine of a member."""
    driven = {
        "driver": DRIVER.peer_id,
        "machines": MEMBERS,
        "spares": 1,
        "precision": "fp32",
        "startup_timeout_s": 20,
    }
    config = PipelineSection.model_validate({**driven, "self_assigned": MEMBERS[: len(layers)]} | settings)
    base = base_model(POLICY, "cpu")
    network = MemoryNetwork(random.Random(0), time.time)
    transports = {peer_id: MemoryTransport(network, peer_id) for peer_id in (DRIVER.peer_id, *MEMBERS)}
    channel = CommandChannel(SWARM, "machines", DRIVER.peer_id, tuple(MEMBERS))
    caller = CommandCaller(channel, DRIVER, transports[DRIVER.peer_id], time.time)
    hosts, services = {}, []
    for number, peer_id in enumerate(MEMBERS):
        fixed = part_by_hand(base, *layers[number]) if number < len(layers) else None
        hosts[peer_id] = host = host_of(number, base, StageSettings(), fixed=fixed)
        services.append(
            CommandService(
                channel,
                transports[peer_id],
                carry_out=host.carry_out,
                max_payload=host.max_payload_bytes,
                carry_out_relayed=host.carry_out_relayed,
            )
        )

    async def give(
        peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, relayed_to: Sequence[str] = ()
    ) -> bytes:
        silence_s = None if kind in ("machine", "load") else 1.0
        return await caller.send(
            peer_id,
            kind,
            payload,
            max_reply_bytes=max_reply_bytes,
            deadline_s=60,
            silence_s=silence_s,
            relayed_to=relayed_to,
        )

    supervisor = PipelineSupervisor(config, base, model_cost(base), StageSettings(), give)
    for transport in transports.values():
        await transport.start()
    try:
        await supervisor.start(Machine(100.0, 1 << 30))
        policy = pipeline_policy(POLICY, base, supervisor, asyncio.get_running_loop(), tmp_path / "hashes.json")
        yield Driven(supervisor, policy, network, transports, hosts)
    finally:
        supervisor.close()
        for service in services:
            await service.close()
        for transport in transports.values():
            await transport.stop()


def requests(policy: Any) -> list[AnswerRequest]:
    texts = ("1 + 2 =", "12 + 30 =", "spell abc backward")
    return [AnswerRequest(policy.encode_prompt(text), 3, 6) for text in texts]


async def test_a_pipeline_samples_and_trains_as_one_process_does(tmp_path: Path) -> None:
    single = load_policy(POLICY, device="cpu")
    sampling = Sampling(temperature=1.0)
    wanted = TransformersEngine(single, 4).generate(requests(single), sampling, seed=3, stop=("2",))
    groups = sampled_groups(single, max_new_tokens=6)
    local = Trainer(TRAINING, single, LocalOptimizer(TRAINING, single), temperature=1.0, max_new_tokens=6)
    async with driven_pipeline(tmp_path) as driven:
        assert driven.policy.lineage == single.lineage
        assert (driven.policy.eos_token_ids, driven.policy.vocab_size) == (
            single.eos_token_ids,
            single.vocab_size,
        )
        engine = PipelineEngine(driven.policy, 5)
        found = await asyncio.to_thread(engine.generate, requests(single), sampling, seed=3, stop=("2",))
        assert [[a.token_ids for a in answers] for answers in found] == [
            [a.token_ids for a in answers] for answers in wanted
        ]
        assert [[a.end for a in answers] for answers in found] == [[a.end for a in answers] for answers in wanted]
        assert found[0][0].logprobs == pytest.approx(wanted[0][0].logprobs, abs=1e-4)
        trainer = driven.trainer()
        for _ in range(2):
            here, there = local.step(groups), await asyncio.to_thread(trainer.step, groups)
            assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-3)
            assert there.loss == pytest.approx(here.loss, abs=1e-4)
            assert there.kl == pytest.approx(here.kl, abs=1e-4) if here.kl is not None else there.kl is None
        assert driven.policy.version == single.version == 2
        (tensors, state), (own, _) = await asyncio.to_thread(trainer.state), local.state()
        assert tensors["adapter"].keys() == own["adapter"].keys()
        assert tensors["optimizer"].keys() == own["optimizer"].keys()
        errors = [(tensors["adapter"][name] - own["adapter"][name]).abs().mean() for name in own["adapter"]]
        assert max(errors) < 1e-4
        local.restore(tensors, state)  # a pipeline's checkpoint is that of a single process, and the other way round
        await asyncio.to_thread(trainer.restore, own, state)
        answer = ([5, 6], [7, 8])
        scored = await asyncio.to_thread(driven.policy.token_logprobs, [answer])
        assert torch.isfinite(scored.logprobs).all()


@pytest.mark.essential
async def test_a_lost_machine_costs_one_step_and_a_spare_goes_on_from_the_copy(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, copy_interval_steps=1) as driven:
        groups = sampled_groups(load_policy(POLICY, device="cpu"), max_new_tokens=6)
        trainer = driven.trainer()
        assert not (await asyncio.to_thread(trainer.step, groups)).skipped
        before, _ = await asyncio.to_thread(trainer.state)
        await driven.lose(1)
        report = await asyncio.to_thread(trainer.step, groups)
        assert "stage 1" in report.skip_reason
        assert driven.policy.version == 1
        after, _ = await asyncio.to_thread(trainer.state)
        assert all(torch.equal(after["adapter"][name], before["adapter"][name]) for name in before["adapter"])
        assert driven.supervisor._peers[1] not in driven.lost
        assert not (await asyncio.to_thread(trainer.step, groups)).skipped
        assert driven.policy.version == 2
        # no spare is left: a machine that has layers already takes others on
        await driven.lose(0)
        engine = PipelineEngine(driven.policy, 16)
        answers = await asyncio.to_thread(engine.generate, requests(driven.policy), Sampling(), seed=1)
        assert all(answer.token_ids for group in answers for answer in group)
        assert driven.supervisor._peers[0] in driven.supervisor._peers[1:]
        assert len(driven.supervisor.recoveries_s) == 2


async def test_a_batch_in_several_steps_moves_a_pipeline_as_it_does_one_process(tmp_path: Path) -> None:
    single = load_policy(POLICY, device="cpu")
    groups = sampled_groups(single, max_new_tokens=6)
    config = TRAINING.model_copy(update={"groups_per_step": 2})
    local = Trainer(config, single, LocalOptimizer(config, single), temperature=1.0, max_new_tokens=6)
    here = local.step(groups)
    async with driven_pipeline(tmp_path) as driven:
        trainer = Trainer(
            config, driven.policy, PipelineOptimizer(config, driven.policy), temperature=1.0, max_new_tokens=6
        )
        there = await asyncio.to_thread(trainer.step, groups)
        assert driven.policy.version == single.version == -(-len(groups) // 2) > 1
        assert (there.num_tokens, there.lr) == (here.num_tokens, pytest.approx(here.lr))
        assert there.loss == pytest.approx(here.loss, abs=1e-4)


async def test_weights_of_others_are_written_into_all_stages_even_when_one_is_lost(tmp_path: Path) -> None:
    groups = sampled_groups(load_policy(POLICY, device="cpu"), max_new_tokens=6)
    async with driven_pipeline(tmp_path, copy_interval_steps=1) as driven:
        steps, trainer = PipelineOptimizer(TRAINING, driven.policy), driven.trainer()
        await asyncio.to_thread(trainer.step, groups)
        start = await asyncio.to_thread(steps.read)
        turned = sorted(start)[:2]
        merged = {name: value + 0.25 for name, value in start.items()}
        await asyncio.to_thread(steps.write, merged, turned)
        state = await asyncio.to_thread(steps.state)
        assert all(torch.equal(state["adapter"][name], merged[name]) for name in merged)
        assert {key.partition(":")[2] for key in state["optimizer"]} == set(start) - set(turned)
        assert driven.policy.version == driven.supervisor.stage_group.version == 1
        await driven.lose(1)
        other = {name: value - 0.5 for name, value in merged.items()}
        await asyncio.to_thread(steps.write, other)
        found = await asyncio.to_thread(steps.read)
        assert all(torch.equal(found[name], other[name]) for name in other)
        assert len(driven.supervisor.recoveries_s) == 1
        assert not (await asyncio.to_thread(trainer.step, groups)).skipped


async def test_the_raised_learning_rate_of_a_rebuilt_stage_is_in_the_checkpoint(tmp_path: Path) -> None:
    groups = sampled_groups(load_policy(POLICY, device="cpu"), max_new_tokens=6)
    async with driven_pipeline(tmp_path, copy_interval_steps=1) as driven:
        trainer = driven.trainer()
        await asyncio.to_thread(trainer.step, groups)
        assert "lr_factors" not in (await asyncio.to_thread(trainer.state))[0]
        await driven.lose(1)
        await asyncio.to_thread(trainer.step, groups)
        rebuilt = set(driven.supervisor.stage_group.facts[1].shapes)
        saved, state = await asyncio.to_thread(trainer.state)
    store = CheckpointStore(tmp_path / "checkpoints", 1)
    store.save(1, saved, {})
    checkpoint = store.load_newest()
    assert checkpoint is not None
    tensors = checkpoint.tensors
    assert {name: round(one.item(), 6) for name, one in tensors["lr_factors"].items()} == dict.fromkeys(rebuilt, 1.1)
    single = load_policy(POLICY, device="cpu")  # one process has one rate, and takes the rest
    Trainer(TRAINING, single, LocalOptimizer(TRAINING, single), temperature=1.0, max_new_tokens=6).restore(
        tensors, state
    )
    async with driven_pipeline(tmp_path) as driven:
        await asyncio.to_thread(driven.trainer().restore, tensors, state)
        factors = [rest["lr_factor"] for _, rest in await driven.supervisor.states()]
        held = [bool(rebuilt & set(facts.shapes)) for facts in driven.supervisor.stage_group.facts]
        assert [factor > 1.05 for factor in factors] == held and any(held) and not all(held)


async def test_a_frozen_machine_is_lost_long_before_the_deadline_of_its_command(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, copy_interval_steps=1, action_timeout_s=60) as driven:
        groups = sampled_groups(load_policy(POLICY, device="cpu"), max_new_tokens=6)
        trainer = driven.trainer()
        await asyncio.to_thread(trainer.step, groups)
        frozen = driven.supervisor._peers[1]
        driven.network.freeze(frozen)
        started = time.monotonic()
        report = await asyncio.to_thread(trainer.step, groups)
        assert "stage 1" in report.skip_reason and "no sign of life" in report.skip_reason
        assert time.monotonic() - started < 30, "in seconds, and nobody asks it to drop the batch"
        assert frozen not in driven.supervisor._peers
        driven.network.thaw(frozen)
        assert not (await asyncio.to_thread(trainer.step, groups)).skipped


async def test_the_loss_goes_on_falling_over_a_loss(tmp_path: Path) -> None:
    parts = [[([5, 6, 7], [20, 21, 22]), ([9], [23, 24])], [([11, 12], [25, 26, 27])]]
    losses: list[float] = []

    def loss_of(index: int, result: TokenLogprobs) -> torch.Tensor:
        loss = -(result.logprobs * result.mask).sum()
        losses.append(loss.item())
        return loss

    async with driven_pipeline(tmp_path, copy_interval_steps=1) as driven:
        steps, per_step, lost = PipelineOptimizer(TRAINING, driven.policy), [], 0
        for step in range(10):
            if step == 5:
                await driven.lose(1)
            losses.clear()
            try:
                await asyncio.to_thread(steps.accumulate, parts, loss_of, 1.0)
            except StageLostError:
                lost += 1
                continue
            per_step.append(sum(losses))
            await asyncio.to_thread(steps.apply, 3e-3)
    assert (lost, len(per_step)) == (1, 9)
    assert per_step == sorted(per_step, reverse=True), "nothing was forgotten with the machine"


async def test_a_machine_that_came_back_without_its_layers_is_lost_and_used_again(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, copy_interval_steps=1) as driven:
        groups = sampled_groups(load_policy(POLICY, device="cpu"), max_new_tokens=6)
        trainer = driven.trainer()
        await asyncio.to_thread(trainer.step, groups)
        for host in driven.hosts.values():
            host._stages.clear()  # as new processes in the old ones' names
        report = await asyncio.to_thread(trainer.step, groups)
        assert "must be loaded" in report.skip_reason
        assert not (await asyncio.to_thread(trainer.step, groups)).skipped
        assert driven.policy.version == 2


async def test_losing_every_machine_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    by_hand = [(0, 1), (1, 2), (2, 3)]
    async with driven_pipeline(tmp_path, by_hand, startup_timeout_s=4.0, action_timeout_s=2.0) as driven:
        for peer_id in MEMBERS:
            await driven.transports[peer_id].stop()
        with pytest.raises(PipelineError, match="swarm stage"):
            await driven.supervisor.recover(StageLostError("gone", (0,)))


async def test_layers_by_hand_stand(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, layers=[(0, 2), (2, 3)], machines=MEMBERS[:2], spares=0) as driven:
        parts = [(facts.part.start, facts.part.stop) for facts in driven.supervisor.stage_group.facts]
        assert parts[:2] == [(0, 2), (2, 3)]
        assert parts[2][0] == 3


def member(peer_id: str, speed: float, ranges: tuple[tuple[int, int], ...] = (), room: int = 1000) -> Member:
    return Member(peer_id, Machine(speed, room), ranges, is_fixed=bool(ranges))


def test_the_slowest_machines_are_the_spares() -> None:
    config = PipelineSection(driver="d", machines=("a", "b", "c"), spares=1, driver_layers=2)
    cost = ModelCost((1,) * 8)
    parts, peers = places([member("a", 2.0), member("b", 1.0), member("c", 1.0001)], Machine(1.0, 1000), cost, config)
    assert peers == ["a", "c"]
    assert [part.num_layers for part in parts] == [4, 2, 2]
    assert parts[0].has_embedding and parts[-1].has_head


def test_layers_by_hand_must_leave_the_last_to_the_driver() -> None:
    config = PipelineSection(driver="d", machines=("a", "b"))
    for ranges in (((0, 4), (4, 8)), ((0, 3), (4, 6)), ((1, 3), (3, 6))):
        members = [member(name, 1.0, (one,)) for name, one in zip("ab", ranges, strict=True)]
        with pytest.raises(PipelineError, match="by hand"):
            places(members, Machine(1.0, 1000), ModelCost((1,) * 8), config)


def test_another_adapter_has_another_fingerprint() -> None:
    base = base_model(POLICY, "cpu")
    other = BaseModel(base.folder, base.lora.model_copy(update={"rank": 3}), base.device, base.dtype)
    assert base.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 4096),
        ({"training": {"micro_batch_tokens": 65_536}}, 65_536),
        ({"policy": {"pipeline": {"max_states": 2048}}}, 2048),
    ],
)
def test_micro_batches_keep_to_what_stages_accept(settings: dict[str, Any], tokens: int) -> None:
    assert micro_batch_tokens(parse(settings)) == tokens


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"rollouts": {"max_new_tokens": 16_384}, "policy": {"pipeline": {"max_states": 16_895}}},
            "max_states is 16895; it must be at least 16896, the tokens of the longest prompt and answer",
        ),
        (
            {"training": {"micro_batch_tokens": 65_537}},
            "micro_batch_tokens is 65537; it must be at most policy.pipeline.max_states = 65536",
        ),
    ],
)
def test_settings_that_no_stage_accepts_are_refused_before_the_first_command(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        micro_batch_tokens(parse(settings))


def test_no_part_of_a_batch_asks_a_stage_for_more_than_the_budget() -> None:
    """With siblings that share a long prompt, whose keys every answer has a copy of."""
    rng = random.Random(0)
    sequences = [([prompt] * rng.randint(1, 200), [5] * rng.randint(1, 60)) for prompt in range(8) for _ in range(16)]
    sequences += [([9] * 400, [5] * rng.randint(1, 8)) for _ in range(64)]
    model = PipelineModel(None, pad_token_id=0)  # type: ignore[arg-type]  # builds rows, and sends none
    parts = cut(sequences, max_sequences=64, max_tokens=1024, max_separate_tokens=MAX_SHARING * 1024)
    scored = [model._scored([sequences[index] for index in part], 1.0, with_entropy=False) for part in parts]
    assert max(part.token_ids.numel() for part in scored) <= 1024 and sum(map(len, parts)) == len(sequences)
    keys = [
        len(shared.prompt_of) * (shared.prompt_columns + shared.columns_per_answer(part.token_ids.numel()))
        for part in scored
        if (shared := part.shared) is not None
    ]
    assert 7 * 1024 < max(keys) <= MAX_SHARING * 1024
