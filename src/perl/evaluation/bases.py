"""The bases of several evaluations: each once, where several were compared with the same one.

Results of several -> numbers of those that have a base in common; what rows are called
"""

from collections.abc import Collection, Sequence

from perl.evaluation.results import Results

SHORT_SHA = 12
"""Digits of a hash that tell policies apart."""


def adapter_names(results: Sequence[Results]) -> list[str]:
    """What the results are called; with a hash or a number where they are called the same, or as a row for bases is."""
    plain = [str(found.subject["name"]) for found in results]
    hashes = [(found.subject.get("adapter_sha256") or "")[:SHORT_SHA] for found in results]
    longer = [
        f"{name} ({sha})" if sha and (plain.count(name) > 1 or name == "base") else name
        for name, sha in zip(plain, hashes, strict=True)
    ]
    return numbered(longer)


def numbered(names: Sequence[str]) -> list[str]:
    """The same names, those that stand there more than once with a number behind them."""
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def base_groups(results: Sequence[Results], numbers: Sequence[int], tasks: Collection[str]) -> list[list[int]]:
    """Which results have the same base, in the order of the first of each.

    Args:
        results: Of which the numbers are.
        numbers: Of those that are looked at.
        tasks: On which a base must have scored the same, as far as several have it there.
    """
    groups: list[list[int]] = []
    for i in numbers:
        same = (group for group in groups if all(_same_base(results[i], results[j], tasks) for j in group))
        group = next(same, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return groups


def base_names(results: Sequence[Results], names: Sequence[str], groups: Sequence[Sequence[int]]) -> list[str]:
    """A name for the base of each group: ``base``, if there is one only."""
    called = [str(results[group[0]].subject["base"]) for group in groups]
    if len(groups) == 1:
        return ["base"]
    return [
        f"base {base}" if called.count(base) == 1 else f"base of {names[group[0]]}"
        for group, base in zip(groups, called, strict=True)
    ]


def _same_base(one: Results, other: Results, tasks: Collection[str]) -> bool:
    """Whether two results have the same base and it did the same under the same protocol wherever both scored it."""
    known = ("base", "base_revision", "base_sha256", "base_quantization")
    if any(one.subject.get(name) != other.subject.get(name) for name in known):
        return False
    others = {task.name: task for task in other.tasks}
    shared = [(t, others[t.name]) for t in one.tasks if t.name in others and t.name in tasks]
    return all((a.base, a.protocol_hash) == (b.base, b.protocol_hash) for a, b in shared if a.base and b.base)
