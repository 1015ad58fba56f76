"""What a command prints: its result, our own lines beside it, and of the libraries only errors.

text -> the terminal, made visible (:func:`perl.errors.visible`)

Nothing else of the command line prints. Imports nothing heavy, so that it is set up before the libraries are.
"""

import logging
import os
import sys
import warnings

import click

from perl.errors import visible
from perl.recipe.recipe import is_first_process, rank

ARGUMENTS = "perl.arguments"
"""Where a command finds what was typed after ``perl``, in its context's ``meta``."""


def say(text: object, *, err: bool = False, colour: str | None = None, end: str = "\n") -> None:
    """Prints a text.

    Args:
        text: Its names may be anybody's: what a terminal would obey is shown, not sent.
        err: On stderr.
        colour: Of all of it, where a person is at the terminal.
        end: What follows it.
    """
    click.secho(visible(str(text)) + end, err=err, fg=colour, nl=False)


class _Visible(logging.Formatter):
    """A line of ours, with the same care; of several processes the main one says what all would."""

    def format(self, record: logging.LogRecord) -> str:
        named = "" if is_first_process() else f"rank {rank()}: "
        return named + visible(super().format(record))


def set_up_output(*, quiet: bool) -> None:
    """Our own lines on stderr; those of the libraries only if they are errors."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
    # PEFT imports them where they are installed, needed or not; torchao names kernels of GPUs that are not here.
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Transformers imports it where it is installed, and it has something to say of each machine without a GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible("%(message)s"))
    logger = logging.getLogger("perl")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR if quiet else logging.INFO if is_first_process() else logging.WARNING)
