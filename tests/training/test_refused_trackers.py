"""Trackers that cannot work are refused in one line each, before a model loads and without asking any of them."""

import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerState

from perl.errors import MissingExtraError, PerlError, RecipeError
from perl.recipe.optional_packages import Package
from perl.recipe.tracker_checks import named_trackers, unusable_trackers
from perl.trainer.config import PeftRLConfig
from perl.trainer.trackers import KeptRuns
from tests.ports import free_port
from tests.training.test_interruptions import RECIPE, TRIPWIRE
from tests.training.tracker_fixtures import INSTALLED, MODULES, SQL, needs


def mistakes(**settings: object) -> list[str]:
    return [str(mistake) for mistake in unusable_trackers({"report_to": settings.pop("report_to"), **settings})]


@needs["wandb"]
def test_wandb_without_a_login_is_refused_and_any_form_of_one_is_enough(nobody, monkeypatch):
    (line,) = mistakes(report_to="wandb")
    assert line.startswith("report_to: wandb has no login for api.wandb.ai")
    assert "`wandb login`, or WANDB_MODE=offline" in line
    for variable, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": "x" * 40, "WANDB_DISABLED": "true"}.items():
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            assert mistakes(report_to=["wandb"]) == []
    (nobody / "wandb").mkdir()
    (nobody / "wandb" / "settings").write_text("[default]\nmode = offline\n")  # as `wandb offline` writes it
    assert mistakes(report_to="wandb") == []
    (nobody / "wandb" / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    (nobody / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert "wandb.example.org" in mistakes(report_to="wandb")[0]
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    assert mistakes(report_to="wandb") == []


@needs["mlflow"]
@pytest.mark.usefixtures("nobody")
def test_a_store_that_mlflow_would_refuse_is_refused_before(monkeypatch):
    if SQL:
        assert mistakes(report_to="mlflow") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:/somewhere")
    assert "MLFLOW_TRACKING_URI=sqlite:///mlflow.db, or MLFLOW_ALLOW_FILE_STORE=true" in mistakes(report_to="mlflow")[0]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert mistakes(report_to="mlflow") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    monkeypatch.setattr(Package, "installed", property(lambda package: package.pip not in ("sqlalchemy", "alembic")))
    assert ["sqlalchemy" in line and "perl-rl[track]" in line for line in mistakes(report_to="mlflow")] == [True, False]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")  # is not asked
    assert mistakes(report_to="mlflow") == []


@needs["mlflow"]
@pytest.mark.usefixtures("nobody")
def test_a_database_whose_driver_is_missing_is_refused_before(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://me:secret@host/db")
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    (line,) = mistakes(report_to="mlflow")
    assert "mlflow needs the package psycopg2 for its database (pip install psycopg2)" in line
    assert "secret" not in line


@needs["mlflow"]
@pytest.mark.usefixtures("nobody")
def test_a_server_that_does_not_answer_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    args = PeftRLConfig(str(tmp_path), use_cpu=True, report_to=["mlflow"])
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]))
    with pytest.raises(PerlError) as raised:
        KeptRuns(trainer).on_train_begin(args, TrainerState())
    assert str(raised.value).startswith("report_to: mlflow takes no run: ")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("beside", ["none", "all"])
def test_none_and_all_stand_alone(beside):
    with pytest.raises(RecipeError, match=f"report_to: {beside} stands beside other names"):
        PeftRLConfig("out", report_to=[beside, "tensorboard"], use_cpu=True)


@needs["trackio"]
@pytest.mark.usefixtures("nobody")
def test_trackio_is_refused_a_space_without_a_network_and_a_server_without_a_token(monkeypatch):
    assert mistakes(report_to="trackio") == []
    assert (
        "the Space user/curves, and HF_HUB_OFFLINE is set"
        in mistakes(report_to="trackio", trackio_space_id="user/curves")[0]
    )
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://curves.example.org")
    assert "TRACKIO_WRITE_TOKEN" in mistakes(report_to="trackio")[0]


@pytest.mark.usefixtures("nobody")
def test_a_scripts_arguments_refuse_a_tracker_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(
        RecipeError, match=r"^report_to: there is no tracker 'tensorbord' \(did you mean tensorboard\?\)$"
    ):
        PeftRLConfig(str(tmp_path), use_cpu=True, report_to="tensorbord")
    if "wandb" in INSTALLED:
        with pytest.raises(RecipeError, match=r"^report_to: wandb has no login[^\n]*$"):
            PeftRLConfig(str(tmp_path), use_cpu=True, report_to=["wandb"])
    monkeypatch.setattr(Package, "installed", property(lambda _: False))
    with pytest.raises(
        MissingExtraError, match=r"^report_to needs the package trackio \(pip install 'perl-rl\[track\]'\)$"
    ):
        PeftRLConfig(str(tmp_path), use_cpu=True, report_to=["trackio"])
    assert PeftRLConfig(str(tmp_path), use_cpu=True, report_to="none").report_to == []


@needs["wandb"]
def test_a_recipes_dry_run_names_the_line_and_another_machine_may_lack_trackers(nobody, capsys):
    from perl.cli.commands import run
    from perl.training.plan import make_plan
    from perl.training.stages import read_recipe

    (nobody / "tripwire.py").write_text(TRIPWIRE)
    (nobody / "recipe.yaml").write_text(RECIPE.replace("  beta: 0.01\n", "  beta: 0.01\n  report_to: wandb\n"))
    assert run(["train", "recipe.yaml", "--dry-run"], "perl") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe.yaml:13: train.report_to: wandb has no login for api.wandb.ai")
    assert len(error.splitlines()) == 1
    assert make_plan(read_recipe("recipe.yaml"), runs_here=False).arguments.report_to == []


def test_all_are_those_that_are_installed():
    assert set(named_trackers("all")) & set(MODULES) == set(INSTALLED)
    assert named_trackers("none") == named_trackers(None) == named_trackers(["none"]) == []
    assert named_trackers("wandb") == named_trackers(["wandb"]) == ["wandb"]
