"""Stage h: whether compiled layers and a fused head make a step faster, each beside neither and both.

The switches are off until they do; ``compile_and_fuse.py`` says what its columns mean.
"""

from compile_and_fuse import measure, table

__all__ = ["measure", "table"]
