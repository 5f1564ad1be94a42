"""Merging in a real learner with the bundled policy: what is written, what is tried on, what survives a restart."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.adapters.adapter_state import read_adapter
from swarm.adapters.checkpoint import CheckpointStore
from swarm.adapters.product_merge import layers_of
from swarm.config import Config, parse
from swarm.merging.adapter_wire import encode_adapter
from swarm.merging.policy_merging import MergePorts, try_probability
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.tasks.task_mixture import TaskMixture
from swarm.types import MeetResult, Partner, Snapshot
from tests.unit.memory_pairer import MemoryFinal, MemoryPairer

GATE_SEED = 123_456_789
Adapter = Mapping[str, Tensor]


class Setting:
    """A learner with one adapted layer per block, and its partner."""

    def __init__(self, finale: MemoryFinal | None = None, **merging: object) -> None:
        torch.set_num_threads(1)
        config = parse(
            {
                "network": {"backend": "off"},
                "policy": {"lora": {"rank": 4, "targets": ["v_proj"]}},
                "rollouts": {"groups_per_round": 3, "group_size": 4, "max_new_tokens": 8, "cache_mib": 64},
                "sharing": {"own_groups": 3, "swarm_groups": 0, "publish": False},
                "merging": {"enabled": True, "inner_steps": 2, "gate_tasks": 3, "gate_share": 1.0, "clip_factor": 1e6}
                | merging,
            }
        )
        self.pairer = MemoryPairer()
        policy = load_policy(config.policy, device="cpu")
        self.start = read_adapter(policy.model)
        self.given: list[Snapshot] = []
        self.now_s = 1000.0
        merge_ports = MergePorts(
            self.pairer, self.given.append, lambda: self.now_s, GATE_SEED, finale, lambda peer_ids: ((), 1.0)
        )
        pool = ExperiencePool(":memory:", config.sharing, time.time)
        backend, mixture = local_backend(config, policy, "me"), TaskMixture(config.tasks)
        ports = SwarmPorts(merge_ports=merge_ports)
        self.learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=ports)
        self._model = policy.model

    @property
    def weights(self) -> Adapter:
        return read_adapter(self._model)

    def train_until_offer(self) -> None:
        """Rounds whose step was skipped, for want of a signal, are no inner steps."""
        offers = len(self.pairer.offers)
        while len(self.pairer.offers) == offers:
            self.learner.run_round()

    def train_one_step(self) -> dict[str, object]:
        version = self.learner.policy.version
        while self.learner.policy.version == version:
            row = self.learner.run_round()
        return row

    def answer(self, change: Callable[[Adapter], Adapter]) -> None:
        """A partner whose weights are the own snapshot's, changed."""
        self.pairer.finish(self.partner(change(self.weights)))

    def partner(self, weights: Adapter, peer_id: str = "peer") -> Partner:
        payload = encode_adapter(weights, "bf16", self.start)
        return Partner(peer_id, Snapshot(self.learner.policy.lineage.policy, "bf16", 0, 0, payload))


def shifted(by: float) -> Callable[[Adapter], Adapter]:
    return lambda weights: {name: tensor + by * name.endswith("lora_B") for name, tensor in weights.items()}


def test_merged_weights_are_what_is_sampled_from_and_the_version_is_that_of_the_step() -> None:
    setting = Setting(gate_tasks=0)
    setting.train_until_offer()
    before, version = setting.weights, setting.learner.policy.version
    setting.answer(shifted(1.0))
    row = setting.train_one_step()  # ends with the canary: the engine's weights are the trained ones
    assert row["merge/merges_total"] == 1 and setting.learner.policy.version == version + 1
    moved = {name: (tensor - before[name]).mean().item() for name, tensor in setting.weights.items()}
    for name, change in moved.items():
        assert change == pytest.approx(0.5 if name.endswith("lora_B") else 0.0, abs=0.02)
    setting.learner._canary.check()
    assert setting.given[0].outer_round == 1


