"""What a command prints beside its result: our own lines, and of the libraries only errors.

Imports nothing heavy, so that it is set up before the libraries are.
"""

import logging
import os
import sys
import warnings


def set_up_output(*, quiet: bool) -> None:
    """Our own lines on stderr; those of the libraries only if they are errors."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, needed or not
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("perl")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
