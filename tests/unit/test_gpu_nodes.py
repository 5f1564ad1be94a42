"""One node per GPU: which GPUs there are, which are meant, and what each node has for itself."""

import os
from pathlib import Path

import pytest

from swarm.config import load
from swarm.errors import ConfigError
from swarm.machine.hardware import Gpu, detect, nvidia_gpus
from swarm.testbeds.gpu_nodes import choose_gpus, plan_gpu_nodes
from tests import swarm_process

GPUS = [
    Gpu(0, "GPU-aa", "RTX 4090", 24.0),
    Gpu(1, "GPU-bb", "RTX 4060, laptop", 8.0),
    Gpu(2, "GPU-cc", "RTX 4060", 8.0),
]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the tool of NVIDIA's driver, which lists `GPUS`."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    lines = "".join(f"{gpu.number}, {gpu.uuid}, {gpu.name}, {gpu.memory_gib * 1024:.0f}\n" for gpu in GPUS)
    path.write_text(f"#!/bin/sh\ncat <<END\n{lines}END\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def test_the_driver_is_asked_for_all_gpus(tool: Path) -> None:
    assert nvidia_gpus() == GPUS
    assert (detect().gpu_name, detect().gpu_memory_gib) == ("RTX 4090", 24.0), "the first one"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert nvidia_gpus() == []


@pytest.mark.parametrize(
    ("visible", "numbers"), [(None, [0, 1, 2]), ("0,2", [0, 2]), ("GPU-bb", [1]), ("GPU-c", [2]), ("", []), ("-1", [])]
)
def test_only_visible_gpus_count(tool: Path, visible: str | None, numbers: list[int]) -> None:
    assert [gpu.number for gpu in nvidia_gpus(visible)] == numbers


@pytest.mark.parametrize(("text", "numbers"), [("all", [0, 1, 2]), ("0,2", [0, 2]), ("2, 0", [2, 0]), ("1", [1])])
def test_gpus_are_chosen_by_their_numbers(text: str, numbers: list[int]) -> None:
    assert [gpu.number for gpu in choose_gpus(text, GPUS)] == numbers


@pytest.mark.parametrize("text", ["3", "0,0", "", "every", "0,", "0-2"])
def test_other_choices_are_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpus must be all, or numbers .* 0 \(RTX 4090\), 1 \(RTX 4060, laptop\)"):
        choose_gpus(text, GPUS)


def test_a_machine_without_gpus_says_so(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    for arguments in (("run", "--gpus", "all"), ("run", "--gpus", "0", "--dry-run")):
        ended = swarm_process.swarm(*arguments, cwd=tmp_path, **environment)
        assert ended.returncode == ConfigError.exit_code
        assert ended.stderr.startswith("error: --gpus needs an NVIDIA GPU") and "leave --gpus out" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_each_node_has_a_gpu_a_folder_and_ports_of_its_own(tmp_path: Path) -> None:
    listen = '["/ip4/0.0.0.0/tcp/28000", "/ip4/0.0.0.0/tcp/0"]'
    overrides = {"node.dir": str(tmp_path / "mine"), "network.listen": listen,
                 "network.gossip_listen": '["/ip4/0.0.0.0/tcp/28001"]',
                 "network.announce": '["/dns4/a.example/tcp/28000"]'}  # fmt: skip
    config = load([], overrides)
    nodes = plan_gpu_nodes(GPUS, lambda gpu: config)
    assert [plan.environment for plan in nodes.plans] == [{"CUDA_VISIBLE_DEVICES": gpu.uuid} for gpu in GPUS]
    assert [plan.folder for plan in nodes.plans] == [tmp_path / "mine" / f"gpu-{n}" for n in range(3)]
    assert {plan.config.node.device for plan in nodes.plans} == {"cuda"}, "no node trains on the CPU unnoticed"
    networks = [plan.config.network for plan in nodes.plans]
    assert [network.listen[0].rpartition("/")[2] for network in networks] == ["28000", "28002", "28004"]
    assert {network.listen[1] for network in networks} == {"/ip4/0.0.0.0/tcp/0"}
    assert [network.gossip_listen[0].rpartition("/")[2] for network in networks] == ["28001", "28003", "28005"]
    assert [network.announce[0] for network in networks] == [f"/dns4/a.example/tcp/{n}" for n in (28000, 28002, 28004)]
    assert nodes.page is not None
    assert len({nodes.page[1], *(plan.config.observability.http_port for plan in nodes.plans)}) == 4
    assert nodes.plans[0].config.training == config.training
    nodes.plans[1].folder.parent.mkdir()
    nodes.plans[1].write()
    assert load([nodes.plans[1].config_path]) == nodes.plans[1].config


def test_the_page_takes_the_port_that_is_set_and_none_where_it_is_off(tmp_path: Path) -> None:
    at = {"node.dir": str(tmp_path)}
    nodes = plan_gpu_nodes(GPUS[:1], lambda gpu: load([], at | {"observability.http_port": "8500"}))
    assert nodes.page == ("127.0.0.1", 8500)
    assert nodes.plans[0].config.observability.http_port != 8500
    assert plan_gpu_nodes(GPUS[:1], lambda gpu: load([], at | {"observability.http": "false"})).page is None


def test_ports_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="must leave room for those of all nodes, got 65535"):
        plan_gpu_nodes(GPUS, lambda gpu: load([], {"network.listen": '["/ip4/0.0.0.0/tcp/65535"]'}))


def test_each_gpu_may_get_a_configuration_of_its_own() -> None:
    """As `swarm join` chooses them, by the memory of the GPU."""
    nodes = plan_gpu_nodes(GPUS, lambda gpu: load([], {"training.lr": str(gpu.memory_gib)}))
    assert [plan.config.training.lr for plan in nodes.plans] == [24.0, 8.0, 8.0]


def test_what_only_one_node_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"so node\.identity must not be set; start each node by itself"):
        plan_gpu_nodes(GPUS, lambda gpu: load([], {"node.identity": str(tmp_path / "key")}))


def test_a_dry_run_shows_every_node_and_what_is_its_own(tool: Path, tmp_path: Path) -> None:
    shown = swarm_process.swarm("run", "--gpus", "0,2", "--dry-run", "--training.lr", "0.5", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert [line for line in shown.stdout.splitlines() if line.startswith("#")] == [
        "# runs/node/gpu-0.toml, on GPU 0, RTX 4090",
        "# runs/node/gpu-2.toml, on GPU 2, RTX 4060",
    ]
    assert shown.stdout.count("  # --gpus") >= 6 and shown.stdout.count("  # --training.lr") == 2
    assert not (tmp_path / "runs").exists()


def test_join_chooses_a_policy_for_each_gpu(tool: Path, tmp_path: Path) -> None:
    made = swarm_process.swarm("create", "friends", "--any-base", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    shown = swarm_process.swarm("join", "friends.swarm.toml", "--gpus", "0,1", "--dry-run", cwd=tmp_path)
    bases = [line.split('"')[1] for line in shown.stdout.splitlines() if line.startswith("base = ")]
    assert bases == ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"]
    assert "# runs/friends/gpu-0.toml, on GPU 0" in shown.stdout
