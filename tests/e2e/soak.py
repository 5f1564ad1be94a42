"""Six nodes live through everything that happens to a swarm in a month, in an hour or two: kills, cuts, clocks, disks.

    python -m tests.e2e.soak [--silo] [--minutes 120] [--seed 0] [--plan] [--old PYTHON] [--folder DIR]

Real nodes with real routers, in network namespaces. One event follows the other: it begins, lasts, ends, and then it counts
how long it takes until every node trains, the one that it happened to has new groups of others, and somebody has new ones of
its own. Two nodes are left in peace, apart from what happens to the others: what they hold (memory, threads, descriptors,
sockets) must not grow. At the end all stop, and nothing may be left behind.

It prints the seed and the plan, which the seed decides, so that a failure can be repeated; then each event with its outcome,
what the two nodes held over time, every distinct warning with how often it came, and one JSON object.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import tomli_w

from swarm.node.report import LEAST_FREE_BYTES
from swarm.observability.metrics import read_rows
from swarm.observability.status_file import read_status
from tests.e2e.namespaces import Host, Network, missing_capability
from tests.e2e.node_process import node_settings

NUM_NODES = 6
NUM_IN_PEACE = 2
RECOVERY_TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 300.0
SAMPLE_INTERVAL_S = 10.0
HOLD_S = (10.0, 40.0)
"""How long an event lasts; of one that begins and ends at once, how long it is quiet before the next."""
STOP_TIMEOUT_S = 60.0
DISK_BYTES = LEAST_FREE_BYTES + (192 << 20)
CLOCK_JUMP_S = 3600
MOST_GROWTH = 1.15
"""What a node in peace may hold at the end, as a multiple of what it held before."""
_PORT, _GOSSIP_PORT = 4001, 4002
_LIBFAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
_NUMBER = re.compile(r"\b\d[\d.,:]*\b|12D3\w+|\b[0-9a-f]{8,}\b")
_LINE = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b\s*(.*)")


class SoakFailed(Exception):
    """What was expected, and what was seen."""


@dataclass
class Node:
    """One `swarm join`, in a namespace of its own, on a disk and with a clock of its own."""

    number: int
    top: Path
    host: Host
    python: str
    manifest: Path
    process: subprocess.Popen[bytes] | None = None
    held: list[dict[str, float]] = field(default_factory=list)
    """Samples of this process, the first one SAMPLE_INTERVAL_S after its start."""

    @property
    def folder(self) -> Path:
        return self.top / f"node{self.number}"

    @property
    def log(self) -> Path:
        return self.top / f"node{self.number}.log"

    @property
    def clock(self) -> Path:
        return self.top / f"node{self.number}.clock"

    def start(self) -> None:
        network = {
            "listen": [f"/ip4/0.0.0.0/tcp/{_PORT}"],
            "gossip_listen": [f"/ip4/0.0.0.0/tcp/{_GOSSIP_PORT}"],
            "poll_interval_s": 1.0,
        }
        config = self.top / f"node{self.number}.toml"
        duty = {"node": {"duty_cycle": 0.2}, "observability": {"http": False}}
        config.write_text(tomli_w.dumps(node_settings(self.folder, network=network, **duty)))
        command = [self.python, "-m", "swarm.cli.main", "join", str(self.manifest), str(config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.host.enter, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.top,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self._clock_settings(),
            )  # fmt: skip
        self.held.clear()

    def _clock_settings(self) -> dict[str, str]:
        if not Path(_LIBFAKETIME).exists():
            return {}
        self.set_clock(0)
        own = {"LD_PRELOAD": _LIBFAKETIME, "FAKETIME_TIMESTAMP_FILE": str(self.clock), "FAKETIME_CACHE_DURATION": "1"}
        return own | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1", "FAKETIME_DISABLE_SHM": "1"}

    def set_clock(self, ahead_s: int) -> None:
        self.clock.write_text(f"{ahead_s:+d}\n")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """To the node and everything that it has started, as a machine that sleeps or dies does."""
        assert self.process is not None
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_TIMEOUT_S)
        if code not in (0, 130):
            raise SoakFailed(f"node {self.number} must end with 0 or 130, got {code}; see {self.log}")

    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [row for row in read_rows(path) if row["kind"] == "round"] if path.exists() else []

    def taken(self) -> dict[str, int]:
        """Groups admitted from each author, as its status says."""
        return {peer["peer_id"]: peer["groups_admitted"] for peer in self._status().peers}

    @property
    def peer_id(self) -> str:
        return self._status().peer_id

    def advice(self) -> list[str]:
        return self._status().contribution.get("advice", [])

    def _status(self) -> Any:
        return read_status(self.folder / "status.json")

    def sample(self) -> None:
        """Add what the process holds now."""
        with contextlib.suppress(psutil.Error, OSError):  # it has just ended, or a file has just gone
            assert self.process is not None
            node = psutil.Process(self.process.pid)
            family = [node, *node.children(recursive=True)]
            self.held.append(
                {
                    "memory_mib": sum(one.memory_full_info().uss for one in family) / 2**20,
                    "descriptors": sum(one.num_fds() for one in family),
                    "threads": sum(one.num_threads() for one in family),
                    "sockets": sum(_num_sockets(one.pid) for one in family),
                    "disk_mib": sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file()) / 2**20,
                }
            )


def _num_sockets(pid: int) -> int:
    """Return how many descriptors are sockets: psutil lists those of the caller's own network namespace alone."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed
            found += str(descriptor.readlink()).startswith("socket:")
    return found


