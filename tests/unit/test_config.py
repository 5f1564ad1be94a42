"""Configuration: merging, overrides, and mistakes that are told with rule, value and fix."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swarm.config import (
    DEMO_TASKS,
    REASONING_TASKS,
    Config,
    dump_toml,
    kept_origin,
    kept_toml,
    load,
    origin_in,
    parse,
    read_layers,
    resolve,
)  # fmt: skip
from swarm.config.load import _ALIASES, _keys
from swarm.config.reference import reference_markdown, settings
from swarm.config.section import RENAMED, _report_old_name
from swarm.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "node_configs").glob("*.toml"))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path) -> None:
    base = write(tmp_path, "base.toml", "[training]\nlr = 0.1\nclip_low = 0.1\n[rollouts]\ngroup_size = 4\n")
    top = write(tmp_path, "top.toml", "[training]\nlr = 0.2\n")
    config = load([base, top], {"rollouts.group_size": "6"})
    assert (config.training.lr, config.training.clip_low, config.rollouts.group_size) == (0.2, 0.1, 6)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("training.lr", "1e-5", 1e-5),
        ("sharing.publish", "false", False),
        ("policy.base", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("network.initial_peers", '["/ip4/1.2.3.4/tcp/5/p2p/x"]', ("/ip4/1.2.3.4/tcp/5/p2p/x",)),
        ("policy.lora.rank", "8", 8),
    ],
)
def test_override_is_a_toml_value_or_plain_text(key: str, text: str, expected: object) -> None:
    value: object = load([], {key: text})
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected


def test_without_a_network_nothing_is_shared_and_a_setting_that_says_otherwise_is_refused() -> None:
    alone = load([], {"network.backend": "off"}).sharing
    assert (alone.swarm_groups, alone.publish) == (0, False)
    with pytest.raises(ConfigError, match=r"sharing\.swarm_groups must be 0 with network\.backend off, got 3"):
        load([], {"network.backend": "off", "sharing.swarm_groups": "3"})


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("training.lrr", "1", "did you mean training.lr?"),
        ("trainin", "1", "did you mean training?"),
        ("training.learning_rate", "1", "did you mean training.lr?"),
        ("policy.model_name", '"x"', "did you mean policy.base?"),
        ("training.lr", "-1", "greater than 0, got -1; set training.lr to more than 0"),
        ("rollouts.group_size", "1.5", "set rollouts.group_size to a whole number"),
        ("node.max_rounds", '"x"', "set node.max_rounds to a whole number"),
        ("group_size", "4", "did you mean rollouts.group_size?"),
        ("rollouts.group_size", "1", "greater than or equal to 2, got 1; set rollouts.group_size"),
        ("rollouts.top_p", "0", "greater than 0, got 0; set rollouts.top_p"),
        ("rollouts.top_k", "-1", "got -1; set rollouts.top_k"),
        ("rollouts.min_p", "1.0", "less than 1, got 1.0; set rollouts.min_p"),
        ("rollouts.stop", '["</answer>", ""]', "rollouts.stop"),
        ("rollouts.cache_mib", "0", "got 0; set rollouts.cache_mib"),
        (
            "training.advantage",
            '"ppo"',
            "must be one of grpo, dr_grpo, median, gdpo, gigpo or one that an installed package offers",
        ),
        ("training.advantage", '"grop"', "got 'grop'; set training.advantage to 'grpo'"),
        ("tasks.sources", '[{name="gcd", kind="reasoninggym"}]', "set tasks.sources.0.kind to 'reasoning_gym'"),
        ("swarm.name", '"a b"', "swarm.name"),
        ("merging.final", "true", "merging.final needs merging.enabled = true, got false"),
        ("merging.final_at", "1e9", "merging.final_at needs merging.enabled = true, got false"),
    ],
)
def test_mistake_is_told_with_value_and_fix(key: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([], {key: text})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[training", "lr = = 1", "\xff"])
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load([path])


def test_the_file_with_the_mistake_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, "first.toml", "[training]\nlr = -1\n")
    second = write(tmp_path, "second.toml", "[training]\nlearning_rate = 1\n")
    with pytest.raises(ConfigError) as caught:
        load([first, second])
    assert f"got -1 in {first}; set training.lr to more than 0" in str(caught.value)
    assert f"unknown setting training.learning_rate in {second}; did you mean training.lr?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"got -2; set training\.lr"):
        load([first], {"training.lr": "-2"})
    third = write(tmp_path, "third.toml", '[[tasks.sources]]\nname = "a"\nweight = -1\n')
    with pytest.raises(ConfigError, match=f"got -1 in {third}; set tasks.sources.0.weight"):
        load([third])


def test_other_names_lead_to_settings_that_there_are() -> None:
    assert set(_ALIASES.values()) <= set(_keys(Config, inside_lists=True))
    others = {alias: target for alias, target in _ALIASES.items() if target.rpartition(".")[2] != alias}
    sections = {alias: target.partition(".")[0] for alias, target in others.items()}
    assert not {f"{section}.{alias}" for alias, section in sections.items()} & set(_keys(Config, inside_lists=True))


OLD_VALUES = {
    "merging.search_s": 7.5,
    "network.max_connections_inbound": 3,
    "policy.pipeline.by_hand": ["a"],
    "policy.pipeline.crew": ["a", "b"],
    "rollouts.prune_after": 9,
    "rollouts.second_round": "hard",
    "tasks.fenced": True,
    "tasks.run_code_unfenced": True,
    "tasks.unfenced_rewards": ["politeness"],
}
NEEDED = {"policy.pipeline.driver": '"d"', "policy.pipeline.machines": '["a"]'}
"""Beside a setting of a pipeline."""


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Each old name is reported once per process; here once per test."""
    _report_old_name.cache_clear()
    return caplog


