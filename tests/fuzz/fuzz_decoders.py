"""Coverage-guided fuzzing of one decoder, with atheris (`pip install atheris`; nothing else needs it):

    python -m tests.fuzz.fuzz_decoders body FOLDER -max_total_time=60

FOLDER takes the inputs that reach new code; further arguments are those of libFuzzer. What breaks a decoder belongs,
minimised (`-minimize_crash=1`), into tests/fuzz/corpus/TARGET, where a test replays it from then on.
"""

import random
import sys
from pathlib import Path

_MAX_INPUT_BYTES = 4096


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["swarm", "hivemind.dht", "libp2p.pubsub"]):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.mutations import mutate, mutate_body
    from tests.fuzz.seeds import seeds

    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        sys.exit(
            f"usage: python -m tests.fuzz.fuzz_decoders TARGET FOLDER [libFuzzer's arguments]; {', '.join(TARGETS)}"
        )
    name, folder = sys.argv[1], Path(sys.argv[2])
    target, valid = TARGETS[name], seeds()[name]
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(valid):
        (folder / f"valid-{number}").write_bytes(seed)
    spoil = mutate_body if name == "body" else mutate

    def changed(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return atheris.Mutate(data, max_bytes)
        return spoil(data, rng.choice(valid), rng)[:max_bytes]

    atheris.Setup(
        [sys.argv[0], f"-max_len={_MAX_INPUT_BYTES}", "-timeout=5", "-rss_limit_mb=1024", *sys.argv[2:]],
        lambda data: target(data) and None,
        custom_mutator=changed,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
