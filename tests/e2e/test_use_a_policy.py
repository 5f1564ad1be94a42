"""What a person does with a policy that a node has trained: serve it, talk to it, evaluate it. Real commands, on loopback."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.config import dump_toml, parse
from tests.swarm_process import SwarmProcess, swarm

FEW = {"groups_per_round": 2, "group_size": 2}
SWARM = [sys.executable, "-m", "swarm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a node after one round."""
    return trained(tmp_path_factory.mktemp("used"), rollouts=FEW)


def trained(home: Path, **sections: dict[str, Any]) -> Path:
    """The folder of a node that has trained for one round."""
    alone = {"network": {"backend": "off"}, "sharing": {"publish": False, "swarm_groups": 0}}
    config = parse({"node": {"dir": "mine", "max_rounds": 1, "device": "cpu"}, **alone, **sections})
    (home / "mine.toml").write_text(dump_toml(config))
    ran = swarm("run", "mine.toml", cwd=home)
    assert ran.returncode == 0, ran.stderr
    return home / "mine"


def until(text: str, path: Path, timeout_s: float = 90.0) -> str:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if path.exists() and text in (said := path.read_text()):
            return said
        time.sleep(0.05)
    raise AssertionError(path.read_text())


@contextmanager
def served(folder: Path, output: Path, *options: str) -> Iterator[tuple[str, SwarmProcess]]:
    """(address, process) of `swarm serve`."""
    with SwarmProcess("serve", str(folder), "--port", "0", *options, output=output) as process:
        line = until("Ctrl-C ends it", output)
        yield line.split(" on ")[1].split("v1")[0] + "v1", process


