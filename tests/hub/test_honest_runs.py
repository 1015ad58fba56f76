"""A run that logged as its recipe asked can be published: its card is true, whatever it asked for."""

import json
import math
from importlib.metadata import PackageNotFoundError

import pytest

from perl import __version__
from perl.hub.card.candidate import find_candidate
from perl.hub.card.facts import RUN_FACTS
from perl.hub.card.published import PUBLIC_RECIPE
from perl.hub.push.package import PushPackage, package_candidate, package_mistakes
from perl.recipe import load_recipe
from perl.recipe.plain_yaml import plain_value
from perl.run.folder import installed_versions
from tests.hub.card_runs import make_run

TRAIN = {"seed": 3, "loss_type": "dapo", "learning_rate": 1e-5}


def _rows(steps, reward=lambda step: step / 100):
    return [{"step": step, "reward": reward(step), "num_tokens": 1000.0 * step} for step in steps]


def _logged(tmp_path, train, rows, steps=50, **recipe):
    """A run of so many steps with that log, as a training leaves it."""
    run = make_run(tmp_path / "run", train=TRAIN | train, **recipe)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not rows:
        run.metrics.unlink()
    settings = run.facts["settings"] | {"KL coefficient (beta)": train.get("beta", 0.0)}
    run.record(steps=steps, settings=settings)
    return run


OWN = {"accuracy": 1.0, "short.py:brevity": 0.5, "format": 0.2}


@pytest.mark.parametrize(
    ("train", "rows", "steps", "rewards"),
    [
        ({"max_steps": 50, "logging_steps": 5}, _rows(range(5, 51, 5)), 50, {}),
        ({"max_steps": 120, "logging_steps": 0.1}, _rows(range(12, 121, 12)), 120, {}),
        ({"max_steps": 10, "logging_steps": 0.6}, _rows([6]), 10, {}),
        ({"num_train_epochs": 3, "logging_steps": 0.1}, _rows(range(12, 121, 12)), 120, {}),
        ({"max_steps": 100, "logging_strategy": "epoch"}, _rows([40, 80]), 100, {}),
        ({"max_steps": 50, "logging_strategy": "no"}, [], 50, {}),
        ({"max_steps": 50, "logging_steps": 20, "logging_first_step": True}, _rows([1, 20, 40]), 50, {}),
        ({"max_steps": 1}, _rows([1]), 1, {}),
        ({"max_steps": 50, "beta": 0.04}, _rows(range(1, 51)), 50, {}),
        ({"max_steps": 50}, _rows(range(1, 51), lambda step: None if step == 1 else 0.5), 50, {}),
        ({"max_steps": 50}, _rows(range(1, 51), lambda step: math.nan if step in (1, 50) else 0.5), 50, {}),
        ({"max_steps": 50}, _rows(range(1, 51)), 50, OWN),
    ],
)
def test_whatever_was_logged_as_asked_can_be_published_with_any_rewards(train, rows, steps, rewards, tmp_path):
    (tmp_path / "short.py").write_text("def brevity(completions, **_):\n    return [0.0 for _ in completions]\n")
    weights = {"rewards": {name: {"weight": weight} for name, weight in rewards.items()}} if rewards else {}
    run = _logged(tmp_path, train, rows, steps, **weights)
    run.record(**({"rewards": rewards} if rewards else {}))
    package = package_candidate(find_candidate(run), "user/adapter")
    assert [str(problem) for problem in package_mistakes(package, run.path)] == []


def _continued(tmp_path, name, says):
    """A run that went on from an adapter of that name, as its recipe and its run.json say."""
    run = make_run(tmp_path / "run", peft={"adapter": name})
    run.record(settings={"continues": says, **run.facts["settings"]})
    return package_candidate(find_candidate(run), "user/adapter"), run


def test_a_run_that_goes_on_from_an_adapter_says_from_which(tmp_path):
    for number, (name, shown) in enumerate(
        (
            *(("zoo:lora", "zoo:lora"), ("user/first@v2", "user/first@v2")),
            *(("/srv/runs/first", "first"), ("a run/first", None)),
        )
    ):
        package, run = _continued(tmp_path / f"{number}", name, name)
        assert [str(problem) for problem in package_mistakes(package, run.path)] == [], name
        assert json.loads(package.files[RUN_FACTS])["settings"].get("continues") == shown
        assert b"/srv/runs" not in b"".join(package.files.values())


def _taught(folder, adapter, says):
    """A run that a teacher with that adapter taught, as its recipe and its run.json say."""
    run = make_run(folder / "run", teacher={"adapter": adapter})
    how = "the base with another adapter; KL over the vocabulary x 1"
    run.record(settings={**run.facts["settings"], "teacher": how, **says})
    return package_candidate(find_candidate(run), "user/adapter"), run


def test_a_run_with_a_teacher_says_whose_adapter_taught_and_its_digest(tmp_path):
    name, digest = "teacher adapter", {"teacher adapter SHA-256": "0a" * 32}
    local = {"runs/other": "other", "/srv/runs/other": "other", "a run/my own": "my own"}
    taught = {"zoo:lora": "zoo:lora", "user/first@v2": "user/first@v2", **local}
    for number, (adapter, called) in enumerate(taught.items()):
        package, run = _taught(tmp_path / f"{number}", adapter, {name: called, **digest})
        assert [str(problem) for problem in package_mistakes(package, run.path)] == [], adapter
        shown = json.loads(package.files[RUN_FACTS])["settings"]
        assert shown.get(name) == (called if " " not in called else None)
        assert f"| teacher adapter SHA-256 | {'0a' * 32} |" in package.files["README.md"].decode()
        assert plain_value(package.files[PUBLIC_RECIPE].decode())["teacher"]["adapter"] == called


def test_a_run_that_chose_its_prompts_says_how_as_its_recipe_does(tmp_path):
    prompts = {"refill": 2, "curriculum": "[a](https://nobody.example) | **level**"}
    run = make_run(tmp_path / "run", prompts=prompts)
    shown = load_recipe({"prompts": prompts}).prompts.shown
    run.record(settings={**run.facts["settings"], "prompts": shown})
    package = package_candidate(find_candidate(run), "user/adapter")
    assert [str(problem) for problem in package_mistakes(package, run.path)] == []
    assert f"| prompts | {shown} |" in package.files["README.md"].decode()
    facts = json.loads(package.files[RUN_FACTS])
    facts["settings"]["prompts"] = f"{shown}; see [here](nobody)"
    changed = PushPackage({**package.files, RUN_FACTS: json.dumps(facts).encode()})
    assert any("settings" in str(problem) for problem in package_mistakes(changed, run.path))


def test_a_run_of_a_checkout_that_is_only_on_the_path_can_be_published(tmp_path, monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("perl.run.folder.version", version)
    run = _logged(tmp_path, {"max_steps": 50}, _rows(range(1, 51)))
    run.record(versions=installed_versions())
    package = package_candidate(find_candidate(run), "user/adapter")
    assert [str(problem) for problem in package_mistakes(package, run.path)] == []
    facts = json.loads(package.files[RUN_FACTS])
    assert (facts["perl"], facts["versions"]["perl-rl"]) == (__version__, __version__)
    assert facts["versions"]["torch"] == "not installed"
