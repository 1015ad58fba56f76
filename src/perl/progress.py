"""Says how far a long piece of work is: a live line on a terminal, a line now and then in a log.

Knows nothing of what is being done.
"""

import logging
import sys

from tqdm import tqdm

logger = logging.getLogger("perl")


def live_line(total: int, label: str, done: int = 0) -> tqdm:
    """A progress bar with rate and time left on a terminal; nothing where the output is a file or a pipe.

    Args:
        total: Units of work.
        label: What is being done.
        done: Units that are done already.
    """
    hidden = not sys.stderr.isatty() or not logger.isEnabledFor(logging.INFO)
    return tqdm(
        total=total,
        initial=done,
        desc=label,
        disable=hidden,
        leave=False,
        dynamic_ncols=True,
        bar_format="{n_fmt}/{total_fmt} |{bar:20}| {desc}  ETA {remaining}",
    )


def duration(seconds: float) -> str:
    """Seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
