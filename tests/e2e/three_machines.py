"""The three uses from one machine to the next, with the commands of the documentation: public swarm, silo, pipeline.

    python -m tests.e2e.three_machines                                    # network namespaces, with routers, delay and loss
    python -m tests.e2e.three_machines --hosts me@10.0.0.1,10.0.0.2,10.0.0.3 --swarm .venv/bin/swarm     # over SSH

The first machine is one that everybody can dial: it founds the public swarm and hosts its bootstrap peer. In namespaces the
other two are behind routers, each of which lets in one port. Real machines need TCP ports 28000 to 28003 and 28080 open to each
other, and `swarm` and a shell with `setsid` on each; the command for `swarm` is relative to the home folder there. Everything
is written into one new folder per machine, which stays. Each step is printed when it is done; the last line is a JSON object
with the seconds that each use took.
"""

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from tests.e2e.namespaces import Network, missing_capability

BOOTSTRAP_PORT, NODE_PORT, SILO_PORT, STAGE_PORT, WEB_PORT = 28000, 28001, 28002, 28003, 28080
DELAYS_MS = (20.0, 40.0)
LOSS_PERCENT = 1.0
TIMEOUT_S = 240.0
SMALL = "--rollouts.groups_per_round 4 --evaluation.tasks_per_source 0 --observability.http false"
USES = ("public", "silo", "pipeline")


class NotReached(Exception):
    """What was expected, and what was seen."""


