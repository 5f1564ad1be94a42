"""Code tasks in any language: right programs pass, hostile ones end, and nothing of the machine is to be seen.

A language whose programs are not installed is skipped by name.
"""

import json
import shutil
import socket
import textwrap
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swarm.config import LanguageSection, TaskSourceSection, TasksSection, parse
from swarm.errors import ConfigError, TaskError
from swarm.sandbox.program_runner import LANGUAGES, ProgramRun, ProgramRunner, ProgramRuns
from swarm.sandbox.runner import RunLimits, SandboxError
from swarm.tasks import code_source
from swarm.tasks.code_source import CodeSource, code_of
from swarm.tasks.task_source import TaskFailure
from swarm.types import Task

SUMS = {
    "awk": "{ print $1 + $2 }",
    "bash": "read a b; echo $((a + b))",
    "c": '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "fortran": "program main\ninteger :: a, b\nread *, a, b\nprint *, a + b\nend program",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)",
    "lua": "print(string.format('%d', io.read('n') + io.read('n')))",
    "perl": "my ($a, $b) = split / /, <STDIN>; print $a + $b, qq(\\n);",
    "python": "a, b = map(int, input().split())\nprint(a + b)",
    "ruby": "a, b = gets.split.map(&:to_i); puts a + b",
}
LIMITS = RunLimits(cpu_s=1, wall_s=10.0)


def runner_of(language: str, limits: RunLimits = LIMITS) -> ProgramRunner:
    try:
        return ProgramRunner(LANGUAGES[language], limits)
    except SandboxError as error:
        pytest.skip(f"{language}: {error}")


def run(language: str, code: str, *inputs: str, limits: RunLimits = LIMITS) -> ProgramRuns:
    return runner_of(language, limits).run(code, inputs or ("",))


def output_of(language: str, code: str, *inputs: str) -> str:
    (one,) = run(language, code, *inputs).runs
    assert one.end == "exit", one
    return one.output.decode()


def source_of(folder: Path, language: str = "perl", answer: str | None = None, **settings: Any) -> CodeSource:
    tests = [
        {"stdin": "1 2\n", "stdout": "3\n"},
        {"stdin": "40 2\n", "stdout": "42"},
        {"stdin": "5 70604\n", "stdout": "70609"},
    ]
    line = {"prompt": "Add.", "tests": tests, "answer": SUMS.get(language, "") if answer is None else answer}
    (folder / "tasks.jsonl").write_text("\n".join([json.dumps(line)] * 12))
    facts = {
        "kind": "code",
        "name": "mine",
        "path": folder / "tasks.jsonl",
        "parameters": {"language": language, "cpu_s": 1},
    }
    return CodeSource(TaskSourceSection.model_validate(facts), TasksSection(**settings))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    if shutil.which("perl") is None:
        pytest.skip("perl")
    return source_of(tmp_path).task(16, 0)


def test_every_known_language_has_a_program_here() -> None:
    assert SUMS.keys() == LANGUAGES.keys()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_right_program_passes_and_a_wrong_one_does_not(tmp_path: Path, language: str) -> None:
    runner_of(language)
    task = source_of(tmp_path, language).task(16, 0)
    assert task.verify(f"Here it is:\n```{language}\n{SUMS[language]}\n```\n") == {"correct": 1.0, "tests": 1.0}
    assert task.verify("this is (no program {") == {"correct": 0.0, "tests": 0.0}


def test_some_tests_may_pass(task: Task) -> None:
    assert task.verify("print <STDIN> =~ /^1 / ? 3 : 42;") == {"correct": 0.0, "tests": pytest.approx(2 / 3)}
    assert task.verify("print 3; exit 1;") == {"correct": 0.0, "tests": 0.0}, "a program that fails is wrong"


