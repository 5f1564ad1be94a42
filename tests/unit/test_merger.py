"""One replica's merging with partners in memory: overlap, steps alone, partners of no use, products, resuming."""

import copy
import json
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.errors import MergeError
from swarm.merging.adapter_wire import decode_adapter
from swarm.merging.merger import Merger
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin
from swarm.merging.robust import median_adapter
from swarm.types import Alone, Partner
from tests.unit.memory_pairer import SHAPES, MemoryPairer, ToyReplica, partner, snapshot_of, start


def test_outer_step_is_taken_from_the_snapshot_and_training_since_is_kept() -> None:
    """From φ = start and δ = 0, β = .5: θ = φ + .5·(θ_i − φ) + ½·(θ_j − θ_i), plus what was learned since."""
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    assert replica.train(3) == []
    sent = replica.read()
    assert replica.train(2) == []  # the partner takes its time and training goes on
    theirs = {name: tensor + 0.1 for name, tensor in start().items()}
    pairer.finish(partner(theirs))
    before = replica.read()
    (step,) = replica.train()
    assert step.partner == "peer" and step.reset_names == []
    learned_last = ToyReplica(None, inner_steps=1000)
    learned_last.train(5)
    fifth = learned_last.read()
    learned_last.train()
    for name, phi in start().items():
        since = before[name] - sent[name] + (learned_last.weights[name] - fifth[name])
        wanted = phi + 0.5 * (sent[name] - phi) + 0.5 * (theirs[name] - sent[name]) + since
        torch.testing.assert_close(step.weights[name], wanted, atol=5e-3, rtol=0)  # bf16 on the wire
    assert replica.merger.row()["merge/overlap_steps"] == 3
    assert replica.merger.row()["merge/partner_share"] == 0.5


def test_what_is_offered_is_the_snapshot_in_the_lineage_s_numbers() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    replica.train(3)
    (offer,) = pairer.offers
    decoded = decode_adapter(offer.payload, SHAPES, "bf16", start())
    for name, tensor in replica.weights.items():
        torch.testing.assert_close(decoded[name], tensor, atol=1e-3, rtol=0)
    assert (offer.outer_round, offer.policy_version, len(offer.payload)) == (0, 3, replica.merger.num_bytes)


