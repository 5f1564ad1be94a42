"""The tool `search`: finds passages in the text files of a folder of the operator, by BM25.

The passages become part of rollouts, which a node may publish: the folder should hold what others may read. So its path is a
setting of the operator and never part of a manifest. The content decides the config digest: nodes with other files do not share
these tasks.
"""

import hashlib
import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from swarm.config import Section, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation
from swarm.tasks.environments.tool import ToolError

_MAX_BYTES = 64 << 20
_MAX_FILES = 10_000
_SUFFIXES = (".txt", ".md", ".rst")
_PASSAGE_CHARS = 600
_MAX_WORDS = 32
_K1, _B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class SearchParameters(Section):
    """Parameters of `search`."""

    num_passages: Annotated[int, Field(ge=1, le=8)] = 2
    """Passages of one reply."""


class SearchTool:
    """An index in memory, made when the source is built."""

    Parameters = SearchParameters
    isolation: ClassVar[Isolation] = Isolation.NONE_NEEDED
    name = "search"
    description = "Finds passages about a few words in a collection of texts."
    argument = "query"
    is_exact = True

    def __init__(self, parameters: SearchParameters, section: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a folder that is missing, empty or too large."""
        self._num_passages = parameters.num_passages
        self._passages: list[tuple[str, str]] = []
        digest = hashlib.sha256()
        for name, text in _texts(section):
            digest.update(f"{name}\0{len(text)}\0{text}".encode())
            self._passages += [(name, passage) for passage in _passages(text)]
        self.rules = digest.hexdigest()[:16]
        self._words = [Counter(_words(passage)) for _, passage in self._passages]
        self._lengths = [sum(words.values()) for words in self._words]
        self._mean = sum(self._lengths) / len(self._lengths)
        self._places: dict[str, list[int]] = {}
        for place, words in enumerate(self._words):
            for word in words:
                self._places.setdefault(word, []).append(place)

    def run(self, text: str) -> str:
        """The best passages, each with the name of its file. Raises ToolError where none has any of the words."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(_words(text)[:_MAX_WORDS]):
            places = self._places.get(word, [])
            weight = math.log(1 + (len(self._passages) - len(places) + 0.5) / (len(places) + 0.5))
            for place in places:
                count, length = self._words[place][word], self._lengths[place] / self._mean
                scores[place] = scores.get(place, 0.0) + weight * count * (_K1 + 1) / (
                    count + _K1 * (1 - _B + _B * length)
                )
        if not scores:
            raise ToolError("no passage has any of these words")
        best = sorted(scores, key=lambda place: (-round(scores[place], 6), place))[: self._num_passages]
        return "\n\n".join(f"[{self._passages[place][0]}] {self._passages[place][1]}" for place in best)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _passages(text: str) -> list[str]:
    """Paragraphs, of which short ones are joined and long ones cut."""
    found: list[str] = []
    for paragraph in filter(None, (one.strip() for one in re.split(r"\n\s*\n", text))):
        if found and len(found[-1]) + len(paragraph) < _PASSAGE_CHARS:
            found[-1] += f"\n{paragraph}"
        else:
            found += [paragraph[start : start + _PASSAGE_CHARS] for start in range(0, len(paragraph), _PASSAGE_CHARS)]
    return found


def _texts(section: TaskSourceSection) -> list[tuple[str, str]]:
    """(name, text) of the files of the folder, in the order of their names."""
    folder = section.search_folder
    if folder is None:
        raise _refusal(section, "be a folder of texts", "none")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not 0 < len(paths) <= _MAX_FILES:
        raise _refusal(section, f"hold 1 to {_MAX_FILES} files {', '.join(_SUFFIXES)}", f"{len(paths)} in {folder}")
    if (num_bytes := sum(path.stat().st_size for path in paths)) > _MAX_BYTES:
        raise _refusal(section, f"hold at most {_MAX_BYTES >> 20} MiB", f"{num_bytes >> 20} MiB in {folder}")
    try:
        texts = [(path.relative_to(folder).as_posix(), path.read_text("utf-8")) for path in paths]
    except (OSError, UnicodeError) as error:
        raise _refusal(section, "hold readable files in UTF-8", str(error)) from None
    if not any(_passages(text) for _, text in texts):
        raise _refusal(section, "hold text", f"empty files in {folder}")
    return texts


def _refusal(section: TaskSourceSection, rule: str, got: str) -> TaskError:
    return TaskError(
        f"the folder of the tool search must {rule}, got {got}; set tasks.sources.search_folder of {section.source_name!r}"
    )
