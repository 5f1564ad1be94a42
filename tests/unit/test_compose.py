"""docker-compose.yml, Dockerfile and what the monitoring profile reads: what holds without Docker."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm.config import setting_variables

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
MONITORING = ROOT / "docker" / "monitoring"
ALWAYS, BY_PROFILE = {"bootstrap", "node", "dashboard"}, {"gpu-node": "gpu", "prometheus": "monitoring"}
OWN = ("bootstrap", "node", "gpu-node", "dashboard")
Services = dict[str, dict[str, Any]]


def services() -> Services:
    return yaml.safe_load(FILE.read_text())["services"]


def composes() -> dict[str, list[str]]:
    """Programs of this machine that read such a file."""
    found: dict[str, list[str]] = {}
    if docker := shutil.which("docker"):
        plugin = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
        found |= {} if plugin.returncode else {"plugin": [docker, "compose"]}
    if program := shutil.which("docker-compose"):
        found["program"] = [program]
    return found


def read_by(command: list[str], **variables: str) -> Services:
    """As with a shell that has only `variables`, and the example as it is for a .env."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    profiles = [part for profile in ("gpu", "monitoring") for part in ("--profile", profile)]
    whole = [*command, "--env-file", str(ROOT / ".env.example"), "-f", str(FILE), *profiles, "config"]
    told = subprocess.run(whole, capture_output=True, text=True, timeout=60, env=environment)
    assert told.returncode == 0, told.stderr
    return yaml.safe_load(told.stdout)["services"]


# Plain YAML everywhere; every compose of this machine besides, which also checks names and types of all settings.
READERS: dict[str, Callable[[], Services]] = {
    "yaml": services,
    **{name: lambda command=command: read_by(command) for name, command in composes().items()},
}


@pytest.mark.parametrize("reader", READERS)
def test_services_and_their_profiles(reader: str) -> None:
    read = READERS[reader]()
    assert set(read) == {*ALWAYS, *BY_PROFILE, "grafana"}
    assert all(not read[name].get("profiles") for name in ALWAYS)
    assert {name: read[name]["profiles"] for name in BY_PROFILE} == {name: [of] for name, of in BY_PROFILE.items()}
    assert read["grafana"]["profiles"] == ["monitoring"]


@pytest.mark.parametrize("reader", READERS)
def test_no_service_has_privileges(reader: str) -> None:
    for name, service in READERS[reader]().items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert service["pids_limit"] > 0, name
        forbidden = {"privileged", "cap_add", "network_mode", "pid", "ipc", "userns_mode", "devices"}
        assert not forbidden & service.keys(), name
        assert "docker.sock" not in json.dumps(service), name