def value_at(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_setting_is_read_under_its_old_name(
    old: str, tmp_path: Path, notices: pytest.LogCaptureFixture
) -> None:
    section, _, name = old.rpartition(".")
    text = json.dumps(OLD_VALUES[old])
    needed = {key: value for key, value in NEEDED.items() if section in key and key != RENAMED[old]}
    file = write(tmp_path, "old.toml", f"[{section}]\n{name} = {text}\n")
    for _ in range(2):
        assert value_at(load([file], needed), RENAMED[old]) == OLD_VALUES[old]
    assert value_at(load([], {old: text} | needed), RENAMED[old]) == OLD_VALUES[old]
    told = [record.getMessage() for record in notices.records]
    assert [f"{old} in {place} is the old name of {RENAMED[old]}" in line for place, line in zip(
        (str(file), "the command line"), told, strict=True
    )] == [True, True]  # fmt: skip


def test_layers_of_settings_meet_under_the_present_name(tmp_path: Path) -> None:
    old = write(tmp_path, "old.toml", "[rollouts]\nprune_after = 9\n")
    new = write(tmp_path, "new.toml", "[rollouts]\nprune_interval_tokens = 5\n")
    assert load([old, new]).rollouts.prune_interval_tokens == 5
    assert load([new, old]).rollouts.prune_interval_tokens == 9
    assert load([new], {"rollouts.prune_after": "7"}).rollouts.prune_interval_tokens == 7
    with pytest.raises(ConfigError, match=f"got 0 in {old}; set rollouts.prune_interval_tokens"):
        load([write(tmp_path, "old.toml", "[rollouts]\nprune_after = 0\n")])


def test_a_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    both = write(tmp_path, "both.toml", "[rollouts]\nprune_after = 9\nprune_interval_tokens = 9\n")
    told = r"got rollouts\.prune_after in .*both\.toml beside its present name rollouts\.prune_interval_tokens; remove"
    with pytest.raises(ConfigError, match=told):
        load([both])
    with pytest.raises(ConfigError, match=r"got tasks\.fenced in the command line beside"):
        load([], {"tasks.fenced": "true", "tasks.sandboxed": "true"})


def test_an_old_name_is_no_setting_any_more_and_stays_in_its_section() -> None:
    for old, new in RENAMED.items():
        known = set(_keys(Config, inside_lists=True))
        assert old not in known and new in known
        assert old.rpartition(".")[0] == new.rpartition(".")[0]


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(["nowhere.toml"])


def test_a_crew_exports_nothing_at_the_end() -> None:
    crew = {"pipeline": {"driver": "d", "machines": ["a"]}}
    parse({"policy": crew, "merging": {"enabled": True, "final": True}})
    with pytest.raises(ConfigError, match="final_export"):
        parse({"policy": crew, "merging": {"enabled": True, "final": True, "final_export": True}})


def test_doubled_source_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="set a different label"):
        parse({"tasks": {"sources": [{"name": "gcd"}, {"name": "gcd"}]}})


