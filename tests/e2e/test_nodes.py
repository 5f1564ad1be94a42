"""Node processes with real sockets: they learn together, survive kill -9, and turn hostile peers away."""

import asyncio
import re
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import safetensors.torch
import torch

from swarm.config import NetworkSection, parse
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.transport import RequestRefused
from swarm.policy.policy import load_policy
from swarm.records.codec import body_hash, encode_body, encode_header, encode_record
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.index import Shard, experience_key, subkey
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import prompt_digest, score
from swarm.types import GroupSummary, Header, Rollout, RolloutGroup, SignedRecord, Task
from tests.e2e.node_process import NodeProcess, node_settings, wait_for

PANELS = Path(__file__).parents[2] / "docker" / "monitoring" / "grafana" / "dashboards" / "swarm.json"
SILO = {"network": {"backend": "off"}, "sharing": {"own_groups": 6, "swarm_groups": 0}}


def drawn_always() -> set[str]:
    """Metrics of Grafana's panels that a node has in any swarm, merging or not, with liars or without."""
    drawn = set(re.findall(r"\bswarm_\w+", PANELS.read_text()))
    return drawn - {"swarm_merge_merges_total", "swarm_exchange_rejected_records"}


@pytest.mark.essential
def test_nodes_learn_together_and_a_late_one_joins(tmp_path: Path) -> None:
    with NodeProcess(node_settings(tmp_path / "a")) as a:
        join = {"initial_peers": [a.address()]}
        with NodeProcess(node_settings(tmp_path / "b", network={"poll_interval_s": 0.2} | join)) as b:
            b.wait_for_round(5)
            with NodeProcess(node_settings(tmp_path / "c", network={"poll_interval_s": 0.2} | join)) as c:
                for node in (a, b, c):
                    learned = wait_for(
                        lambda node=node: (
                            node.last_round if node.last_round.get("train/swarm_groups_total", 0) > 6 else None
                        ),
                        "training on groups of others",
                        node,
                    )
                    assert learned["exchange/records_admitted"] > 0
                    assert set(learned["exchange/rejected"]) <= {"no_signal", "unavailable"}
                status = a.status()
                assert status is not None
                health = httpx.get(f"http://127.0.0.1:{status.http_port}/health").json()
                assert health["peers"] >= 2
                assert health["round"] > 0
                metrics = httpx.get(f"http://127.0.0.1:{status.http_port}/metrics").text
                assert drawn_always() <= set(re.findall(r"^swarm_\w+", metrics, re.M))
                b.kill_9()
                reached = a.last_round["round"]
                a.wait_for_round(reached + 5)  # nobody waits for the dead
        a.signal(signal.SIGINT)
        assert a.wait() == 0


@pytest.mark.alone
def test_interrupt_ends_node_and_daemon_within_five_seconds(tmp_path: Path) -> None:
    with NodeProcess(node_settings(tmp_path / "a")) as a:
        a.wait_for_round(2)
        children = psutil.Process(a.process.pid).children(recursive=True)
        assert children, "the libp2p daemon is a child"
        started = time.monotonic()
        a.signal(signal.SIGINT)
        assert a.wait(5) == 0
        assert time.monotonic() - started < 5
        assert not psutil.wait_procs(children, timeout=5)[1]
        rounds = a.last_round["round"]
    with NodeProcess(node_settings(tmp_path / "a", node={"dir": str(tmp_path / "a"), "threads": 1})) as again:
        assert again.wait_for_round(rounds + 1)["round"] >= rounds + 1
        assert "resumed after round" in again.output.read_text()


