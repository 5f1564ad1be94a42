"""A machine of a pipeline that lies to its driver, and a driver that sends what no honest one sends."""

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.config import PipelineSection
from swarm.errors import CheckpointError, PipelineError, StageLostError, StageReplyError
from swarm.pipeline.commands import CloseBatchCommand, StageSettings, part_fields
from swarm.pipeline.driver.expected_stage import BatchSizes, Proportions, StateBounds, expected_stages
from swarm.pipeline.driver.machines import StageMachines
from swarm.pipeline.driver.pipeline_policy import PipelineOptimizer
from swarm.pipeline.driver.stage_group import StageGroup, StageGroupSettings
from swarm.pipeline.model_shape import stage_parts
from swarm.pipeline.stage.stage_host import BaseModel, StageHost, base_model, part_by_hand
from swarm.pipeline.stage_link import RemoteLink, SendCommand
from swarm.pipeline.tensor_bundle import Bundle, decode_bundle, encode_bundle
from swarm.policy.logprobs import TokenLogprobs
from swarm.policy.policy import load_policy
from swarm.training.policy_optimizer import LocalOptimizer
from tests.swarm.test_pipeline_driver import DRIVER, MEMBERS, POLICY, TRAINING, Driven, driven_pipeline

Lie = Callable[[str, Bundle], Bundle]
PARTS = [[([5, 6, 7], [20, 21, 22]), ([9], [23, 24])], [([11, 12], [25, 26, 27])]]
LIAR = 1


