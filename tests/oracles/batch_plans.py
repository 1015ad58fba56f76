"""The plan of a batch by search over all ways to cut it.

prompts, generations, rows, passes (None: free), processes -> those five numbers, or None where nothing fits
"""


def search(prompts, generations, rows, passes, world_size):
    """The first plan among all that fit, in the documented order of preference; None if nothing fits."""
    generations = generations or 8
    if prompts is None and (rows or passes):
        rows, passes = rows or 8, passes or 1
        wanted = range(1, rows * passes * world_size + 1)
    else:
        wanted = [prompts or 16]
    for p in wanted:
        completions = p * generations
        largest_first = [rows] if rows else range(8 if passes is None else completions, 0, -1)
        # Room for more than there is, or what fits one process: on several, or the next below.
        if rows and passes is None and (completions % rows == 0 or rows * world_size > completions):
            largest_first = range(rows, 0, -1)
        for r in largest_first:
            for a in [passes] if passes else range(1, completions + 1):
                if r * a * world_size == completions:
                    return p, generations, r, a, world_size
    return None
