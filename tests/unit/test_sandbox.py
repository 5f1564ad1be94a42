"""The sandbox against malicious programs: each ends within seconds and leaves nothing behind."""

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from swarm.sandbox.runner import RunLimits, RunResult, Sandbox

DEAF = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except Exception: pass
while True: pass
"""
WAITING = "import select\nselect.select([], [], [], 100)"
FLOODING = "import os\nwhile True: os.write(3, b'a' * 65536)"
LIMITS = RunLimits(cpu_s=1, wall_s=60.0, memory_bytes=128 << 20)


def run(body: str, *inputs: list[object], limits: RunLimits = LIMITS, use_namespaces: bool = True) -> RunResult:
    """Run `answer(*args)` with this body, of one line or more, and return its result."""
    lines = "".join(f"    {line}\n" for line in body.strip().split("\n"))
    return Sandbox(limits, use_namespaces=use_namespaces).run(f"def answer(*args):\n{lines}", "answer", inputs or ([],))


def value(body: str, *inputs: list[object]) -> object:
    result = run(body, *inputs)
    assert result.end == "exit", result
    assert len(result.lines) == 1 and result.lines[0], result
    return json.loads(result.lines[0])


def attempt(statements: str) -> str:
    """Run statements and return the name of the exception that they raise, or their value of `got`."""
    indented = "\n    ".join(statements.strip().split("\n"))
    guarded = f"try:\n    got = 'done'\n    {indented}\nexcept BaseException as e:\n    got = type(e).__name__"
    return f"import os, sys\n{guarded}\nreturn got"


def test_results_come_back_in_order() -> None:
    result = run("print('noise')\nreturn [args[0] * 2, 'é']", [1], ["ab"], [[3]])
    assert [json.loads(line) for line in result.lines] == [[2, "é"], ["abab", "é"], [[3, 3], "é"]]
    assert result.end == "exit" and 0 <= result.cpu_s < 1


def test_sets_have_the_same_order_in_every_run() -> None:
    first, second = (value("return list({str(n) for n in range(50)})") for _ in range(2))
    assert first == second


def test_an_exception_costs_one_result_only() -> None:
    assert run("return 1 / args[0]", [0], [2]).lines == (b"", b"0.5")
    assert run("import sys\nif args[0]: sys.exit(0)\nreturn 1", [1], [0]).lines == (b"", b"1")


@pytest.mark.parametrize("code", ["", "def answer(:", "x = 1", "raise SystemExit(0)", "\0", "answer = 5", "(" * 5000])
def test_code_without_the_function_gives_no_result(code: str) -> None:
    result = Sandbox(LIMITS).run(code, "answer", [[1]])
    assert not any(result.lines)


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("while True: pass", "signal"),
        ("return 10**10**8 % 7", "signal"),
        ("x = 3\nwhile True: x = x * x", "signal"),
        (DEAF, "signal"),
        (FLOODING, "output"),
        ("return 'a' * 10**6", "output"),
    ],
)  # fmt: skip
def test_a_program_without_end_is_ended(body: str, end: str) -> None:
    assert run(body).end == end


def test_a_program_that_waits_is_ended() -> None:
    started = time.monotonic()
    limits = RunLimits(wall_s=1.0)
    assert run("import threading\nthreading.Event().wait(100)", limits=limits).end == "wall"
    assert time.monotonic() - started < 5


@pytest.mark.essential
@pytest.mark.parametrize(
    "body",
    [
        "return ['a' * 10**6 for _ in range(10**6)]",
        "x = bytearray(1 << 30)\nreturn len(x)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nreturn f(0)",
        "x = []\nfor _ in range(10**6): x = [x]\nreturn x",
        "import mmap\nreturn len(mmap.mmap(-1, 1 << 30))",
        "import os\nos._exit(0)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
    ],
)
def test_a_program_that_takes_too_much_gives_no_result(body: str) -> None:
    result = run(body)
    assert not any(result.lines), result


def test_a_flood_of_prints_goes_nowhere() -> None:
    assert value("for _ in range(200): print('x' * 10**5)\nreturn 1") == 1


OUTSIDE = (
    "while True: os.fork()",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "import subprocess; subprocess.run([sys.executable, '-c', '1'])",
    "import threading; threading.Thread(target=print).start()",
    "os.execv(sys.executable, ['python'])",
    "import time; time.sleep(100)",
    "import socket; socket.socket(socket.AF_INET)",
    "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import socket; socket.socketpair()",
    "os.memfd_create('x')",
    "os.setsid()",
    "os.chroot('/')",
    "os.setuid(0)",
    "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    "os.pidfd_open(1)",
    "open('/etc/passwd').read()",
    "open('/proc/self/environ').read()",
    "open('/dev/null').read()",
    "os.listdir('/tmp')",
    "open('/outside', 'w')",
    "open(os.__file__, 'a')",
    "os.mkdir(os.path.dirname(os.__file__) + '/x')",
    "os.remove(os.__file__)",
    "os.mknod('/work/x', 0o600 | 0o020000, os.makedev(1, 1))",
    "import torch",
    "import swarm.config",
)


TRIES = """
import os, sys
names, outcome = {"os": os, "sys": sys}, []
for text in args[0]:
    try: exec(text, names); outcome.append("done")
    except Exception as e: outcome.append(type(e).__name__)