class Liar(StageHost):
    """Does its work, and answers something else."""

    lie: Lie = staticmethod(lambda kind, reply: reply)

    def carry_out(self, kind: str, payload: bytes) -> bytes:
        return self._lied(kind, super().carry_out(kind, payload))

    def carry_out_relayed(self, sender: str, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
        return self._lied(kind, super().carry_out_relayed(sender, kind, payload))

    def _lied(self, kind: str, outcome: bytes | tuple[str, bytes]) -> bytes | tuple[str, bytes]:
        if isinstance(outcome, tuple):
            return outcome[0], self._lied_bytes(kind, outcome[1])
        return self._lied_bytes(kind, outcome)

    def _lied_bytes(self, kind: str, reply: bytes) -> bytes:
        return encode_bundle(self.lie(kind, decode_bundle(reply)))


def host_of(number: int, *args: Any, **kwargs: Any) -> StageHost:
    """The slowest machine is the spare, whatever else this computer does."""
    host = (Liar if number == LIAR else StageHost)(*args, **kwargs)
    host._speed = 10.0 - number
    return host


def liar_of(driven: Driven) -> Liar:
    liar = driven.hosts[MEMBERS[LIAR]]
    assert isinstance(liar, Liar)
    return liar


def given_to(hosts: dict[str, StageHost]) -> SendCommand:
    """Carries out the commands of a driver at once, without a network."""

    async def give(
        peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, relayed_to: Sequence[str] = ()
    ) -> bytes:
        reply = hosts[peer_id].carry_out(kind, payload)
        assert isinstance(reply, bytes) and not relayed_to
        assert len(reply) <= max_reply_bytes, "the transport would have cut it off"
        return reply

    return give


def link_to_a_liar() -> tuple[Liar, RemoteLink]:
    """Make a liar of the middle one of three stages, and the link to it."""
    base = base_model(POLICY, "cpu")
    liar = Liar(base, StageSettings())
    expected = expected_stages(base.folder, base.lora, stage_parts([1, 1, 1]))[1]
    assert "refused" not in load(liar, 1, 2).fields
    return liar, RemoteLink(given_to({MEMBERS[LIAR]: liar}), MEMBERS[LIAR], expected, "fp32")


def fields(kind: str, **changed: Any) -> Lie:
    """A lie that changes fields of the replies to one kind of command."""
    return lambda asked, reply: Bundle(reply.fields | changed, reply.tensors) if asked == kind else reply


def tensors(kind: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Lie:
    """A lie that changes the tensors of the replies to one kind of command, in place."""

    def lie(asked: str, reply: Bundle) -> Bundle:
        if asked == kind and "refused" not in reply.fields:
            change(reply.tensors)
        return reply

    return lie


def loss_of(index: int, result: TokenLogprobs) -> torch.Tensor:
    return -(result.logprobs * result.mask).sum()


async def step(driven: Driven) -> float:
    """Take a step and return its gradient norm."""
    steps = PipelineOptimizer(TRAINING, driven.policy)
    norm = await asyncio.to_thread(steps.accumulate, PARTS, loss_of, 1.0)
    if norm < float("inf"):
        await asyncio.to_thread(steps.apply, 1e-3)
    return norm


async def saved(driven: Driven) -> dict[str, dict[str, torch.Tensor]]:
    """Return what a checkpoint would hold."""
    return await asyncio.to_thread(PipelineOptimizer(TRAINING, driven.policy).state)


def first(found: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    return next(tensor for name, tensor in sorted(found.items()) if part in name)


FOREIGN_LAYER = [[f"model.layers.9.mlp.up_proj.lora_{one}", [64, 64]] for one in "AB"]
DESCRIPTIONS = {
    "shapes for a reply of 1 GiB": {"shapes": [["model.layers.1.mlp.up_proj.lora_A", [1 << 14, 1 << 14]]]},
    "layers of others": {"start": 0, "stop": 3},
    "a layer that nobody holds": {"shapes": FOREIGN_LAYER},
    "another model": {"num_model_layers": 9},
    "another prefix": {"layer_prefix": "model."},
    "no hash": {"content_hash": "x" * 5000},
}


async def test_a_stage_is_not_believed_what_it_says_of_itself() -> None:
    liar, link = link_to_a_liar()
    assert (await link.describe()).part.start == 1
    for what, lie in DESCRIPTIONS.items():
        liar.lie = fields("describe", **lie)
        with pytest.raises(StageReplyError, match=MEMBERS[LIAR]):
            await link.describe()
            pytest.fail(what)


@pytest.mark.parametrize("last_batch", [1, 2**62 - 1])
async def test_a_batch_that_the_driver_never_began_stops_the_start(tmp_path: Path, last_batch: int) -> None:
    def lying(number: int, *args: Any, **kwargs: Any) -> StageHost:
        host = host_of(number, *args, **kwargs)
        host.lie = fields("describe", last_batch=last_batch)  # type: ignore[attr-defined]
        return host

    with pytest.raises(PipelineError, match="stage 1 must know batches up to 0"):
        async with driven_pipeline(tmp_path, host_of=lying, machines=MEMBERS[:2], spares=0):
            pass


CLAIMS = {
    "all layers, given by hand": {"is_fixed": True, "slots": [0], "stops": [3]},
    "infinite speed": {"layers_per_s": float("inf")},
    "no speed": {"layers_per_s": 0.0},
    "a speed that is no number": {"layers_per_s": float("nan")},
    "memory without end": {"memory_bytes": 2**61},
    "layers that do not exist": {"slots": [0], "stops": [2**40]},
    "layers twice": {"slots": [0, 0], "stops": [1, 2]},
    "another base": {"fingerprint": "x"},
}


async def test_a_machine_with_a_claim_that_cannot_be_true_is_left_out() -> None:
    base, members = base_model(POLICY, "cpu"), MEMBERS[:3]
    hosts = {peer_id: host_of(number, base, StageSettings()) for number, peer_id in enumerate(members)}
    settings = {"driver": DRIVER.peer_id, "machines": members, "spares": 1, "startup_timeout_s": 20}
    for what, claim in CLAIMS.items():
        hosts[MEMBERS[LIAR]].lie = fields("machine", **claim)  # type: ignore[attr-defined]
        machines = StageMachines(PipelineSection.model_validate(settings), base, given_to(hosts), time.monotonic)
        assert [one.peer_id for one in await machines.gather()] == [MEMBERS[0], MEMBERS[2]], what
        assert {one.peer_id for one in await machines.answering(members)} <= {MEMBERS[0], MEMBERS[2], MEMBERS[LIAR]}
        without_spares = PipelineSection.model_validate(settings | {"spares": 0})
        with pytest.raises(PipelineError, match=MEMBERS[LIAR]):
            await StageMachines(without_spares, base, given_to(hosts), time.monotonic).gather()


async def test_a_claim_of_speed_gives_no_more_layers_than_one_machine_may_hold(tmp_path: Path) -> None:
    def lying(number: int, *args: Any, **kwargs: Any) -> StageHost:
        host = host_of(number, *args, **kwargs)
        host.lie = fields("machine", layers_per_s=1e6)  # type: ignore[attr-defined]
        return host

    async with driven_pipeline(tmp_path, host_of=lying, machines=MEMBERS[:2], spares=0, max_layers=1) as driven:
        sizes = {peer: part.num_layers for part, peer in driven.supervisor.places()}
        assert sizes[MEMBERS[LIAR]] == 1


LIES: dict[str, Lie] = {
    "a negative norm": fields("settle", own_norm_squared=-1e30),
    "a version of the future": fields("commit", version=99),
    "a gradient of a part of the rows": tensors("backward", lambda t: t.update(states=t["states"][:, :1])),
    "no gradient": tensors("backward", lambda t: t.clear()),
    "hidden states of another width": tensors("forward", lambda t: t.update(states=t["states"][..., :1])),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_stage_that_answers_what_no_honest_one_does_is_replaced_for_good(tmp_path: Path, what: str) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3], copy_interval_steps=1) as driven:
        await step(driven)
        liar_of(driven).lie = LIES[what]
        for _ in range(3):
            try:
                await step(driven)
            except PipelineError:
                continue
        assert MEMBERS[LIAR] not in driven.supervisor._peers, "a spare has its layers"
        assert MEMBERS[LIAR] in driven.supervisor._banned
        assert driven.policy.version >= 3, "and the run goes on"
        found = await saved(driven)
        assert all(bool(torch.isfinite(tensor).all()) for group in found.values() for tensor in group.values())


def times(factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda found: found.update(states=found["states"] * factor)


RUINS: dict[str, Lie] = {
    "a norm that dwarfs all others": fields("settle", own_norm_squared=1e300),
    "a norm that is no number": fields("settle", own_norm_squared=float("nan")),
    "a gradient that makes the stage before it look bad": tensors("backward", times(1e12)),
}


@pytest.mark.parametrize("begins_with", ["a true batch", "the lie"])
@pytest.mark.parametrize("what", RUINS)
async def test_a_stage_that_ruins_batch_after_batch_is_replaced_and_nobody_else(
    tmp_path: Path, what: str, begins_with: str
) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3], copy_interval_steps=1) as driven:
        others = [one for one in driven.supervisor._peers if one != MEMBERS[LIAR]]
        if begins_with == "a true batch":
            await step(driven)
        liar_of(driven).lie = RUINS[what]
        for _ in range(2):
            assert not await step(driven) < float("inf")
        with pytest.raises(StageLostError, match=r"stage 1 spoiled several batches in a row"):
            await step(driven)
        assert MEMBERS[LIAR] not in driven.supervisor._peers and driven.supervisor._banned == {MEMBERS[LIAR]}
        assert set(others) <= set(driven.supervisor._peers)
        assert await step(driven) < float("inf")


async def test_a_ruined_batch_now_and_then_costs_no_stage(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3]) as driven:
        for _ in range(2):
            await step(driven)
            liar_of(driven).lie = RUINS["a norm that dwarfs all others"]
            for _ in range(2):
                assert not await step(driven) < float("inf")
            liar_of(driven).lie = Liar.lie
        await step(driven)
        assert MEMBERS[LIAR] in driven.supervisor._peers


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_who_passes_on_odd_states_is_named_and_not_the_stage_whose_gradient_explodes(factor: float) -> None:
    """One token with nearly zero states is enough: a norm layer multiplies its gradient."""

    def batch(token: float, gain: float) -> BatchSizes:
        sizes, states, gradient = BatchSizes(4), torch.ones(2, 3, 8), torch.ones(2, 3, 8)
        for stage in range(3):
            odd = states.clone()
            odd[1, 2] *= token if stage == 1 else 1.0
            sizes.forward(stage, odd)
        for stage in (3, 2, 1):
            sizes.backward(stage, gradient, gradient * (gain if stage == 2 else 2.0))
        sizes.backward(0, gradient, None)
        return sizes

    proportions, norms, ruined = Proportions(), [1.0] * 4, [1.0, 1.0, 1e30, 1.0]
    proportions.observe(batch(1.0, 2.0), norms)
    assert [proportions.ruined(batch(factor, 1e20), ruined) for _ in range(3)] == [(1, False), (1, False), (1, True)]
    assert proportions.ruined(batch(1.0, 1e20), ruined) == (2, False), "of its own accord"
    assert proportions.ruined(batch(1.0, 2.0), norms) == (None, False)


