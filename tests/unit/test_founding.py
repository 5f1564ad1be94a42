"""What a founder gives by name, by content or by lineage, and what those who join are told to have and to give."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import PolicySection, parse
from swarm.errors import ConfigError, ManifestError, PolicyError, PreflightError, SwarmError
from swarm.manifest.files import read_manifest
from swarm.manifest.joining import check_base_at_hand
from swarm.policy.policy import load_policy
from tests.unit.silo_factory import swarm

LISTEN = ("--network.listen", '["/ip4/127.0.0.1/tcp/0"]')
TASKS = ("--tasks.sources", '[{name = "lcm"}]')
REWARD = "def score(task, answer):\n    return 1.0\n"
FILES = """
[[tasks.sources]]
kind = "jsonl"
name = "own"
path = "data/own.jsonl"
[[tasks.sources.signals]]
name = "mine"
function = "my_reward.py:score"
"""


@pytest.fixture
def base(tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a base in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as the commands do in a process of their own
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("tiny").symlink_to(tiny_models["qwen2"])
    return "tiny"


@pytest.fixture
def files(base: str) -> str:
    """A configuration that names a data file and a reward file, and the base."""
    Path("data").mkdir()
    Path("data/own.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"say {n}", "answer": str(n)}) for n in range(20))
    )
    Path("my_reward.py").write_text(REWARD)
    Path("mine.toml").write_text(f'[policy]\nbase = "./{base}"\n{FILES}')
    return "mine.toml"


def checked(*arguments: str) -> tuple[str, SwarmError | None]:
    """The table of `swarm join --check` with what follows it, and the error that it ends with."""
    result = CliRunner().invoke(app, ["join", *arguments, "--check", *LISTEN], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SwarmError | SystemExit), result.exception
    return result.stdout, result.exception if isinstance(result.exception, SwarmError) else None


@pytest.mark.parametrize("form", ["./tiny", "tiny", "absolute"])
def test_a_base_that_is_a_folder_is_in_the_manifest_by_its_lineage(base: str, form: str) -> None:
    given = str(Path(base).absolute()) if form == "absolute" else form
    said = swarm("create", "friends", "--policy.base", given, *TASKS)
    manifest = read_manifest("friends.swarm.toml")
    lineage = load_policy(PolicySection(base=f"./{base}"), device="cpu").lineage.policy
    assert (manifest.bases, manifest.lineages) == ((), (lineage,))
    assert "each of them gives --policy.base PATH" in said


def test_folders_and_names_of_hubs_are_told_apart_in_new_manifests_and_later_editions(base: str) -> None:
    swarm("create", "friends", "--base", "bundled", "--base", f"./{base}", "--base", "a/b@v1", *TASKS)
    first = read_manifest("friends.swarm.toml")
    assert first.bases == ("bundled", "a/b@v1") and len(first.lineages) == 1
    swarm("create", "pinned", "--policy.base", base, "--policy.revision", "v1", *TASKS)
    assert read_manifest("pinned.swarm.toml").bases == (f"{base}@v1",), "a folder has no revision"
    swarm("create", "--update", "pinned.swarm.toml", "--policy.base", f"./{base}")
    second = read_manifest("pinned.swarm.toml")
    assert (second.bases, second.lineages) == ((), first.lineages)
    swarm("create", "--update", "pinned.swarm.toml", "--base", "bundled")
    third = read_manifest("pinned.swarm.toml")
    assert (third.bases, third.lineages) == (("bundled",), first.lineages), "what is not given stays"


def test_a_founder_is_never_sent_to_the_founder(base: str) -> None:
    for arguments, error in [
        (["create", "a", "--base", "a b", *TASKS], ManifestError),
        (["create", "a", "--lineage", "xyz", *TASKS], ManifestError),
        (["create", "a", "--policy.base", "./nowhere", *TASKS], PolicyError),
        (["silo", "init", "a", "--dir", "lab", "--base", "a b", *TASKS], ManifestError),
        (["silo", "init", "a", "--dir", "other", "--base", "./nowhere", *TASKS], PolicyError),
    ]:
        with pytest.raises(error) as caught:
            swarm(*arguments)
        assert "founder" not in str(caught.value)


def test_the_last_lines_name_all_files_and_the_whole_command(files: str) -> None:
    said = swarm("create", "friends", files, "--policy.lora.rank", "8").splitlines()
    assert said[-2].endswith("tell them your id: friends.swarm.toml, own.jsonl, my_reward.py, tiny/")
    assert said[-1] == (
        "  they run: swarm join friends.swarm.toml --task-file own=own.jsonl --reward-file my_reward.py "
        "--policy.base ./tiny --policy.lora.rank 8"
    )
    assert swarm("create", "plain", *TASKS).splitlines()[-1] == "  they run: swarm join plain.swarm.toml"


def test_a_check_lists_all_that_is_missing_and_a_start_does_so_in_one_error(files: str) -> None:
    swarm("create", "friends", files)
    table, error = checked("friends.swarm.toml")
    assert str(error).startswith("nothing may stand in the way, got problems with missing;")
    for said in ("this swarm names no base: give --policy.base, as the founder says", "--task-file own=PATH"):
        assert said in table
    assert "get the file from the founder, read what it does, and give --reward-file PATH/my_reward.py" in table
    with pytest.raises(ConfigError, match=r"no base.* --task-file own=PATH.* --reward-file PATH/my_reward\.py"):
        swarm("join", "friends.swarm.toml", "--dry-run")
    table, error = checked("friends.swarm.toml", "--policy.base", "./tiny", "--task-file", "own=data/own.jsonl")
    assert "--reward-file PATH/my_reward.py" in table and "--task-file" not in table


def test_a_check_compares_the_lineage_of_a_base_that_is_here(base: str) -> None:
    swarm("create", "friends", "--policy.base", f"./{base}", *TASKS)
    table, error = checked("friends.swarm.toml", "--policy.base", f"./{base}")
    assert error is None and table.strip().endswith("can join")
    table, error = checked("friends.swarm.toml", "--policy.base", "bundled")
    assert isinstance(error, PreflightError) and "must be of a lineage that friends allows" in table
    table, error = checked("friends.swarm.toml", "--policy.base", f"./{base}", "--policy.lora.rank", "8")
    assert isinstance(error, PreflightError) and "policy.lora as the founder says" in table
    table, error = checked("friends.swarm.toml", "--policy.base", "./nowhere")
    assert isinstance(error, PreflightError) and "must be an existing folder, got ./nowhere" in table


def test_a_check_promises_nothing_of_a_base_that_is_still_to_be_downloaded(base: str) -> None:
    swarm("create", "friends", "--policy.base", "nobody/none", *TASKS)
    table, error = checked("friends.swarm.toml")
    assert error is None and table.strip().endswith("can join, if nobody/none can be downloaded")


def test_a_silo_takes_a_folder_and_its_check_speaks_of_no_download(files: str) -> None:
    said = swarm("silo", "init", "lab", files, "--dir", "lab", "--address", "/ip4/127.0.0.1/tcp/28000").splitlines()
    manifest = read_manifest("lab/manifest.toml")
    assert manifest.bases == () and len(manifest.lineages) == 1
    own = next(line for line in said if "# starts this node" in line)
    assert f"--reward-file {Path('my_reward.py').absolute()} --policy.base {Path('tiny').absolute()}" in own
    assert "own.jsonl, my_reward.py" in said[-2] and "--task-file own=own.jsonl" in said[-1]
    swarm("silo", "init", "other", *TASKS, "--dir", "other", "--policy.base", "nobody/none")
    table, error = checked("other/manifest.toml")
    assert isinstance(error, PreflightError) and "at hand in a silo, which downloads nothing" in table
    assert "downloaded at the start" not in table and "policy.base to a folder" not in table


def test_a_silo_tells_how_to_get_a_base_only_in_ways_that_work() -> None:
    with pytest.raises(PolicyError, match=r"`hf download nobody/none --revision v1`$"):
        check_base_at_hand(parse({"policy": {"base": "nobody/none", "revision": "v1"}}))
    with pytest.raises(PolicyError, match="set it to the folder that the owner sent"):
        check_base_at_hand(parse({"policy": {"base": "./nowhere"}}))