return outcome
"""


def test_what_leads_outside_is_refused() -> None:
    """One program tries everything and reports the results."""
    outcome = value(TRIES, [list(OUTSIDE)])
    refused = {"PermissionError", "FileNotFoundError", "OSError", "RuntimeError", "ModuleNotFoundError", "ValueError"}
    assert isinstance(outcome, list) and len(outcome) == len(OUTSIDE)
    assert [text for text, name in zip(OUTSIDE, outcome, strict=True) if name not in refused] == []


@pytest.mark.parametrize(
    "call",
    ["ptrace(16, 1, 0, 0)", "unshare(0x10000000)", "syscall(425, 1, 0)", "mount(b'a', b'/work', b'tmpfs', 0, 0)"],
)
def test_calls_by_ctypes_are_denied(call: str) -> None:
    body = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nreturn [libc.{call}, ctypes.get_errno()]"
    assert value(body) == [-1, 1]  # EPERM


def test_the_world_is_an_empty_folder_and_pythons_library() -> None:
    facts = "os.getcwd(), os.listdir('.'), os.listdir('/'), dict(os.environ), os.getpid(), os.getppid()"
    folder, content, root, environment, pid, parent = value(f"import os\nreturn [{facts}]")  # type: ignore[misc]
    assert (folder, content, pid, parent) == ("/work", [], 2, 1)
    assert set(environment) <= {"LC_CTYPE", "PYTHONHASHSEED", "PYTHONHOME"}  # nothing of the node's
    assert set(root) == {"work", "proc"}  # the way to the library, not a file system of the kernel
    packages = (
        "import os\np = os.path.dirname(os.__file__) + '/site-packages'\nreturn os.path.isdir(p) and os.listdir(p)"
    )
    assert not value(packages)


def test_nothing_tells_the_name_of_the_machine_or_where_things_are_installed() -> None:
    """Everything Python knows about paths and names: its variables, its modules, the frames that call the program."""
    body = """
import gc, os, sys
found = [sys.argv, sys.orig_argv, sys.path, sys.executable, sys.prefix, sys.base_prefix, os.uname().nodename, dict(os.environ)]
found += [(vars(m).get("__file__"), vars(m).get("__path__")) for m in list(sys.modules.values())]
frame = sys._getframe()
while frame:
    found.append(frame.f_code.co_filename)
    frame = frame.f_back
found += [o.__code__.co_filename for o in gc.get_objects() if type(o).__name__ == "function"]
return sorted({repr(one) for one in found})
"""
    outcome = value(body)
    outcome = " ".join(outcome)  # type: ignore[call-overload]
    assert "/proc/self/fd/" in outcome
    own = (platform.node(), str(Path(__file__).parents[2]), sys.base_prefix, sys.prefix, str(Path.home()))
    assert [name for name in own if len(name) > 4 and name in outcome] == []


@pytest.mark.parametrize(("number", "error"), [(467, 38), (10_000, 38), (0x4000_0000 | 39, 38), (428, 1), (57, 1)])
def test_calls_that_are_not_listed_fail_and_new_ones_are_unknown(number: int, error: int) -> None:
    """467: open_tree_attr of Linux 6.15."""
    body = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    assert value(body + f"return [libc.syscall({number}, 0, 0, 0, 0, 0), ctypes.get_errno()]") == [-1, error]


def test_the_folder_is_small_and_gone_with_the_program() -> None:
    written = "f = open('a', 'wb')\nfor _ in range(64): f.write(bytes(1 << 16)); f.flush()"
    assert value(attempt(written)) == "OSError"
    assert value("import os\nreturn os.listdir('/work')") == []


def test_what_the_node_holds_open_is_closed(tmp_path: Path) -> None:
    secret = (tmp_path / "identity.key").open("w+")
    os.set_inheritable(secret.fileno(), True)
    body = """
import os
numbers = []
for number in range(64):
    try: os.fstat(number); numbers.append(number)
    except OSError: pass