async def answered(driven: Driven) -> list[list[int]]:
    """Sample an answer of two tokens, as the engine does."""
    policy = driven.policy.pipeline_model
    return await policy.generate([[5, 6, 7]], lambda logits, rows, step: torch.tensor([9]), max_new_tokens=2)


REFUSED: dict[str, Callable[[Driven], Awaitable[Any]]] = {
    "forward": step,
    "settle": step,
    "decode": lambda driven: driven.supervisor.persist(lambda: answered(driven)),
    "state": saved,
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_stage_that_goes_on_refusing_neither_ends_the_run_nor_holds_it_up(tmp_path: Path, kind: str) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3], copy_interval_steps=1) as driven:
        await step(driven)
        liar_of(driven).lie = lambda asked, reply: Bundle({"refused": "no"}) if asked == kind else reply
        refusals: list[str] = []
        for _ in range(4):
            try:
                await REFUSED[kind](driven)
            except PipelineError as error:
                refusals.append(str(error))
        assert MEMBERS[LIAR] not in driven.supervisor._peers, "a spare has its layers"
        assert len(refusals) == (3 if REFUSED[kind] is step else 0)
        assert all(line.startswith("stage 1 must") and "refusal: no" in line for line in refusals)
        assert await step(driven) < float("inf")


async def test_a_refusal_now_and_then_costs_no_stage(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3]) as driven:
        for _ in range(3):
            liar_of(driven).lie = lambda asked, reply: Bundle({"refused": "no memory"}) if asked == "forward" else reply
            for _ in range(2):
                with pytest.raises(PipelineError, match="stage 1 must carry out commands"):
                    await step(driven)
            liar_of(driven).lie = Liar.lie
            await step(driven)
        assert MEMBERS[LIAR] in driven.supervisor._peers and not driven.supervisor.recoveries_s


