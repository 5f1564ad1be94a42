"""Rebuilds tasks and scores answers of strangers in a process of its own, within bounds of time and memory.

argv: the task sources as JSON, bytes of address space
out:  {"ready": true} or {"error": text}, then one line per line in:
      {"prompt_digest": text, "rewards": [number, ...]}, {"unknown": text} or {"failure": text}
in:   [source, config digest, seed, index, [answer, ...]] per line
"""

import json
import os
import resource
import sys
from typing import Any

from swarm.config import TasksSection
from swarm.tasks.task_mixture import TaskMixture, score
from swarm.tasks.task_source import TaskFailure, UnknownTask, prompt_digest
from swarm.types import TaskRef

_MAX_MESSAGE_CHARS = 300


def main() -> None:
    sections, memory_bytes = sys.argv[1:]
    replies = os.dup(1)
    os.dup2(2, 1)  # what third-party code prints goes nowhere
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # a verifier has nothing to write
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    try:
        mixture = TaskMixture(TasksSection.model_validate_json(sections))
    except Exception as error:  # the process's edge: the node tells it
        return _reply(replies, {"error": _told(error)})
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        _reply(replies, _judge(mixture, *json.loads(line)))
    return None


def _judge(
    mixture: TaskMixture, source: str, config_digest: str, seed: int, index: int, texts: list[str]
) -> dict[str, Any]:
    try:
        task = mixture.rebuild(TaskRef(source, config_digest, seed, index))
        return {"prompt_digest": prompt_digest(task.prompt), "rewards": [score(task, text) for text in texts]}
    except UnknownTask as error:
        return {"unknown": _told(error)}
    except TaskFailure as failure:
        is_overrun = isinstance(failure.__cause__, MemoryError)
        return {"overrun" if is_overrun else "failure": str(failure)[:_MAX_MESSAGE_CHARS]}
    except MemoryError:
        return {"overrun": "out of memory"}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]


def _reply(channel: int, reply: dict[str, Any]) -> None:
    os.write(channel, json.dumps(reply).encode() + b"\n")
