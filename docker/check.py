"""Runs the swarm of docker-compose.yml for real and breaks it: `python docker/check.py`, with Docker and its compose at hand.

    build ─▶ up ─▶ learn ─▶ guest ─▶ kill nodes ─▶ kill bootstrap ─▶ cut a network ─▶ stop, start ─▶ one more ─▶ down, up

Says what it does and what came of it, and ends with one JSON object. Takes some ten minutes on two cores; removes what it made.
"""

import argparse
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from containers import CHECKPOINT_ROUNDS, CheckFailed, Container, Told, came_back, compose_program, run, wait_until

ROOT = Path(__file__).parents[1]
PROJECT, GUESTS = "swarm-check", "swarm-check-guests"
NETWORK = f"{PROJECT}_swarm"
IMAGE = "localhost/swarm:cpu"
WEB = f"{PROJECT}-web"
"""A container that serves the manifest by HTTP, as a founder's web site would."""
PANELS = ROOT / "docker" / "monitoring" / "grafana" / "dashboards" / "swarm.json"
DRAWN_SOMETIMES = {"swarm_exchange_rejected_records", "swarm_merge_merges_total"}
"""After a record was refused; where nodes merge."""
NUM_NODES = 4
MAX_IMAGE_BYTES = 1_500_000_000
MAX_STOP_S = 10.0
"""What compose gives a container before it is killed (stop_grace_period)."""
MIN_REWARD_GAIN = 0.05
"""Of the mean of all nodes, from their first WINDOW rounds to their last; noise of such a mean is some 0.02."""
WINDOW = 8


