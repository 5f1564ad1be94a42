"""How libraries load models, tokenizers and configurations here: from a folder, never with code of that folder, and quietly."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.observability.progress import tracked


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Call `kind.from_pretrained` of a transformers class. Raises what it raises; ValueError where the folder needs code.

    By default transformers asks on the terminal whether to run such code, and accepts a `y` from a pipe.
    """
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.set_tqdm_hook(_bar)
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    finally:
        transformers_logging.set_tqdm_hook(before)


def _bar(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Show how many weights are loaded as all other progress is shown."""
    if options.get("desc") != "Loading weights" or len(arguments) != 1:
        return factory(*arguments, **options)
    return tracked(arguments[0], "loading weights", len(arguments[0]))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide warnings and progress bars of transformers and peft within this context; their errors still appear.

    bitsandbytes stays at error level after it: it warns in every forward pass about the cast that 8-bit bases always make,
    and at import (by peft) about optional kernels that are not needed here.
    """
    from transformers.utils import logging as transformers_logging

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
