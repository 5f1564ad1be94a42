"""Registries, and packages that extend swarm: found by their entry points, imported only where the operator says so."""

import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from importlib import invalidate_caches
from pathlib import Path
from typing import Any, ClassVar

import pytest

from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import TaskSourceSection, TasksSection, parse
from swarm.errors import ConfigError, ManifestError, SwarmError, TaskError
from swarm.extensions.points import ADVANTAGES, TASK_SOURCES
from swarm.extensions.registry import BuiltIn, Isolation, Registry
from swarm.manifest.joining import compose
from swarm.manifest.manifest import create
from swarm.manifest.manifest import parse as parse_manifest
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.sandboxed_verifier import SandboxedVerifier, needs_process
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import TaskFailure, prompt_digest, score
from swarm.types import Lineage, Rollout, RolloutGroup, TaskRef
from tests.unit.test_manifest import signed_by

FOUNDER = Identity(b"f" * 32)
SECRET = "-----BEGIN PRIVATE KEY-----"


# --- registries


class Declares:
    isolation: ClassVar[Isolation] = Isolation.NONE_NEEDED


class Inherits(Declares):
    """Declares nothing itself: what its parent may do in the node it may not."""


class Misspells:
    isolation = "none needed"


def registry_of(*names: str) -> Registry:
    lines = [BuiltIn(name, f"{__name__}:{name}", "for a test") for name in names]
    return Registry("a task source", lines, error=TaskError, needs_isolation=True)


def test_an_implementation_is_imported_when_it_is_loaded_and_not_before() -> None:
    registry = Registry("a thing", [BuiltIn("late", "no.such.module:Thing", "not there")])
    assert registry.names == ("late",) and registry.is_built_in("late") and registry.summary == "late: not there."
    with pytest.raises(ModuleNotFoundError):
        registry.load("late")


@pytest.mark.parametrize("name", ["Inherits", "Misspells"])
def test_what_declares_no_isolation_is_refused(name: str) -> None:
    assert registry_of("Declares").load("Declares") is Declares
    with pytest.raises(
        TaskError, match=rf"must declare what isolation it needs, got no attribute `isolation` of {name}"
    ):
        registry_of(name).load(name)


def test_two_built_in_implementations_need_two_names() -> None:
    with pytest.raises(ValueError, match="must have a name of its own"):
        registry_of("Declares", "Declares")


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"must be one of grpo, .*got 'dr_grop'; set training.advantage to 'dr_grpo'"):
        parse({"training": {"advantage": "dr_grop"}})
    with pytest.raises(TaskError, match=r"must be one of reasoning_gym, .*got 'jsonll'; set 'jsonl'"):
        TASK_SOURCES.load("jsonll")


