"""Hides output of other libraries while models load."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