@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("3", "3\n", True), ("  3 \n\n", "3", True), ("a  b\tc\nd", "a b c\nd\n", True), ("", "\n", True),
        ("3\n4", "3 4", False), ("34", "3 4", False), ("\n3", "3", False), ("3\n\n4", "3\n4", False), ("A", "a", False),
        ("3.0", "3", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_the_words_of_their_lines(printed: str, expected: str, is_right: bool) -> None:
    assert code_source._has_lines(expected, printed.encode()) is is_right


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```c++\nint x;\n```", "int x;\n"),
        ("```js\n1\n```", "1\n"),
        ("```\n1\n```", "1\n"),
        ("```int x;\ny\n```", "int x;\ny\n"),
    ],
)
def test_the_word_behind_a_fence_is_no_code(text: str, code: str) -> None:
    assert code_of(text, is_python=False) == code


# --- hostile programs


@pytest.mark.parametrize(
    ("language", "code", "end"),
    [
        ("c", "int main(void) { for (;;) ; }", "limit"),
        ("perl", "1 while 1", "limit"),
        ("bash", "while true; do :; done", "limit"),
        ("c", "#include <unistd.h>\nint main(void) { pause(); for (;;) ; }", "limit"),
        ("bash", "sleep 100", "wall"),
        ("bash", "cat <&1", "exit"),
        ("perl", "print 'x' x 65536 while 1", "output"),
        ("c", "#include <stdlib.h>\nint main(void) { abort(); }", "exit"),
        ("c", "int main(void) { return *(volatile int *) 0; }", "exit"),
    ],
)
def test_a_program_without_end_is_ended(language: str, code: str, end: str) -> None:
    started = time.monotonic()
    limits = RunLimits(cpu_s=1, wall_s=1.5 if end == "wall" else 20.0)
    (one,) = run(language, code, limits=limits).runs
    assert one.end == end, one
    assert time.monotonic() - started < 15
    assert end != "exit" or one.code != 0


def test_a_command_of_a_script_that_does_not_end_is_ended_and_nobodys_fault(tmp_path: Path) -> None:
    """The script itself goes on, so that its result may depend on the machine."""
    task = source_of(tmp_path, "bash").task(16, 0)
    with pytest.raises(TaskFailure, match=r"the program (took|had not ended)"):
        task.verify("awk 'BEGIN { while (1) ; }'; echo done")


def test_a_compiler_that_does_not_end_is_ended() -> None:
    bomb = "template <int N> struct A { static const int v = A<N - 1>::v + A<N - 2>::v + A<N - 3>::v; }; "
    runs = run("cpp", bomb + "int main() { return A<900>::v; }")
    assert runs.compiled is not None and not runs.runs
    assert runs.compiled.end == "limit" or runs.compiled.code != 0


FORKS = """#include <stdio.h>
#include <unistd.h>
int main(void) {
    int n = 0, child;
    while (n < 100 && (child = fork()) > 0) n++;
    if (child == 0) sleep(100);
    printf("%d\\n", n);
    fflush(stdout);
    _exit(0);
}"""


def test_few_processes_are_there_at_once_and_none_outlives_a_run() -> None:
    section = LANGUAGES["c"].model_copy(update={"max_processes": 5})
    runner_of("c")
    first, second = ProgramRunner(section, LIMITS).run(FORKS, ["", ""]).runs
    assert (first.output, second.output) == (b"5\n", b"5\n"), "as many again: those of the first run were ended"
    assert output_of("c", FORKS) == "0\n", "a language that needs none has none"


def test_a_program_that_runs_on_does_not_disturb_the_next_run() -> None:
    code = "read x; if [ $x = 1 ]; then (while true; do echo noise; done) & fi; echo $x"
    first, second = run("bash", code, "1\n", "2\n", limits=RunLimits(cpu_s=1, wall_s=20.0)).runs
    assert first.output.split()[0] in (b"1", b"noise")
    assert (second.end, second.output) == ("exit", b"2\n")