@pytest.mark.parametrize("group", ["adapter", "optimizer", "lr_factors"])
async def test_a_checkpoint_that_no_training_gives_is_held_against_no_stage(tmp_path: Path, group: str) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3]) as driven:
        await step(driven)
        found = await saved(driven)
        steps = PipelineOptimizer(TRAINING, driven.policy)
        await asyncio.to_thread(steps.restore, found, 1)
        name = next(iter(found["adapter"]))
        odd = {"adapter": torch.full((1,), torch.nan), "optimizer": torch.zeros(0), "lr_factors": torch.zeros(2)}
        key = f"exp_avg:{name}" if group == "optimizer" else name
        with pytest.raises(CheckpointError, match="must fit the pipeline"):
            await asyncio.to_thread(steps.restore, {**found, group: {**found.get(group, {}), key: odd[group]}}, 1)
        assert not driven.supervisor.stage_group.dishonest_stages and not driven.supervisor.recoveries_s
        await step(driven)


async def test_a_norm_that_dwarfs_all_others_moves_nothing(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3]) as driven:
        await step(driven)
        before = (await saved(driven))["adapter"]
        liar_of(driven).lie = fields("settle", own_norm_squared=1e300)
        assert await step(driven) == float("inf"), "as a gradient that is not finite: the step is not taken"
        after = (await saved(driven))["adapter"]
        assert all(torch.equal(after[name], before[name]) for name in before)
        liar_of(driven).lie = Liar.lie
        assert await step(driven) < float("inf")