@pytest.mark.essential
@pytest.mark.parametrize(
    ("rollouts", "training", "merging"),
    [
        (
            {
                "over_provision": 2.0,
                "task_choice": "thompson",
                "extra_rollouts": "hard",
                "largest_group": 8,
                "refill_draws": 1,
            },
            {"replay_groups": 3},
            {"enabled": True, "inner_steps": 3},
        ),
    ],
    ids=["answers wait for later rounds and are replayed, outer steps are taken"],
)
def test_run_killed_at_a_random_moment_ends_bitwise_equal(
    tmp_path: Path, rollouts: dict[str, object], training: dict[str, object], merging: dict[str, object]
) -> None:
    def run_to_the_end(name: str, kill: bool) -> dict[str, torch.Tensor]:
        folder = tmp_path / name
        node = {"dir": str(folder), "threads": 1, "max_rounds": 10}
        sections = {"rollouts": {**rollouts, "cache_mib": 256}, "training": training, "merging": merging}
        settings = node_settings(folder, node=node, **sections, **SILO)
        folder.mkdir(mode=0o700)
        key = folder / "identity.key"
        key.write_bytes(b"k" * 32)  # the same identity draws the same tasks
        key.chmod(0o600)
        if kill:
            with NodeProcess(settings) as first:
                first.wait_for_round(5)
                first.kill_9()
        with NodeProcess(settings) as last:
            assert last.wait() == 0, last.output.read_text()[-2000:]
        return safetensors.torch.load_file(folder / "checkpoints" / "round-000010" / "adapter.safetensors")

    whole, resumed = run_to_the_end("whole", kill=False), run_to_the_end("resumed", kill=True)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(tensor.abs().max() > 0 for name, tensor in whole.items() if "lora_B" in name)


def test_two_processes_cannot_share_one_identity(tmp_path: Path) -> None:
    settings = node_settings(tmp_path / "a", **SILO)
    with NodeProcess(settings) as first:
        first.wait_for_round(1)
        second = NodeProcess(settings)
        assert second.wait(30) == 4
        assert str(first.process.pid) in second.output.read_text()


@pytest.mark.essential
def test_forged_replayed_and_lying_records_are_turned_away(tmp_path: Path) -> None:
    # No floor: how likely an honest answer of hers is there decides else whether the first lie gets her banned.
    settings = node_settings(tmp_path / "a", sharing={"likelihood_floor_quantile": 0.0})
    with NodeProcess(settings) as victim:
        address = victim.address()
        victim.wait_for_round(1)
        reasons = asyncio.run(_attack(tmp_path, address, victim, parse(settings).swarm_id))
        assert {
            "bad_signature",
            "reward_mismatch",
            "tokens",
            "replay",
            "wrong_slot",
            "held_out_task",
            "unavailable",
        } <= reasons
        assert victim.last_round["exchange/groups_admitted"] == 1, "the one honest record gets in"
        reached = victim.last_round["round"]
        victim.wait_for_round(reached + 2)