OWN = " ".join(f"-e ^{name}=" for name in ("PATH", "HOME", "TMPDIR", "LC_ALL", "PYTHONHASHSEED", "PWD", "SHLVL", "_"))
C_HEAD = "#include <stdio.h>\n#include <unistd.h>\n#include <sys/ptrace.h>\nint main(void) { "
SIGHT = [
    ("bash", "cat /etc/passwd /etc/hostname /root/.bashrc /home/* 2>/dev/null; echo end"),
    ("bash", "ls /proc /sys /home /root /var /work 2>/dev/null; echo end"),
    ("bash", f"env | grep -v {OWN}; echo end"),
    ("bash", "touch /usr/x /x /dev/x /bin/x 2>/dev/null && echo wrote; echo end"),
    ("bash", "kill -2 1; kill -9 1; kill -15 -1 2>/dev/null; echo end"),
    ("bash", "mount -t tmpfs none /tmp 2>/dev/null && echo mounted; unshare -r true 2>/dev/null && echo unshared; echo end"),
    ("perl", "print 'x' if -e '/etc/passwd'; print qq(end\n)"),
    ("perl", "print 'forked' if defined fork; print qq(end\n)"),
    ("perl", "use Socket; print 'socket' if socket(my $s, PF_INET, SOCK_STREAM, 0); print qq(end\n)"),
    ("c", C_HEAD + 'if (!ptrace(PTRACE_ATTACH, 1, 0, 0)) puts("traced"); puts("end"); }'),
    ("c", C_HEAD + 'for (int n = 3; n < 999; n++) if (write(n, "x", 1) > 0) puts("wrote"); puts("end"); }'),
]  # fmt: skip


@pytest.mark.parametrize(("language", "code"), SIGHT)
def test_nothing_of_the_machine_is_to_be_seen_or_reached(language: str, code: str) -> None:
    assert output_of(language, code).split() == ["end"]


def test_nothing_that_listens_on_this_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached; echo end"
        assert output_of("bash", code) == "end\n"
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_folder_is_that_of_the_program_alone_and_small() -> None:
    code = "ls; head -c 100000000 /dev/zero > big 2>/dev/null; wc -c < big | awk '{ print ($1 < 40000000) }'"
    assert output_of("bash", code).split()[0] == "main.sh"


def test_expected_outputs_never_enter(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def watched(self: ProgramRunner, code: str, inputs: list[str]) -> ProgramRuns:
        sent.append(json.dumps([self._request, code, inputs]))
        return real(self, code, inputs)

    real = ProgramRunner.run
    monkeypatch.setattr(ProgramRunner, "run", watched)
    assert task.verify(SUMS["perl"] + "#") == {"correct": 1.0, "tests": 1.0}
    assert sent and not any("70609" in one for one in sent)


def test_a_long_input_and_output_pass_through() -> None:
    text = "word " * 12_000
    assert output_of("perl", "print while <STDIN>", text) == text
    assert output_of("perl", "print 7", text) == "7", "also where the program does not read it"


# --- what the clock decides


@pytest.mark.parametrize(
    ("runs", "tests"),
    [
        (ProgramRuns(None, tuple(ProgramRun("exit", 0, 0.25, text) for text in (b"3", b"42", b"70609"))), 1.0),
        (ProgramRuns(None, (ProgramRun("exit", 0, 0.26, b"3"),)), None),
        (ProgramRuns(None, (ProgramRun("wall", 0, 0.0, b""),)), None),
        (ProgramRuns(None, (ProgramRun("exit", 0, 0.1, b"3"), ProgramRun("limit", -9, 1.0, b""))), 1 / 3),
        (ProgramRuns(ProgramRun("exit", 0, 3.0, b""), ()), None),
        (ProgramRuns(ProgramRun("limit", -9, 10.0, b""), ()), 0.0),
        (ProgramRuns(ProgramRun("exit", 1, 0.1, b""), ()), 0.0),
    ],
)
def test_what_the_clock_decides_is_nobodys_fault(
    task: Task, monkeypatch: pytest.MonkeyPatch, runs: ProgramRuns, tests: float | None
) -> None:
    monkeypatch.setattr(ProgramRunner, "run", lambda *_: runs)
    if tests is None:
        with pytest.raises(TaskFailure):
            task.verify("print 1")
    else:
        given = task.verify("print 1")
        assert isinstance(given, dict) and given["tests"] == pytest.approx(tests)


# --- settings


def test_a_language_that_does_not_work_here_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"language must be one of awk, bash, .*, got cobol; describe it in tasks.languages"
    ):
        source_of(tmp_path, "cobol", "x")
    gone = {"perl": LanguageSection(run=("no-such-perl", "main.pl"), file="main.pl")}
    with pytest.raises(TaskError, match=r"got no-such-perl must be installed in one of .* or set tasks.languages.perl"):
        source_of(tmp_path, languages=gone)
    with pytest.raises(TaskError, match=r"must pass its tests, got 33% of them in perl for 'Add.'"):
        source_of(tmp_path, answer="print 3")
    with pytest.raises(
        TaskError, match="one line of a file of programs must have an answer, to see that perl works here"
    ):
        source_of(tmp_path, answer="")


