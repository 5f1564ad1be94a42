"""Settings from variables of the environment: their place among files and options, their origin, and mistakes."""

import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swarm.config import Config, dump_toml, load, origin_in, read_layers, resolve, setting_variables, variable_of
from swarm.config.load import _keys
from swarm.config.section import RENAMED
from swarm.errors import ConfigError
from swarm.manifest.joining import compose
from swarm.testbeds.testbed import NodeProcess
from tests import swarm_process
from tests.unit.test_join import make


def resolved(environment: dict[str, str], *files: Path, **overrides: str) -> Config:
    return resolve(read_layers(files, overrides, setting_variables(environment)))


def comments(text: str) -> dict[str, str]:
    """{setting: origin} of a dumped configuration; settings of equal name keep the last."""
    lines = [line.partition("  # ") for line in text.splitlines()]
    return {line.split(" = ")[0].strip("[] "): origin for line, _, origin in lines if origin}


def test_a_variable_wins_over_files_and_loses_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[training]\nlr = 0.5\n[node]\nseed = 1\nduty_cycle = 0.5\n")
    environment = {"SWARM_TRAINING__LR": "1e-5", "SWARM_NODE__SEED": "2"}
    config = resolved(environment, file, **{"node.seed": "3"})
    assert (config.training.lr, config.node.seed, config.node.duty_cycle) == (1e-5, 3, 0.5)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("SWARM_POLICY__LORA__RANK", "4", 4),
        ("SWARM_POLICY__BASE", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("SWARM_MERGING__ENABLED", "true", True),
        ("SWARM_NETWORK__LISTEN", '["/ip4/127.0.0.1/tcp/7", "/ip4/127.0.0.1/tcp/8"]',
         ("/ip4/127.0.0.1/tcp/7", "/ip4/127.0.0.1/tcp/8")),
        ("SWARM_TRAINING__SIGNAL_WEIGHTS", '{"exact": 0.5}', {"exact": 0.5}),
        ("SWARM_TRAINING__SIGNAL_WEIGHTS", "{exact = 0.5}", {"exact": 0.5}),
        ("SWARM_MERGING__SEARCH_S", "3", 3.0),
    ],
)  # fmt: skip
def test_values_are_text_toml_or_json(variable: str, text: str, expected: object) -> None:
    config: Any = resolved({variable: text})
    key = variable.removeprefix("SWARM_").lower().replace("__", ".")
    for name in RENAMED.get(key, key).split("."):
        config = getattr(config, name)
    assert config == expected


@pytest.mark.parametrize("text", ['[{"name": "sums"}, {"name": "lcm"}]', '[{name = "sums"}, {name = "lcm"}]'])
def test_lists_of_tables_are_toml_or_json(text: str) -> None:
    config = resolved({"SWARM_TASKS__SOURCES": text})
    assert [source.name for source in config.tasks.sources] == ["sums", "lcm"]


def test_a_section_can_be_set_as_a_whole_and_in_parts() -> None:
    environment = {"SWARM_POLICY__LORA": "{rank = 4, alpha = 8.0}", "SWARM_POLICY__LORA__RANK": "2"}
    assert (resolved(environment).policy.lora.rank, resolved(environment).policy.lora.alpha) == (2, 8.0)


def test_every_setting_has_a_variable_of_its_own() -> None:
    keys = [key for key in _keys(Config) if "." in key]
    assert len({variable_of(key) for key in keys}) == len(keys) > 150
    assert set(setting_variables({variable_of(key): "1" for key in keys})) == set(keys)


def test_an_empty_variable_is_an_unset_one() -> None:
    assert resolved({"SWARM_POLICY__BASE": "", "SWARM_TRAINING__LR": " "}) == load()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SWARM_TRAINNG__LR", "SWARM_TRAINING__LR"),
        ("SWARM_TRAINING_LR", "SWARM_TRAINING__LR"),
        ("SWARM_POLICY_LORA_RANK", "SWARM_POLICY__LORA__RANK"),
        ("SWARM_training__lr", "SWARM_TRAINING__LR"),
        ("SWARM_NODE__DIRR", "SWARM_NODE__DIR"),
    ],
)
def test_what_looks_like_a_setting_and_is_none_is_an_error_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"got {name}; did you mean {meant}\\?"):
        setting_variables({name: "1"})


def test_variables_of_other_purposes_pass() -> None:
    others = ["SWARM_PASSPHRASE", "SWARM_PASSPHRASE_FILE", "SWARM_MANIFEST", "SWARM_FOUNDER", "SWARM_ARGUMENTS",
              "SWARM_PORT_9100_TCP", "SWARM_SERVICE_HOST", "PATH", "swarm_training__lr"]  # fmt: skip
    assert setting_variables(dict.fromkeys(others, "x")) == {}


def test_a_mistake_names_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"got 'fast' in SWARM_TRAINING__LR; set training\.lr to a number"):
        resolved({"SWARM_TRAINING__LR": "fast"})


