"""The one way in which models, tokenizers and configurations are loaded: from a folder, and never with code of that folder."""

from pathlib import Path
from typing import Any


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """`kind.from_pretrained` of a class of transformers. Raises what that raises, among it ValueError for a folder that needs
    code of its own.

    Left to itself, transformers asks on the terminal whether to run such code, and takes an `y` from a pipe for consent.
    """
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
