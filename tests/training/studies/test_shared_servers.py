"""Cells of one real vLLM server: each is its solo run to the parity of servers; one that is too small is refused."""

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import perl
from perl.errors import RecipeError
from perl.recipe.server_address import server_address
from perl.rollouts.vllm.adapter_room import adapter_rooms
from perl.run.folder import Run
from perl.training.studies.shared_servers import check_room, room_lines, served
from perl.training.studies.written_plan import load_study
from tests.ports import free_port
from tests.rollouts.loopback import Proxy

ROOM = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
STEPS = 2
OVERRIDES = {
    "train.max_steps": STEPS,
    "train.prompts_per_step": 4,
    "train.num_generations": 4,
    "train.per_device_train_batch_size": 16,
    "rollout.max_completion_length": 24,
    "rollout.backend": "vllm-server",
    "rollout.check_every": 1,
    "eval.limit": 8,
    "eval.k": 1,
}


def study_on(url, **changes):
    grid = [{"peft.method": ["lora"], "peft.rank": [2]}, {"peft.method": ["hra"], "peft.rank": [4]}]
    overrides = OVERRIDES | {"rollout.servers": [url]} | changes.pop("overrides", {})
    return {"recipe": "quickstart", "overrides": overrides, "grid": grid, "seeds": {"score": [1]}} | changes


class Seeded(Proxy):
    """Before a server whose completions then depend on what is asked, so that two runs can be compared."""

    def forward(self, method, path, headers, body):
        if path == "/v1/completions":
            asked = json.loads(body)
            plain = json.dumps({key: value for key, value in asked.items() if key != "model"}, sort_keys=True)
            if asked.get("seed") is None:
                asked["seed"] = int.from_bytes(hashlib.sha256(plain.encode()).digest()[:4], "little")
            body = json.dumps(asked).encode()
            headers = {key: value for key, value in headers.items() if key.lower() != "content-length"}
        return super().forward(method, path, headers, body)


@pytest.fixture(scope="module")
def small_server(own_servers):
    """Room for two adapters of rank 8; as `perl rollout command` starts it, so that it does not report its settings."""
    return own_servers(1, ROOM, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})[0].url


@pytest.fixture(scope="module")
def both(small_server, tmp_path_factory):
    """Run folders of each cell, of the study in which they trained side by side and of its recipe alone."""
    folder = tmp_path_factory.mktemp("shared")
    with Seeded(small_server)() as url:
        study = study_on(url, at_once=2)
        result = perl.study(study, folder / "out")
        assert [row.status for row in result.rows] == ["done", "done"], result.rows
        for row in result.rows:
            settings = study["overrides"] | dict(row.settings) | {"train.seed": row.seed}
            perl.train(
                "quickstart", [f"{key}={json.dumps(value)}" for key, value in settings.items()], folder / row.name
            )
    return [(folder / "out" / "cells" / "score" / row.name, folder / row.name) for row in result.rows]


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_cells_of_one_server_are_proven_like_their_solo_runs(both):
    for shared, alone in both:
        for run in (shared, alone):
            rows = rows_of(run)
            assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
            near_nothing = pytest.approx([0.0] * STEPS, abs=1e-4)
            assert [row["sync/logp_diff"] for row in rows] == near_nothing
            assert [row["sampling/sampling_logp_difference/mean"] for row in rows] == near_nothing
            assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 2e-3
            assert [row["sampling/corrected_fraction"] for row in rows] == [0.0] * STEPS


@pytest.mark.nightly
def test_cells_of_one_server_end_with_the_adapters_and_scores_of_their_solo_runs(both):
    """The completions are those of what was asked, so that nothing but the rounding of a server's batch differs."""
    for shared, alone in both:
        mine, other = ([(row["reward"], row["kl"]) for row in rows_of(run)] for run in (shared, alone))
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)
        mine, other = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (shared, alone))
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)
        scores = [[task["adapter"] for task in Run.read(run).facts["eval"].values()] for run in (shared, alone)]
        assert scores[0] == pytest.approx(scores[1])
    ranks = [json.loads((shared / "adapter" / "adapter_config.json").read_text())["r"] for shared, _ in both]
    assert ranks == [2, 4]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"at_once": 2}, []),
        ({"at_once": 3, "seeds": {"score": [1, 2]}}, ["at_once: {} has room for 2 adapters at a time, and 3 cells at"]),
        ({"at_once": 3}, []),  # two cells are all there are
        (
            {"at_once": 2, "overrides": {"rollout.prefetch": 1}},
            ["at_once: {} has room for 2 adapters at a time, and 2 cells at once need 4 (start it with"],
        ),
        (
            {"grid": {"peft.method": ["lora"], "peft.rank": [8, 9]}},
            ["grid: {} takes adapters up to rank 8, and lora, rank 9 needs 16 (start it with --max-lora-rank"],
        ),
    ],
)
def test_a_server_without_room_is_refused_in_a_line_before_a_cell_trains(small_server, tmp_path, changes, lines):
    study = load_study(study_on(small_server, **changes))
    if not lines:
        assert check_room(study, served(study), tmp_path) == []
        return
    with pytest.raises(RecipeError) as raised:
        check_room(study, served(study), tmp_path)
    for mistake, line in zip(raised.value.mistakes, lines, strict=True):
        assert str(mistake).startswith(line.format(small_server))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_folder_that_was_made_to_ask(tmp_path):
    (there := tmp_path / "there").mkdir()
    (absent,) = adapter_rooms([server_address(f"http://127.0.0.1:{free_port()}")], 8, there / "deep" / "sync")
    assert absent.absent
    assert len(list(tmp_path.rglob("*"))) == pytest.approx(1)  # that which was there


def test_what_a_server_has_room_for_is_known_whether_or_not_it_says_so(small_server, vllm_server, tmp_path):
    addresses = [server_address(url) for url in (small_server, vllm_server, f"http://127.0.0.1:{free_port()}")]
    small, told, absent = adapter_rooms(addresses, 128, tmp_path)
    assert (small.adapters, small.rank) == (2, 8)
    assert (told.adapters, told.rank) == (4, 64)
    assert (absent.adapters, absent.rank) == (None, None)
    assert absent.absent
    study = load_study(study_on(absent.url))
    (line,) = room_lines(study, tmp_path / "not" / "there")
    assert line.startswith(f"{absent.url} does not answer: ")
