"""Reward functions of the operator's own: a file beside the configuration, or a module. Each runs in a real process."""

import json
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import Config, TaskSourceSection, TasksSection, dump_toml, load, parse
from swarm.errors import ConfigError, ManifestError, TaskError
from swarm.manifest import manifest as manifests
from swarm.manifest.joining import compose, file_sha256, published_task
from swarm.manifest.manifest import Manifest
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import Policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.tasks import signalled_source
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import TaskFailure, assess, prompt_digest
from swarm.types import Lineage, Rollout, RolloutGroup, Task
from tests.e2e.test_tutorials import files
from tests.swarm_process import swarm

MakePolicy = Callable[..., Policy]
FOUNDER = Identity(b"f" * 32)
SCORE = """
    def score(task, answer, bonus=0.0):
        right = float(answer.strip() == task.answer)
        return min(1.0, 0.5 * right + 0.5 * (task.facts.get("level") == 3) + bonus)
"""


def mixture_of(folder: Path, code: str, function: str = "mine.py:score", **settings: Any) -> TaskMixture:
    """Tasks of a file whose reward is the function of another file beside it."""
    signal = settings.pop("signal", {})
    (folder / "mine.py").write_text(textwrap.dedent(code))
    lines = [json.dumps({"prompt": f"p{number}", "answer": number, "level": number % 4}) for number in range(12)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    others = [{"name": "correct"}] if settings.pop("with_correct", False) else []
    facts = {"kind": "jsonl", "name": "mine", "path": folder / "tasks.jsonl", "verifier": "numeric"}
    named = f"{folder}/{function}" if ".py:" in function else function
    section = TaskSourceSection.model_validate(facts | {"signals": [{"function": named, **signal}, *others]})
    return TaskMixture(TasksSection(sources=(section,), **settings))


def task_of(*arguments: Any, **settings: Any) -> Task:
    return mixture_of(*arguments, **settings).sources["mine"].task(16, 0)


def test_a_function_of_a_file_sees_prompt_answer_and_facts_and_gives_the_reward(tmp_path: Path) -> None:
    source = mixture_of(tmp_path, SCORE).sources["mine"]
    for index in range(6):
        task, right = source.task(16, index), source.answer(16, index)
        assert task.prompt == f"p{right}"
        assert assess(task, right).reward == 0.5 + 0.5 * (int(right) % 4 == 3)
        assert assess(task, "?").reward == 0.5 * (int(right) % 4 == 3)


def test_a_function_gets_its_parameters(tmp_path: Path) -> None:
    signal = {"parameters": {"bonus": 0.25}}
    assert assess(task_of(tmp_path, SCORE, signal=signal), "?").reward in (0.25, 0.75)


def test_functions_have_weights_beside_other_signals(tmp_path: Path) -> None:
    code = "def score(task, answer): return 'please' in answer"
    source = mixture_of(tmp_path, code, signal={"weight": 3}, with_correct=True).sources["mine"]
    score = assess(source.task(16, 0), f"{source.answer(16, 0)}")
    assert (score.reward, dict(score.signals)) == (0.25, {"score": 0.0, "correct": 1.0})


FAILS_ON_MOST = """
    def score(task, answer):
        if answer in (task.answer, "0", "no such answer"):
            return 1.0
        return task.facts["nope"]
"""


def test_a_reward_that_fails_with_every_answer_ends_the_node_and_says_where(
    tmp_path: Path, make_policy: MakePolicy, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse({"rollouts": {"groups_per_round": 3, "group_size": 4, "max_new_tokens": 3}})
    mixture = mixture_of(tmp_path, FAILS_ON_MOST, held_out_share=0)
    pool = ExperiencePool(":memory:", config.sharing, time.time)
    backend = local_backend(config, make_policy(), "me")
    learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=SwarmPorts())
    with pytest.raises(TaskError, match="got failures alone, of mine"):
        learner.run_round()
    told = [record.message for record in caplog.records if "could not be scored" in record.message]
    assert len(told) == 1 and "number 1 of source mine: mine: reward function score: mine.py:5: KeyError" in told[0]
    learner.round, learner._num_unscored_rounds = 1, 0  # as after a round that went well
    for _ in range(9):
        assert learner.run_round()["rollout/failed_tasks"] == 3
    with pytest.raises(TaskError, match="got failures alone"):
        learner.run_round()
    told = [one.message for one in caplog.records if one.name.endswith("worker") and one.levelname == "WARNING"]
    assert len(told) == 2 and "number 10 of source mine" in told[1]


@pytest.mark.parametrize(
    ("returned", "weights", "reward"),
    [
        ("{'right': 1, 'short': 0.5}", {}, 0.75),
        ("{'right': 1, 'short': 0.5}", {"right": 3, "short": 1}, 0.875),
        ("{'right': 1, 'short': 0.5}", {"right": 0, "short": 1}, 0.5),
        ("{'reward': 0.25, 'short': 1}", {}, 0.25),
        ("{'reward': 0.25, 'short': 1}", {"reward": 1, "short": 1}, 0.625),
    ],
)
def test_a_dict_gives_signals_by_name(tmp_path: Path, returned: str, weights: dict[str, float], reward: float) -> None:
    task = task_of(tmp_path, f"def score(task, answer): return {returned}", signal={"weights": weights})
    score = assess(task, "")
    assert score.reward == pytest.approx(reward)
    assert dict(score.signals) == pytest.approx(eval(returned)), "all of them, for the metrics"


@pytest.mark.parametrize(
    ("code", "signal", "message"),
    [
        ("def score(task, answer): return None", {}, r"must be a number.*got None; is a `return` missing"),
        ("def score(task, answer): return 'good'", {}, "got 'good'"),
        ("def score(task, answer): return 2.0", {}, r"\[0, 1\].*gave 2.0"),
        ("def score(task, answer): return float('nan')", {}, "gave nan"),
        ("def score(task, answer): return {}", {}, "1 to 8 names"),
        ("def score(task, answer): return {'a b': 1}", {}, "letters, digits and _, got 'a b'"),
        ("def score(task, answer): return {'a': 1.5}", {}, "gave 1.5"),
        ("def score(task, answer): return {str(n): 1 for n in range(9)}", {}, "1 to 8 names"),
        ("def score(task, answer):\n    x = 1\n    return wrong(x)", {}, "mine.py:3: NameError: name 'wrong'"),
        ("def score(task, answer): task.answer = '7'", {}, "FrozenInstanceError"),
        ("def score(task, answer): task.facts['level'] = 7", {}, "TypeError"),
        ("def score(task, answer): return task.facts['hint']", {}, "hint: facts of this task are level.*columns"),
        (
            "def score(task, answer): return 1 if answer == task.answer else 1 / 0",
            {},
            "ZeroDivisionError.*'no such answer'.*; fix it$",
        ),
        (
            "def score(task, answer): return {'a': 1} if answer == task.answer else {'b': 0}",
            {},
            "gave b, and a for the right",
        ),
        ("def score(task): return 1", {}, r"must take \(task, answer\), got \(task\)"),
        ("def score(task, answer): return 1", {"parameters": {"x": 1}}, r"must take \(task, answer, x\)"),
        ("def other(task, answer): return 1", {}, "there is no function score in"),
        ("score = 5", {}, "score is no function"),
        ("def score(task, answer) return 1", {}, r"SyntaxError: .*line 1"),
        ("import nothing_of_this_name", {}, ":1: ModuleNotFoundError.*imports installed packages only"),
        ("import sys\nsys.exit(3)", {}, "SystemExit: 3"),
        ("def score(task, answer): return {'a': 1}", {"weights": {"b": 1}}, "must be of a, .*got b"),
        ("def score(task, answer): return 1.0", {"weights": {"b": 1}}, "must be of score, .*got b"),
        ("def score(task, answer): return open('/etc/passwd') and 1", {}, "FileNotFoundError.*unsandboxed_rewards"),
    ],
)
def test_a_function_that_cannot_work_is_reported_before_the_first_round(
    tmp_path: Path, code: str, signal: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=f"(?s){message}"):
        mixture_of(tmp_path, code, signal=signal)


HOSTILE = """
    import os, subprocess, sys, threading

    kept = []

    def score(task, answer):
        print("noise", file=sys.stdout)
        os.write(1, b"more noise")
        if answer == "fork": os.fork()
        if answer == "program": subprocess.run(["/bin/true"])
        if answer == "exit": sys.exit(0)
        if answer == "die": os._exit(0)
        if answer == "raise": raise ValueError(answer)
        if answer == "interrupt": raise KeyboardInterrupt
        if answer == "hang":
            while True: pass
        if answer == "eat":
            while True: kept.append(bytearray(1 << 24))
        if answer == "deep": return score(task, "deep")
        if answer == "forge": os.write(int(os.environ.get("NO", "3")), b'{"value": 1.0}\\n')
        return {"nan": float("nan"), "two": 2.0, "text": "1", "none": None, "dict": {"a": 1.0}}.get(answer, 0.5)
"""


@pytest.mark.parametrize(
    "answer",
    [
        "fork",
        "program",
        "exit",
        "die",
        "raise",
        "interrupt",
        "hang",
        "eat",
        "deep",
        "nan",
        "two",
        "text",
        "none",
        "dict",
    ],
)
def test_an_answer_that_spoils_a_function_costs_its_group_and_the_next_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(signalled_source, "TIME_BUDGET_S", 1.0)
    task = task_of(tmp_path, HOSTILE, reward_memory_mib=256)
    with pytest.raises(TaskFailure, match="score"):
        assess(task, answer)
    assert assess(task, "fine").reward == 0.5, "and nothing that it printed is a reply"


def test_a_reply_that_a_function_writes_itself_is_no_reward(tmp_path: Path) -> None:
    """Whatever it writes to any open file, the answer after it gets a value of its own or a failure, never that text."""
    code = """
        import os

        def score(task, answer):
            for number in range(3, 64) if answer == "forge" else ():
                try: os.write(number, b'{"value": 1.0}\\n{"value": 1.0}\\n')
                except OSError: pass
            return 0.5
    """
    task = task_of(tmp_path, code)
    with pytest.raises(TaskFailure):
        assess(task, "forge")
    assert [assess(task, "fine").reward for _ in range(3)] == [0.5] * 3


def test_the_file_alone_is_handed_over_and_its_folder_is_not_to_be_seen(tmp_path: Path) -> None:
    code = """
        from pathlib import Path

        def score(task, answer): return float(Path(answer).exists())
    """
    task = task_of(tmp_path, code)
    assert assess(task, "/tmp").reward == 1.0
    assert assess(task, str(tmp_path)).reward == 0.0
    task = task_of(tmp_path, code, unsandboxed_rewards=("mine.py:score",))
    assert assess(task, str(tmp_path)).reward == 1.0, "where the operator lists it"


def test_a_file_of_a_manifest_leaves_its_sandbox_by_its_content_only(tmp_path: Path) -> None:
    code = f"import os\ndef score(task, answer): return float(os.path.exists({str(tmp_path)!r}))"
    assert assess(task_of(tmp_path, code, sandboxed=True, unsandboxed_rewards=("mine.py:score",)), "").reward == 0.0
    listed = (file_sha256(tmp_path / "mine.py"),)
    assert assess(task_of(tmp_path, code, sandboxed=True, unsandboxed_rewards=listed), "").reward == 1.0


def test_the_content_of_the_file_and_the_weights_are_part_of_the_digest(tmp_path: Path) -> None:
    def digest(code: str, **signal: Any) -> str:
        return mixture_of(tmp_path, code, signal=signal).sources["mine"].config_digest

    code = "def score(task, answer): return {'a': 1.0}"
    found = [digest(code), digest(code + "\n"), digest(code, weights={"a": 1}), digest(code, name="other")]
    assert len(set(found)) == 4
    assert digest(code) == found[0]


def test_a_file_that_is_missing_or_another_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"must be readable, got .*gone.py: No such file"):
        mixture_of(tmp_path, SCORE, "gone.py:score")
    with pytest.raises(TaskError, match=r"signal score must have SHA-256 0{64}, got [0-9a-f]{64} of .*mine.py"):
        mixture_of(tmp_path, SCORE, signal={"sha256": "0" * 64})
    with pytest.raises(TaskError, match="at most 256 KiB"):
        mixture_of(tmp_path, SCORE + "#" * (256 << 10))


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ({"function": "mine.py"}, "FILE.py:NAME or package.module:NAME, got 'mine.py'"),
        ({"function": "mine.py:a.b"}, "FILE.py:NAME"),
        ({"function": "a.b:c", "sha256": "0" * 64}, "sha256 of a signal belongs to a function of a file"),
        ({"function": "a.py:c", "package": "x==1"}, "package of a signal belongs to a function of a module"),
        ({"name": "correct", "weights": {"a": 1}}, "weights of a signal belong to its function"),
        ({"function": "a.py:c", "weights": {"a": 0}}, "one must be more than 0"),
        ({"function": "a.py:correct"}, None),
    ],
)
def test_settings_of_a_function_are_checked(tmp_path: Path, signal: dict[str, Any], message: str | None) -> None:
    facts = {"kind": "jsonl", "name": "mine", "path": str(tmp_path / "tasks.jsonl"), "signals": [signal]}
    if message:
        with pytest.raises(ConfigError, match=message):
            parse({"tasks": {"sources": [facts]}})
    else:
        mixture_of(tmp_path, SCORE)
        with pytest.raises(TaskError, match="must not have the name of a built-in signal, got correct"):
            TaskMixture(parse({"tasks": {"sources": [facts]}}).tasks)