def test_without_profile_there_are_four_nodes_and_no_file_of_settings_is_tracked() -> None:
    assert not services()["node"].get("profiles")
    assert services()["node"]["scale"] == 4
    assert "container_name" not in services()["node"], "replicas need names of their own"
    assert "ports" not in services()["node"], "replicas cannot share a port of the host"
    tracked = subprocess.run(["git", "ls-files", ".env*"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert tracked.stdout.split() == [".env.example"]
    assert "/.env" in (ROOT / ".gitignore").read_text().split()


def variables(text: str) -> set[str]:
    return set(re.findall(r"\$\{([A-Z_]+)", text))


def test_the_example_names_every_variable_and_sets_none() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    named = {found[1] for line in lines if (found := re.match(r"#([A-Z_]+)=", line))}
    assert named == variables(FILE.read_text())
    assert all(not line or line.startswith("#") for line in lines)


def test_variables_that_are_passed_on_are_settings_of_the_node_or_of_its_start() -> None:
    start = (ROOT / "docker" / "start.py").read_text()
    for name in ("bootstrap", "node", "gpu-node"):
        passed = services()[name]["environment"]
        assert set(setting_variables(dict.fromkeys(passed, "1"))) == {
            key.removeprefix("SWARM_").lower().replace("__", ".") for key in passed if "__" in key
        }
        assert all(f'"{key}"' in start for key in passed if key.startswith("SWARM_") and "__" not in key)


@pytest.mark.parametrize("program", composes())
def test_base_tasks_and_threads_come_from_variables_and_have_defaults(program: str) -> None:
    plain = read_by(composes()[program])
    assert plain["gpu-node"]["environment"]["SWARM_POLICY__BASE"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert plain["gpu-node"]["environment"]["SWARM_POLICY__QUANTIZATION"] == "4bit"
    assert not plain["node"]["environment"]["SWARM_POLICY__BASE"], "bundled"
    given = {"SWARM_POLICY__BASE": "a/b", "SWARM_NODE__THREADS": "3", "SWARM_MANIFEST": "http://x/y", "HF_TOKEN": "t"}
    for name in ("node", "gpu-node"):
        told = read_by(composes()[program], **given)[name]["environment"]
        assert {key: told[key] for key in given} == given
    assert plain["bootstrap"]["environment"].keys() >= {"SWARM_TASKS__SOURCES", "SWARM_MANIFEST"}


def test_bases_are_downloaded_to_a_volume_of_their_own() -> None:
    for name in ("node", "gpu-node"):
        assert services()[name]["environment"]["HF_HOME"] == "/hub"
        assert "hub:/hub" in services()[name]["volumes"]
    assert "/hub" in (ROOT / "Dockerfile").read_text(), "a new volume belongs to whom its folder in the image does"


def test_no_registry_has_a_name_of_an_image_that_is_built_here() -> None:
    for name in OWN:
        default = re.sub(r"\$\{\w+:-(.*)\}", r"\1", services()[name]["image"])
        assert default == f"localhost/swarm:{'gpu' if name == 'gpu-node' else 'cpu'}"
        assert services()[name]["pull_policy"] == "${SWARM_PULL_POLICY:-build}"


def test_a_passphrase_is_a_secret_and_no_variable() -> None:
    declared = yaml.safe_load(FILE.read_text())["secrets"]["passphrase"]["file"]
    default = declared.removeprefix("${SWARM_PASSPHRASE_FILE:-").rstrip("}")
    assert (ROOT / default).read_bytes() == b"", "none"
    assert {name for name, service in services().items() if service.get("secrets") == ["passphrase"]} == {
        "bootstrap", "node", "gpu-node",
    }  # fmt: skip
    assert "SWARM_PASSPHRASE:" not in FILE.read_text()


@pytest.mark.parametrize("reader", READERS)
def test_every_service_has_limits_a_health_check_and_stops_being_started(reader: str) -> None:
    for name, service in READERS[reader]().items():
        assert service["mem_limit"], name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "on-failure", name
        assert service["logging"]["options"]["max-size"], name


def test_own_services_stop_in_ten_seconds_and_tell_their_health() -> None:
    for name in OWN:
        service = services()[name]
        assert service["stop_grace_period"] == "10s"
        assert service["init"] is True
        assert service["healthcheck"]["test"][:3] == ["CMD", "start-swarm", "healthy"]
    for name in ("node", "gpu-node"):
        assert services()[name]["depends_on"]["bootstrap"] == {"condition": "service_healthy"}
    assert "dashboard" in services()["gpu-node"]["depends_on"], "`up gpu-node` brings the page along"


def test_only_the_bootstrap_peer_writes_the_manifest_and_sees_the_founders_key() -> None:
    volumes = {name: services()[name].get("volumes", []) for name in OWN}
    assert [name for name in OWN if "manifest:/swarm" in volumes[name]] == ["bootstrap"]
    assert [name for name in OWN if "bootstrap:/data" in volumes[name]] == ["bootstrap"]
    assert {name for name in OWN if "manifest:/swarm:ro" in volumes[name]} == {"node", "gpu-node"}
    declared = yaml.safe_load(FILE.read_text())["volumes"]
    used = {volume.split(":")[0] for service in services().values() for volume in service.get("volumes", [])}
    assert {volume for volume in used if not volume.startswith((".", "$"))} == set(declared)
    assert all((ROOT / volume).exists() for volume in used if volume.startswith("."))


def test_ports_are_bound_to_this_machine() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_image_runs_as_a_user_and_holds_no_tools() -> None:
    text = (ROOT / "Dockerfile").read_text()
    final = text.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\w+)", final, re.M) == ["swarm"]
    assert "apt-get" not in final
    assert "pip install" not in final
    assert "requirements-dev.lock" not in text
    assert "OMP_NUM_THREADS" not in text, "whoever runs an image decides"
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*", "only what is named goes into an image"
    sources = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M)
    assert {name for names in sources for name in names.split()} <= {line.removeprefix("!") for line in ignored}


def test_the_image_gets_all_that_the_wheel_is_built_of() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    parts = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", "README.md", "LICENSE"}
    copied = {
        part
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for part in line.split()
    }
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert parts <= copied & sent, "what is left out stops the build"


def test_prometheus_asks_the_port_that_nodes_serve() -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == {"bootstrap", "node", "gpu-node"}
    assert found["type"] == "A", "nodes answer to addresses, and to no name that their settings do not list"
    assert f"HTTP_PORT = 38000, 38001, {found['port']}\n" in (ROOT / "docker" / "start.py").read_text()
    assert services()["dashboard"]["command"][-2:] == [
        f"http://{name}:{found['port']}" for name in ("node", "gpu-node")
    ]


def test_grafana_finds_its_source_and_its_panels() -> None:
    (source,) = yaml.safe_load((MONITORING / "grafana/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((MONITORING / "grafana/dashboards/provider.yml").read_text())["providers"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/swarm.json"
    panels = json.loads((MONITORING / "grafana/dashboards/swarm.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}


def test_nobody_is_admin_of_grafana_by_the_password_that_it_comes_with() -> None:
    settings = services()["grafana"]["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"


def test_grafana_answers_to_its_own_name_only() -> None:
    settings = services()["grafana"]["environment"]
    assert (settings["GF_SERVER_DOMAIN"], settings["GF_SERVER_ENFORCE_DOMAIN"]) == ("localhost", "true")