def test_path_of_a_task_file_is_relative_to_its_config(tmp_path: Path) -> None:
    config = write(tmp_path, "c.toml", '[[tasks.sources]]\nkind = "jsonl"\nname = "mine"\npath = "tasks.jsonl"\n')
    assert load([config]).tasks.sources[0].path == tmp_path / "tasks.jsonl"


def test_what_a_node_keeps_of_its_configuration_is_read_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = {"node.dir": "mine", "node.identity": "keys/one.key", "policy.base": "base", "warm_start.adapter": "out"}
    kept = parse(tomllib.loads(kept_toml(load([], chosen))))
    places = (kept.node.dir, kept.node.identity, Path(kept.policy.base), kept.warm_start.adapter)
    assert places == tuple(tmp_path / name for name in ("mine", "keys/one.key", "base", "out"))
    of_hub = load([], {"policy.base": "base", "policy.revision": "a" * 40})
    assert parse(tomllib.loads(kept_toml(of_hub))).policy.base == "base"


def test_dumped_configuration_is_read_back_equal() -> None:
    config = load([], {"node.max_rounds": "3", "network.listen": '["/ip4/127.0.0.1/tcp/1"]', "policy.base": 'a"b\\c'})
    assert parse(tomllib.loads(dump_toml(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_ready_config_is_valid_and_says_why(path: Path) -> None:
    config = load([path])
    assert config != Config()
    assert path.read_text().count("#") >= 3


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem not in ("public", "silo")], ids=lambda path: path.name)
@pytest.mark.parametrize("mode", ["public", "silo"])
def test_hardware_and_mode_compose(path: Path, mode: str) -> None:
    config = load([path, ROOT / "node_configs" / f"{mode}.toml"])
    assert (config.network.backend == "off") == (mode == "silo")
    assert config.max_shared_groups >= config.sharing.swarm_groups + 1


def test_there_are_ready_configs() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"testbed", "public", "silo", "laptop-cpu", "gpu-8gb", "gpu-24gb"} <= names


def test_every_setting_says_what_it_means() -> None:
    unexplained = [key for key, _, _, meaning in settings() if not meaning]
    assert unexplained == []


def test_reference_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference_markdown(), (
        "run: swarm config schema --markdown > docs/configuration.md"
    )


def test_swarm_id_depends_on_the_name_alone() -> None:
    one, other = load([], {"swarm.name": '"a"'}), load([], {"swarm.name": '"b"', "training.lr": "1"})
    assert one.swarm_id == load([], {"swarm.name": '"a"', "node.seed": "5"}).swarm_id != other.swarm_id
    assert len(bytes.fromhex(one.swarm_id)) == 16


def test_a_language_model_has_defaults_of_its_own_where_nothing_is_set() -> None:
    bundled, hub = Config.model_validate({}), Config.model_validate({"policy": {"base": "Qwen/Qwen2.5-0.5B-Instruct"}})
    assert (bundled.rollouts.max_new_tokens, bundled.policy.max_prompt_tokens, bundled.training.lr) == (24, 512, 1e-3)
    assert (hub.rollouts.max_new_tokens, hub.policy.max_prompt_tokens, hub.training.lr) == (1024, 1024, 2e-5)
    own = {"policy": {"base": "some/model", "max_prompt_tokens": 300}, "rollouts": {"max_new_tokens": 48}}
    config = Config.model_validate({**own, "training": {"lr": 1e-4}})
    assert (config.rollouts.max_new_tokens, config.policy.max_prompt_tokens, config.training.lr) == (48, 300, 1e-4)
    assert config.training.warmup_steps == 10
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_the_reasoning_policy_has_tasks_and_longer_answers_where_nothing_is_set() -> None:
    policy = {"base": "bundled-reasoning"}
    plain = Config.model_validate({"policy": policy})
    assert (plain.tasks.sources, plain.rollouts.max_new_tokens, plain.training.lr) == (REASONING_TASKS, 256, 1e-3)
    own = {"rollouts": {"max_new_tokens": 64}, "tasks": {"sources": [DEMO_TASKS[0].model_dump()]}}
    config = Config.model_validate({"policy": policy, **own})
    assert (config.tasks.sources, config.rollouts.max_new_tokens) == (DEMO_TASKS[:1], 64)


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({}, 4096),
        ({"rollouts": {"max_new_tokens": 4000}}, 4096),
        ({"rollouts": {"max_new_tokens": 16_384}}, 16_384),
        ({"rollouts": {"max_new_tokens": 16_384}, "sharing": {"max_answer_tokens": 2000}}, 2000),
        ({"policy": {"base": "some/model"}}, 4096),
    ],
)
def test_a_node_accepts_answers_as_long_as_its_own_unless_set(settings: dict[str, object], accepted: int) -> None:
    assert parse(settings).sharing.max_answer_tokens == accepted


