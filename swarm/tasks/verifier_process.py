"""The service that rebuilds tasks and scores answers of strangers, in the confined process of `line_process`.

opening:  the task sources as JSON
question: [source, config digest, seed, index, [answer, ...]]
reply:    {"prompt_digest": text, "rewards": [number, ...]}, {"unknown": text}, {"failure": text} or {"overrun": text}
"""

from collections.abc import Callable
from typing import Any

from swarm.config import TasksSection
from swarm.tasks.task_mixture import TaskMixture, score
from swarm.tasks.task_source import TaskFailure, UnknownTask, prompt_digest
from swarm.types import TaskRef

_MAX_MESSAGE_CHARS = 300


def start(opening: str) -> Callable[[Any], dict[str, Any]]:
    """Build the sources. Raises TaskError where not one of them works."""
    mixture = TaskMixture(TasksSection.model_validate_json(opening))
    return lambda question: _judge(mixture, *question)


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