@dataclass
class Machine:
    """Somewhere that a line of shell can run."""

    name: str
    enter: list[str]
    """The command that takes a line of shell as its last argument."""
    address: str
    """Where the others dial it."""
    folder: str
    swarm: str
    _running: list[tuple[str, str]] = field(default_factory=list)
    """(process id, command) of what was started and has not been ended."""

    def run(self, line: str, *, stdin: str = "") -> str:
        """The output of a command line, which runs in the machine's folder. Raises NotReached where it fails."""
        script = f"cd {shlex.quote(self.folder)} && {self._with_path(line)}"
        done = subprocess.run(
            [*self.enter, script], input=stdin, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise NotReached(f"{self.name}: `{line}` ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def _with_path(self, line: str) -> str:
        return f"{shlex.quote(self.swarm)} {line.removeprefix('swarm ')}" if line.startswith("swarm ") else line

    def start(self, line: str, log: str) -> None:
        """Begin a command that runs until `end`; its output goes to the file `log`."""
        self.run(f"{{ setsid {self._with_path(line)} >{log} 2>&1 </dev/null & echo $! >{log}.pid; }}")
        self._running.append((self.run(f"cat {log}.pid"), line))

    def end(self) -> None:
        """Ask all that was started to end, and wait for it."""
        for pid, _ in self._running:
            self.run(f"kill {pid} 2>/dev/null || true")
        for pid, line in self._running:
            until(
                f"{self.name}: end of `{line}`",
                lambda pid=pid: not self.run(f"kill -0 {pid} 2>/dev/null && echo yes || true"),
            )
        self._running.clear()

    def log(self, name: str) -> str:
        return self.run(f"tail -c 3000 {name}")

    def trained(self, folder: str) -> dict[str, Any]:
        """The last round of a node; empty before the first."""
        told = self.run(f"cat {folder}/status.json 2>/dev/null || true")
        return json.loads(told)["last_round"] if told else {}

    def peer_id(self, folder: str) -> str:
        return json.loads(self.run(f"swarm identity show --dir {folder} --json"))["peer_id"]


def until(what: str, is_reached: Callable[[], Any], logs: Callable[[], str] = lambda: "") -> None:
    """Poll another machine, which sends no event. Raises NotReached after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_reached():
        if time.monotonic() > deadline:
            raise NotReached(f"no {what} within {TIMEOUT_S:.0f} s\n{logs()}")
        time.sleep(1.0)
    print(f"  {what}", flush=True)


def learn_from_others(*nodes: tuple[Machine, str, str]) -> None:
    """Wait until each node (machine, folder, log) has trained on groups of others that it took after this call."""
    before = [machine.trained(folder).get("train/swarm_groups_total", 0) for machine, folder, _ in nodes]
    for (machine, folder, log), known in zip(nodes, before, strict=True):
        until(
            f"{machine.name} trains on groups of others",
            lambda machine=machine, folder=folder, known=known: (
                machine.trained(folder).get("train/swarm_groups_total", 0) > known
            ),
            lambda machine=machine, log=log: machine.log(log),
        )


def public_swarm(first: Machine, second: Machine, third: Machine) -> None:
    first.run('swarm create friends --description "three machines"')
    manifest = "friends.swarm.toml"
    first.start(f"swarm bootstrap --manifest {manifest} --listen /ip4/0.0.0.0/tcp/{BOOTSTRAP_PORT}", "bootstrap.log")
    mark = f"/tcp/{BOOTSTRAP_PORT}/p2p/"
    until("the bootstrap peer runs", lambda: mark in first.log("bootstrap.log"), lambda: first.log("bootstrap.log"))
    peer_id = first.log("bootstrap.log").split(mark)[1].split()[0].strip("'\"`,)")
    first.run(f"swarm create --update {manifest} --bootstrap /ip4/{first.address}{mark}{peer_id}")
    founder = tomllib.loads(first.run(f"cat {manifest}"))["founder"]
    first.run(f"mkdir web && cp {manifest} web")
    first.start(f"python3 -m http.server {WEB_PORT} --directory web", "web.log")
    url = f"http://{first.address}:{WEB_PORT}/{manifest}"
    listen = f"""--network.listen '["/ip4/0.0.0.0/tcp/{NODE_PORT}"]'"""
    first.start(f"swarm join {manifest} --node.dir runs/mine {listen} {SMALL}", "join.log")
    second.start(f"swarm join {url} --founder {founder} --node.dir runs/mine {SMALL}", "join.log")
    node = ("runs/mine", "join.log")
    learn_from_others((first, *node), (second, *node))
    third.run(f"swarm join {url} --founder {founder} --check")
    third.start(f"swarm join {url} --founder {founder} --node.dir runs/mine {SMALL}", "join.log")
    learn_from_others((third, *node), (first, *node), (second, *node))
    first.run("swarm status runs/mine")


def silo(first: Machine, second: Machine, third: Machine) -> None:
    second.run(f"swarm silo init lab --dir runs/lab --address /ip4/{second.address}/tcp/{SILO_PORT}")
    members = [(second, "runs/lab", "silo.log")]
    listen = f"""--network.listen '["/ip4/0.0.0.0/tcp/{SILO_PORT}"]'"""
    second.start(f"swarm join runs/lab/manifest.toml {listen} {SMALL}", "silo.log")
    for guest in (third, first):
        request = guest.run("swarm silo request --dir runs/guest").splitlines()[-1]
        invitation = second.run(f"swarm silo invite {request} --dir runs/lab --days 30").splitlines()[-1]
        guest.run(f"swarm silo join {invitation} --dir runs/guest")
        guest.start(f"swarm join runs/guest/manifest.toml {SMALL}", "silo.log")
        members.append((guest, "runs/guest", "silo.log"))
    learn_from_others(*members)
    second.run(f"swarm silo revoke {third.peer_id('runs/guest')} --dir runs/lab")
    until(
        "the founder turns the revoked member away",
        lambda: any("stranger" in reason for reason in second.trained("runs/lab").get("network/refused", {})),
        lambda: second.log("silo.log"),
    )
    learn_from_others(members[0], members[2])


def pipeline(first: Machine, second: Machine, third: Machine) -> None:
    """The second machine drives; it needs no port that is open to others."""
    stages = (first, third)
    for machine in (*stages, second):
        machine.run("swarm init runs/crew")
    listen = f"/ip4/0.0.0.0/tcp/{STAGE_PORT}"
    table = {
        "driver": second.peer_id("runs/crew"),
        "machines": [
            f"/ip4/{stage.address}/tcp/{STAGE_PORT}/p2p/{stage.peer_id('runs/crew')}" for stage in stages
        ],
        "spares": 0,
    }  # fmt: skip
    for machine in (*stages, second):
        machine.run("cat >crew.toml", stdin=tomli_w.dumps({"policy": {"pipeline": table}}))
    for stage in stages:
        stage.start(f"swarm stage crew.toml --node.dir runs/crew --network.listen '[\"{listen}\"]'", "stage.log")
    small = "--rollouts.groups_per_round 2 --rollouts.group_size 4 --sharing.own_groups 2 --sharing.swarm_groups 0"
    alone = "--evaluation.tasks_per_source 0 --training.filter_groups false --observability.http false"
    second.start(f"swarm run crew.toml --node.dir runs/crew {small} {alone}", "driver.log")
    until(
        "the pipeline has made three steps",
        lambda: second.trained("runs/crew").get("policy_version", 0) >= 3,
        lambda: "\n".join([second.log("driver.log"), *(stage.log("stage.log") for stage in stages)]),
    )


@contextlib.contextmanager
def in_namespaces(top: Path) -> Iterator[list[Machine]]:
    """A machine on a public segment, and two behind routers with late and lossy lines."""
    swarm = str(Path(sys.executable).parent / "swarm")
    with Network() as network:
        public = network.public_host()
        homes = [network.home(forwarded_port=port, is_degradable=True) for port in (SILO_PORT, STAGE_PORT)]
        for home, delay_ms in zip(homes, DELAYS_MS, strict=True):
            home.router.degrade(delay_ms=delay_ms, loss_percent=LOSS_PERCENT)
        hosts = [(public, public.address), *((home.host, home.router.address) for home in homes)]
        machines: list[Machine] = []
        for name, (host, address) in zip(("first", "second", "third"), hosts, strict=True):
            (top / name).mkdir(parents=True)
            machines.append(Machine(name, [*host.enter, "sh", "-c"], address, str(top / name), swarm))
        yield machines


@contextlib.contextmanager
def over_ssh(hosts: Sequence[str], swarm: str) -> Iterator[list[Machine]]:
    """`hosts`: USER@ADDRESS or ADDRESS of three machines, which dial each other at these addresses."""
    machines: list[Machine] = []
    for host in hosts:
        enter = ["ssh", "-o", "BatchMode=yes", host]
        home = Machine(host, enter, host.rpartition("@")[2], ".", swarm)
        there = home.run('command -v setsid >/dev/null && mktemp -d -p "$HOME" swarm-check-XXXXXX')
        command = swarm if "/" not in swarm or swarm.startswith("/") else f"{there.rpartition('/')[0]}/{swarm}"
        machines.append(Machine(host, enter, home.address, there, command))
    yield machines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.three_machines", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--hosts", help="Three machines to reach by SSH, with commas, in place of namespaces.")
    parser.add_argument(
        "--swarm", default="swarm", help="The command there; a relative path begins in the home folder."
    )
    parser.add_argument("--uses", default=",".join(USES), help="Of public, silo and pipeline; by default all.")
    options = parser.parse_args(arguments)
    if options.hosts is None and (missing := missing_capability()) is not None:
        sys.exit(
            f"this needs network namespaces, got: {missing}; run as root with iproute2 and iptables, or name --hosts"
        )
    hosts = options.hosts.split(",") if options.hosts else []
    if hosts and len(hosts) != 3:
        sys.exit(f"--hosts must name three machines, got {len(hosts)}")
    if unknown := set(options.uses.split(",")) - set(USES):
        sys.exit(f"--uses must be of {', '.join(USES)}, got {', '.join(sorted(unknown))}")
    took_s: dict[str, float | None] = {}
    top = Path(tempfile.mkdtemp(prefix="three-machines-"))
    with over_ssh(hosts, options.swarm) if hosts else in_namespaces(top) as machines:
        for use in (public_swarm, silo, pipeline):
            name = use.__name__.partition("_")[0]
            if name not in options.uses.split(","):
                continue
            print(f"{name}:", flush=True)
            start = time.monotonic()
            try:
                use(*machines)
                took_s[name] = round(time.monotonic() - start, 1)
            except NotReached as error:
                took_s[name] = None
                print(f"  {error}", flush=True)
            finally:
                for machine in machines:
                    machine.end()
    print(json.dumps({"took_s": took_s}))
    sys.exit(None in took_s.values())


if __name__ == "__main__":
    main()