@pytest.mark.parametrize("reason", ["nobody", "declined", "deadline", "unreachable"])
def test_without_a_partner_the_step_is_taken_alone(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    replica.train(3)
    sent = replica.read()
    pairer.leave_alone(reason)
    (step,) = replica.train()
    assert step.partner is None
    for name, phi in start().items():
        torch.testing.assert_close(replica.merger.slow[name], phi + 0.5 * (sent[name] - phi))
    assert "outer step 1 alone" in caplog.text
    row = replica.merger.row()
    assert (row["merge/solo_steps_total"], row["merge/merges_total"], row["merge/reasons"]) == (1, 0, {reason: 1})


def test_a_partner_that_takes_for_ever_stops_nothing_and_what_was_due_meanwhile_follows_at_once() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    assert replica.train(19) == [] and len(pairer.offers) == 1
    pairer.leave_alone()
    assert len(replica.train()) == 1  # step 20: outer steps were due at 6, 9 … 18, and one of them is made up for
    assert len(pairer.offers) == 2 and pairer.offers[1].outer_round == 1
    pairer.leave_alone()
    assert len(replica.train()) == 1 and len(pairer.offers) == 3  # step 21
    pairer.leave_alone()
    assert len(replica.train(2)) == 1 and len(pairer.offers) == 3


BAD = {
    "NaN": {"payload": b"\xc0\x7f" * 20},
    "infinity": {"payload": b"\x80\x7f" * 20},
    "too short": {"payload": b"\0" * 38},
    "too long": {"payload": b"\0" * 42},
    "another lineage": {"lineage": "cd" * 16},
    "another precision": {"precision": "int8"},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_adapter_of_no_use_costs_a_step_alone_and_trust(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pairers = MemoryPairer(), MemoryPairer()
    replica, alone = (ToyReplica(pairer) for pairer in pairers)
    for one in (replica, alone):
        one.train(3)
    pairers[0].finish(partner(moved(0.5), **changes))
    pairers[1].leave_alone()
    (step,), (wanted,) = replica.train(), alone.train()
    assert all(torch.equal(step.weights[name], wanted.weights[name]) for name in SHAPES)
    assert pairers[0].distrusted == ["peer"] and pairers[1].distrusted == []
    assert sum("the adapter of peer is not merged" in line for line in caplog.messages) == 1
    assert replica.merger.row()["merge/reasons"] == {"unusable": 1}


@pytest.mark.parametrize(("behind", "weight"), [(-3, 0.5), (0, 0.5), (1, 0.5 / math.sqrt(2)), (5, None)])
def test_a_partner_behind_has_less_weight(behind: int, weight: float | None) -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    replica.merger.begin(start(), outer_steps=10)
    replica.train(3)
    pairer.finish(partner(start(), outer_round=10 - behind))
    (step,) = replica.train()
    assert replica.merger.row().get("merge/partner_share") == weight
    assert (step.partner is None) == (weight is None)


def test_gate_that_prefers_nothing_of_the_partner_steps_alone() -> None:
    def score(weights: Adapter) -> list[float]:
        return [-weights["l.lora_B"].mean().item()]

    pairers = MemoryPairer(), MemoryPairer()
    replica, alone = ToyReplica(pairers[0], score=score), ToyReplica(pairers[1])
    for one in (replica, alone):
        one.train(3)
    pairers[0].finish(partner({name: tensor + 5 for name, tensor in start().items()}))
    pairers[1].leave_alone()
    (step,), (wanted,) = replica.train(), alone.train()
    assert step.partner is None and replica.merger.row()["merge/reasons"] == {"gate": 1}
    for name in SHAPES:
        torch.testing.assert_close(step.weights[name], wanted.weights[name])


def test_a_refused_partner_is_tried_until_it_has_passed_twice_and_waits_if_refused_again() -> None:
    tries = iter([True, False])  # what chance says of the first merge, and of the first one after the passes
    pairer = MemoryPairer()

    def score(weights: Adapter) -> list[float]:
        return [-round(abs(weights["l.lora_B"].mean().item()), 1)]

    replica = ToyReplica(pairer, score=score, tries=lambda: next(tries))
    tried: list[tuple[int, int]] = []
    for offset in (5.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0):
        replica.train(2 if tried else 3)
        own = decode_adapter(pairer.offers[-1].payload, SHAPES, "bf16", start())
        weights = {name: tensor + offset for name, tensor in own.items()}
        pairer.finish(partner(weights, replica.merger.row()["merge/outer_steps"]))
        replica.train()
        tried.append((replica.merger.row()["merge/is_tried"], len(pairer.distrusted)))
    refused_again = [(1, 0), (1, 0), (1, 0), (1, 1)]
    assert tried == [*refused_again, (1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (0, 1)]
    assert replica.merger.row()["merge/reasons"] == {"gate": 3, "merged": 7}


def test_partner_is_clipped_around_what_the_replica_moves_itself() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer, clip_factor=2.0)
    replica.train(3)
    own = {name: (replica.weights[name] - start()[name]).norm().item() for name in SHAPES}
    pairer.finish(partner({name: tensor + 1000 for name, tensor in start().items()}))
    replica.train()
    assert replica.merger.row()["merge/clipped_share"] == 1.0
    for name, phi in start().items():
        assert (replica.merger.slow[name] - phi).norm().item() <= 0.5 * 2 * own[name] + 1e-6


def test_factors_that_drifted_apart_are_merged_as_products() -> None:
    """The partner computes the same with its basis turned: a mean of factors would be wrong, of products it is the same."""
    pairer = MemoryPairer()
    replica = ToyReplica(pairer, drift_threshold=0.3)
    replica.train(3)
    sent = replica.read()
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    theirs = {"l.lora_A": turn @ sent["l.lora_A"], "l.lora_B": sent["l.lora_B"] @ turn.T}
    pairer.finish(partner(theirs))
    (step,) = replica.train()
    row = replica.merger.row()
    assert row["merge/product_layers"] == 1 and row["merge/drift"] > 0.3
    assert sorted(step.reset_names) == ["l.lora_A", "l.lora_B"]
    slow = replica.merger.slow
    torch.testing.assert_close(
        slow["l.lora_B"] @ slow["l.lora_A"], sent["l.lora_B"] @ sent["l.lora_A"], atol=5e-3, rtol=0
    )
    tensors, _ = replica.merger.state()
    assert not any(tensor.any() for tensor in tensors["outer_momentum"].values())


def resumed(replica: ToyReplica, pairer: MemoryPairer | None, **settings: object) -> ToyReplica:
    tensors, state = replica.merger.state()
    again = ToyReplica(pairer, **settings)  # type: ignore[arg-type]
    again.resume(replica, copy.deepcopy(tensors), json.loads(json.dumps(state)), replica.rng_state())
    return again


@pytest.mark.parametrize("saved_after", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["fixed", "late"])
def test_resumed_replica_without_partners_computes_bit_for_bit_the_same(saved_after: int, schedule: str) -> None:
    whole = ToyReplica(None, schedule=schedule)
    whole.train(20)
    begun = ToyReplica(None, schedule=schedule)
    begun.train(saved_after)
    again = resumed(begun, None, schedule=schedule)
    again.train(20 - saved_after)
    assert all(torch.equal(again.weights[name], whole.weights[name]) for name in SHAPES)
    assert again.merger.row() == whole.merger.row()
    assert again.merger.row()["merge/outer_steps"] in ([6] if schedule == "fixed" else [1, 2])


def test_exchange_under_way_at_a_kill_is_lost_and_the_next_one_is_not() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    replica.train(4)
    again = resumed(replica, pairer)
    assert again.train(2) == [] and len(pairer.offers) == 2
    pairer.finish(partner(start()))
    assert [step.partner for step in again.train()] == ["peer"]


def test_own_adapter_that_cannot_be_sent_costs_a_step_alone() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer)
    replica.weights = {name: tensor + 1e5 for name, tensor in replica.weights.items()}
    assert len(replica.train(3)) == 1 and pairer.offers == []
    assert replica.merger.row()["merge/reasons"] == {"unsendable": 1}


def test_several_inner_steps_at_once_do_not_jump_over_an_outer_step() -> None:
    replica = ToyReplica(None, inner_steps=3)
    assert [replica.merger.after(2, replica.read, version) is not None for version in (2, 4, 6, 8)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_late_schedule_leaves_most_early_outer_steps_out() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer, schedule="late")
    for _ in range(21):
        replica.train()
        if pairer.futures and not pairer.futures[-1].done():
            pairer.leave_alone()
    assert len(pairer.futures) == replica.merger.row()["merge/outer_steps"] <= 4, "of seven"


def test_every_outer_step_is_given_to_newcomers() -> None:
    replica = ToyReplica(None)
    replica.train(6)
    assert [snapshot.outer_round for snapshot in replica.given] == [1, 2]
    decoded = decode_adapter(replica.given[1].payload, SHAPES, "bf16", start())
    torch.testing.assert_close(decoded["l.lora_A"], replica.weights["l.lora_A"], atol=1e-2, rtol=0)


def moved(by: float) -> dict[str, Tensor]:
    return {name: tensor + by for name, tensor in start().items()}


def test_newcomer_begins_at_the_median_of_three_donors_and_one_liar_is_outvoted() -> None:
    replica = ToyReplica(None)
    assert replica.merger.join([partner(moved(1.0), 8), partner(moved(-900.0), 9), partner(moved(1.5), 10)])
    torch.testing.assert_close(replica.merger.slow["l.lora_A"], moved(1.0)["l.lora_A"], atol=1e-2, rtol=0)
    assert replica.merger.row()["merge/outer_steps"] == 9


def test_too_few_usable_donors_are_none() -> None:
    replica = ToyReplica(None)
    assert not replica.merger.join([partner(moved(1.0)), partner(moved(1.0)), partner(moved(1.0), lineage="cd" * 16)])
    assert all(torch.equal(replica.merger.slow[name], start()[name]) for name in SHAPES)


@pytest.mark.parametrize("sign", [-1, 0])
def test_donors_that_do_no_better_than_the_start_are_none(sign: int) -> None:
    """Worse, or level: where the start earns nothing, so does noise."""
    replica = ToyReplica(None, score=lambda weights: [sign * weights["l.lora_B"].abs().sum().item()] * 24)
    assert not replica.merger.join([partner(moved(1.0))] * 3)
    assert all(torch.equal(replica.merger.slow[name], start()[name]) for name in SHAPES)


def test_no_donor_stretches_the_median() -> None:
    """Two of three liars, far away in the same direction, are cut to the middle one's distance before the median."""
    replica = ToyReplica(None)
    assert replica.merger.join([partner(moved(1.0)), partner(moved(2.0)), partner(moved(9.0))])
    assert (replica.merger.slow["l.lora_B"] - start()["l.lora_B"]).norm() <= (moved(2.0)["l.lora_B"]).norm() + 1e-3
    assert replica.merger.join([partner(moved(1.0)), partner(moved(-900.0)), partner(moved(-901.0))])
    assert (replica.merger.slow["l.lora_B"] - start()["l.lora_B"]).norm() <= (moved(900.0)["l.lora_B"]).norm() + 4


def test_poison_that_the_gate_refused_does_not_come_by_the_momentum() -> None:
    """One merge is taken, the next is refused: from then on the replica does what one does that never met the second one, and the
    first one has stopped to move it."""
    pairers = MemoryPairer(), MemoryPairer()
    replica, alone = ToyReplica(pairers[0], score=lambda weights: [0.0]), ToyReplica(pairers[1])
    for one in (replica, alone):
        one.train(3)
    pairers[0].finish(partner({name: tensor + 5 for name, tensor in replica.weights.items()}))
    pairers[1].leave_alone()
    (taken,), _ = replica.train(), alone.train()
    assert taken.partner == "peer"
    by_partner = {name: replica.weights[name] - alone.weights[name] for name in SHAPES}
    replica.merger._score = lambda weights: [-weights["l.lora_B"].mean().item()]
    for _ in range(3):
        for one in (replica, alone):
            one.train(2)
        pairers[0].finish(partner({name: tensor + 5 for name, tensor in replica.weights.items()}))
        pairers[1].leave_alone()
        (step,), _ = replica.train(), alone.train()
        assert step.partner is None
        for name in SHAPES:
            torch.testing.assert_close(replica.weights[name] - alone.weights[name], by_partner[name], atol=1e-4, rtol=0)


def own_way(replica: ToyReplica) -> dict[str, float]:
    steps = replica.merger._strangers.state()
    return {name: sum(own for own, _ in steps[name]) for name in SHAPES}


def by_strangers(replica: ToyReplica) -> dict[str, float]:
    steps = replica.merger._strangers.state()
    return {name: sum(moved for _, moved in steps[name]) for name in SHAPES}


def test_all_strangers_together_move_a_node_no_further_than_its_own_training() -> None:
    """Another name each time, each as far away as the clip allows, and no gate that could see it."""
    pairer = MemoryPairer()
    replica = ToyReplica(pairer, clip_factor=4.0)
    pairer.known.clear()
    for number in range(12):
        replica.train(2 if number else 3)
        pairer.finish(Partner(f"sybil-{number}", snapshot_of(moved(1000.0), outer_round=number)))
        replica.train()
        own, moved_by = own_way(replica), by_strangers(replica)
        assert all(0 < moved_by[name] <= own[name] * (1 + 1e-4) for name in SHAPES)
    restored = resumed(replica, pairer)
    assert by_strangers(restored) == by_strangers(replica)


def test_a_known_partner_is_not_bounded_as_strangers_are() -> None:
    pairer = MemoryPairer()
    replica = ToyReplica(pairer, clip_factor=4.0, strangers_factor=0.0)
    replica.train(3)
    pairer.finish(partner(moved(1000.0)))
    (step,) = replica.train()
    assert step.partner == "peer" and replica.merger.row()["merge/is_stranger"] == 0
    pairer.known.clear()
    replica.train(2)
    pairer.finish(partner(moved(1000.0), outer_round=1))
    replica.train()
    assert replica.merger.row()["merge/is_stranger"] == 1 and by_strangers(replica) == dict.fromkeys(SHAPES, 0.0)


def test_checkpoints_without_strangers_are_read() -> None:
    replica = ToyReplica(None)
    replica.train(6)
    tensors, state = replica.merger.state()
    del state["strangers"]
    again = ToyReplica(None)
    again.resume(replica, tensors, state, replica.rng_state())
    again.train(3)
    assert again.merger.row()["merge/outer_steps"] == 3


def test_median_is_between_two_honest_ones() -> None:
    values = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 1e9)]
    assert median_adapter([{"w": value} for value in values])["w"].item() == 2.5
    assert median_adapter([{"w": value} for value in values[1:]])["w"].item() == 3.0
    with pytest.raises(MergeError, match="at least 3"):
        median_adapter([{"w": values[0]}] * 2)


