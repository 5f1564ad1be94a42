"""Single tensors out of a folder of safetensors files: what a stage does not hold is never read."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm.errors import PipelineError
from swarm.policy.base_folder import weight_files


class WeightReader:
    """Names are those in the files. Files with other tensors may be absent: a stage needs only its own."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers. Raises PolicyError without weight files, PipelineError for others than safetensors."""
        self.num_bytes = 0
        """Bytes of the tensors read so far."""
        self._files: dict[str, Path] = {}
        for path in weight_files(folder):
            if path.suffix != ".safetensors":
                raise PipelineError(
                    f"a pipelined base must hold safetensors, got {path.name} in {folder}; convert it first"
                )
            try:
                with safe_open(path, "pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from None

    def names(self) -> set[str]:
        """All that the files hold."""
        return set(self._files)

    def read(self, names: Iterable[str]) -> tuple[dict[str, Tensor], str]:
        """(tensors by name, SHA-256 over names, types, shapes and contents). Raises PipelineError for what is absent.

        Two folders give the same hash for the same tensors, however they are split into files.
        """
        tensors: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name in sorted(set(names)):
            path = self._files.get(name)
            if path is None:
                raise PipelineError(f"a stage's weights must be in the base's files, got no {name}; fetch it again")
            try:
                with safe_open(path, "pt") as file:
                    tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from None
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            self.num_bytes += tensor.nbytes
            tensors[name] = tensor
        return tensors, digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> PipelineError:
    return PipelineError(
        f"a stage's weights must be readable, got {path}: {' '.join(str(error).split())[:200]}; fetch the model again"
    )
