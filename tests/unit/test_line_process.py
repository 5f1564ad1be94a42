"""What a service may do and say after a stranger's text has taken it over. With real processes."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError, confined_environment

SERVICE = """
import json, os, subprocess, sys, threading, time

def start(opening):
    def answer(question):
        try:
            return {"got": eval(question)}
        except BaseException as error:
            return {"raised": type(error).__name__}
    return answer
"""
MEMORY_BYTES = 512 << 20
Start = Callable[..., LineProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a service that evaluates Python for the test, like a service that a text has taken over."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "evil_service.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    started: list[LineProcess] = []

    def begin(namespaces: Any = "required", **settings: Any) -> LineProcess:
        process = LineProcess("evil_service", None, Confinement(MEMORY_BYTES, namespaces=namespaces, **settings))
        started.append(process)
        return process

    yield begin
    for process in started:
        process.close()


def got(process: LineProcess, expression: str) -> Any:
    reply = process.ask(expression, 10.0)
    return reply.get("got", reply.get("raised"))


def test_a_service_sees_no_secrets_no_home_no_network_and_starts_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    (tmp_path / "identity.key").write_text("secret")
    process = start(file_bytes=1 << 20)
    assert set(got(process, "sorted(os.environ)")) <= {
        "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "LC_ALL", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "LD_LIBRARY_PATH", "PATH",
    }  # fmt: skip
    assert got(process, f"open({str(tmp_path / 'identity.key')!r}).read()") == "FileNotFoundError"
    home, shown = Path.home(), f"[name for name in os.listdir('/') if name == {Path.home().parts[1]!r}]"
    seen = got(process, f"os.listdir({str(home)!r}) if {shown} else []")
    assert not {".ssh", ".bashrc", ".profile", ".cache"} & set(seen), "of a home only the way to the interpreter"
    assert got(process, "os.path.exists('/proc') or os.path.exists('/etc/passwd')") is False
    assert got(process, "open(os.__file__, 'a')") == "OSError", "read-only"
    assert got(process, "__import__('socket').create_connection(('127.0.0.1', 22), 1)") == "PermissionError"
    assert got(process, "os.fork()") == "PermissionError"
    assert got(process, "subprocess.run(['/bin/true'])") == "PermissionError"
    assert got(process, "os.getpid()") == 1 and got(process, "os.kill(-1, 9)") == "ProcessLookupError"
    assert got(process, "(lambda t: (t.start(), t.join(), 'thread')[2])(threading.Thread(target=int))") == "thread"


def test_memory_and_files_are_bounded(start: Start) -> None:
    process = start(file_bytes=1 << 20)
    assert got(process, f"len(bytearray({MEMORY_BYTES}))") == "MemoryError"
    assert got(process, "open('/tmp/a', 'wb', 0).write(bytes(1 << 19))") == 1 << 19
    assert got(process, "[open(f'/tmp/{n}', 'wb', 0).write(bytes(1 << 19)) for n in range(9)]") == "OSError"


NO_SOCKET = """[
    family for family in range(1, 46) if not (lambda: (
        lambda libc: libc.socket(family, 1, 0) < 0 and libc.socket(family, 2, 0) < 0 and libc.socket(family, 3, 0) < 0
    )(__import__('ctypes').CDLL(None)))()
]"""


def test_no_family_of_sockets_leads_out_of_the_namespaces(start: Start) -> None:
    """Some socket families, such as those of virtual machines, do not belong to a network namespace."""
    process = start()
    assert got(process, NO_SOCKET) == [], "families of which a socket could be made"
    assert got(process, "[one.close() for one in __import__('socket').socketpair()]") == [None, None], "for event loops"


def test_no_memory_is_taken_that_counts_as_nobodys(start: Start) -> None:
    process = start(file_bytes=1 << 20)
    assert got(process, "os.memfd_create('a')") == "PermissionError"
    for call in ("shmget(0, 1 << 20, 0o1600)", "semget(0, 250, 0o1600)", "msgget(0, 0o1600)"):
        assert got(process, f"__import__('ctypes').CDLL(None).{call}") == -1, call
    assert got(process, "[os.pipe() for _ in range(200)]") == "OSError", "too many open files"
    assert got(process, "(lambda c: c.CFUNCTYPE(c.c_int)(lambda: 7)())(__import__('ctypes'))") == 7, "callbacks work"


@pytest.mark.parametrize("namespaces", ["required", "none"])
def test_what_it_was_given_is_not_in_the_list_of_processes(start: Start, namespaces: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    process = LineProcess("evil_service", {"api_key": "s3cret"}, Confinement(MEMORY_BYTES, namespaces=namespaces))  # type: ignore[arg-type]
    process.start()
    children = set(psutil.Process().children(recursive=True)) - before
    assert children and not any("s3cret" in " ".join(child.cmdline()) for child in children)
    process.close()


@pytest.mark.parametrize("namespaces", ["required", "none"])
def test_nothing_is_imported_from_the_current_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: str
) -> None:
    here = tmp_path / "downloads"
    here.mkdir()
    for name in ("json.py", "swarm.py", "sitecustomize.py", "resource.py"):
        (here / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(here))
    for entry in ("", ".", str(here)):
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
    assert got(start(namespaces), "1 + 1") == 2
    assert not (tmp_path / "ran").exists()
    assert str(here) not in confined_environment(sys.path)["PYTHONPATH"].split(os.pathsep)


def test_what_a_service_without_namespaces_has_started_ends_with_it(start: Start) -> None:
    process = start("none")
    pid = got(process, "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid")
    child = psutil.Process(pid)
    process.close()
    child.wait(10)


def test_a_service_in_namespaces_ends_with_its_node(start: Start, tmp_path: Path) -> None:
    """The node is killed while the service computes and neither reads nor writes."""
    script = (
        "import sys\nfrom swarm.sandbox.line_process import *\n"
        "p = LineProcess('evil_service', None, Confinement(None)); p.start()\n"
        "print(p._process.pid, flush=True); p.ask('[0 for _ in iter(int, 1)]', 600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "packages"), str(Path.cwd())])}
    node = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert node.stdout is not None
    supervisor = psutil.Process(int(node.stdout.readline()))
    (service,) = supervisor.children()
    node.kill()
    node.wait()
    service.wait(10)
    supervisor.wait(10)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("os.write(3, b'[1]\\n')", "ended with"),
        ("os.write(3, b'[' * 200000 + b'\\n')", "ended with"),
        ("os.write(3, b'5\\n')", "ended with"),
        ("'\\ud800'", "surrogates not allowed"),
        ("os.write(3, b'{\"got\": ' + b'9' * 5000 + b'}\\n')", "ended with"),
        ("[os.write(3, b'x' * 65536) for _ in range(40)]", "ended with"),
        ("os._exit(0)", "ended with"),
        ("os.write(3, b'{')", "ended with"),
    ],
)
def test_whatever_it_replies_is_a_table_or_the_one_error(start: Start, expression: str, expected: str) -> None:
    process = start()
    with pytest.raises(LineProcessError, match=expected) as caught:
        process.ask(expression, 5.0)
    assert caught.value.by_question
    assert got(process, "1 + 1") == 2, "and a new one is there"


def test_a_reply_to_no_question_is_not_taken_for_the_next_answer(start: Start) -> None:
    process = start()
    later = 'threading.Timer(0.1, lambda: os.write(3, b\'{"got": "forged"}\\n\')).start()'
    assert got(process, later) is None
    stdout = process._process.stdout  # type: ignore[union-attr]
    assert select.select([stdout], [], [], 10)[0], "it has spoken unasked"
    assert got(process, "'right'") == "right"
    assert got(process, "'right again'") == "right again"


def test_a_service_that_does_not_read_costs_its_time_and_no_more(start: Start) -> None:
    process = start("none")
    assert got(process, "threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()") is None
    stop = "os.write(3, b'{\"got\": 7}\\n') and os.kill(os.getpid(), 19)"
    assert process.ask(stop, 5.0) == {"got": 7}
    with pytest.raises(LineProcessError, match=r"took longer than 0\.5 s"):
        process.ask("x" * (1 << 20), 0.5)


WITHOUT_NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"',
    "-",
)


@pytest.mark.parametrize(
    ("namespaces", "expected"), [("required", "unshare"), ("if possible", "got 2 PermissionError")]
)
def test_without_namespaces_it_starts_only_where_that_is_allowed(
    start: Start, tmp_path: Path, namespaces: str, expected: str
) -> None:
    script = (
        "import sys\nfrom swarm.sandbox.line_process import *\n"
        f"p = LineProcess('evil_service', None, Confinement(None, namespaces={namespaces!r}))\n"
        "try: print('got', p.ask('1 + 1', 10)['got'], p.ask('os.fork()', 10)['raised'])\n"
        "except LineProcessError as e: print(e)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "packages"), str(Path.cwd())])}
    command = [*WITHOUT_NAMESPACES, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert expected in done.stdout, done


@pytest.mark.parametrize("namespaces", ["required", "none"])
def test_packages_may_ask_for_the_temporary_folder_where_no_file_may_be_written(start: Start, namespaces: str) -> None:
    assert got(start(namespaces), "__import__('tempfile').gettempdir()") == "/tmp"


def test_questions_of_several_threads_get_their_own_answers(start: Start) -> None:
    process, answers = start(), {}

    def ask(number: int) -> None:
        answers[number] = got(process, f"{number} * 2")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: 2 * number for number in range(8)}