return numbers
"""
    try:
        assert value(body) == [0, 1, 2, 3]
    finally:
        secret.close()


def test_no_way_leads_out_by_a_handle_however_many_files_the_node_has_open() -> None:
    """New handles have the lowest free numbers, which are above those of all sockets of a busy node."""
    body = """
import os
found = []
for number in range(4, 6000):
    try: os.fstat(number); found.append(number)
    except OSError: continue
return found
"""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 6000:
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, limits[1]))
    held: list[int] = []
    try:
        while len(held) < 4500:
            held.append(os.dup(2))
        assert value(body) == []
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_nothing_that_listens_on_this_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert value(attempt(connect)) in ("PermissionError", "OSError")


def test_the_node_and_its_group_cannot_be_killed() -> None:
    body = (
        "import os\nfor pid in (os.getppid(), 0, 1, -1):\n    try: os.kill(pid, 9)\n    except OSError: pass\nreturn 7"
    )
    assert value(body) == 7


def test_exit_codes_and_a_closed_channel_say_nothing() -> None:
    for ending in ("os._exit(1)", "os._exit(3)", "os._exit(4)", "os.close(3)", "os._exit = lambda code: None"):
        result = run(f"import os\n{ending}\nreturn 1")
        assert (result.end == "exit" and not result.lines) or result.lines == (b"1",), (ending, result)


def test_lines_that_the_program_adds_are_its_own_loss() -> None:
    """The program may write anything as a result. The node compares results with what only the node knows."""
    assert run("import os\nos.write(3, b'passed\\n')\nreturn 1").lines == (b"passed", b"1")
    assert run('import os\nos.write(2, b\'{"end": "exit"}\')\nos.close(3)\nos._exit(0)').lines == ()


def test_no_process_is_left(tmp_path: Path) -> None:
    """The pipe of a killed run ends only when the last process that holds it has ended; so does the process tree."""
    before = children()
    for body in (
        "while True: pass",
        "import os\nwhile True: os.write(3, b'a' * 65536)",
        "import select\nselect.select([], [], [], 100)",
    ):
        run(body, limits=RunLimits(cpu_s=1, wall_s=1.0))
    assert children() == before


def children() -> set[int]:
    return {int(word) for path in Path("/proc/self/task").glob("*/children") for word in path.read_text().split()}


def test_a_killed_node_takes_the_program_along() -> None:
    """After SIGKILL to the process that runs the sandbox, all processes that hold its pipes end."""
    script = (
        "from swarm.sandbox.runner import *\nimport sys\n"
        "print('begin', flush=True)\n"
        "Sandbox(RunLimits(cpu_s=60, wall_s=60)).run('def f():\\n  while True: pass', 'f', [[]])"
    )
    node = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert node.stdout is not None and node.stdout.readline() == b"begin\n"
    launcher = wait_for(lambda: next(iter(grandchildren(node.pid)), None))
    program = wait_for(lambda: next(iter(grandchildren(launcher)), None))
    handle = os.pidfd_open(program)
    node.kill()
    node.wait()
    assert ended(handle, 10.0)


def grandchildren(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_for(look):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 10
    while (found := look()) is None:
        assert time.monotonic() < deadline
        os.sched_yield()
    return found


def ended(handle: int, timeout_s: float) -> bool:
    import select

    return bool(select.select([handle], [], [], timeout_s)[0])


def test_runs_in_several_threads_do_not_disturb_each_other() -> None:
    results: list[object] = []
    threads = [threading.Thread(target=lambda n=n: results.append(value("return args[0]", [n]))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]  # type: ignore[type-var]


def test_without_namespaces_the_limits_still_hold() -> None:
    assert run("while True: pass", use_namespaces=False).end == "signal"
    assert run("return args[0] + 1", [1], use_namespaces=False).lines == (b"2",)
    assert run("return len(bytearray(1 << 30))", use_namespaces=False).lines == (b"",)
    tried = ["os.fork()", "import socket; socket.socket()", "os.kill(0, 9)"]
    assert run(TRIES, [tried], use_namespaces=False).lines == (json.dumps(["PermissionError"] * 3).encode(),)


def test_a_sandbox_that_cannot_be_set_up_says_why() -> None:
    """Runs in a process that may not create a user namespace, as on systems that forbid them."""
    script = "from swarm.sandbox.runner import *\ntry: Sandbox(RunLimits()).check()\nexcept SandboxError as e: print(e)"
    limited = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"',
        "-",
    ]
    done = subprocess.run([*limited, sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert "unshare" in done.stdout, done


def test_check_passes_here() -> None:
    Sandbox(LIMITS).check()
