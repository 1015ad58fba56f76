"""An engine is opened in the type that the policy computes in; servers answer all processes and meet the main one."""

import random
import sys
import time
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from perl.errors import RolloutError
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts import open_engine as opening
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.run.joint_work import joining
from tests import warm
from tests.rollouts.loopback import FakeVllm
from tests.rollouts.test_parity_check import policy_with


@pytest.fixture(autouse=True)
def _no_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("weights", "mixed_precision", "expected"),
    [("float32", "no", "float32"), ("float32", "bf16", "bfloat16"), ("bfloat16", "no", "bfloat16")],
)
def test_vllm_in_this_process_computes_in_the_type_that_the_policy_computes_in(
    monkeypatch, weights, mixed_precision, expected
):
    monkeypatch.setattr(opening, "InProcessEngine", lambda *_, **options: options)
    policy = Accelerator(mixed_precision=mixed_precision, cpu=True).prepare_model(policy_with(dtype=weights))
    how = RolloutSection(backend="vllm")
    assert open_engine(how, None, policy, EngineSettings("run", Path("sync")))["dtype"] == expected


ASKED = [(2, 0, 3), (0, 0, 1), (8, 1, 3), (0, 4, 0), (0, 0, 0)]
"""Requests of each of three processes, call by call."""
HELD, REFUSED, SEEN = 99, 98, "seen"


class Holding(FakeVllm):
    """Answers the held prompt once a process has been given a group; refuses another prompt."""

    def __init__(self, folder):
        super().__init__(length_of=lambda chance: chance.randrange(1, 9))
        self.folder, self.held_in_vain = folder, False

    def _complete(self, body):
        end = time.monotonic() + 30
        while body["prompt"][0] == HELD and not (self.folder / SEEN).exists() and not self.held_in_vain:
            self.held_in_vain = time.monotonic() > end
            time.sleep(0.01)
        return (400, {"error": {"message": "no"}}) if body["prompt"][0] == REFUSED else super()._complete(body)


def written(request):
    """What the server writes, by the seed of each completion."""
    chances = [random.Random(request.seed + index) for index in range(request.count)]
    return [tuple(chance.randrange(5, 30) for _ in range(chance.randrange(1, 9))) for chance in chances]


def ask(port, folder):
    """What each of three processes does; prints how often it has connected to the server and what it was told."""
    connected = []
    sys.addaudithook(lambda event, of: event == "socket.connect" and of[1][1:] == (port,) and connected.append(1))
    sampling = EngineSampling(1.0, 8, ())
    with joining(on_cpu=True) as processes:
        rank = processes.rank
        settings = EngineSettings("run", folder / "sync", longest=64, processes=processes)
        servers = [f"http://127.0.0.1:{port}"]
        engine = open_engine(RolloutSection(backend="vllm-server", servers=servers), None, None, settings)
        calls, pending, seen = [], [], []
        for call, counts in enumerate(ASKED):
            begun = 100 * call + 10 * sum(counts[:rank])
            first = HELD if call == 2 and rank == 0 else 1
            requests = [Request((first, call, rank, n), 2 + n % 2, begun + 10 * n) for n in range(counts[rank])]

            def on_group(position, group, call=call):
                seen.append((call, position, [one.token_ids for one in group]))
                if call == 2 and rank == 2:
                    (folder / SEEN).touch()

            calls.append(requests)
            pending.append(engine.start(requests, sampling, on_group))
        for requests, begun in zip(
            calls, pending, strict=True
        ):  # all are under way, as of a training that samples ahead
            found = [[one.token_ids for one in group] for group in begun.result()]
            assert found == [written(request) for request in requests]
        expected = [(call, n, written(one)) for call, some in enumerate(calls) for n, one in enumerate(some)]
        assert sorted(seen) == expected
        with pytest.raises(RolloutError) as raised, processes.failing_together():
            engine.start([Request((REFUSED,), 1)] * (rank == 1), sampling).result()
        engine.close()
        sys.stdout.write(f"{rank}: {bool(connected)} {raised.value}\n")


def test_processes_get_the_tokens_of_their_own_prompts_from_servers_that_only_the_main_one_meets(tmp_path):
    """Of any number of prompts, several calls under way, groups before the last one is written, one error for all."""
    fake = Holding(tmp_path)
    with fake() as url:
        port = url.rpartition(":")[2]
        done = warm.run_distributed(["-m", "tests.rollouts.test_open_engine", port, tmp_path], tmp_path, 3)
    assert done.returncode == 0, done.stderr
    assert not fake.held_in_vain
    refused = f"{url} refuses a request: no"
    assert sorted(done.stdout.splitlines()) == [f"0: True {refused}", f"1: False {refused}", f"2: False {refused}"]
    asked = sorted(tuple(body["prompt"]) for body in fake.asked)
    assert len(asked) == len(set(asked)) == sum(map(sum, ASKED))


if __name__ == "__main__":
    ask(int(sys.argv[1]), Path(sys.argv[2]))