def test_serve_answers_and_ends_at_a_signal(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with served(folder, output, "--base") as (address, process):
        assert "mine and mine-base, round 1, on http://127.0.0.1:" in output.read_text()
        body = {"model": "mine-base", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0}
        with httpx.Client(trust_env=False, timeout=30) as client:
            told = client.post(f"{address}/chat/completions", json=body)
            assert told.status_code == 200 and told.json()["choices"][0]["message"]["content"]
        port = address.split(":")[2].split("/")[0]
        taken = swarm("serve", str(folder), "--port", port)
        assert taken.returncode == 3
        assert f"--port must be free, got 127.0.0.1:{port}" in taken.stderr
        assert "loading" not in taken.stderr, "it is said before the policy is loaded"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0


def test_serve_asks_for_a_token_outside_of_loopback(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with served(folder, output, "--host", "0.0.0.0", "--context", "64") as (address, _):
        token_file = folder / "serve.token"
        assert f"the API key is in {token_file}" in output.read_text()
        assert token_file.stat().st_mode & 0o077 == 0
        token = token_file.read_text().strip()
        assert token not in output.read_text()
        with httpx.Client(trust_env=False, timeout=30) as client:
            assert client.get(f"{address}/models").status_code == 401
            models = client.get(f"{address}/models", headers={"authorization": f"Bearer {token}"}).json()
        assert [(one["id"], one["max_model_len"]) for one in models["data"]] == [("mine", 64)]


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_folder_without_a_policy_is_told(command: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    none = swarm(command, str(tmp_path / "new"))
    assert none.returncode == 3 and "there is no node in it" in none.stderr
    (tmp_path / "new" / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    untrained = swarm(command, str(tmp_path / "new"), *(["--port", "0"] if command == "serve" else []))
    assert untrained.returncode == 8 and "must hold a checkpoint" in untrained.stderr


def chat(folder: Path, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWARM, "chat", str(folder), *options], input=lines, capture_output=True, text=True, timeout=120, check=False
    )


def test_chat_through_a_pipe_answers_every_line(folder: Path) -> None:
    told = chat(folder, "What is 3 + 4?\n\n/reset\n/what\nWhat is 3 + 4?\n/quit\nmore\n", "--seed", "3")
    assert told.returncode == 0, told.stderr
    first, second = told.stdout.splitlines()
    assert first == second, "after a reset the same message gets the same answer"
    assert "unknown command /what; /reset forgets" in told.stderr
    both = chat(folder, "What is 3 + 4?\n", "--compare")
    assert [line.split(":")[0] for line in both.stdout.splitlines()] == ["mine", "base"]
    assert f"mine: {first}" in both.stdout
    long = chat(folder, "x" * 3000 + "\n")
    assert long.returncode == 3 and "write /reset" in long.stderr


class Terminal:
    """`swarm chat` on a terminal of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.said = ""
        self._end_of_found = 0
        self.pid, self._screen = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [*SWARM, "chat", str(folder), *options])

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def until(self, text: str, timeout_s: float = 90.0) -> None:
        """Read on until it says `text`, after what was waited for before."""
        end = time.monotonic() + timeout_s
        while (found := self.said.find(text, self._end_of_found)) < 0:
            assert time.monotonic() < end, self.said
            if select.select([self._screen], [], [], 1.0)[0]:
                try:
                    self.said += os.read(self._screen, 65536).decode(errors="replace")
                except OSError:  # it has ended
                    assert text in self.said[self._end_of_found :], self.said
                    return
        self._end_of_found = found + len(text)

    def until_more(self, num_chars: int) -> None:
        """Read on until there are so many characters more."""
        end = len(self.said) + num_chars
        while len(self.said) < end:
            self.said += os.read(self._screen, 65536).decode(errors="replace")

    def leave(self) -> int:
        """Press Ctrl-C until it has ended, and return its exit code: readline overlooks a signal that comes just as it begins
        to wait, until the next key."""
        end = time.monotonic() + 60.0
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < end, self.said
            with contextlib.suppress(OSError):  # it has ended
                self.type("\x03")
                if select.select([self._screen], [], [], 1.0)[0]:
                    self.said += os.read(self._screen, 65536).decode(errors="replace")
        return os.waitstatus_to_exitcode(ended[1])


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a node whose policy babbles for tens of thousands of tokens."""
    from tests.unit.tiny_models import write_tiny_models

    home = tmp_path_factory.mktemp("endless")
    base = write_tiny_models(home)["llama"]
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    return trained(home, policy={"base": str(base), "max_prompt_tokens": 64}, rollouts={**FEW, "max_new_tokens": 8})


def test_on_a_terminal_ctrl_c_stops_an_answer_and_a_second_one_leaves(endless: Path) -> None:
    terminal = Terminal(endless, "--context", "90000", "--max-tokens", "80000")
    terminal.until("> ")
    terminal.type("abc\n")
    terminal.until("abc\r\n")
    terminal.until_more(200)
    terminal.type("\x03")
    terminal.until("(stopped; Ctrl-C again leaves)")
    terminal.until("> ")
    assert terminal.leave() == 130


def test_the_shell_completes_commands_and_options() -> None:
    for words, offered in (("swarm ser", "serve"), ("swarm serve --max-a", "--max-answers")):
        variables = {"_SWARM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        told = subprocess.run(
            SWARM, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
        )
        assert told.stdout.split() == [offered], told.stderr


@pytest.mark.extra("lm_eval")
def test_lm_eval_measures_an_exported_policy_on_a_task_of_ones_own(folder: Path, tmp_path: Path) -> None:
    """The commands of docs/using.md."""
    exported = swarm("export", str(tmp_path / "out"), "--dir", str(folder))
    assert exported.returncode == 0, exported.stderr
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 3 + 4?", "answer": "7"}\n' * 3)
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/sums.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={tmp_path}/out",
         "--include_path", str(tmp_path), "--tasks", "sums", "--apply_chat_template", "--device", "cpu",
         "--output_path", str(tmp_path / "results")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["sums"]
    answer = chat(folder, "What is 3 + 4?\n", "--max-tokens", "8").stdout.strip()
    assert found["exact_match,none"] == float(answer == "7")


@pytest.mark.essential
def test_run_eval_sample_and_export_work_on_one_folder(tmp_path: Path) -> None:
    ran = swarm(
        "run",
        "--node.dir",
        "n",
        "--node.max_rounds",
        "2",
        "--network.backend",
        "off",
        "--evaluation.tasks_per_source",
        "1",
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    evaluated = swarm("eval", "--dir", "n", "--tasks", "2", "--json", cwd=tmp_path)
    assert 0 <= json.loads(evaluated.stdout)["reward_mean"] <= 1
    sampled = swarm("sample", "--dir", "n", cwd=tmp_path, stdin="1 + 1 =\nagain\n")
    assert len(sampled.stdout.splitlines()) == 2, sampled.stderr
    tried = swarm("sample", "--dir", "n", "--tasks", "1", "--show-prompt", cwd=tmp_path)
    assert len(re.findall(r"^  → .*\(reward \d\.\d\d\)$", tried.stdout, re.M)) == 6, tried.stdout
    for form, what in (("merged", "model"), ("adapter", "adapter")):
        exported = swarm("export", form, "--dir", "n", "--format", form, cwd=tmp_path)
        assert exported.returncode == 0, exported.stderr
        assert exported.stdout == f"{what} of round 2 written to {form}\n"
        (line,) = exported.stderr.splitlines()
        assert line.startswith("loading policy"), "no progress bars"
    check = (
        "import sys\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "print(AutoModelForCausalLM.from_pretrained('merged').num_parameters())\nAutoTokenizer.from_pretrained('merged')"
    )
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert int(loaded.stdout) > 100_000, loaded.stderr
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    refused = swarm("export", "merged", "--dir", "n", cwd=tmp_path)
    assert refused.returncode != 0
    fresh = swarm("run", "n/config.toml", "--fresh", "--node.dir", "n", cwd=tmp_path)
    assert "earlier run moved to" in fresh.stdout
    assert (tmp_path / "n" / "previous-001" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("quantization", "is_imported"), [("none", False), ("8bit", True)])
def test_bitsandbytes_is_left_out_where_nothing_is_quantised(quantization: str, is_imported: bool) -> None:
    script = (
        "import sys\nfrom swarm.cli.arguments import prepare_imports\nfrom swarm.config import parse\n"
        f"prepare_imports(parse({{'policy': {{'quantization': '{quantization}'}}}}))\n"
        "from swarm.policy.policy import load_policy\nload_policy(parse({}).policy, device='cpu')\n"
        "print(sys.modules.get('bitsandbytes') is not None, 'torch._inductor.compile_fx' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split()[-2:] == [str(is_imported)] * 2, ended.stdout
