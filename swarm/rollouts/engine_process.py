"""An engine in a process of its own, which samples while this process trains.

    this process       load(weights), generate(requests) ─▶ socket ─▶ child: base + adapter, engine
      trains meanwhile                        answers ◀────────────────────┘

The child has the base a second time; the adapter comes through the socket before each round. Only this process writes to that
socket, so what comes out of it may be unpickled. The child ends with this process, however that ends.
"""

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarm.adapters.adapter_state import write_adapter
from swarm.config import PolicySection, RolloutsSection
from swarm.engine.engine import AnswerRequest, Completion, Engine
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.errors import SwarmError
from swarm.machine.child_python import module_command
from swarm.policy.policy import load_policy

_MODULE = "swarm.rollouts.engine_process"


class EngineProcess:
    """A `ResumingEngine` that samples from the weights of the last `load`, in a child process. For one thread at a time."""

    def __init__(
        self,
        policy: PolicySection,
        rollouts: RolloutsSection,
        *,
        device: str,
        num_threads: int | None = None,
        hash_cache: Path | None = None,
    ) -> None:
        """Start the process, which loads the base on `device` meanwhile. `num_threads`: of torch; None leaves it to torch."""
        self._socket, of_child = Pipe()
        with of_child:
            command = module_command(_MODULE, str(of_child.fileno()))
            self._process = subprocess.Popen(  # in a session of its own, as Ctrl-C is for this process
                command, stdin=subprocess.PIPE, pass_fds=[of_child.fileno()], start_new_session=True
            )
        self._is_ready = False
        self._send("start", policy, rollouts, device, num_threads, hash_cache)

    def wait_until_ready(self) -> None:
        """Wait for the base. Raises what loading it or making the engine raised."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample from this adapter from now on. The tensors are on the CPU."""
        self._ask("load", {name: tensor.numpy() for name, tensor in weights.items()})

    def close(self) -> None:
        """End the process, in the middle of a call, too: the thread that waits for that gets an error. Safe from any thread."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def generate(
        self, requests: Sequence[AnswerRequest], sampling: Sampling, *, seed: int, stop: Sequence[str] = ()
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        return self._ask("generate", requests, sampling, seed=seed, stop=stop)

    def resume(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        enough: int,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `ResumingEngine.resume`."""
        return self._ask("resume", requests, sampling, enough=enough, seed=seed, stop=stop)

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        return self._ask("score", prompt, answer)

    def answer_bytes(self, num_tokens: int) -> int:
        """See `Engine.answer_bytes`."""
        return self._ask("answer_bytes", num_tokens)

    @property
    def answers_wait(self) -> bool:
        """See `Engine.answers_wait`."""
        return self._ask("answers_wait")

    @property
    def held_bytes(self) -> int:
        """See `Engine.held_bytes`."""
        return self._ask("held_bytes")

    def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.wait_until_ready()
        self._send(name, *arguments, **named)
        return self._answer()

    def _send(self, name: str, *arguments: Any, **named: Any) -> None:
        try:
            self._socket.send((name, arguments, named))
        except OSError:
            raise self._end() from None

    def _answer(self) -> Any:
        try:
            answer, error = self._socket.recv()
        except (EOFError, OSError):
            raise self._end() from None
        if error is not None:
            raise error
        return answer

    def _end(self) -> SwarmError:
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return SwarmError(
            f"the process that samples must run as long as the node, got its end by {how}; free memory, or set "
            "rollouts.overlap = false"
        )


class _Child:
    """What the child does with each call."""

    def __init__(self) -> None:
        self._write: Callable[[Mapping[str, Tensor]], None]
        self._engine: Engine

    def start(
        self,
        policy: PolicySection,
        rollouts: RolloutsSection,
        device: str,
        num_threads: int | None,
        hash_cache: Path | None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        loaded = load_policy(policy, device=device, hash_cache=hash_cache)
        self._engine = make_engine(loaded, rollouts)
        self._write = lambda weights: write_adapter(loaded.model, weights)

    def load(self, weights: Mapping[str, Any]) -> None:
        self._write({name: torch.from_numpy(values) for name, values in weights.items()})

    def call(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if name in ("start", "load"):
            return getattr(self, name)(*arguments)
        found = getattr(self._engine, name)
        return found(*arguments, **named) if callable(found) else found


def _serve(socket: Connection) -> None:
    child = _Child()
    while True:
        try:
            name, arguments, named = socket.recv()
        except EOFError:
            return
        try:
            socket.send((child.call(name, arguments, named), None))
        except (SwarmError, torch.OutOfMemoryError) as error:
            socket.send((None, error))
        except Exception:  # whatever it is, this process has nobody to tell; the other one ends the node with it
            socket.send((None, RuntimeError(f"in the process that samples:\n{traceback.format_exc()}")))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # nothing is ever written there: it ends when the other process does
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