def spoil(part: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        first(found, part).view(-1)[0] = value

    return change


STATES: dict[str, Lie] = {
    "NaN": tensors("state", spoil("adapter/", float("nan"))),
    "infinity": tensors("state", spoil("adapter/", float("inf"))),
    "a weight that no training gives": tensors("state", spoil("adapter/", 1e30)),
    "a B that no training gives": tensors("state", spoil("lora_B", 0.1)),
    "NaN in a moment": tensors("state", spoil("exp_avg:", float("nan"))),
    "a negative second moment": tensors("state", spoil("exp_avg_sq:", -1.0)),
    "a moment that no clipped gradient gives": tensors("state", spoil("exp_avg:", 1e6)),
    "a negative count of steps": tensors("state", spoil("step:", -1.0)),
    "a tensor of somebody else": tensors("state", lambda t: t.update({"adapter/x": torch.zeros(2)})),
    "a tensor too few": tensors("state", lambda t: t.pop(min(t))),
    "moments of nothing": tensors("state", lambda t: t.update({"optimizer/junk:y": torch.zeros(2)})),
    "one of three moments": tensors("state", lambda t: t.pop(next(name for name in t if "step:" in name))),
    "a learning rate of its own": fields("state", lr_factor=1e9),
    "another version": fields("state", version=77),
}


async def test_a_state_that_no_training_gives_is_refused_at_the_door() -> None:
    liar, link = link_to_a_liar()
    driven = StageGroup([link], StageGroupSettings(), StateBounds(link._expected.shapes))
    weights, rest = await driven.state(0)
    moments = {f"exp_avg:{name}": torch.zeros_like(value) for name, value in weights["adapter"].items()}
    moments |= {f"exp_avg_sq:{name}": torch.zeros_like(value) for name, value in weights["adapter"].items()}
    moments |= {f"step:{name}": torch.tensor(3.0) for name in weights["adapter"]}
    await driven.restore(0, ({"adapter": weights["adapter"], "optimizer": moments}, rest))
    assert len((await driven.state(0))[0]["optimizer"]) == len(moments)
    for what, lie in STATES.items():
        liar.lie = lie
        with pytest.raises(StageLostError):
            await driven.state(0)
            pytest.fail(what)
        assert driven.dishonest_stages == {0}
        driven._dishonest.clear()


@pytest.mark.parametrize("what", ["NaN", "a weight that no training gives"])
async def test_a_state_that_no_training_gives_reaches_no_checkpoint(tmp_path: Path, what: str) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3], copy_interval_steps=1) as driven:
        await step(driven)
        honest = await saved(driven)
        liar_of(driven).lie = STATES[what]
        found = await saved(driven)
        assert found["adapter"].keys() == honest["adapter"].keys()
        assert all(torch.equal(found["adapter"][name], honest["adapter"][name]) for name in found["adapter"]), (
            "its copy"
        )
        assert all(key in honest["optimizer"] for key in found["optimizer"])
        assert MEMBERS[LIAR] in driven.supervisor._banned and driven.policy.version == 1


async def test_what_is_not_finite_is_not_written_even_if_the_door_let_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:2], spares=0) as driven:
        monkeypatch.setattr("swarm.pipeline.driver.expected_stage.StateBounds.check", lambda self, state: None)
        monkeypatch.setattr("swarm.pipeline.driver.expected_stage.ExpectedStage.check_state", lambda *state: None)
        liar_of(driven).lie = STATES["NaN"]
        with pytest.raises(CheckpointError, match="finite"):
            await saved(driven)