def test_a_path_is_that_of_the_file_beside_the_configuration(tmp_path: Path) -> None:
    """Also where the configuration is written out again, as in a node's folder."""
    mixture_of(tmp_path, SCORE)
    text = """
        [[tasks.sources]]
        kind = "jsonl"
        name = "mine"
        path = "tasks.jsonl"
        signals = [{ function = "mine.py:score" }]
    """
    (tmp_path / "node.toml").write_text(textwrap.dedent(text))
    config = load([tmp_path / "node.toml"])
    (signal,) = config.tasks.sources[0].signals
    assert (signal.name, signal.function) == ("score", f"{tmp_path}/mine.py:score")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.toml").write_text(dump_toml(config))
    assert load([tmp_path / "inner" / "config.toml"]).tasks == config.tasks
    assert assess(TaskMixture(config.tasks).sources["mine"].task(16, 0), "?").reward in (0.0, 0.5)


def test_lines_with_other_fields_are_read_only_where_a_function_reads_them(tmp_path: Path) -> None:
    mixture_of(tmp_path, SCORE)
    plain = TaskSourceSection(kind="jsonl", name="mine", path=tmp_path / "tasks.jsonl")
    with pytest.raises(TaskError, match=r"got \['level'\]"):
        TaskMixture(TasksSection(sources=(plain,)))


