"""What a process may take of the machine that it shares with other processes of its run.

so many of something on a node -> this process's part
"""

import os


def own_share(count: int) -> int:
    """This process's part of what its node has, so that all of its processes together take no more.

    At least one: more processes than there are take one each, and so more than there are.

    Args:
        count: How many there are for the node: worker processes, CPU threads.
    """
    processes, number = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return max(1, count // processes + (number < count % processes))