class Soak:
    """The swarm, and what is done to it. A context manager: it ends what it started."""

    def __init__(self, top: Path, *, is_silo: bool, seed: int, old_python: str | None) -> None:
        self.top = top
        self.is_silo = is_silo
        self._old_python = old_python
        self._rng = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self.nodes: list[Node] = []
        self._bootstrap: subprocess.Popen[bytes] | None = None
        self._bootstrap_address = ""
        self._is_sampled = threading.Event()

    def __enter__(self) -> "Soak":
        network = self._stack.enter_context(Network())
        self._public = network.public_host()
        hosts = [network.home().host if number in (1, 5) else network.public_host() for number in range(NUM_NODES)]
        if self.is_silo:  # the founder's own node is the one that others find first
            self._run("silo", "init", "soak", "--dir", "node0", "--address", f"/ip4/{hosts[0].address}/tcp/{_PORT}")
        else:
            self._run("create", "soak")
            self._start_bootstrap()
            self._sign_edition()
        for number, host in enumerate(hosts):
            old = self._old_python if number >= NUM_NODES - 2 else None
            manifest = self.top / (f"node{number}/manifest.toml" if self.is_silo else "soak.swarm.toml")
            node = Node(number, self.top, host, old or sys.executable, manifest)
            self._give_disk(node)
            if self.is_silo and number:
                request = self._run("silo", "request", "--dir", node.folder.name)
                invitation = self._run("silo", "invite", request.splitlines()[-1], "--dir", "node0")
                self._run("silo", "join", invitation.splitlines()[-1], "--dir", node.folder.name)
            self.nodes.append(node)
            node.start()
        sampling = threading.Thread(target=self._sample, daemon=True)
        sampling.start()
        self._stack.callback(sampling.join)
        self._stack.callback(self._is_sampled.set)
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes:
            if node.is_running:
                node.signal(signal.SIGKILL)
                assert node.process is not None
                node.process.wait()
        self._kill_bootstrap()
        self._stack.close()

    def _run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "swarm.cli.main", *arguments]
        done = subprocess.run(command, cwd=self.top, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SoakFailed(f"swarm {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def _give_disk(self, node: Node) -> None:
        """A small file system of its own; what `silo init` wrote moves onto it."""
        node.folder.mkdir(mode=0o700, exist_ok=True)
        kept = self.top / f"{node.folder.name}.kept"
        shutil.copytree(node.folder, kept)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(node.folder)], check=True
        )
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(node.folder)], check=False)
        shutil.copytree(kept, node.folder, dirs_exist_ok=True)

    def _start_bootstrap(self) -> None:
        log = self.top / "bootstrap.log"
        begin = log.stat().st_size if log.exists() else 0
        listen = ("--listen", "/ip4/0.0.0.0/tcp/4000", "--gossip-listen", "/ip4/0.0.0.0/tcp/4003")
        command = [sys.executable, "-m", "swarm.cli.main", "bootstrap", "--manifest", "soak.swarm.toml", *listen]
        with log.open("ab") as file:
            self._bootstrap = subprocess.Popen(
                [*self._public.enter, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self.top
            )
        self._wait(SETTLE_TIMEOUT_S, "start of the bootstrap peer", lambda: " serves" in log.read_text()[begin:])
        address = re.compile(rf"/ip4/{re.escape(self._public.address)}/tcp/4000/p2p/\w+")
        found = address.search(log.read_text())  # it prints it where the manifest does not have it
        assert found is not None
        self._bootstrap_address = found[0]

    def _kill_bootstrap(self) -> None:
        if self._bootstrap is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in psutil.Process(self._bootstrap.pid).children(recursive=True):
                    one.kill()
            self._bootstrap.kill()
            self._bootstrap.wait()

    def _sign_edition(self) -> None:
        self._run("create", "--update", "soak.swarm.toml", "--bootstrap", self._bootstrap_address)

    def _sample(self) -> None:
        while not self._is_sampled.wait(SAMPLE_INTERVAL_S):
            for node in self.nodes[:NUM_IN_PEACE]:
                node.sample()

    def _wait(self, timeout_s: float, what: str, is_reached: Callable[[], Any]) -> float:
        """Poll other processes, which send no event. Returns the seconds that it took."""
        start = time.monotonic()
        while not is_reached():
            if time.monotonic() > start + timeout_s:
                told = {node.number: node.advice() for node in self.nodes if node.is_running}
                raise SoakFailed(f"no {what} within {timeout_s:.0f} s; the nodes advise {told}")
            time.sleep(0.5)
        return time.monotonic() - start

    def settle(self) -> float:
        """Wait until every node has trained and has groups of others. Returns seconds."""

        def is_settled() -> bool:
            with contextlib.suppress(Exception):  # no status yet
                return all(node.rounds() and any(node.taken().values()) for node in self.nodes)
            return False

        return self._wait(SETTLE_TIMEOUT_S, "exchange between all nodes", is_settled)

    def recover(self, node: Node) -> float:
        """Wait until all train, `node` takes new groups and others take new ones of it. Returns seconds."""
        num_rounds = {one.number: len(one.rounds()) for one in self.nodes}
        taken = {one.number: one.taken() for one in self.nodes}
        author = node.peer_id

        def has_recovered() -> bool:
            if any(len(one.rounds()) <= num_rounds[one.number] for one in self.nodes):
                return False
            grown = {
                one.number: {peer for peer, count in one.taken().items() if count > taken[one.number].get(peer, 0)}
                for one in self.nodes
            }
            return bool(grown[node.number]) and any(author in peers for peers in grown.values())

        return self._wait(RECOVERY_TIMEOUT_S, f"recovery of node {node.number}", has_recovered)

    def events(self) -> dict[str, Callable[[Node, float], None]]:
        events: dict[str, Callable[[Node, float], None]] = {
            "killed": self.kill,
            "left and came back": self.leave,
            "froze": self.freeze,
            "slept": self.sleep,
            "disk full": self.fill_disk,
            "network cut": self.cut,
            "new address": self.change_address,
        }
        if Path(_LIBFAKETIME).exists():
            events |= {"clock an hour ahead": self.clock_ahead, "clock an hour behind": self.clock_behind}
        if self.is_silo:
            events["key rotated"] = self.rotate
        else:
            events |= {"bootstrap peer killed": self.lose_bootstrap, "new edition": self.new_edition}
        if self._old_python:
            events["upgraded"] = self.upgrade
        return events

    def kill(self, node: Node, hold_s: float) -> None:
        before = node.rounds()[-1]["round"]
        node.signal(signal.SIGKILL)
        assert node.process is not None
        node.process.wait()
        time.sleep(hold_s)
        self._come_back(node, before)

    def leave(self, node: Node, hold_s: float) -> None:
        before = node.rounds()[-1]["round"]
        node.stop()
        time.sleep(hold_s)
        self._come_back(node, before)

    def _come_back(self, node: Node, last_round: int) -> None:
        """Start it, and check that it goes on where its last checkpoint is."""
        num_before = len(node.rounds())
        node.start()
        self._wait(SETTLE_TIMEOUT_S, f"round of node {node.number}", lambda: len(node.rounds()) > num_before)
        resumed, interval = node.rounds()[num_before]["round"], 3
        if not last_round - interval <= resumed <= last_round + interval:
            raise SoakFailed(f"node {node.number} must go on from round {last_round}, began with {resumed}")

    def freeze(self, node: Node, hold_s: float) -> None:
        node.signal(signal.SIGSTOP)
        time.sleep(hold_s)
        node.signal(signal.SIGCONT)

    def sleep(self, node: Node, hold_s: float) -> None:
        """A laptop that is shut: its connections die meanwhile."""
        self.cut_line(node, is_up=False)
        self.freeze(node, 2 * hold_s)
        self.cut_line(node, is_up=True)

    def fill_disk(self, node: Node, hold_s: float) -> None:
        filler = node.folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(hold_s)
        filler.unlink()

    def cut(self, node: Node, hold_s: float) -> None:
        self.cut_line(node, is_up=False)
        time.sleep(hold_s)
        self.cut_line(node, is_up=True)

    def cut_line(self, node: Node, *, is_up: bool) -> None:
        node.host.set_line(is_up=is_up)
        if is_up and node.host.address.startswith("192.168."):
            router = node.host.address.rpartition(".")[0] + ".1"
            node.host.run("ip", "route", "replace", "default", "via", router)

    def change_address(self, node: Node, hold_s: float) -> None:
        """As when a provider gives another one."""
        old, device = node.host.address, node.host.device
        prefix, _, last = old.rpartition(".")
        new = f"{prefix}.{int(last) + 100 if int(last) < 100 else int(last) - 100}"
        node.host.run("ip", "address", "add", f"{new}/24", "dev", device)
        node.host.run("ip", "address", "del", f"{old}/24", "dev", device)
        node.host = Host(node.host.namespace, new, device, node.host.line)
        with contextlib.suppress(subprocess.CalledProcessError):
            node.host.run("ip", "address", "add", f"{new}/24", "dev", device)  # where it went with the first one
        if prefix.startswith("192.168."):
            node.host.run("ip", "route", "replace", "default", "via", f"{prefix}.1")
        time.sleep(hold_s)

    def clock_ahead(self, node: Node, hold_s: float) -> None:
        self._jump(node, CLOCK_JUMP_S, hold_s)

    def clock_behind(self, node: Node, hold_s: float) -> None:
        self._jump(node, -CLOCK_JUMP_S, hold_s)

    def _jump(self, node: Node, ahead_s: int, hold_s: float) -> None:
        """The clock is wrong for a while, and is then corrected."""
        node.set_clock(ahead_s)
        time.sleep(hold_s)
        node.set_clock(0)

    def lose_bootstrap(self, node: Node, hold_s: float) -> None:
        """It dies, a node restarts without it, and it comes back."""
        self._kill_bootstrap()
        self.kill(node, hold_s)
        self.recover(node)
        self._start_bootstrap()

    def new_edition(self, node: Node, hold_s: float) -> None:
        self._sign_edition()
        self.leave(node, hold_s)

    def rotate(self, node: Node, hold_s: float) -> None:
        self._run("silo", "rotate", "--dir", "node0")
        time.sleep(hold_s)

    def upgrade(self, node: Node, hold_s: float) -> None:
        """From the old release, where it still runs that, to this one."""
        node.python = sys.executable
        self.leave(node, hold_s)

    def plan(self) -> Iterator[tuple[str, int, float]]:
        """(event, node, seconds) without end: every event once, in any order, and again."""
        while True:
            names = sorted(self.events())
            self._rng.shuffle(names)
            for name in names:
                yield name, self._rng.randrange(NUM_IN_PEACE, NUM_NODES), self._rng.uniform(*HOLD_S)

    def growth(self) -> dict[str, float]:
        """Of each kind: what the nodes in peace held in the last fifth, over the second one. The larger of the nodes."""
        found: dict[str, float] = {}
        for node in self.nodes[:NUM_IN_PEACE]:
            fifth = len(node.held) // 5
            for kind in node.held[0] if fifth else ():
                early, late = (
                    median(one[kind] for one in part) for part in (node.held[fifth : 2 * fifth], node.held[-fifth:])
                )
                found[kind] = max(found.get(kind, 0.0), late / max(early, 1.0))
        return found

    def end(self) -> list[str]:
        """Stop all nodes; what they have left behind."""
        pids = [node.process.pid for node in self.nodes if node.process is not None]
        for node in self.nodes:
            node.stop()
        left = [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
        owned = (path / "owner" for path in Path("/tmp").glob("swarm-*"))
        left += [str(owner) for owner in owned if owner.exists() and int(owner.read_text() or 0) in pids]
        return left + [str(path) for node in self.nodes for path in node.folder.rglob("*.tmp*")]

    def messages(self) -> Counter[str]:
        """Warnings and errors of all nodes, numbers and names left out."""
        found: Counter[str] = Counter()
        for node in self.nodes:
            for line in node.log.read_text(errors="replace").splitlines():
                if match := _LINE.search(line):
                    found[f"{match[1]} {_NUMBER.sub('#', match[2])[:160]}"] += 1
                elif line.startswith("Traceback"):
                    found["Traceback"] += 1
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--silo", action="store_true", help="A silo whose key is rotated, in place of a public swarm.")
    parser.add_argument("--minutes", type=float, default=120.0, help="No event begins after this time.")
    parser.add_argument("--seed", type=int, default=0, help="Decides the plan.")
    parser.add_argument("--plan", action="store_true", help="Print the first events of the plan, and end.")
    parser.add_argument("--only", default="", help="Names of events, with commas, in place of all.")
    parser.add_argument("--old", help="Python of an earlier release, with which two nodes begin.")
    parser.add_argument("--folder", type=Path, help="Takes folders and logs of the nodes.")
    options = parser.parse_args(arguments)
    top = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(top, is_silo=options.silo, seed=options.seed, old_python=options.old)
    plan = ((name, node, s) for name, node, s in soak.plan() if not options.only or name in options.only.split(","))
    if options.plan:
        for _ in range(2 * len(soak.events())):
            name, number, hold_s = next(plan)
            print(f"{name}, node {number}, {hold_s:.0f} s")
        return
    if (missing := missing_capability()) is not None:
        sys.exit(f"the soak needs network namespaces, got: {missing}; run as root with iproute2 and iptables")
    if any(top.iterdir()) if top.exists() else False:
        sys.exit(f"the folder must be empty, got {top}; name another one with --folder")
    top.mkdir(parents=True, exist_ok=True)
    if not Path(_LIBFAKETIME).exists():
        print("clocks are left alone: install the package faketime", flush=True)
    print(f"seed {options.seed}, {'silo' if options.silo else 'public swarm'}, logs in {top}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    recoveries: dict[str, list[float]] = {}
    failures: list[str] = []
    with soak:
        print(
            f"all exchange after {soak.settle():.0f} s\n\n| event | node | recovered after |\n|---|---|---|", flush=True
        )
        while time.monotonic() < deadline:
            name, number, hold_s = next(plan)
            node = soak.nodes[number]
            try:
                soak.events()[name](node, hold_s)
                recoveries.setdefault(name, []).append(soak.recover(node))
                outcome = f"{recoveries[name][-1]:.0f} s"
            except (SoakFailed, subprocess.SubprocessError) as error:
                outcome = f"not recovered: {error}"
                failures.append(f"{name}, node {number}: {error}")
            print(f"| {name} | {number} | {outcome} |", flush=True)
            if any(not one.is_running for one in soak.nodes):
                failures += [f"node {one.number} has ended; see {one.log}" for one in soak.nodes if not one.is_running]
                break
        growth = soak.growth()
        left = soak.end() if all(node.is_running for node in soak.nodes) else []
        messages = soak.messages()
    for text, count in messages.most_common():
        print(f"{count:5d}  {text}")
    grown = {kind: round(ratio, 2) for kind, ratio in growth.items()}
    failures += [
        f"{kind} grew to {ratio} times" for kind, ratio in grown.items() if ratio > MOST_GROWTH and kind != "disk_mib"
    ]
    failures += [f"left behind: {one}" for one in left]
    figures = {
        "recovery_median_s": round(median(s for all_s in recoveries.values() for s in all_s), 1)
        if recoveries
        else None,
        "recovery_worst_s": {name: round(max(all_s), 1) for name, all_s in sorted(recoveries.items())},
        "num_events": sum(map(len, recoveries.values())),
        "growth": grown,
        "failures": failures,
    }
    print(json.dumps(figures))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