def test_a_function_sees_what_a_generator_knows_of_its_task(tmp_path: Path) -> None:
    code = """
        def score(task, answer):
            low, high = task.facts["difficulty"]["num_terms"]
            return {"terms": low / 8, "right": float(answer == task.answer)}
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    section = TaskSourceSection.model_validate(
        {
            "name": "chain_sum",
            "parameters": {"min_terms": 2, "max_terms": 2},
            "signals": [{"function": f"{tmp_path}/mine.py:score"}],
        }
    )
    mixture = TaskMixture(TasksSection(sources=(section,)))
    source = mixture.sources["chain_sum"]
    assert dict(assess(source.task(16, 0), source.answer(16, 0)).signals) == {"terms": 0.25, "right": 1.0}
    mixture.close()


# --- modules of installed packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`nice-rewards` 1.2 with the module `nice.rewards`, installed as pip does."""
    site = tmp_path / "site"
    (site / "nice").mkdir(parents=True)
    (site / "nice" / "__init__.py").write_text("")
    (site / "nice" / "rewards.py").write_text("def polite(task, answer): return float('please' in answer)\n")
    info = site / "nice_rewards-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nice-rewards\nVersion: 1.2\n")
    (info / "RECORD").write_text("nice/__init__.py,,\nnice/rewards.py,,\nnice_rewards-1.2.dist-info/METADATA,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    invalidate_caches()
    return site


MODULE = "nice.rewards:polite"


def test_a_function_of_an_installed_module_needs_no_entry_point(package: Path, tmp_path: Path) -> None:
    task = task_of(tmp_path, "", MODULE)
    assert [assess(task, text).reward for text in ("5", "please")] == [0.0, 1.0]
    assert "nice" not in sys.modules, "the node does not import it"


@pytest.mark.parametrize(
    ("function", "signal", "message"),
    [
        (MODULE, {"package": "nice-rewards==1.3"}, r"needs nice-rewards==1.3 .*got nice-rewards==1.2; install it: pip install"),
        ("os:getenv", {}, "needs an installed package for os:getenv, got none"),
        ("no_such.module:f", {"package": "no-such==1"}, "needs no-such==1 for no_such.module:f, got none"),
        ("nice.gone:f", {}, "ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_a_module_that_is_not_installed_is_reported(
    package: Path, tmp_path: Path, function: str, signal: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        mixture_of(tmp_path, "", function, signal=signal)


# --- manifests


def manifest_of(folder: Path, **content: Any) -> Manifest:
    config = load([folder / "node.toml"])
    tasks = [published_task(source, config.tasks) for source in config.tasks.sources]
    return manifests.create(FOUNDER, "friends", 1, 1.8e9, **({"tasks": tasks, "bases": ["bundled"]} | content))


@pytest.fixture
def founded(tmp_path: Path) -> Path:
    """The founder's folder."""
    folder = tmp_path / "founder"
    folder.mkdir()
    mixture_of(folder, SCORE)
    (folder / "node.toml").write_text(
        '[[tasks.sources]]\nkind = "jsonl"\nname = "mine"\npath = "tasks.jsonl"\nverifier = "numeric"\n'
        'signals = [{ function = "mine.py:score", parameters = { bonus = 0.25 } }]\n'
    )
    return folder


def joined(manifest: Manifest, folder: Path, *files: Path) -> Config:
    return compose(manifest, {}, {}, {"mine": folder / "tasks.jsonl"}, reward_files=files)


def test_a_manifest_names_a_file_by_its_content_and_carries_no_code(founded: Path, tmp_path: Path) -> None:
    manifest = manifest_of(founded)
    text = manifests.dump(manifest, FOUNDER)
    assert "mine.py:score" in text and file_sha256(founded / "mine.py") in text
    assert "def score" not in text and str(tmp_path) not in text
    assert f"function mine.py:score sha256 {file_sha256(founded / 'mine.py')} bonus=0.25" in manifest.tasks[0].settings
    assert manifests.parse(text.encode()) == manifest


def test_who_joins_gives_the_file_and_it_must_be_the_founders(founded: Path, tmp_path: Path) -> None:
    manifest = manifest_of(founded)
    with pytest.raises(
        TaskError, match=r"needs mine.py with SHA-256 .* read what it does, and give --reward-file PATH/mine.py"
    ):
        joined(manifest, founded)
    copied, other = tmp_path / "copy.py", tmp_path / "other.py"
    copied.write_bytes((founded / "mine.py").read_bytes())
    other.write_text("def score(task, answer): return 1.0")
    with pytest.raises(
        ConfigError, match=r"--reward-file must name a file that friends needs, by SHA-256 .*got .*other.py"
    ):
        joined(manifest, founded, other)
    config = joined(manifest, founded, copied)
    ours, theirs = (
        TaskMixture(config.tasks).sources["mine"],
        TaskMixture(load([founded / "node.toml"]).tasks).sources["mine"],
    )
    assert ours.config_digest == theirs.config_digest
    assert assess(ours.task(16, 0), "?") == assess(theirs.task(16, 0), "?")
    copied.write_text("def score(task, answer): return 1.0")
    with pytest.raises(TaskError, match="signal score must have SHA-256"):
        TaskMixture(config.tasks)


def test_the_command_line_creates_and_joins_with_the_file(founded: Path, tmp_path: Path) -> None:
    (founded / "node.toml").write_text('[[tasks.sources]]\nname = "lcm"\nsignals = [{ function = "mine.py:score" }]\n')
    created = swarm("create", "friends", "node.toml", cwd=founded)
    assert created.returncode == 0, created.stderr
    join = ("join", str(founded / "friends.swarm.toml"), "--dry-run")
    without = swarm(*join, cwd=tmp_path)
    assert without.returncode == 6
    assert "task lcm needs mine.py with SHA-256" in without.stderr and "--reward-file PATH/mine.py" in without.stderr
    with_file = swarm(*join, "--reward-file", str(founded / "mine.py"), cwd=tmp_path)
    assert with_file.returncode == 0, with_file.stderr
    (signal,) = tomllib.loads(with_file.stdout)["tasks"]["sources"][0]["signals"]
    assert signal["function"] == f"{founded}/mine.py:score"
    assert signal["sha256"] == file_sha256(founded / "mine.py")


def test_a_reader_computes_the_reward_of_others_again(founded: Path) -> None:
    mixture = TaskMixture(joined(manifest_of(founded), founded, founded / "mine.py").tasks)
    task, right = mixture.sources["mine"].task(16, 0), mixture.sources["mine"].answer(16, 0)
    claimed = tuple(Rollout(text, (1,), (0.0,), True, 1.0) for text in (right, "?", "x" * 99_999))
    group = RolloutGroup(task.ref, prompt_digest(task.prompt), claimed, "author", Lineage("p" * 32, "t" * 32), 1)
    level = 0.5 * (int(right) % 4 == 3)
    assert RewardVerifier(mixture, sandboxed=None).rewards(group) == (min(1.0, 0.75 + level), 0.25 + level, 0.0)


def test_a_file_that_changes_is_a_change_of_the_manifest_that_needs_consent(founded: Path) -> None:
    first = manifest_of(founded)
    (founded / "mine.py").write_text("def score(task, answer, bonus=0): return 1.0")
    assert any("sha256" in line for line in manifests.changes(first, manifest_of(founded, edition=2)))


def test_a_manifest_uses_a_module_only_where_the_operator_allows_it(package: Path, founded: Path) -> None:
    source = {"kind": "reasoning_gym", "name": "lcm"}
    signal = {"name": "polite", "function": MODULE, "package": "nice-rewards==1.2"}
    manifest = manifests.create(FOUNDER, "friends", 1, 1.8e9, tasks=[source | {"signals": [signal]}], bases=["bundled"])
    with pytest.raises(
        ConfigError, match=r"only where you allow it, got nice.rewards:polite; set tasks.allowed_rewards"
    ):
        compose(manifest, {}, {}, {})
    config = compose(manifest, {}, {"tasks": {"allowed_rewards": [MODULE]}}, {})
    assert published_task(config.tasks.sources[0], config.tasks)["signals"][0]["package"] == "nice-rewards==1.2"


@pytest.mark.parametrize(
    "signal",
    [
        {"function": "mine.py:score"},
        {"function": "/etc/mine.py:score", "sha256": "0" * 64},
        {"function": "../mine.py:score", "sha256": "0" * 64},
        {"function": "a\x1b[2J.py:score", "sha256": "0" * 64},
        {"function": MODULE},
        {"function": "mine.py:score", "sha256": "0" * 64, "parameters": {"path": "/etc/passwd"}},
    ],
)
def test_a_manifest_with_a_function_that_is_not_named_by_content_is_refused(signal: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        manifests.create(FOUNDER, "friends", 1, 1.8e9, tasks=[{"name": "lcm", "signals": [signal]}])


def test_a_manifest_without_functions_is_signed_over_the_same_bytes_as_before() -> None:
    signals = [{"name": "correct", "weight": 2.0}, {"name": "length", "parameters": {"max_chars": 9}}]
    text = manifests.dump(
        manifests.create(FOUNDER, "x", 1, 1.8e9, tasks=[{"name": "lcm", "signals": signals}]), FOUNDER
    )
    assert not any(name in text for name in ("function", "weights", "package", "sha256"))


# --- the documentation


def test_the_first_reward_of_the_page_is_short_and_works(tmp_path: Path) -> None:
    blocks = files("rewards.md")
    assert len((blocks["my_reward.py"] + blocks["mine.toml"]).strip().splitlines()) <= 20
    for name in ("my_reward.py", "mine.toml"):
        (tmp_path / name).write_text(blocks[name])
    mixture = TaskMixture(load([tmp_path / "mine.toml"]).tasks)
    (source,) = mixture.sources.values()
    assert assess(source.task(16, 0), source.answer(16, 0)).reward == 1.0
    right = int(source.answer(16, 0))
    assert [assess(source.task(16, 0), text).reward for text in (str(right + 1), "no idea")] == [0.75, 0.0]
    mixture.close()


def test_the_package_of_the_page_installs_and_offers_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = files("rewards.md")
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    for name in ("pyproject.toml", "nice_rewards.py"):
        (project / name).write_text(blocks[name])
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(project)], check=True, timeout=120)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    invalidate_caches()
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    facts = {"kind": "jsonl", "name": "mine", "path": tmp_path / "tasks.jsonl", "signals": [{"name": "politeness"}]}
    mixture = TaskMixture(TasksSection(sources=(TaskSourceSection.model_validate(facts),)))
    task = mixture.sources["mine"].task(16, 0)
    assert [assess(task, text).reward for text in ("1", "1, please")] == [0.0, 1.0]