@pytest.mark.parametrize("name", ["", "../evil", "os:system", "a" * 65, "evil\n", "\ud800", "ev il"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    for settings in ({"training": {"advantage": name}}, {"tasks": {"sources": [{"name": "gcd", "kind": name}]}}):
        with pytest.raises(ConfigError):
            parse(settings)


def test_parameters_of_what_takes_none_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"an advantage grpo takes no parameters, .*remove training.advantage_parameters"
    ):
        ADVANTAGES.make("grpo", {"scale": 1}, "training.advantage_parameters")


def test_the_parameters_of_an_extension_are_validated_beside_it(example_extension: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"parameters of rank must be valid, .*scale.*set training.advantage_parameters"
    ):
        ADVANTAGES.make("rank", {"scale": -1}, "training.advantage_parameters")
    section = TaskSourceSection(kind="near_sums", name="sums", parameters={"largest": 0})
    with pytest.raises(TaskError, match=r"parameters of near_sums must be valid, .*largest.*of 'sums'"):
        TaskMixture(TasksSection(sources=(section,)))


# --- packages that mean harm

EVIL = """
    import os, socket, time
    from pathlib import Path
    from swarm.extensions.registry import Isolation
    from swarm.types import Task, TaskRef

    Path({marker!r}).touch() if os.access(os.path.dirname({marker!r}), os.W_OK) else None

    def attempt(work):
        try:
            return str(work())
        except OSError as error:
            return type(error).__name__

    def fork():
        child = os.fork()
        if child == 0:
            os._exit(0)
        return os.waitpid(child, 0)

    class Evil:
        isolation = Isolation.NONE_NEEDED   # it lies: that must not matter
        config_digest = "1"
        num_held_out = 5

        def __init__(self, config, tasks):
            self.name = config.source_name
            if config.parameters.get("hangs"):
                while True: pass

        def task(self, seed, index):
            told = [
                attempt(lambda: Path({secret!r}).read_text()),
                attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 5)),
                attempt(lambda: os.listdir({folder!r})),
                attempt(lambda: os.kill({pid}, 0)),
                attempt(fork),
                os.environ.get("HF_TOKEN", "no variable"),
            ]
            return Task(TaskRef("chain_sum", "0" * 16, 1, 2), " | ".join(told), self.verify)

        def verify(self, text):
            if text == "hang":
                while True: pass
            if text == "eat":
                bytearray(64 << 30)
            if text == "die":
                os._exit(3)
            return {{"two": 2.0, "nan": float("nan"), "text": "x"}}.get(text, 1.0)

        def answer(self, seed, index):
            raise KeyError("no answer")

    class Forgetful(Evil):
        pass
"""
ENTRIES = """
    [swarm.task_sources]
    evil = evil_tasks:Evil
    forgetful = evil_tasks:Forgetful
    missing = evil_tasks:NotThere
    jsonl = evil_tasks:Evil
    [swarm.advantages]
    evil_advantage = evil_tasks:Evil
"""


class Evil:
    """An installed package whose task source does what it should not, on a machine with a secret and an open port."""

    def __init__(self, folder: Path, port: int, name: str = "evil-tasks", version: str = "1.2") -> None:
        self.folder, self.marker, self.secret = folder, folder / "was-imported", folder / "identity.key"
        self.secret.write_text(SECRET)
        site = folder / f"site-{name}-{version}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(ENTRIES))
        facts = {"marker": str(self.marker), "secret": str(self.secret), "folder": str(folder)}
        code = textwrap.dedent(EVIL).format(**facts, port=port, pid=os.getpid())
        (site / "evil_tasks.py").write_text(code)
        self.site = str(site)

    @property
    def was_imported_outside(self) -> bool:
        """By a process that can write here: the node, or one without a fence."""
        return self.marker.exists() or "evil_tasks" in sys.modules


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Evil(tmp_path, server.getsockname()[1])
        monkeypatch.setattr(sys, "path", [*sys.path, made.site])
        invalidate_caches()
        yield made


SECTION = {"kind": "evil", "name": "evil"}


def tasks_of(section: dict[str, Any] = SECTION, **settings: Any) -> TasksSection:
    return TasksSection.model_validate({"sources": [section], **settings})


def test_a_source_of_a_package_reads_no_file_opens_no_socket_and_starts_nothing(evil: Evil) -> None:
    mixture = TaskMixture(tasks_of())
    task = mixture.sources["evil"].task(16, 0)
    identity, connection, listing, kill, fork, variable = task.prompt.split(" | ")
    assert SECRET not in task.prompt and "secret" not in variable
    assert identity in ("FileNotFoundError", "PermissionError")
    assert connection in ("PermissionError", "ConnectionRefusedError", "OSError")
    assert "identity.key" not in listing, "a folder of the same name at most, with what it wrote there itself"
    assert kill in ("ProcessLookupError", "PermissionError")
    assert fork in ("PermissionError", "BlockingIOError")
    assert task.ref == TaskRef("evil", mixture.sources["evil"].config_digest, 16, 0), "whatever it claims"
    assert not evil.was_imported_outside
    mixture.close()


def test_a_source_of_a_package_is_let_out_only_where_the_operator_names_its_kind(evil: Evil) -> None:
    mixture = TaskMixture(tasks_of(unsandboxed_kinds=("evil",)))
    prompt = mixture.sources["evil"].task(16, 0).prompt
    assert prompt.startswith(SECRET) and "socket" in prompt and prompt.endswith("no variable")
    assert evil.marker.exists() and "evil_tasks" not in sys.modules, "even then not in the node"
    mixture.close()


@pytest.mark.parametrize("text", ["hang", "eat", "die", "two", "nan", "text"])
def test_a_verifier_of_a_package_that_fails_costs_its_task_and_works_again(evil: Evil, text: str) -> None:
    mixture = TaskMixture(tasks_of())
    assert mixture._sandboxed is not None
    mixture._sandboxed._time_budget_s = 0.5
    task = mixture.sources["evil"].task(16, 0)
    started = time.monotonic()
    with pytest.raises(TaskFailure):
        score(task, text)
    assert score(task, "fine") == 1.0
    with pytest.raises(TaskFailure, match="no answer"):
        mixture.sources["evil"].answer(16, 0)
    assert time.monotonic() - started < 20
    mixture.close()


def test_answers_of_strangers_meet_a_source_of_a_package_in_a_process_and_their_author_pays(evil: Evil) -> None:
    mixture, fence = TaskMixture(tasks_of()), SandboxedVerifier(tasks_of(), time_budget_s=1.0)
    judge = RewardVerifier(mixture, sandboxed=fence)
    ref = TaskRef("evil", mixture.sources["evil"].config_digest, training_seed("alice", 0), 0)

    def group(text: str) -> RolloutGroup:
        rollouts = (Rollout(text, (1,), (-1.0,), True, 0.0),)
        digest = prompt_digest(mixture.rebuild(ref).prompt)
        return RolloutGroup(ref, digest, rollouts, "alice", Lineage("a", "b"), 0)

    assert fence.holds("evil") and judge.rewards(group("fine")) == (1.0,)
    with pytest.raises(InvalidRecord) as caught:
        judge.rewards(group("hang"))
    assert caught.value.reason is Rejection.TOO_SLOW
    assert judge.rewards(group("fine")) == (1.0,)
    mixture.close()
    fence.close()


def test_a_source_that_hangs_when_it_is_built_takes_no_other_with_it(evil: Evil) -> None:
    hanging, good = {**SECTION, "label": "hangs", "parameters": {"hangs": 1}}, dict(SECTION)
    fence = SandboxedVerifier(TasksSection.model_validate({"sources": [hanging, good]}), time_budget_s=1.0)
    with pytest.raises(TaskError, match="within 1 s"):
        fence.open("hangs")
    assert fence.open("evil").num_held_out == 5
    fence.close()


@pytest.mark.parametrize(
    ("kind", "told"), [("forgetful", "must declare what isolation"), ("missing", "AttributeError")]
)
def test_a_source_that_cannot_be_loaded_is_left_out_with_the_reason(evil: Evil, kind: str, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        TaskMixture(tasks_of({"kind": kind, "name": "x"}))
    assert not evil.was_imported_outside


def test_nothing_but_what_is_listed_as_safe_runs_in_the_node(evil: Evil, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "p", "answer": 1}\n' * 2)
    kinds = {
        "jsonl": TaskSourceSection(kind="jsonl", name="mine", path=path),  # a package offers this name, too
        "code": TaskSourceSection(kind="code", name="list_functions"),
        "reasoning_gym": TaskSourceSection(name="chain_sum"),
        "game": TaskSourceSection(kind="game", name="guess_number"),
        "dataset": TaskSourceSection(kind="dataset", name="rows", path=path),
        "evil": TaskSourceSection.model_validate(SECTION),
    }
    assert {kind: needs_process(section) for kind, section in kinds.items()} == {
        "jsonl": False, "code": False, "reasoning_gym": True, "game": False, "dataset": False, "evil": True,
    }  # fmt: skip
    assert TASK_SOURCES.origin("jsonl") == "", "a built-in name comes first"
    assert set(kinds) == {*TASK_SOURCES.names, "evil"}, "a new source is judged here by its reviewer"


def manifest_bytes(**task: Any) -> bytes:
    plain = create(FOUNDER, "friends", PROTOCOL_VERSION, 1.8e9, tasks=[{"name": "chain_sum"}], bases=["bundled"])
    content = plain.model_dump(exclude_none=True)
    content |= {"tasks": [{"name": "chain_sum", **task}]}
    return signed_by(FOUNDER, {key: value for key, value in content.items() if value not in ((), {}, "")})


def test_a_manifest_cannot_choose_which_package_is_imported(evil: Evil) -> None:
    manifest = parse_manifest(manifest_bytes(kind="evil"))
    with pytest.raises(ConfigError, match=r"only where you allow it, got evil; set tasks.allowed_kinds = \['evil'\]"):
        compose(manifest, {}, {}, {})
    with pytest.raises(ManifestError, match="must be a number or boolean"):
        parse_manifest(manifest_bytes(kind="evil", parameters={"module": "os"}))
    with pytest.raises(ManifestError, match="must be one of reasoning_gym"):
        parse_manifest(manifest_bytes(kind="not_installed"))
    assert not evil.was_imported_outside
    many = [{"name": "chain_sum", "label": f"sums-{number}", "kind": "evil"} for number in range(17)]
    with pytest.raises(ManifestError, match="take a process each, got 17"):
        create(FOUNDER, "friends", PROTOCOL_VERSION, 1.8e9, tasks=many, bases=["bundled"])
    config = compose(manifest, {}, {"tasks": {"allowed_kinds": ["evil"]}}, {})
    mixture = TaskMixture(config.tasks)
    assert SECRET not in mixture.sources["chain_sum"].task(16, 0).prompt
    assert not evil.was_imported_outside, "the operator agreed to a sandboxed process, and to nothing else"
    mixture.close()


def test_a_record_of_a_peer_cannot_choose_which_package_is_imported(evil: Evil) -> None:
    section = TaskSourceSection(kind="code", name="list_functions")
    mixture = TaskMixture(TasksSection(sources=(section,)))
    judge = RewardVerifier(mixture, sandboxed=SandboxedVerifier(TasksSection(sources=(section,))))
    for source in ("evil", "evil_tasks:Evil", "swarm.task_sources", "os"):
        with pytest.raises(InvalidRecord) as caught:
            judge.check_known(TaskRef(source, "0" * 16, training_seed("alice", 0), 0))
        assert caught.value.reason is Rejection.UNKNOWN_TASK
    assert not evil.was_imported_outside


def test_reading_a_configuration_imports_no_package(evil: Evil) -> None:
    config = parse({"training": {"advantage": "evil_advantage"}, "tasks": {"sources": [SECTION]}})
    assert (config.training.advantage, config.tasks.sources[0].kind) == ("evil_advantage", "evil")
    assert not evil.was_imported_outside


def test_two_packages_with_one_name_are_refused(evil: Evil, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Evil(evil.folder, 1, name="twin")
    monkeypatch.setattr(sys, "path", [*sys.path, twin.site])
    invalidate_caches()
    told = r"must come from one package, got 'evil' of evil-tasks==1.2 and twin==1.2"
    for load in (lambda: ADVANTAGES.load("evil_advantage"), lambda: TaskMixture(tasks_of())):
        with pytest.raises(SwarmError, match=told.replace("'evil'", "'evil(_advantage)?'")):
            load()
    assert not evil.was_imported_outside


# --- a package that means well


def digest_of(section: dict[str, Any]) -> str:
    mixture = TaskMixture(tasks_of(section))
    (source,) = mixture.sources.values()
    mixture.close()
    return source.config_digest


def test_settings_are_part_of_the_digest(example_extension: Path) -> None:
    facts: dict[str, Any] = {"kind": "near_sums", "name": "sums"}
    sections = [facts, facts | {"parameters": {"largest": 99}}, facts | {"name": "others"}]
    assert len({digest_of(section) for section in sections}) == 3
    assert TASK_SOURCES.origin("near_sums") == "example-extension==1.0"


def test_package_and_version_are_part_of_the_digest(evil: Evil, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = digest_of(SECTION)
    newer = Evil(evil.folder, 1, version="1.3")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != evil.site] + [newer.site])
    invalidate_caches()
    assert digest_of(SECTION) != digest


def test_a_node_trains_with_the_task_source_reward_and_advantage_of_an_installed_package(
    example_extension: Path, make_policy: Callable[..., Any]
) -> None:
    from swarm.node.learner import Learner, SwarmPorts
    from swarm.node.policy_backend import local_backend
    from swarm.pool.experience_pool import ExperiencePool

    signals = [{"name": "correct", "weight": 3}, {"name": "few_words", "parameters": {"max_words": 1}}]
    sums = {"kind": "near_sums", "name": "sums", "parameters": {"largest": 9}, "signals": signals}
    config = parse(
        {
            "tasks": {"sources": [sums]},
            "rollouts": {"groups_per_round": 2, "group_size": 8, "max_new_tokens": 8, "temperature": 1.5},
            "sharing": {"swarm_groups": 0, "own_groups": 2, "likelihood_floor_quantile": 0.0},
            "training": {"advantage": "rank", "advantage_parameters": {"scale": 2.0}, "mask_truncated": False},
        }
    )
    policy, mixture = make_policy(), TaskMixture(config.tasks)
    pool = ExperiencePool(":memory:", config.sharing, time.time)
    learner = Learner(
        config, local_backend(config, policy, "me"), mixture=mixture, pool=pool, peer_id="me", ports=SwarmPorts()
    )
    row = learner.run_round()
    assert row["rollout/failed_tasks"] == 0
    assert {"reward/correct", "reward/few_words"} <= row.keys()
    assert policy.version == 1 and row["train/grad_norm"] > 0 and not row["train/skip_reason"]
    mixture.close()
