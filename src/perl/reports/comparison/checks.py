"""Whether a run's scores are its own, as far as its small files tell: no weights are read, no completion is judged.

RunLog, Results -> the first contradiction, or None

``perl card --check`` and ``perl eval compare`` do more: they count from the samples.
"""

import math
from collections.abc import Mapping

from perl.evaluation.recounting.recount import recount
from perl.evaluation.results import Results
from perl.reports.run_log import RunLog, number

_CLOSE = 1e-9
_RESULTS = "results.json"


def disagreement(run: RunLog, results: Results) -> str | None:
    """Where the files of a run say something else than each other; None: nowhere.

    Figures must follow from each problem's rights and wrongs, base and adapter must be those that ``run.json`` names,
    and the scores there the same; seed and method must be the recipe's.

    Args:
        run: Finished.
        results: Of its last adapter.
    """
    found = recount(results).mistakes
    if found:
        return f"{found[0].where or _RESULTS}: {found[0].message}"
    other = of_another(run, results)
    if other is not None:
        return f"{_RESULTS} is of another {other} than run.json names"
    for name, facts in _mapping(run.facts.get("eval")).items():
        task = next((task for task in results.tasks if task.name == name), None)
        told = number(_mapping(facts).get("adapter"))
        right = None if task is None or task.adapter is None else task.adapter.accuracy
        if told is not None and right is not None and not math.isclose(told, right, rel_tol=_CLOSE):
            return f"run.json says {told:g} of {name}, {_RESULTS} {right:g}"
    return _of_recipe(run)


def of_another(run: RunLog, results: Results) -> str | None:
    """``base`` or ``adapter`` if results are of another one than the run names; None: not as far as it says."""
    fingerprint = _mapping(run.facts.get("fingerprint"))
    for of in ("base", "adapter"):
        said, known = results.subject.get(f"{of}_sha256"), fingerprint.get(of)
        if said is not None and known is not None and said != known:
            return of
    return None


def _of_recipe(run: RunLog) -> str | None:
    train, peft = _mapping(run.settings.get("train")), _mapping(run.settings.get("peft"))
    if not peft.get("adapter") and not peft.get("type"):
        said, known = run.facts.get("method"), peft.get("method")
        if said is not None and known is not None and said != known:
            return f"run.json says method {said}, recipe.yaml {known}"
    said, known = run.facts.get("seed"), train.get("seed")
    if said is not None and known is not None and said != known:
        return f"run.json says seed {said}, recipe.yaml {known}"
    return None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