def test_outer_steps_by_the_clock_come_at_multiples_of_the_interval_whatever_was_trained(tmp_path: Path) -> None:
    setting = Setting(interval_s=60.0, inner_steps=8)

    def offers_after(now_s: float) -> int:
        setting.now_s = now_s
        before = len(setting.pairer.offers)
        setting.train_one_step()
        if len(setting.pairer.offers) > before:
            setting.pairer.leave_alone()
        return len(setting.pairer.offers)

    assert [offers_after(now_s) for now_s in (1001, 1010, 1019)] == [0, 0, 0], "1020 is the next multiple of 60"
    assert offers_after(1021) == 1
    assert offers_after(1079) == 1 and offers_after(1080) == 2
    assert offers_after(1300) == 3, "intervals that passed in one long round are one outer step"
    store = CheckpointStore(tmp_path, 1)
    setting.learner.save(store)
    resumed = Setting(interval_s=60.0, inner_steps=8)
    resumed.now_s = 2030.0
    assert resumed.learner.resume(store)
    resumed.now_s = 2039.0
    resumed.train_one_step()
    assert len(resumed.pairer.offers) == 0
    resumed.now_s = 2041.0
    resumed.train_one_step()
    assert len(resumed.pairer.offers) == 1


def test_candidates_are_tried_on_private_tasks_that_change_with_every_merge() -> None:
    setting = Setting()
    merging = setting.learner.merging
    assert merging is not None
    first = merging._tasks()
    assert merging._tasks() is first and len(first) == 3
    assert {task.ref.seed for task in first} == {GATE_SEED}
    assert len({task.ref.source for task in first}) == 3
    setting.learner.policy.version += 1
    second = merging._tasks()
    assert not {task.ref for task in first} & {task.ref for task in second}


def test_candidate_that_computes_nan_is_the_worst_there_is_and_ends_nothing() -> None:
    setting = Setting()
    merging = setting.learner.merging
    assert merging is not None
    assert merging._score({name: torch.full_like(tensor, 1e30) for name, tensor in setting.start.items()}) == [
        -math.inf
    ]
    assert min(merging._score(setting.start)) >= 0
    setting.train_one_step()


def test_gate_keeps_a_ruined_policy_out() -> None:
    """Tasks and answers of the bundled policy: right sometimes, and never with weights that say nothing but noise."""
    setting = Setting(gate_tasks=24)
    setting.train_until_offer()
    generator = torch.Generator().manual_seed(0)
    setting.answer(lambda weights: {n: t + 3 * torch.randn(t.shape, generator=generator) for n, t in weights.items()})
    row = setting.train_one_step()
    assert row["merge/reasons"] == {"gate": 1}


def test_trying_merges_takes_a_share_of_the_answers_of_rounds_unless_all_are_tried() -> None:
    def of(**merging: float) -> Config:
        return parse({"merging": {"enabled": True, **merging}})

    assert of().rollouts.groups_per_round * of().rollouts.group_size == 64 and of().merging.gate_tasks == 24
    assert try_probability(of(), 3) == pytest.approx(0.1 * 3 * 64 / (2 * 24))
    assert try_probability(of(gate_tasks=8, gate_share=0.5), 1) >= 1
    assert try_probability(of(gate_share=1.0, gate_tasks=1000), 1) == 1


def test_a_merge_that_is_not_tried_takes_the_partner_as_it_is() -> None:
    setting = Setting(gate_tasks=24, gate_share=1e-9)
    setting.train_until_offer()
    generator = torch.Generator().manual_seed(0)
    setting.answer(lambda weights: {n: t + 3 * torch.randn(t.shape, generator=generator) for n, t in weights.items()})
    row = setting.train_one_step()
    assert row["merge/reasons"] == {"merged": 1} and row["merge/is_tried"] == 0


def test_moments_of_turned_factors_are_forgotten_and_training_goes_on() -> None:
    setting = Setting(gate_tasks=0, drift_threshold=0.3)
    setting.train_until_offer()
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))[0]

    def turned(weights: Adapter) -> Adapter:
        return {name: turn @ t if name.endswith("lora_A") else t @ turn.T for name, t in weights.items()}

    setting.answer(turned)
    row = setting.train_one_step()
    assert row["merge/product_layers"] == len(layers_of(setting.start))
    tensors, _ = setting.learner._trainer.state()
    assert tensors["optimizer"] == {}
    setting.train_one_step()


