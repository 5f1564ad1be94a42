"""What cutting a policy into stages costs and gains: one process, and the same policy over two and four, one thread each.

    python benchmarks/pipeline_speed.py            two policies, 1, 2 and 4 stages, delays of 0, 20 and 50 ms; ten minutes
    python benchmarks/pipeline_speed.py --quick    the larger policy, 1 and 2 stages without delays, short answers; under a minute

The driver holds the last stage, the others are `swarm stage` over py-libp2p, all with one thread, and one process has one thread
too. Lengths are given, and every system gets the same prompts. Medians over turns.

    sampling   tokens/s of one call of the engine, prompts included
    training   a batch forward and backward, and the step
    overhead   a decode step over the stages beyond the same step with all stages in this process, per remote stage
    bytes      what a decode step brings to the driver, per row, over 2 x hidden size
    delay      a line that is late in each direction (in network namespaces, so as root): tokens/s times the round trip, over
               the answers that are sampled at once; 1 where nothing but the line takes time

The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from measuring.engine_models import small_llama

from swarm.adapters.load_pretrained import quiet_libraries
from swarm.config import Config, dump_toml, parse
from swarm.engine.engine import AnswerRequest
from swarm.engine.sampling import Sampling
from swarm.machine.memory import keep_heaps_small
from swarm.machine.node_folder import NodeFolder
from swarm.node.node import configured_transport
from swarm.node.pipeline_driver import PipelineDriver
from swarm.node.policy_backend import PolicyBackend, local_backend
from swarm.pipeline.commands import StageSettings
from swarm.pipeline.driver.pipeline_policy import PipelineModel, PipelinePolicy, greedy
from swarm.pipeline.driver.stage_group import StageGroup, StageGroupSettings
from swarm.pipeline.model_shape import model_modules, model_shape, stage_parts
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_host import base_model
from swarm.pipeline.stage.stage_model import load_stage
from swarm.pipeline.stage_link import InProcessLink
from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.logprobs import TokenLogprobs
from swarm.policy.policy import load_policy
from swarm.records import identity as identities
from swarm.sharing.index import EntryValidator
from tests.e2e.namespaces import Network, missing_capability
from tests.e2e.pipeline_processes import free_ports, settings_identity

PROMPT_TOKENS = 16
DELAYS_MS = (20.0, 50.0)


@dataclass(frozen=True)
class Case:
    """What one measuring process does."""

    base: str
    num_stages: int
    num_turns: int
    num_groups: int = 8
    group_size: int = 8
    num_tokens: int = 64
    stages: tuple[str, ...] = ()
    """Addresses of the stage machines."""
    folder: str = ""
    """Of the driver."""

    @property
    def settings(self) -> dict[str, Any]:
        rollouts = {"max_new_tokens": self.num_tokens, "max_batch_sequences": self.num_groups * self.group_size}
        policy: dict[str, Any] = {"base": self.base}
        if self.stages:
            policy["pipeline"] = {"driver": settings_identity(Path(self.folder)), "machines": list(self.stages)}
            policy["pipeline"]["self_assigned"] = [address.rpartition("/")[2] for address in self.stages]
        return {"node": {"dir": self.folder, "threads": 1}, "policy": policy, "rollouts": rollouts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        case = json.loads(options.measure)
        with quiet_libraries():
            print(json.dumps(measure(Case(**{**case, "stages": tuple(case["stages"])}))))
        return
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        large = Path(scratch) / "llama"
        with quiet_libraries():
            small_llama(large)
        if options.quick:
            figures |= over_stages("32 M", Case(str(large), 1, 2, num_groups=4, num_tokens=32), Path(scratch), (2,))
        else:
            for name, base, turns in (("0.9 M", str(BUNDLED_FOLDER), 5), ("32 M", str(large), 2)):
                figures |= over_stages(name, Case(base, 1, turns), Path(scratch), (2, 4))
            figures |= over_delays(Case(str(BUNDLED_FOLDER), 2, 3), Path(scratch))
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def over_stages(name: str, case: Case, scratch: Path, sizes: Sequence[int]) -> dict[str, float]:
    """Ratios of pipelines to one process, above 1 where the pipeline is faster."""
    suffix = "" if name == "32 M" else "_small"
    one, figures = run(case), dict[str, float]()
    print(f"{name}, one process: {one['tokens_per_s']:.0f} tokens/s, {one['step_s']:.3f} s a step", flush=True)
    for size in sizes:
        found = over_machines(Case(**{**asdict(case), "num_stages": size}), scratch)
        figures[f"ratio_sample_{size}{suffix}"] = found["tokens_per_s"] / one["tokens_per_s"]
        figures[f"ratio_train_{size}{suffix}"] = one["step_s"] / found["step_s"]
        if size == sizes[-1]:
            figures[f"overhead_ms_per_stage{suffix}"] = found["overhead_ms"]
            figures[f"bytes_over_hidden{suffix}"] = found["bytes_over_hidden"]
        print(
            f"{name}, {size} stages: {found['tokens_per_s']:.0f} tokens/s, {found['step_s']:.3f} s a step, "
            f"{found['overhead_ms']:.2f} ms per remote stage and decode step, {found['bytes_over_hidden']:.2f} of the hidden "
            "states in bytes",
            flush=True,
        )
    return figures


def over_delays(case: Case, scratch: Path) -> dict[str, float]:
    """Tokens/s over a late line, over what micro-batches / round trip gives; 1 where nothing but the line takes time."""
    if problem := missing_capability():
        print(f"left out: {problem}")
        return {}
    figures = dict[str, float]()
    with Network() as network:
        driver, stage = network.public_host(), network.public_host(is_degradable=True)
        for delay_ms in DELAYS_MS:
            stage.degrade(delay_ms=delay_ms)
            found = over_machines(case, scratch, [(stage.address, stage.enter)], driver.enter)
            rows, round_trip_s = case.num_groups * case.group_size, 2 * delay_ms / 1e3
            figures[f"delay_{delay_ms:.0f}_ms"] = found["tokens_per_s"] * round_trip_s / rows
            print(f"{delay_ms:.0f} ms: {found['tokens_per_s']:.0f} of {rows / round_trip_s:.0f} tokens/s", flush=True)
    return figures


def over_machines(
    case: Case,
    scratch: Path,
    hosts: Sequence[tuple[str, list[str]]] = (),
    driver: Sequence[str] = (),
) -> dict[str, float]:
    """Start the stages and measure from a driver. `hosts`: address and command prefix of each stage."""
    hosts = hosts or [("127.0.0.1", [])] * (case.num_stages - 1)
    size = layers_per_stage(case)
    with tempfile.TemporaryDirectory(dir=scratch) as folder, contextlib.ExitStack() as stack:
        folders = [Path(folder, f"stage-{number}") for number in range(len(hosts))]
        stages = tuple(
            f"/ip4/{address}/tcp/{port}/p2p/{settings_identity(one)}"
            for (address, _), port, one in zip(hosts, free_ports(len(hosts)), folders, strict=True)
        )
        case = Case(**{**asdict(case), "stages": stages, "folder": str(Path(folder, "driver"))})
        for number, ((_, prefix), one) in enumerate(zip(hosts, folders, strict=True)):
            listen = stages[number].partition("/p2p/")[0]
            settings = {**case.settings, "node": {"dir": str(one), "threads": 1}}
            settings["network"] = {"backend": "libp2p", "gossip": "off", "listen": [listen]}
            config = one.parent / f"{one.name}.toml"
            config.write_text(dump_toml(parse(settings)))
            layers = f"{size * number}:{size * (number + 1)}"
            command = [*prefix, sys.executable, "-P", "-m", "swarm.cli.main", "stage", str(config), "--layers", layers]
            process = subprocess.Popen(
                command, stdout=(one.parent / f"{one.name}.out").open("w"), stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        return run(case, driver)


def layers_per_stage(case: Case) -> int:
    """Layers of each stage but the driver's, whose head takes the time of some layers."""
    base = base_model(parse(case.settings).policy, "cpu")
    layers, _, head = model_modules(base.folder)
    of_head, of_layer = (sum(p.numel() for p in module.parameters()) for module in (head, layers[0][1]))
    return round((len(layers) + of_head / of_layer) / case.num_stages)