@pytest.mark.parametrize(
    ("settings", "tasks_per_source"),
    [
        ({}, 32),
        ({"policy": {"base": "some/model"}}, 10),
        ({"policy": {"base": "some/model"}, "tasks": {"sources": [{"name": "gcd"}]}}, 32),
        (
            {
                "policy": {"base": "some/model"},
                "tasks": {"sources": [{"name": f"s{i}"} for i in range(40)]},
            },
            4,
        ),
        ({"policy": {"base": "some/model"}, "evaluation": {"tasks_per_source": 0}}, 0),
    ],
)
def test_an_evaluation_of_a_language_model_takes_about_a_round(
    settings: dict[str, object], tasks_per_source: int
) -> None:
    assert parse(settings).evaluation.tasks_per_source == tasks_per_source


def test_defaults_of_language_models_do_not_count_as_set() -> None:
    config = parse({"policy": {"base": "some/model"}, "rollouts": {"max_new_tokens": 512}, "training": {"lr": 2e-5}})
    assert config.policy.model_fields_set == {"base"}
    assert (config.rollouts.model_fields_set, config.training.model_fields_set) == ({"max_new_tokens"}, {"lr"})


def test_a_policy_that_examples_have_made_sure_takes_smaller_steps() -> None:
    def lr(**sections: Any) -> float:
        return parse(sections).training.lr

    started = {"warm_start": {"steps": 100}}
    assert lr(**started) == lr(**started, policy={"base": "bundled-reasoning"}) == 3e-4
    assert lr() == lr(warm_start={"steps": 0}) == 1e-3
    assert lr(**started, training={"lr": 5e-3}) == 5e-3
    assert lr(**started, policy={"base": "some/model"}) == 2e-5
    assert parse({**started, "policy": {"base": "bundled-reasoning"}}).rollouts.max_new_tokens == 256
    assert "lr" not in parse(started).training.model_fields_set


def test_a_node_that_goes_on_from_its_own_file_still_knows_where_its_settings_came_from(tmp_path: Path) -> None:
    mine, kept = tmp_path / "mine.toml", tmp_path / "node" / "config.toml"
    mine.write_text('[training]\nlr = 0.5\n[[tasks.sources]]\nname = "lcm"\n')
    kept.parent.mkdir()
    layers = read_layers([mine], {"node.max_rounds": "3", "rollouts.stop": '["a  # b"]'})
    kept.write_text(kept_toml(resolve(layers), origin_in(layers)))
    again = read_layers([kept], {"rollouts.group_size": "6"})
    origin = kept_origin(origin_in(again), kept)
    told = {key: origin(key.split(".")) for key in ("training.lr", "node.max_rounds", "rollouts.stop", "tasks.sources")}
    assert told == {
        "training.lr": str(mine), "node.max_rounds": "--node.max_rounds", "rollouts.stop": "--rollouts.stop",
        "tasks.sources": str(mine),
    }  # fmt: skip
    assert (origin(["rollouts", "group_size"]), origin(["training", "max_grad_norm"])) == ("--rollouts.group_size", "")
    assert resolve(again).training.lr == 0.5
    elsewhere = kept_origin(origin_in(again), tmp_path / "other" / "config.toml")  # the same file is another's there
    assert elsewhere(["training", "lr"]) == str(kept)