def test_newcomer_s_policy_begins_at_the_median_of_its_donors() -> None:
    setting = Setting(gate_tasks=0)
    merging = setting.learner.merging
    assert merging is not None
    donors = [setting.partner(shifted(by)(setting.start), f"donor-{by}") for by in (0.01, 0.02, 50.0)]
    assert merging.join(donors)
    for name, tensor in setting.weights.items():
        wanted = setting.start[name] + 0.02 * name.endswith("lora_B")
        torch.testing.assert_close(tensor, wanted, atol=1e-3, rtol=0)


def test_refused_donors_leave_the_policy_as_it_was() -> None:
    setting = Setting(gate_tasks=24)
    merging = setting.learner.merging
    assert merging is not None
    generator = torch.Generator().manual_seed(0)
    noise = {name: t + 3 * torch.randn(t.shape, generator=generator) for name, t in setting.start.items()}
    assert not merging.join([setting.partner(noise)] * 3)
    assert all(torch.equal(setting.weights[name], setting.start[name]) for name in setting.start)


def test_restart_continues_the_outer_steps(tmp_path: Path) -> None:
    setting, store = Setting(), CheckpointStore(tmp_path, 2)
    setting.train_until_offer()
    setting.pairer.leave_alone()
    setting.train_one_step()
    setting.learner.save(store)
    again = Setting()
    assert again.learner.resume(store)
    assert setting.learner.merging is not None and again.learner.merging is not None
    old, new = setting.learner.merging.state(), again.learner.merging.state()
    assert old[1] == new[1] and old[1]["outer_steps"] == 1
    assert all(torch.equal(old[0][group][name], new[0][group][name]) for group in old[0] for name in setting.start)


def test_merging_that_is_turned_on_later_begins_where_the_policy_is(tmp_path: Path) -> None:
    setting, store = Setting(enabled=False), CheckpointStore(tmp_path, 2)
    setting.train_one_step()
    setting.learner.save(store)
    again = Setting()
    assert again.learner.resume(store) and again.learner.merging is not None
    tensors, rest = again.learner.merging.state()
    assert all(torch.equal(tensors["slow_weights"][name], again.weights[name]) for name in again.weights)
    assert rest["inner_steps"] == 0
    again.train_one_step()
    assert again.learner.merging.state()[1]["inner_steps"] == 1


def ended(change: Callable[[Adapter], Adapter], **merging: object) -> tuple[Setting, Adapter]:
    """A learner that is about to meet one whose weights are its own, changed; and its own."""
    finale = MemoryFinal(2, 0, [])
    setting = Setting(finale, **merging)
    setting.train_one_step()
    own = setting.weights
    finale.mets.append(MeetResult(setting.partner(change(own)), 1))
    return setting, own


def test_final_merge_is_written_into_policy_and_checkpoint_and_is_the_only_one(tmp_path: Path) -> None:
    setting, own = ended(shifted(0.01))
    assert setting.learner.merging is not None
    row = setting.learner.merging.finish()
    assert row is not None and row["final/is_taken"] == 1
    for name, tensor in setting.weights.items():
        by = 0.005 if name.endswith("lora_B") else 0.0
        torch.testing.assert_close(tensor, own[name] + by, atol=1e-3, rtol=0)
        assert torch.equal(tensor, setting.learner.merging._merger.slow[name])
    assert setting.learner.merging.finish() is None
    store = CheckpointStore(tmp_path, 1)
    setting.learner.save(store)
    resumed = Setting(MemoryFinal(2, 0, []))
    assert resumed.learner.resume(store) and resumed.learner.merging is not None
    assert resumed.learner.merging.finish() is None
    resumed.train_one_step()  # training goes on from there


def test_final_merge_that_would_ruin_the_policy_leaves_it_as_it_was() -> None:
    setting, own = ended(shifted(5.0), gate_tasks=24)
    assert setting.learner.merging is not None
    row = setting.learner.merging.finish()
    assert row is not None and row["final/is_taken"] == 0 and row["final/reasons"] == {"gate": 1}
    assert all(torch.equal(tensor, own[name]) for name, tensor in setting.weights.items())
