"""Renders a chat template of a stranger in a process of its own, within bounds of time, memory and files.

in:  {"template": text, "special_tokens": {name: text}, "chats": [[message, …], …]}
out: {"texts": [text, …]} or {"error": text}
"""

import json
import os
import resource
import sys

from swarm.sandbox.inside.file_guard import close_files

CPU_S = 2
MEMORY_BYTES = 1 << 30
"""Of address space beyond what the libraries take."""
MAX_OUTPUT_BYTES = 1 << 20


def main() -> None:
    question = json.loads(sys.stdin.buffer.read())
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound()
    try:
        texts, _ = render_jinja_template(
            question["chats"],
            chat_template=question["template"],
            add_generation_prompt=True,
            **question["special_tokens"],
        )
    except (Exception, MemoryError) as error:  # a template fails in any way it likes
        return print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}))
    return print(json.dumps({"texts": texts}))


def _bound() -> None:
    """From here on the template's program decides what happens."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + CPU_S
    memory = _address_space() + MEMORY_BYTES
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    close_files()


def _address_space() -> int:
    """Bytes; 0 where the system does not tell, which also does not enforce the limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 40


if __name__ == "__main__":
    main()
