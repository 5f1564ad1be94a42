"""From the inputs that fuzzing found, the few that reach every line that any of them reaches:

    python -m tests.fuzz.minimise_corpus FOLDER

FOLDER holds a folder per target, as `fuzz_decoders` fills them; the chosen ones are written to tests/fuzz/corpus,
beside what is there. Lines are those of this project's code; a target keeps at most MAX_FILES.
"""

import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MAX_FILES = 10
MAX_FILE_BYTES = 4096
_PROJECT = str(Path(__file__).parents[2] / "swarm")

Line = tuple[str, int, int]
"""(file, line, how it was left: the line after it)"""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.fuzz.minimise_corpus FOLDER")
    logging.disable()
    valid = seeds()
    for name, target in TARGETS.items():
        found = {file.read_bytes() for file in (Path(sys.argv[1]) / name).glob("*")} | set(valid[name])
        small = sorted((data for data in found if len(data) <= MAX_FILE_BYTES), key=lambda data: (len(data), data))
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        chosen = fewest({data: reached(target, data) for data in small})
        for data in chosen:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        print(f"{name}: {len(chosen)} of {len(small)} inputs")


def fewest(lines: dict[bytes, set[Line]]) -> list[bytes]:
    """Greedily, the input that adds most first, at most MAX_FILES."""
    chosen: list[bytes] = []
    covered: set[Line] = set()
    while len(chosen) < MAX_FILES:
        best = max(lines, key=lambda data: len(lines[data] - covered))
        if not lines[best] - covered:
            break
        chosen.append(best)
        covered |= lines[best]
    return chosen


def reached(target: Callable[[bytes], bool], data: bytes) -> set[Line]:
    """Pairs of lines of the project that follow each other while the target runs on `data`."""
    pairs: set[Line] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if not file.startswith(_PROJECT):
            return None
        last = 0

        def step(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal last
            pairs.add((file, last, frame.f_lineno))
            last = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return pairs


if __name__ == "__main__":
    main()