class Check:
    """The swarm under test, and what is done to it."""

    def __init__(self, services: Sequence[str], *, build: bool) -> None:
        self.services = services
        self.build = build
        self._program = compose_program()

    def compose(self, *arguments: str, project: str = PROJECT, **variables: str) -> str:
        file = ("--file", str(ROOT / "docker-compose.yml"))
        return run(*self._program, "--project-name", project, *file, *arguments, variables=variables)

    def up(self, num_nodes: int = NUM_NODES) -> None:
        self.compose("up", "--detach", "--no-build", "--scale", f"node={num_nodes}", *self.services)

    def nodes(self) -> list[Container]:
        found = [Container(line) for line in self.compose("ps", "--quiet", "node").split()]
        return sorted(found, key=lambda node: node.name)

    def image(self) -> Told:
        if self.build:
            self.compose("build", "bootstrap")
        size, user = run("docker", "image", "inspect", "--format", "{{.Size}} {{.Config.User}}", IMAGE).split()
        if int(size) > MAX_IMAGE_BYTES or user in ("", "0", "root"):
            raise CheckFailed(
                f"{IMAGE} must have {MAX_IMAGE_BYTES / 1e6:.0f} MB at most and a user, got {size}, {user}"
            )
        return {"image_mb": int(size) // 10**6, "user": user}

    def comes_up(self) -> Told:
        self.up()
        ids = self.compose("ps", "--quiet", *self.services).split()
        ask = ("docker", "inspect", "--format", "{{.State.Health.Status}}", *ids)
        wait_until(lambda: set(run(*ask).split()) == {"healthy"}, lambda: f"not all healthy: {self.compose('ps')}")
        capabilities = {node.exec("grep", "CapEff", "/proc/1/status").split()[1] for node in self.nodes()}
        if {int(one, 16) for one in capabilities} != {0}:
            raise CheckFailed(f"nodes must have no capabilities, got {capabilities}")
        return {"healthy": len(ids), "folders": self.folders()}

    def folders(self) -> list[str]:
        folders = [node.folder for node in self.nodes()]
        if len(set(folders)) != len(folders):
            raise CheckFailed(f"every node must have a folder of its own, got {folders}")
        return folders

    def learn_from_each_other(self) -> Told:
        def learned(status: Told) -> bool:
            return _swarm_groups(status) > 0 and status["round"] > CHECKPOINT_ROUNDS

        what = f"groups of others in training after {CHECKPOINT_ROUNDS} rounds"
        rows = {node.name: node.wait_for(what, learned)["last_round"] for node in self.nodes()}
        return {name: f"{row['train/swarm_groups_total']} groups of others" for name, row in rows.items()}

    def take_in_a_guest(self) -> Told:
        """A node of another project joins with the address of the manifest, and pins its founder."""
        bootstrap, volume = self.compose("ps", "--quiet", "bootstrap").strip(), f"{PROJECT}_manifest:/swarm:ro"
        self.dismiss_guests()
        manifest = tomllib.loads(run("docker", "exec", bootstrap, "cat", "/swarm/compose.swarm.toml"))
        web = ("--detach", "--rm", "--name", WEB, "--network", NETWORK, "--volume", volume, IMAGE)
        run("docker", "run", *web, "python", "-m", "http.server", "8000", "--directory", "/swarm")
        where = f'{{{{(index .NetworkSettings.Networks "{NETWORK}").IPAddress}}}}'
        address = run("docker", "inspect", "--format", where, WEB).strip()  # a private address only counts as a number
        told = {"SWARM_MANIFEST": f"http://{address}:8000/compose.swarm.toml", "SWARM_FOUNDER": manifest["founder"]}
        only = ("up", "--no-start", "--no-build", "--no-deps", "--scale", "node=1", "node")
        self.compose(*only, project=GUESTS, SWARM_TRAINING__LR="5e-4", **told)
        guest = Container(self.compose("ps", "--all", "--quiet", "node", project=GUESTS).strip())
        run("docker", "network", "disconnect", "--force", f"{GUESTS}_swarm", guest.id, may_fail=True)
        run("docker", "network", "connect", NETWORK, guest.id)
        run("docker", "start", guest.id)
        status = guest.wait_for("groups of others", lambda status: _swarm_groups(status) > 0)
        config = tomllib.loads(guest.exec("cat", f"{guest.folder}/config.toml"))
        learned = (config["swarm"]["id"], config["training"]["lr"])
        if learned != (manifest["id"], 5e-4):
            raise CheckFailed(f"a guest must be of the swarm {manifest['id']} with its own lr, got {learned}")
        self.dismiss_guests()
        return {"guest": f"{status['peer_name']}, {_swarm_groups(status)} groups of others"}

    def dismiss_guests(self) -> None:
        run("docker", "rm", "--force", WEB, may_fail=True)
        self.compose("down", "--volumes", "--timeout", str(int(MAX_STOP_S)), project=GUESTS)

    def show_what_grafana_draws(self) -> Told:
        drawn = set(re.findall(r"\bswarm_\w+", PANELS.read_text(encoding="utf-8")))
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        told = {
            name for node in self.nodes() for name in re.findall(r"^swarm_\w+", node.exec("python", "-c", ask), re.M)
        }
        if missing := drawn - told - DRAWN_SOMETIMES:
            raise CheckFailed(f"nodes must tell all that panels draw, miss {sorted(missing)}")
        return {"drawn": len(drawn), "not_yet": sorted(drawn - told)}

    def show_all_on_one_page(self) -> Told:
        (page,) = self.compose("ps", "--quiet", "dashboard").split()
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/health').read().decode())"

        def health() -> Told:
            return json.loads(run("docker", "exec", page, "python", "-c", ask))

        wait_until(lambda: health().get("nodes_alive") == NUM_NODES, lambda: f"not all nodes on the page: {health()}")
        return health()

    def survive_killed_nodes(self) -> Told:
        first, second, *others = self.nodes()
        before = {node.name: node.status() for node in (first, second)}
        run("docker", "kill", first.id, second.id)
        for node in others:
            node.wait_for_growth("round", "train/swarm_groups_total", by=2)
        run("docker", "start", first.id, second.id)
        return {node.name: came_back(node, before[node.name]) for node in (first, second)}

    def survive_the_bootstrap(self) -> Told:
        self.compose("kill", "bootstrap")
        for node in self.nodes():
            node.wait_for_growth("round", "exchange/records_admitted", by=3)
        self.compose("start", "bootstrap")
        return {node.name: f"round {node.status()['round']}" for node in self.nodes()}

    def survive_a_cut(self) -> Told:
        node = self.nodes()[-1]
        run("docker", "network", "disconnect", NETWORK, node.id)
        node.wait_for_growth("round", by=3)
        alone = node.status()["round"]
        run("docker", "network", "connect", "--alias", "node", NETWORK, node.id)
        node.wait_for_growth("exchange/records_admitted", by=3)
        return {node.name: f"went on alone to round {alone}, hears others again at round {node.status()['round']}"}

    def stop_and_resume(self) -> Told:
        before = {node.id: node.status() for node in self.nodes()}
        started = time.monotonic()
        self.compose("stop")
        took_s = time.monotonic() - started
        codes = run("docker", "inspect", "--format", "{{.State.ExitCode}}", *before).split()
        if took_s > MAX_STOP_S or "137" in codes:
            raise CheckFailed(f"all must stop in {MAX_STOP_S:.0f} s and nobody be killed, took {took_s:.1f} s, {codes}")
        self.up()
        resumed = {node.name: came_back(node, before[node.id]) for node in self.nodes()}
        return {"stopped_in_s": round(took_s, 1), **resumed}

    def take_one_more(self) -> Told:
        before = {node.id for node in self.nodes()}
        self.up(NUM_NODES + 1)
        newcomers = [node for node in self.nodes() if node.id not in before]
        if len(newcomers) != 1 or len(self.nodes()) != NUM_NODES + 1:
            raise CheckFailed(f"one more must leave the others alone, got {len(newcomers)} new containers")
        status = newcomers[0].wait_for("rounds", lambda status: status["round"] > 0)
        self.folders()
        return {newcomers[0].name: f"{status['peer_name']} in {newcomers[0].folder}"}

    def come_back_in_new_containers(self) -> Told:
        before = {node.name: node.status() for node in self.nodes()}
        self.compose("down", "--timeout", str(int(MAX_STOP_S)))
        self.up(NUM_NODES + 1)
        return {node.name: came_back(node, before[node.name]) for node in self.nodes()}

    def reward_rose(self) -> Told:
        """Last, over all that happened before."""
        rewards = [[row["rollout/reward_mean"] for row in node.rows()] for node in self.nodes()[:NUM_NODES]]
        first, last = (mean([mean(part) for part in parts]) for parts in zip(*map(ends, rewards), strict=True))
        if last - first < MIN_REWARD_GAIN:
            raise CheckFailed(f"the reward must rise by {MIN_REWARD_GAIN}, went from {first:.3f} to {last:.3f}")
        return {"first": round(first, 3), "last": round(last, 3), "rounds": [len(one) for one in rewards]}

    def steps(self) -> dict[str, Callable[[], Told]]:
        return {
            "the image is small and runs as nobody special": self.image,
            "bootstrap, nodes and page come up healthy, without privileges, each node with a folder of its own": self.comes_up,
            "nodes learn from each other": self.learn_from_each_other,
            "a node of another project joins by the address of the manifest": self.take_in_a_guest,
            "nodes tell every metric that Grafana's panels draw": self.show_what_grafana_draws,
            **({"one page shows all nodes": self.show_all_on_one_page} if "dashboard" in self.services else {}),
            "two nodes are killed: the others go on; they come back as who they were": self.survive_killed_nodes,
            "the bootstrap peer is killed: nodes go on exchanging records": self.survive_the_bootstrap,
            "one node's network is cut and mended: it goes on alone, then hears others again": self.survive_a_cut,
            "all is stopped, and started again: in time, and each resumes its round and identity": self.stop_and_resume,
            "one more node: the others are left alone": self.take_one_more,
            "all containers are removed, and made anew on the same volumes": self.come_back_in_new_containers,
            "the reward has risen": self.reward_rose,
        }


def _swarm_groups(status: Told) -> int:
    return status["last_round"].get("train/swarm_groups_total", 0)


def say(result: Told) -> None:
    told = result["told"]
    lines = [f"{name}: {value}" for name, value in told.items()] if result["ok"] else [told]
    print("\n    ".join([f"  {'ok' if result['ok'] else 'FAILED'}, {result['took_s']} s", *lines]), flush=True)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def ends(values: list[float]) -> tuple[list[float], list[float]]:
    return values[:WINDOW], values[-WINDOW:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the containers running at the end")
    parser.add_argument("--no-build", action="store_true", help="take the image that is there")
    parser.add_argument("--services", nargs="+", default=["bootstrap", "node", "dashboard"], help="what to bring up")
    options = parser.parse_args()
    check = Check(options.services, build=not options.no_build)
    results: list[Told] = []
    try:
        for name, step in check.steps().items():
            print(f"{name} …", flush=True)
            started = time.monotonic()
            result: Told = {"check": name, "ok": True}
            try:
                result |= {"told": step()}
            except CheckFailed as failure:
                result |= {"ok": False, "told": str(failure)}
            result["took_s"] = round(time.monotonic() - started, 1)
            results.append(result)
            say(result)
            if not result["ok"]:
                break
    finally:
        if not options.keep:
            check.dismiss_guests()
            check.compose("down", "--volumes", "--timeout", str(int(MAX_STOP_S)))
    is_ok = all(result["ok"] for result in results) and len(results) == len(check.steps())
    print(json.dumps({"ok": is_ok, "checks": results}, indent=2, ensure_ascii=False))
    sys.exit(not is_ok)


if __name__ == "__main__":
    main()