async def test_honest_states_stay_within_their_bounds_over_many_large_steps(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, machines=MEMBERS[:2], spares=0) as driven:
        steps = PipelineOptimizer(TRAINING, driven.policy)
        for number in range(12):
            await asyncio.to_thread(steps.accumulate, PARTS[number % 2 :], loss_of, 1.0)
            await asyncio.to_thread(steps.apply, 0.05)
        state = await saved(driven)
        await asyncio.to_thread(steps.restore, state, 12)
        merged = {name: value * 3 for name, value in state["adapter"].items()}
        await asyncio.to_thread(steps.write, merged)
        assert torch.equal(first((await saved(driven))["adapter"], "lora_B"), first(merged, "lora_B"))
        assert not driven.supervisor.recoveries_s, "nobody was taken for a liar"


async def test_a_false_copy_of_a_neighbour_is_left_out(tmp_path: Path) -> None:
    """The liar holds the copy of the first stage and returns another one, finite and of the right shape."""
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3], copy_interval_steps=1) as driven:
        await step(driven)
        assert driven.supervisor._peers == MEMBERS[:2]
        liar_of(driven).lie = tensors("kept", lambda t: [tensor.fill_(0.01) for tensor in t.values()])
        await driven.lose(0)
        found = (await saved(driven))["adapter"]
        assert not any(bool((tensor == 0.01).all()) for tensor in found.values())
        assert await step(driven) > 0


async def test_a_stage_says_for_itself_alone_which_copy_is_stored(tmp_path: Path) -> None:
    """The liar names the layers of another stage, to overwrite the copy of that stage."""
    async with driven_pipeline(tmp_path, host_of=host_of, machines=MEMBERS[:3], copy_interval_steps=1) as driven:
        liar_of(driven).lie = fields("copy", of=0)
        await step(driven)
        slots = {facts.part.start for facts in driven.supervisor.stage_group.facts}
        held = {slot for host in driven.hosts.values() for slot in host._copies}
        stage = driven.supervisor._peers.index(MEMBERS[LIAR])
        own = driven.supervisor._copies._own.values()
        reported = held | {decode_bundle(copy).fields["of"] for copy in own}
        assert reported <= slots and driven.supervisor.stage_group.facts[stage].part.start in reported


async def test_the_driver_reads_no_more_than_a_stage_can_have(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, machines=MEMBERS[:2], spares=0) as driven:
        weights = (await saved(driven))["adapter"]
        whole_bytes = sum(4 * tensor.numel() for tensor in weights.values())
        assert sum(one.state_bytes for one in driven.supervisor._expected) < 4 * whole_bytes + (1 << 18)


# a driver against a machine


def machine(**settings: Any) -> StageHost:
    return StageHost(base_model(POLICY, "cpu"), StageSettings(**settings))