def test_each_value_is_shown_with_its_origin_and_the_text_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "it's #1.toml"
    file.write_text('[training]\nlr = 0.5\n[[tasks.sources]]\nname = "sums"\n')
    layers = read_layers([file], {"node.seed": "3"}, {"network.listen": '["/ip4/127.0.0.1/tcp/7"]'})
    text = dump_toml(resolve(layers), origin_in(layers))
    told = comments(text)
    assert (told["lr"], told["seed"], told["listen"]) == (str(file), "--node.seed", "SWARM_NETWORK__LISTEN")
    assert (told["duty_cycle"], told["tasks.sources"]) == ("default", str(file))
    (tmp_path / "again.toml").write_text(text)
    assert load([tmp_path / "again.toml"]) == resolve(layers)


def test_a_path_with_a_line_break_stays_in_its_comment(tmp_path: Path) -> None:
    file = tmp_path / "a\n[node]\nseed = 9\n.toml"
    file.write_text("[training]\nlr = 0.5\n")
    text = dump_toml(load([file]), origin_in(read_layers([file])))
    assert tomllib.loads(text)["node"]["seed"] == 0


def test_a_variable_that_contradicts_the_manifest_is_an_error_that_names_it() -> None:
    manifest = make(limits={"max_group_size": 6})
    for variable, text, key in [
        ("SWARM_POLICY__BASE", "some/base", "policy.base"),
        ("SWARM_SWARM__NAME", "foes", "swarm.name"),
        ("SWARM_ROLLOUTS__GROUP_SIZE", "9", "rollouts.group_size"),
    ]:
        layers = read_layers(variables=setting_variables({variable: text}))
        with pytest.raises(ConfigError, match=f"{key} is decided by the manifest of friends.* in {variable}; remove"):
            compose(manifest, {}, layers[0].settings, {}, origin_in(layers))


def test_no_file_sets_a_variable(tmp_path: Path) -> None:
    """Neither one of settings nor a .env in the current folder, which may be somebody else's."""
    (tmp_path / ".env").write_text("SWARM_TRAINING__LR=0.25\n")
    (tmp_path / "node.toml").write_text('SWARM_TRAINING__LR = 0.25\n[node]\ndir = "$SWARM_X"\n')
    shown = swarm_process.swarm("config", "show", cwd=tmp_path)
    assert tomllib.loads(shown.stdout)["training"]["lr"] == load().training.lr
    assert swarm_process.swarm("config", "show", "node.toml", cwd=tmp_path).returncode == ConfigError.exit_code
    (tmp_path / "node.toml").write_text('[node]\ndir = "${HOME}"\n')
    shown = swarm_process.swarm("config", "show", "node.toml", cwd=tmp_path)
    assert tomllib.loads(shown.stdout)["node"]["dir"] == "${HOME}", "nothing is filled in"


def test_commands_read_variables_and_show_them(tmp_path: Path) -> None:
    shown = swarm_process.swarm("run", "--dry-run", cwd=tmp_path, SWARM_TRAINING__LR="1e-5", SWARM_NODE__SEED="4")
    assert shown.returncode == 0, shown.stderr
    assert (comments(shown.stdout)["lr"], comments(shown.stdout)["seed"]) == ("SWARM_TRAINING__LR", "SWARM_NODE__SEED")
    wrong = swarm_process.swarm("run", "--dry-run", cwd=tmp_path, SWARM_TRAINNG__LR="1e-5")
    assert wrong.returncode == ConfigError.exit_code and "did you mean SWARM_TRAINING__LR?" in wrong.stderr


def test_join_shows_hardware_manifest_variable_and_option(tmp_path: Path) -> None:
    made = swarm_process.swarm("create", "friends", cwd=tmp_path, SWARM_TASKS__SOURCES='[{name = "lcm"}]')
    assert made.returncode == 0, made.stderr
    join = ("join", "friends.swarm.toml", "--rollouts.group_size", "4", "--dry-run")
    shown = swarm_process.swarm(*join, cwd=tmp_path, SWARM_NODE__SEED="4")
    told = comments(shown.stdout)
    expected = {"dir": "hardware", "seed": "SWARM_NODE__SEED", "group_size": "--rollouts.group_size",
                "id": "manifest", "tasks.sources": "manifest", "threads": None}  # fmt: skip
    assert {name: told.get(name) for name in expected} == expected
    refused = swarm_process.swarm(*join, cwd=tmp_path, SWARM_SWARM__NAME="foes")
    assert refused.returncode == ConfigError.exit_code and "in SWARM_SWARM__NAME; remove your setting" in refused.stderr


def test_nodes_of_a_testbed_get_no_settings_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs are complete: what the command line has set must not be overridden again by a variable."""
    monkeypatch.setenv("SWARM_TRAINING__LR", "0.25")
    monkeypatch.setenv("SWARM_PASSPHRASE_FILE", "/secret")
    script = "import os; print(sorted(name for name in os.environ if name.startswith('SWARM_')), os.environ['EXTRA'])"
    process = NodeProcess(tmp_path, [sys.executable, "-c", script], environment={"EXTRA": "x"})
    process.wait(time.monotonic() + 30)
    assert (tmp_path / "terminal.log").read_text() == "['SWARM_PASSPHRASE_FILE'] x\n"
    assert os.environ["SWARM_TRAINING__LR"] == "0.25"
