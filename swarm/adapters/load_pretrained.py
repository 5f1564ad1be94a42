"""The one way to load models, tokenizers and configurations: from a folder, and never with code of that folder."""

from pathlib import Path
from typing import Any


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Call `kind.from_pretrained` of a transformers class. Raises what it raises; ValueError where the folder needs code.

    By default transformers asks on the terminal whether to run such code, and accepts a `y` from a pipe.
    """
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