def reply_of(host: StageHost, kind: str, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Bundle:
    return decode_bundle(host.carry_out(kind, encode_bundle(Bundle(fields, tensors or {}))))


def load(host: StageHost, start: int, stop: int, instead_of: tuple[int, ...] = ()) -> Bundle:
    part = part_by_hand(host._base, start, stop)
    return reply_of(host, "load", **part_fields(part), instead_of=list(instead_of))


def test_a_machine_holds_every_layer_once() -> None:
    host = machine()
    assert "refused" not in load(host, 0, 2).fields
    for start, stop in ((0, 2), (2, 3)):
        assert "refused" not in load(host, start, stop).fields, "in its own place, or beside it"
    for start, stop in ((1, 2), (1, 3)):
        assert "held once" in load(host, start, stop).fields["refused"]
    assert [(part.start, part.stop) for part in host.status().parts] == [(0, 2), (2, 3)]
    assert "refused" not in load(host, 1, 3, instead_of=(0, 2)).fields
    assert [(part.start, part.stop) for part in host.status().parts] == [(1, 3)]


def test_a_machine_loads_no_layers_that_its_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    host = machine()
    monkeypatch.setattr("swarm.pipeline.stage.stage_host.available_bytes", lambda device: 1000)
    assert "must fit into memory" in load(host, 0, 1).fields["refused"]
    assert not host.status().parts


def test_layers_by_hand_are_not_changed_by_the_driver() -> None:
    base = base_model(POLICY, "cpu")
    host = StageHost(base, StageSettings(), fixed=part_by_hand(base, 0, 1))
    assert "by hand" in load(host, 1, 2).fields["refused"]
    assert "refused" not in load(host, 0, 1).fields, "anew, in its own place"
    assert [(part.start, part.stop) for part in host.status().parts] == [(0, 1)]


def test_a_count_of_micro_batches_costs_no_memory() -> None:
    host = machine()
    load(host, 0, 1)
    stage = host._stages[0]
    stage._open(1)
    tracemalloc.start()
    try:
        with pytest.raises(PipelineError, match="must be complete"):
            stage.close_batch(CloseBatchCommand(1, 3_000_000, ()))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_copies_take_no_more_than_the_adapter_of_the_whole_model() -> None:
    host = machine()
    base: BaseModel = host._base
    limit = host.max_payload_bytes("keep")
    assert limit < 4 << 20, base.folder
    num_values = limit // 3 // 4
    for slot in range(4):
        assert not reply_of(host, "keep", {"adapter/x": torch.zeros(num_values)}, of=slot, version=1).fields
    assert sum(len(copy.payload) for copy in host._copies.values()) <= limit
    assert 3 in host._copies, "the newest stays"


def test_a_learning_rate_factor_of_the_drivers_own_is_refused() -> None:
    host = machine()
    load(host, 0, 1)
    stage = host._stages[0]
    weights, rest = stage.state()
    for factor in (float("nan"), 1e30, -1.0):
        with pytest.raises(PipelineError, match="factor"):
            stage.restore(weights, rest | {"lr_factor": factor})
    spoiled = {name: torch.full_like(value, -1.0) for name, value in list(weights["adapter"].items())[:1]}
    with pytest.raises(PipelineError, match="second moments"):
        stage.restore(weights | {"optimizer": {f"exp_avg_sq:{n}": v for n, v in spoiled.items()}}, rest)


MOMENTS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "a number in place of a moment": lambda t: t.update({key: torch.tensor(0.1) for key in t if "exp_avg:" in key}),
    "a step count per number": lambda t: t.update(
        {key: t[key.replace("step", "exp_avg")] for key in t if "step:" in key}
    ),
    "no step count": lambda t: [t.pop(key) for key in list(t) if "step:" in key],
    "whole numbers": lambda t: t.update({key: value.long() for key, value in t.items()}),
    "moments of nothing": lambda t: t.update({f"junk:{key}": value for key, value in t.items()}),
}