def test_an_operator_describes_a_language(tmp_path: Path) -> None:
    """Here one whose program is in a folder of its own."""
    home = tmp_path / "language"
    home.mkdir()
    home.chmod(0o755)
    program = home / "reverse-perl"
    program.write_text("#!/bin/sh\nexec perl -pe '$_ = join q( ), reverse split' \"$1\"\n")
    program.chmod(0o755)
    section = LanguageSection(run=(str(program), "/dev/null"), file="program", home=home, max_processes=4)
    runs = ProgramRunner(section, LIMITS).run("text", ["1 2"])
    assert runs.runs[0].end == "exit", runs
    with pytest.raises(ConfigError, match="languages"):
        parse({"tasks": {"languages": {"x y": {"run": ["x"], "file": "x"}}}})
    with pytest.raises(ConfigError, match="file"):
        parse({"tasks": {"languages": {"x": {"run": ["x"], "file": "../x"}}}})


def test_the_language_that_the_page_describes_works(tmp_path: Path) -> None:
    if shutil.which("sqlite3") is None:
        pytest.skip("sqlite3")
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    block = page.split("    [tasks.languages.sql]")[1].split("\n\n")[0].split("\n", 1)[1]
    section = LanguageSection.model_validate(tomllib.loads(textwrap.dedent(block)))
    tables = "create table t (x); insert into t values (1), (41);"
    (one,) = ProgramRunner(section, LIMITS).run("select sum(x) from t;", [tables]).runs
    assert (one.end, one.code, one.output) == ("exit", 0, b"42\n")


def test_a_manifest_runs_a_language_only_where_the_operator_allows_it(tmp_path: Path) -> None:
    source = {"kind": "code", "name": "mine", "path": "/x", "parameters": {"language": "perl"}}
    tasks: dict[str, Any] = {"sandboxed": True, "sources": [source]}
    with pytest.raises(ConfigError, match=r"run only where you allow it, got perl; set tasks.allowed_languages"):
        parse({"tasks": tasks})
    assert parse({"tasks": tasks | {"allowed_languages": ["perl"]}}).tasks.sources


def test_the_language_is_part_of_the_digest_and_python_functions_keep_theirs(tmp_path: Path) -> None:
    runner_of("perl")
    first = source_of(tmp_path, "perl", None)
    second = source_of(tmp_path, "bash", SUMS["perl"], languages={"bash": LANGUAGES["perl"]})
    assert first.config_digest != second.config_digest
    made_up = CodeSource(TaskSourceSection(kind="code", name="list_functions"), TasksSection())
    assert made_up.config_digest == "6d68378abf301bfe"


def test_a_file_of_functions_is_no_file_of_programs(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "p", "entry": "f", "tests": [{"args": [], "expected": 1}]}\n' * 3)
    facts = {"kind": "code", "name": "mine", "path": path, "parameters": {"language": "perl"}}
    with pytest.raises(TaskError, match="must be one JSON object"):
        CodeSource(TaskSourceSection.model_validate(facts), TasksSection())
    with pytest.raises(TaskError, match="programs in c need a file of tasks"):
        facts = {"kind": "code", "name": "list_functions", "parameters": {"language": "c"}}
        CodeSource(TaskSourceSection.model_validate(facts), TasksSection())
