"""Whatever bytes come, a decoder answers or refuses: in bounded time and memory, with the errors that it documents.

The targets hold what must be true of an input. Here they get what is valid, what breaks bounds on purpose, spoiled
versions of what is valid, and the inputs with which coverage-guided fuzzing once reached every branch (corpus/).
"""

import logging
import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bombs import bombs
from tests.fuzz.mutations import mutate, mutate_body
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CORPUS = Path(__file__).parent / "corpus"
MAX_SECONDS = 5.0
"""For one input; on an idle machine the slowest takes a tenth of it."""
MAX_PEAK_BYTES = 64 << 20
"""Memory that one input may ask for: a body unpacks to 8 MiB, and the fuzzed reply of a peer has 4 MiB."""
_BOMBS = bombs()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is refused is also logged: for thousands of inputs that is most of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_target_has_a_place_to_begin() -> None:
    assert seeds().keys() == TARGETS.keys()
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_valid_bytes_are_taken(name: str) -> None:
    taken = [TARGETS[name](seed) for seed in seeds()[name]]
    assert any(taken)


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_is_taken_or_refused(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files
    for file in files:
        check(name, file.read_bytes())


@pytest.mark.essential
@pytest.mark.parametrize("name", _BOMBS)
def test_bombs_cost_bounded_time_and_memory(name: str) -> None:
    TARGETS[name](b"")  # what is imported or made once is none of the bomb's
    for bomb in _BOMBS[name]:
        tracemalloc.start()
        try:
            check(name, bomb)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < MAX_PEAK_BYTES + len(bomb), f"{name} took {peak_bytes} bytes for {bomb[:40]!r}"


@pytest.mark.essential
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), raw=st.binary(max_size=64))
def test_spoiled_bytes_are_taken_or_refused(name: str, seed: int, raw: bytes) -> None:
    rng, valid = random.Random(seed), seeds()[name]
    spoil = mutate_body if name == "body" else mutate
    check(name, spoil(rng.choice(valid), rng.choice(valid), rng))
    check(name, raw)


def check(name: str, data: bytes) -> None:
    start = time.process_time()  # what else this machine does is not held against the decoder
    TARGETS[name](data)
    assert time.process_time() - start < MAX_SECONDS