def moments_for(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kinds = {
        f"{kind}:{name}": torch.zeros_like(value)
        for name, value in weights.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return kinds | {f"step:{name}": torch.tensor(1.0) for name in weights}


@pytest.mark.parametrize("what", MOMENTS)
def test_moments_that_are_not_as_large_as_their_tensor_are_refused(what: str) -> None:
    """The fused step would access as many numbers as the parameter has, beyond the end of the moment's memory."""
    host = machine()
    load(host, 0, 1)
    stage = host._stages[0]
    weights = stage.state()[0]["adapter"]
    found = moments_for(weights)
    stage.restore({"adapter": weights, "optimizer": found}, {"policy_version": 1, "lr_factor": 1.0})
    MOMENTS[what](found)
    sent = {f"adapter/{name}": value for name, value in weights.items()}
    sent |= {f"optimizer/{name}": value for name, value in found.items()}
    for kind in ("restore", "recover"):
        assert reply_of(host, kind, sent, slot=0, version=2, lr_factor=1.0).fields.get("refused"), kind
    assert stage.version == 1, "and nothing has changed"


@pytest.mark.parametrize("what", MOMENTS)
def test_a_checkpoint_with_such_moments_is_refused_in_one_process_too(what: str) -> None:
    policy = load_policy(POLICY)
    steps = LocalOptimizer(TRAINING, policy)
    weights = steps.state()["adapter"]
    found = moments_for(weights)
    steps.restore({"adapter": weights, "optimizer": found}, 1)
    MOMENTS[what](found)
    with pytest.raises(CheckpointError):
        steps.restore({"adapter": weights, "optimizer": found}, 2)
    assert policy.version == 1


# a spare that lies when it is needed


def lying_spare(number: int, *args: Any, **kwargs: Any) -> StageHost:
    """The last machine is the first one asked to take over, since it claims to have the most memory."""
    host = (Liar if number == len(MEMBERS) - 1 else StageHost)(*args, **kwargs)
    host._speed = 10.0 - number
    return host


def tells(driven: Driven, lie: Lie) -> None:
    most = fields("machine", memory_bytes=1 << 49)
    driven.hosts[MEMBERS[-1]].lie = lambda kind, reply: lie(kind, most(kind, reply))  # type: ignore[attr-defined]


async def test_a_spare_that_refuses_to_load_costs_no_copy(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, host_of=lying_spare, spares=2, copy_interval_steps=1) as driven:
        await step(driven)
        before = (await saved(driven))["adapter"]
        tells(driven, fields("load", refused="no"))
        await driven.lose(0)
        after = (await saved(driven))["adapter"]
        assert all(torch.equal(after[name], before[name]) for name in before), "the other spare went on from the copy"
        assert MEMBERS[2] in driven.supervisor._peers


async def test_a_spare_does_not_choose_the_weights_that_it_begins_with(tmp_path: Path) -> None:
    async with driven_pipeline(tmp_path, host_of=lying_spare, spares=2, copy_interval_steps=0) as driven:
        await step(driven)
        tells(driven, tensors("state", spoil("lora_B", 1e30)))
        await driven.lose(0)
        after = (await saved(driven))["adapter"]
        assert max(value.abs().max().item() for value in after.values()) < 1
        assert MEMBERS[-1] not in driven.supervisor._peers


async def test_a_spare_that_is_gone_whenever_it_has_loaded_does_not_hold_the_driver_up_for_good(tmp_path: Path) -> None:
    settings = {
        "spares": 1,
        "startup_timeout_s": 3.0,
        "copy_interval_steps": 1,
        "machines": [MEMBERS[0], MEMBERS[-1]],
    }
    async with driven_pipeline(tmp_path, host_of=lying_spare, **settings) as driven:
        assert driven.supervisor._peers == MEMBERS[:1]
        driven.supervisor._clock = iter(range(1 << 30)).__next__  # a second at each look
        tells(driven, fields("describe", gone="another process"))
        await driven.lose(0)
        with pytest.raises(PipelineError, match="must find another machine"):
            async with asyncio.timeout(20):
                await driven.supervisor.recover(StageLostError("gone", (0,)))


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
async def test_a_norm_that_is_no_number_does_not_keep_a_neighbour_from_being_rebuilt(
    tmp_path: Path, norm: float
) -> None:
    """There is no copy, so the neighbours are averaged, by their norms in the last batch."""
    async with driven_pipeline(tmp_path, host_of=host_of, startup_timeout_s=30, copy_interval_steps=0) as driven:
        await step(driven)
        liar_of(driven).lie = fields("settle", own_norm_squared=norm)
        assert not await step(driven) < float("inf")
        driven.supervisor._clock = iter(range(1 << 30)).__next__  # a second at each look
        await driven.lose(2)
        assert len((await saved(driven))["adapter"]) > 0
        assert driven.supervisor._peers[2] not in driven.lost and driven.policy.version == 1
