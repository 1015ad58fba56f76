"""Trackers that cannot work are refused in one line each, before a model loads and without asking any of them."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from perl.errors import MissingExtraError, PerlError, RecipeError
from perl.recipe.optional_packages import RequiredPackage, unusable_trackers
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.callbacks.trackers import KeptRuns
from tests.launch.launchers import TRIPWIRE
from tests.ports import free_port
from tests.training.test_interruptions import RECIPE
from tests.training.tracker_fixtures import INSTALLED, SQL, needs


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
    monkeypatch.setattr(
        RequiredPackage, "installed", property(lambda package: package.pip not in ("sqlalchemy", "alembic"))
    )
    assert ["sqlalchemy" in line and "perl-rl[track]" in line for line in mistakes(report_to="mlflow")] == [True, False]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")  # is not asked
    assert mistakes(report_to="mlflow") == []


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


@pytest.mark.usefixtures("nobody")
def test_a_scripts_arguments_refuse_a_tracker_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(
        RecipeError, match=r"^report_to: there is no tracker 'tensorbord' \(did you mean tensorboard\?\)$"
    ):
        PeftRLConfig(str(tmp_path), use_cpu=True, report_to="tensorbord")
    if "wandb" in INSTALLED:
        with pytest.raises(RecipeError, match=r"^report_to: wandb has no login[^\n]*$"):
            PeftRLConfig(str(tmp_path), use_cpu=True, report_to=["wandb"])
    monkeypatch.setattr(RequiredPackage, "installed", property(lambda _: False))
    with pytest.raises(
        MissingExtraError, match=r"^report_to needs the package trackio \(pip install 'perl-rl\[track\]'\)$"
    ):
        PeftRLConfig(str(tmp_path), use_cpu=True, report_to=["trackio"])
    assert PeftRLConfig(str(tmp_path), use_cpu=True, report_to="none").report_to == []


@needs["wandb"]
def test_a_recipes_dry_run_names_the_line_and_another_machine_may_lack_trackers(nobody, capsys):
    from perl.cli.commands import run
    from perl.training.prepare import plan_of, read_recipe

    (nobody / "tripwire.py").write_text(TRIPWIRE)
    (nobody / "recipe.yaml").write_text(RECIPE.replace("  beta: 0.01\n", "  beta: 0.01\n  report_to: wandb\n"))
    assert run(["train", "recipe.yaml", "--dry-run"], "perl") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe.yaml:12: train.report_to: wandb has no login for api.wandb.ai")
    assert len(error.splitlines()) == 1
    assert plan_of(read_recipe("recipe.yaml"), runs_here=False).arguments.report_to == []