def run(case: Case, prefix: Sequence[str] = ()) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [*prefix, sys.executable, __file__, "--measure", json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case) -> dict[str, float]:
    """Run a case, and return its figures."""
    torch.set_num_threads(1)
    keep_heaps_small(computes=True)  # as every node and stage does
    config = parse(case.settings | {"network": {"backend": "libp2p", "gossip": "off"}})
    if not case.stages:
        return timed(case, local_backend(config, load_policy(config.policy, device="cpu"), peer_id=""))
    with driven(config) as (backend, received):
        found = timed(case, backend)
        assert isinstance(backend.policy, PipelinePolicy)
        return found | overheads(case, config, backend.policy, received)


@contextlib.contextmanager
def driven(config: Config) -> Iterator[tuple[PolicyBackend, Any]]:
    """Drive a pipeline from a loop on a thread; yields the backend and a function that returns the bytes received so far."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    folder = NodeFolder(config.node.dir, config.node.identity)
    identity = identities.load_or_create(folder.identity)
    transport = configured_transport(config, identity, folder, EntryValidator(config.swarm_id))
    assert transport is not None
    driver = PipelineDriver(config, identity, transport, clock=time.time)
    wait(transport.start())
    try:
        yield driver.bring_up(config, loop, folder.path / "hashes.json"), lambda: transport.traffic.bytes_received
    finally:
        driver.close()
        wait(transport.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def timed(case: Case, backend: PolicyBackend) -> dict[str, float]:
    """Tokens/s of sampling, and seconds of a training step: medians over turns, the first of which does not count."""
    rng, speeds, steps = random.Random(0), list[float](), list[float]()
    backend.policy.eos_token_ids = (-1,)  # lengths are given
    for turn in range(case.num_turns + 1):
        prompts = [[rng.randrange(3, 100) for _ in range(PROMPT_TOKENS)] for _ in range(case.num_groups)]
        requests = [AnswerRequest(prompt, case.group_size, case.num_tokens) for prompt in prompts]
        started_s = time.perf_counter()
        groups = backend.engine.generate(requests, Sampling(), seed=turn)
        speeds.append(case.num_groups * case.group_size * case.num_tokens / (time.perf_counter() - started_s))
        parts = [
            [(prompt, answer.token_ids) for answer in group[start : start + 8]]
            for prompt, group in zip(prompts, groups, strict=True)
            for start in range(0, case.group_size, 8)
        ]
        started_s = time.perf_counter()
        backend.optimizer.accumulate(parts, mean_loss, 1.0)
        backend.optimizer.apply(1e-5)
        steps.append(time.perf_counter() - started_s)
    return {"tokens_per_s": statistics.median(speeds[1:]), "step_s": statistics.median(steps[1:])}


def mean_loss(part: int, result: TokenLogprobs) -> torch.Tensor:
    return -(result.logprobs * result.mask).sum() / result.mask.sum()


def overheads(case: Case, config: Config, policy: PipelinePolicy, received: Any) -> dict[str, float]:
    """Milliseconds per remote stage of a decode step in one session, and its bytes; see the head of this file."""
    rows = case.num_groups * case.group_size // case.num_stages
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 100) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]

    async def decode(model: PipelineModel, num_tokens: int) -> tuple[float, int]:
        started_s, before = time.perf_counter(), received()
        await model.generate(prompts, greedy, max_new_tokens=num_tokens, num_sessions=1)
        return time.perf_counter() - started_s, received() - before

    async def per_step(model: PipelineModel) -> tuple[float, float]:
        """Median seconds and bytes of one step, without what the prompts take."""
        found = []
        for _ in range(case.num_turns):
            short, long = await decode(model, 2), await decode(model, 2 + case.num_tokens)
            found.append([(b - a) / case.num_tokens for a, b in zip(short, long, strict=True)])
        return statistics.median(s for s, _ in found), statistics.median(b for _, b in found)

    here_s, _ = asyncio.run(in_one_process(case, config, per_step))
    over_s, num_bytes = policy.wait_for(per_step(policy.pipeline_model))
    hidden_bytes = 2 * model_shape(Path(case.base)).hidden * rows
    return {
        "overhead_ms": 1e3 * (over_s - here_s) / (case.num_stages - 1),
        "bytes_over_hidden": num_bytes / hidden_bytes,
    }


async def in_one_process(case: Case, config: Config, measured: Any) -> tuple[float, float]:
    """The same with all stages in this process, one after the other."""
    base = base_model(config.policy, "cpu")
    size, num_layers = layers_per_stage(case), model_shape(base.folder).num_layers
    sizes = [size] * (case.num_stages - 1)
    links = [
        InProcessLink(
            Stage(load_stage(base.folder, part, lora=base.lora, device=base.device, dtype=base.dtype), StageSettings()),
            precision=None,
        )
        for part in stage_parts([*sizes, num_layers - sum(sizes)])
    ]
    stage_group = StageGroup(links, StageGroupSettings())
    await stage_group.start()
    try:
        return await measured(PipelineModel(stage_group, 0))
    finally:
        for link in links:
            link.close()


if __name__ == "__main__":
    main()
