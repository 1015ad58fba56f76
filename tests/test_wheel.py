"""What people install: the wheel holds all it needs, and trains in an environment that never saw the checkout."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from perl.sandbox import MODELS

# In bytes of the archive: weights of the sandbox's two bases and of its zoo; code, recipes and texts. Together 5 MB.
LARGEST_WEIGHTS, LARGEST_REST = 3_400_000, 1_600_000
ASSETS = ("recipes", "eval", "model_cards")

# Loads what was trained as other people do: with PEFT alone on the published base.
LOAD_WITH_PLAIN_PEFT = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from perl.sandbox import BASE_FOLDER
base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
ids = torch.tensor([[7, 78, 8, 86]])
before = base(ids).logits.detach()
policy = PeftModel.from_pretrained(base, sys.argv[1])
print((policy(ids).logits - before).abs().max().item())
"""


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a person who is in no virtual environment and in no checkout."""
    dropped = ("PYTHON", "VIRTUAL_ENV", "PYTEST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, **extra}


def must_run(command: list, **options: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    for package in ("build", "hatchling"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("dist")
    checkout = Path(__file__).resolve().parent.parent
    must_run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, checkout],
        cwd=folder,
        env=clean_environment(),
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_what_it_needs_and_nothing_else_and_declares_its_scripts_and_licence(wheel, checkout):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        of_weights = [one for one in archive.infolist() if one.filename.endswith((".safetensors", ".tar.xz"))]
        weights = sum(one.compress_size for one in of_weights)
    assert weights <= LARGEST_WEIGHTS
    assert wheel.stat().st_size - weights <= LARGEST_REST
    expected = {"perl/py.typed"}
    for folder in ASSETS:
        files = [path for path in (checkout / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files, f"{folder} is empty"
        expected |= {f"perl/assets/{path.relative_to(checkout).as_posix()}" for path in files}
    single = {name for name in expected if "/zoo/entries/" in name}
    assert len(single) >= 20
    expected = expected - single | {"perl/assets/model_cards/zoo/entries.jsonl"}
    in_archives = {name for name in expected if "/zoo/adapters/" in name}
    assert len(in_archives) >= 2 * 6
    expected = expected - in_archives | {f"{name.rpartition('/')[0]}.tar.xz" for name in in_archives}
    expected |= {f"perl/sandbox/{folder.name}/{path.name}" for folder in MODELS.values() for path in folder.iterdir()}
    modules = [path for kind in ("py", "toml") for path in (checkout / "src").rglob(f"*.{kind}")]
    assert len(modules) >= 50
    expected |= {path.relative_to(checkout / "src").as_posix() for path in modules}
    pages = list((checkout / "src" / "perl" / "reports" / "templates").iterdir())
    assert len(pages) == 3
    expected |= {path.relative_to(checkout / "src").as_posix() for path in pages}
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == expected
    assert {name.partition(".dist-info/")[2] for name in metadata} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    assert {f"perl/sandbox/{name}/model.safetensors" for name in ("base", "copyist")} <= names
    with zipfile.ZipFile(wheel) as archive:
        files = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        entry_points = archive.read(files["entry_points.txt"]).decode()
        metadata = archive.read(files["METADATA"]).decode()
        licence = archive.read(files["licenses/LICENSE"])
    assert "perl = perl.cli.main:perl\n" in entry_points
    assert "perl-rl = perl.cli.main:perl_rl\n" in entry_points
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert licence == (checkout / "LICENSE").read_bytes()


@pytest.mark.nightly
def test_the_unpacked_wheel_trains_far_from_the_checkout(wheel, tmp_path, checkout):
    """With the packages of this environment."""
    unpacked, away = tmp_path / "unpacked", tmp_path / "away"
    away.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    environment = clean_environment(PYTHONPATH=str(unpacked), HF_HUB_OFFLINE="1")
    imported_from = must_run([sys.executable, "-c", "import perl; print(perl.__file__)"], cwd=away, env=environment)
    assert Path(imported_from.strip()).is_relative_to(unpacked)
    assert not unpacked.is_relative_to(checkout)
    short = ["train.max_steps=1", "eval.limit=4", "eval.k=1", "engine.threads=1"]
    must_run([sys.executable, "-m", "perl", "train", "quickstart", *short], cwd=away, env=environment)
    run = away / "runs" / "quickstart"
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    change = must_run([sys.executable, "-c", LOAD_WITH_PLAIN_PEFT, run / "adapter"], cwd=away, env=environment)
    assert float(change) > 0.0
    (away / "mine.yaml").write_text("extends: trlx/sandbox\ntrain: {max_steps: 16}\n", encoding="utf-8")
    planned = must_run([sys.executable, "-m", "perl", "train", "mine.yaml", "--dry-run"], cwd=away, env=environment)
    assert "algorithm: ppo" in planned
    assert "# steps    16 " in planned
    must_run([sys.executable, "-m", "perl", "zoo", "pull", "sandbox-lora", "pulled"], cwd=away, env=environment)
    shipped = checkout / "model_cards" / "zoo" / "adapters" / "sandbox-lora" / "adapter_model.safetensors"
    assert (away / "pulled" / shipped.name).read_bytes() == shipped.read_bytes()
