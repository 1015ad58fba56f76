"""What a training argument needs is known for every tracker and optimizer of the installed transformers."""

import inspect
import re

import pytest
from transformers import trainer_optimizer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames

from perl.recipe.optional_packages import (
    OPTIMIZERS,
    SWITCHES,
    TRACKERS,
    RequiredPackage,
    missing_packages,
    tracker_mistakes,
)

# Of the libraries that transformers imports for an optimizer, those that come with it.
_OURS = {"torch", "transformers", "packaging", "importlib", "functools"}


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(RequiredPackage, "installed", property(lambda _: False))
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)


def problems(**train):
    return list(missing_packages(train))


@pytest.mark.usefixtures("nothing_installed")
def test_every_tracker_of_transformers_is_known_and_refused_without_its_package():
    assert set(TRACKERS) == set(INTEGRATION_TO_CALLBACK)
    for name, reports in [(known, given) for known in INTEGRATION_TO_CALLBACK for given in (known, [known])]:
        found = [*problems(report_to=reports), *tracker_mistakes(reports, "train.report_to")]
        assert len(found) == max(1, len(TRACKERS[name])), name
        for problem, package in zip(found, TRACKERS[name], strict=False):
            assert package.pip in str(problem)
            assert "pip install" in problem.hint
            assert "train.report_to" in str(problem)


@pytest.mark.usefixtures("nothing_installed")
def test_an_optimizer_is_refused_exactly_where_transformers_needs_more_than_torch():
    for optimizer in OptimizerNames:
        handler = inspect.getsource(trainer_optimizer._OPTIMIZER_HANDLERS[optimizer])
        modules = {
            name.split(".")[0]
            for names in re.findall(r"^ +from ([a-z][\w.]*) import|^ +import (\w+)", handler, re.M)
            for name in names
            if name
        } - _OURS
        found = problems(optim=optimizer.value)
        assert len(found) == bool(modules), (optimizer, modules)
        for problem in found:
            (module,) = modules
            (package,) = {p.pip: p for p in OPTIMIZERS.values() if module in p.modules}.values()
            assert f"the package {package.pip}" in str(problem)
            assert problem.where == "train.optim"


def test_a_switch_is_refused_without_its_package_and_what_is_off_or_installed_is_no_mistake(monkeypatch):
    assert SWITCHES
    with monkeypatch.context() as patched:
        patched.setattr(RequiredPackage, "installed", property(lambda _: False))
        for name in SWITCHES:
            (problem,) = problems(**{name: True})
            assert problem.where == f"train.{name}"
            assert [off for off in (None, False, "") if problems(**{name: off})] == [], name
    assert problems() == problems(report_to=None, optim=None) == []
    assert problems(report_to="none") == problems(report_to="all") == problems(report_to=[]) == []
    monkeypatch.setattr(RequiredPackage, "installed", property(lambda _: True))
    names = [name for name in TRACKERS if name != "kubeflow"]
    assert problems(report_to=names, optim="lomo", use_liger_kernel=True) == []
    # A package is found by any of its modules, and not by a parent.
    monkeypatch.undo()
    assert RequiredPackage(("nowhere_at_all", "json"), "x").installed
    assert RequiredPackage(("os.path",), "x").installed
    assert not RequiredPackage(("nowhere_at_all.deeper",), "x").installed
