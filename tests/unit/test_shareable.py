"""What leaves the machine with a report, a model card or a run that is watched elsewhere: no path, no address, no password."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from swarm.config import Config, dump_toml, load, parse
from swarm.config.shareable import HIDDEN, base_name, shareable, told_settings
from swarm.machine.node_folder import NodeFolder
from swarm.node.crash_report import CrashReports
from swarm.report.run_report import write_report

SECRET = "hunter2"
SETTINGS: dict[str, Any] = {
    "node": {"dir": f"/home/me/{SECRET}", "seed": 7},
    "swarm": {"name": "friends"},
    "network": {
        "listen": [f"/dns4/{SECRET}.lan/tcp/4001"],
        "relays": [SECRET],
        "initial_peers": [SECRET],
        "backend": "libp2p",
        "poll_interval_s": 2.0,
    },
    "tasks": {
        "sources": [
            {
                "name": "x",
                "path": f"/data/{SECRET}.jsonl",
                "parameters": {"token": SECRET, "deep": [{"a": SECRET}], "n": 3},
            }
        ]
    },
    "policy": {"base": f"/models/{SECRET}/llama", "pipeline": {"machines": [SECRET], "driver": SECRET}},
    "rollouts": {"max_new_tokens": 24, "stop": [SECRET]},
    "integrations": {
        "hub_endpoint": f"https://me:{SECRET}@hub",
        "wandb": "online",
        "otel_endpoint": f"http://{SECRET}",
    },
    "observability": {"http_host": SECRET, "http_names": [SECRET], "log_level": "info"},
    "unknown": {"section": 1},
    "training": {"api_password": 1234, "of_a_later_version": "x", "lr": 0.5, "advantage": SECRET},
}


def test_only_what_is_known_to_be_harmless_is_shared() -> None:
    shown = shareable(SETTINGS)
    assert SECRET not in json.dumps(shown)
    assert shown["node"] == {"dir": HIDDEN, "seed": 7} and shown["swarm"] == {"name": "friends"}
    assert shown["rollouts"] == {"max_new_tokens": 24, "stop": [HIDDEN]}
    assert shown["training"] == {"lr": 0.5, "advantage": HIDDEN}, "a choice that is none of the list is another text"
    assert shown["network"]["backend"] == "libp2p" and shown["network"]["poll_interval_s"] == 2.0
    assert shown["tasks"]["sources"][0]["parameters"] == {"token": HIDDEN, "deep": [{"a": HIDDEN}], "n": 3}
    assert shown["policy"]["base"] == "llama" and shown["integrations"]["wandb"] == "online" and "unknown" not in shown


def test_settings_of_an_earlier_version_are_shared_under_their_present_names() -> None:
    old = {"rollouts": {"prune_after": 9}, "policy": {"pipeline": {"crew": [SECRET]}}}
    shown = shareable(old)
    assert shown == {"rollouts": {"prune_interval_tokens": 9}, "policy": {"pipeline": {"machines": [HIDDEN]}}}
    assert shareable({"rollouts": {"prune_after": 9, "prune_interval_tokens": 5}}) == {
        "rollouts": {"prune_interval_tokens": 5}
    }


def test_a_setting_of_text_is_hidden_until_somebody_allows_it() -> None:
    """Every text of every setting is replaced; what comes through is on the list, and nothing else is."""
    allowed = {"name", "id", "label", "revision", "targets", "base"}

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(part) for key, part in value.items()}
        return [spoil(part) for part in value] or [SECRET] if isinstance(value, list) else SECRET

    def names(value: Any, name: str = "") -> set[str]:
        if isinstance(value, dict):
            return {found for key, part in value.items() for found in names(part, key)}
        return (
            {found for part in value for found in names(part, name)}
            if isinstance(value, list)
            else {name} & spoilt(value, name)
        )

    def spoilt(value: Any, name: str) -> set[str]:
        return {name} if value == SECRET else set()

    settings = spoil(Config().model_dump(mode="json"))
    assert len(names(settings)) > 50 and names(shareable(settings)) <= allowed


@pytest.mark.parametrize(
    ("base", "name"),
    [("bundled", "bundled"), ("org/model", "org/model"), ("/home/me/model", "model"), ("./a/b", "b"), ("C:\\me\\m", "m"),
     ("https://me:secret@host/base", "base"), ("~/m", "m")],
)  # fmt: skip
def test_a_base_is_called_by_its_name(base: str, name: str) -> None:
    assert base_name(base) == name


def test_reports_and_crash_reports_tell_no_secret(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    folder.metrics.write_text(
        json.dumps({"kind": "evaluation", "round": 1, "phase": "end", "accuracy_mean": 0.5}) + "\n"
    )
    folder.config.write_text(tomli_w.dumps(SETTINGS))
    write_report([tmp_path], folder.path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert SECRET not in page and "max_new_tokens = 24" in page
    reports = CrashReports(folder)
    logging.getLogger("x").error("cannot reach https://me:%s@host/", SECRET)
    told = reports.write("it broke").read_text()
    reports.close()
    assert SECRET not in told and "max_new_tokens = 24" in told and "https://…@host/" in told


def test_settings_with_their_origin_tell_no_secret_and_no_folder() -> None:
    places = {
        "node.dir": f"/home/{SECRET}",
        "observability.http_names": f'["{SECRET}"]',
        "rollouts.stop": f'["{SECRET}"]',
    }
    config = load((), places | {"training.lr": "0.5", "tasks.sources": f'[{{"name": "lcm", "system": "{SECRET}"}}]'})
    told = told_settings(config, lambda place: f"/home/{SECRET}/mine.toml")
    assert SECRET not in json.dumps(told)
    by_key = {one["key"]: one for one in told}
    assert by_key["training.lr"]["value"] == "0.5" and by_key["training.lr"]["origin"] == "mine.toml"
    assert all(not by_key[key]["is_default"] for key in (*places, "tasks.sources[0]"))
    assert "name lcm" in by_key["tasks.sources[0]"]["value"]


def test_what_is_shared_of_a_whole_configuration_is_toml() -> None:
    import tomllib

    config = parse({})
    assert (
        tomllib.loads(tomli_w.dumps(shareable(tomllib.loads(dump_toml(config)))))["training"]["lr"]
        == config.training.lr
    )