def test_replicas_that_merge_stay_closer_than_those_that_do_not() -> None:
    def distance(merging: bool) -> float:
        pairers = [MemoryPairer(), MemoryPairer()]
        replicas = [ToyReplica(pairer, seed=number) for number, pairer in enumerate(pairers)]
        rng = random.Random(0)
        for _ in range(45):
            for replica in rng.sample(replicas, 2):
                replica.train()
            if all(pairer.futures and not pairer.futures[-1].done() for pairer in pairers):
                for one, other in (pairers, pairers[::-1]):
                    snapshot = other.offers[-1]
                    one.finish(
                        partner(start(), payload=snapshot.payload, outer_round=snapshot.outer_round)
                        if merging
                        else Alone("nobody")
                    )
        first, second = (replica.weights for replica in replicas)
        return sum((first[name] - second[name]).square().sum().item() for name in SHAPES) ** 0.5

    assert distance(merging=True) < 0.5 * distance(merging=False)


def test_adapter_beyond_what_may_be_sent_is_refused_at_the_start() -> None:
    replica = ToyReplica(None)
    huge = {"l.lora_A": torch.zeros(1).expand(2, 1 << 30), "l.lora_B": torch.zeros(4, 2)}
    with pytest.raises(MergeError, match="at most"):
        Merger(replica.merger._config, AdapterOrigin("ab" * 16, 2.0, huge), replica.merger._schedule)


def test_snapshot_of_the_start_is_all_zeros() -> None:
    assert set(snapshot_of(start()).payload) == {0}