class Mallory:
    """A peer that makes valid-looking records of every wrong kind, for tasks that the victim knows."""

    def __init__(self, swarm_id: str, transport: HivemindTransport, identity: Identity) -> None:
        self.swarm_id, self.transport, self.identity = swarm_id, transport, identity
        self.policy = load_policy(parse({}).policy)
        self.mixture = TaskMixture(parse({}).tasks)
        self.bodies: dict[bytes, bytes] = {}
        self.sequence = 0

    async def serve(self, peer_id: str, request: bytes) -> bytes:
        if request not in self.bodies:
            raise RequestRefused("unknown body")
        return self.bodies[request]

    def task(self, index: int, seed: int = 777) -> Task:
        return self.mixture.sources["sums"].task(seed, index)

    def group(self, task: Task, texts: tuple[str, ...], claims: tuple[float, ...] | None = None) -> RolloutGroup:
        rewards = claims or tuple(score(task, text) for text in texts)
        rollouts = tuple(self.rollout(text, reward) for text, reward in zip(texts, rewards, strict=True))
        digest = prompt_digest(task.prompt)
        return RolloutGroup(task.ref, digest, rollouts, self.identity.peer_id, self.policy.lineage, 1)

    def rollout(self, text: str, reward: float) -> Rollout:
        ids = (*self.policy.encode_answer(text), self.policy.eos_token_ids[0])
        return Rollout(text, ids, (-0.7,) * len(ids), True, reward)

    def honest(self, index: int) -> RolloutGroup:
        answer = self.mixture.sources["sums"].answer(777, index)
        return self.group(self.task(index), (answer, "no"))

    async def announce(
        self, group: RolloutGroup, *, identity: Identity | None = None, withhold: bool = False, **changes: object
    ) -> bytes:
        """Store a header for one group in the index; returns the record."""
        body = encode_body([group])
        if not withhold:
            self.bodies[body_hash(body)] = body
        now = self.transport.now()
        header = Header(
            self.swarm_id, self.identity.peer_id, self.sequence, body_hash(body), len(body),
            (GroupSummary(group.task, len(group.rollouts), group.mean_reward),), group.lineage, 1, now, now + 300,
        )  # fmt: skip
        header = replace(header, **changes)  # type: ignore[arg-type]
        record = sign_record(identity or self.identity, self.swarm_id, encode_header(header))
        data = encode_record(SignedRecord(self.identity.peer_id, record.payload, record.signature))
        await self.put(data, header)
        return data

    def attacks(self) -> list[dict[str, Coroutine[None, None, object]]]:
        """One record of every wrong kind, by the reason that it should be turned away for.

        Together, but for the one that has it left alone for a while, and at last the one that gets it banned.
        """
        now = self.transport.now()
        poisoned, withheld = self.honest(4), self.honest(7)
        wrong_ids = replace(poisoned.rollouts[0], token_ids=poisoned.rollouts[1].token_ids, logprobs=(-0.7,) * 3)
        side_by_side = {
            "replay": self.announce(self.honest(1)),
            "bad_signature": self.announce(self.honest(2), identity=Identity(b"x" * 32)),
            "wrong_slot": self.announce(self.honest(5), created_at=now - 500, expires_at=now - 100),  # of an old window
            "held_out_task": self.announce(self.group(self.task(6, seed=1), ("1", "no"), (1.0, 0.0))),
            "tokens": self.announce(replace(poisoned, rollouts=(wrong_ids, poisoned.rollouts[1]))),
        }
        withholding = {"unavailable": self.announce(withheld, withhold=True)}
        lie = {"reward_mismatch": self.announce(self.group(self.task(3), ("wrong", "no"), (1.0, 0.0)))}
        return [side_by_side, withholding, lie]

    async def put(self, data: bytes, header: Header) -> None:
        self.sequence += 1
        now = self.transport.now()
        key = experience_key(self.swarm_id, Shard(0, 0), now)
        slot = subkey(self.identity.peer_id, header.sequence)
        await self.transport.store(key, slot, data, max(header.expires_at, now + 1))


async def _attack(folder: Path, address: str, victim: NodeProcess, swarm_id: str) -> set[str]:
    """Every attack; returns the reasons that the victim counted."""
    identity = Identity(b"m" * 32)
    state = folder / "mallory"
    state.mkdir(mode=0o700)
    transport = HivemindTransport(NetworkSection(initial_peers=(address,)), identity, state)
    mallory = await asyncio.to_thread(Mallory, swarm_id, transport, identity)
    transport.serve(BODY_PROTOCOL, mallory.serve, max_request_bytes=64)
    await transport.start()
    try:
        await mallory.announce(mallory.honest(1))
        await _counted(victim, "an honest group", lambda row: row["exchange/groups_admitted"] == 1)
        for attacks in mallory.attacks():
            for attack in attacks.values():
                await attack
            told = ", ".join(attacks)
            await _counted(victim, told, lambda row, reasons=set(attacks): reasons <= set(row["exchange/rejected"]))
        return set(victim.last_round["exchange/rejected"])
    finally:
        await transport.stop()


async def _counted(victim: NodeProcess, what: str, condition) -> None:
    await asyncio.to_thread(
        wait_for, lambda: row if (row := victim.last_round) and condition(row) else None, what, victim, deadline_s=60
    )
