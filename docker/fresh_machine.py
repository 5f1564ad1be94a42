"""Shows that a machine without a compiler gets from a clone to a node that trains: `python docker/fresh_machine.py`.

    slim image + git, make ─▶ git clone ─▶ make demo: environment ─▶ first trained step of each node

It needs Docker, and clones what is committed here. It prints how long each part took, as one JSON object, and removes the
container. Everything else of `make demo` is what a person would type.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from containers import CheckFailed, run

ROOT = Path(__file__).parents[1]
IMAGE, CONTAINER = "swarm-fresh-machine", "swarm-fresh-machine"
DOCKERFILE = """
FROM {base}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN ! command -v cc && ! command -v gcc && ! command -v clang
RUN useradd --create-home someone
USER someone
WORKDIR /home/someone
"""
NUM_NODES = 4
PAUSE_S = 1.0


def build_image(base: str) -> None:
    """Raises CheckFailed where the image has a compiler."""
    text = DOCKERFILE.format(base=base)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "Dockerfile").write_text(text, encoding="utf-8")
        run("docker", "build", "--tag", IMAGE, folder)


def inside(*command: str) -> str:
    """The output of a program in the container; empty where it failed."""
    return run("docker", "exec", CONTAINER, *command, may_fail=True, timeout_s=60)


def seconds_until(what: str, command: tuple[str, ...], expected: int, started: float, timeout_s: float) -> float:
    """Wait until `command` prints the number `expected`. Raises CheckFailed with the end of the log."""
    while not (told := inside(*command).strip()).isdecimal() or int(told) < expected:
        is_running = run("docker", "inspect", "--format", "{{.State.Running}}", CONTAINER).strip() == "true"
        if not is_running or time.monotonic() - started > timeout_s:
            log = run("sh", "-c", f"docker logs --tail 30 {CONTAINER} 2>&1")
            raise CheckFailed(f"no {what} within {timeout_s:.0f} s: {log[-3000:]}")
        time.sleep(PAUSE_S)
    return round(time.monotonic() - started, 1)


def try_it(torch_index: str, timeout_s: float) -> dict[str, float | str]:
    """What a person would type, in the container. Returns the seconds from the start to each part."""
    commit = run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run("git", "-C", str(ROOT), "bundle", "create", "--quiet", f"{folder}/swarm.bundle", "HEAD")
        environment = ("--env", f"PIP_EXTRA_INDEX_URL={torch_index}") if torch_index else ()
        typed = "git clone --quiet /bundle/swarm.bundle swarm && cd swarm && exec make demo"
        started = time.monotonic()
        options = ("--detach", "--name", CONTAINER, "--volume", f"{folder}:/bundle:ro", *environment)
        run("docker", "run", *options, IMAGE, "sh", "-c", typed)
        environment_there = ("sh", "-c", "ls swarm/.venv/.installed | wc -l")
        installed_s = seconds_until("environment", environment_there, 1, started, timeout_s)
        trained = r"""cat swarm/runs/testbed/node-*/metrics.jsonl | grep -c '"policy_version": [1-9]'"""
        first_s = seconds_until("trained step", ("sh", "-c", trained), 1, started, timeout_s)
        each = r"""grep -l '"policy_version": [1-9]' swarm/runs/testbed/node-*/metrics.jsonl | wc -l"""
        all_s = seconds_until("trained step of each node", ("sh", "-c", each), NUM_NODES, started, timeout_s)
        size = inside("du", "--summarize", "--block-size=1M", "swarm/.venv").split()[0]
    return {
        "commit": commit,
        "cores": str(os.cpu_count()),
        "environment_mb": size,
        "environment_s": installed_s,
        "first_trained_step_s": first_s,
        "each_node_trained_s": all_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="python:3.11-slim", help="an image with Python 3.11, 3.12 or 3.13 and apt")
    parser.add_argument("--torch-index", default="", metavar="URL", help="where pip also looks for torch")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for all of it")
    options = parser.parse_args()
    try:
        build_image(options.base)
        print(json.dumps({"base": options.base, **try_it(options.torch_index, options.timeout_s)}, indent=2))
    except CheckFailed as failure:
        sys.exit(str(failure))
    finally:
        run("docker", "rm", "--force", CONTAINER, may_fail=True)


if __name__ == "__main__":
    main()
