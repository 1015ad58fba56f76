"""Processes of a run on one machine divide what it has."""

import json

import pytest
import torch

from perl.run import threads
from perl.run.node import own_share
from perl.run.threads import fitting_threads
from tests import warm


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_together_they_take_what_there_is_and_at_least_one_each(monkeypatch, count, processes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    shares = []
    for number in range(processes):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        shares.append(own_share(count))
    assert sum(shares) == max(count, processes)
    assert max(shares) - min(shares) <= 1


def test_a_process_that_no_launcher_started_takes_all(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert own_share(5) == 5


def test_the_processes_of_a_machine_divide_its_threads_unless_someone_chose_the_number(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_defaults", lambda: {4})
    monkeypatch.setattr(threads, "_asked", False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    large, before = torch.nn.Linear(2048, 1024), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for processes in (1, 2, 8):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
            found.append(fitting_threads(large))
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        found.append(fitting_threads(large))
    finally:
        torch.set_num_threads(before)
    assert found == [4, 2, 1, 4]


def test_workers_are_counted_for_the_machine_and_not_for_each_process(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(
        "import json, os, sys, time\n"
        "import psutil\n"
        "from perl.rewards.custom import Failures, in_workers\n"
        "from perl.rewards.verifier import check_all, start_workers\n"
        "start_workers(3)\n"
        "verifier = len(psutil.Process().children())\n"
        "[verdict] = check_all(['x+1'], ['\\\\boxed{1+x}'], workers=3)\n"
        "own = in_workers('math:prod', {}, Failures('math:prod', 0), workers=5, timeout_seconds=5.0)\n"
        "own(completions=['a'] * 9)\n"
        "both = len(psutil.Process().children())\n"
        "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(json.dumps([verifier, both, verdict.status]))\n"
    )
    done = warm.run_distributed([str(script), str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[2, 5, "right"], [1, 3, "right"]]
