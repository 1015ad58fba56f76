"""vLLM, in this process or on servers, scores base and adapter as transformers does, or says why it cannot."""

import math
import os
import subprocess
import time
from statistics import fmean, stdev

import httpx2
import pytest
import torch

import perl
from perl.errors import RolloutError
from perl.evaluation.drawing.request import EvalSettings
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from tests.ports import free_port
from tests.rollouts.policies import perturbed
from tests.rollouts.test_vllm_engine import python_with_vllm

TASK = "sandbox:addition"
LONGEST, PROBLEMS = 60, 60
# How far the adapters are from the base: half of what they write is still an answer, so that scores say something.
NOISE = 0.03
WARM = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": LONGEST}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    """Folder of a LoRA of random numbers."""
    torch.manual_seed(1)
    base = load_base(ModelSection(), torch.device("cpu"))
    policy = perturbed(attach_adapter(base, adaptation(PeftSection(method="lora"))), NOISE)
    folder = tmp_path_factory.mktemp("adapters") / "lora"
    write_adapter(policy, folder, "sandbox:base", None)
    return str(folder)


def evaluated(output, *servers: str, adapter: str | None = None, base: str | None = None, **settings):
    """Results from servers; from transformers if none is named."""
    backend = "vllm-server" if servers else "transformers"
    chosen = EvalSettings(backend=backend, servers=servers, lighteval=False, limit=PROBLEMS, **WARM, **settings)
    return perl.evaluate(adapter, base, [TASK], 4, output=output, settings=chosen)


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory, adapter):
    """Results of the adapter and its base from transformers."""
    return evaluated(tmp_path_factory.mktemp("by_transformers"), adapter=adapter)


def shares(results, who: str) -> list[float]:
    return [fmean(getattr(problem, who)) for problem in results.task(TASK).problems]


def assert_same_within_noise(one: list[float], other: list[float]) -> None:
    """Of two draws of one policy on the same problems."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    assert abs(fmean(one) - fmean(other)) <= 4 * stdev(differences) / math.sqrt(len(differences))


@pytest.mark.nightly
def test_base_and_adapter_score_on_a_server_as_with_transformers_and_it_keeps_nothing(
    lone_server, adapter, tmp_path, by_transformers
):
    before = set(models(lone_server))
    served, here = evaluated(tmp_path / "served", lone_server, adapter=adapter), by_transformers
    for who in ("base", "adapter"):
        assert_same_within_noise(shares(served, who), shares(here, who))
    assert served.task(TASK).protocol_hash == here.task(TASK).protocol_hash
    assert here.task(TASK).difference.high < 0  # so that one taken for the other would show
    assert served.task(TASK).difference.high < 0
    assert served.engine["logp_diff"] < 1e-4
    assert here.engine["logp_diff"] is None
    assert served.engine["backend"] == "vllm-server"
    assert {name for name in models(lone_server) if name.endswith(("-probe", "-adapter"))} <= before
    assert not (tmp_path / "served" / "sync").exists()


def test_where_no_server_answers_the_evaluation_ends_when_it_was_told_to(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(RolloutError, match=f"no vLLM server answers, for 1 seconds: {url}"):
        evaluated(tmp_path / "out", url, base="sandbox:base", server_timeout=1.0)
    assert time.monotonic() - started < 30


def models(url: str) -> list[str]:
    return [card["id"] for card in httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"]]


@pytest.mark.nightly
def test_vllm_in_this_process_scores_as_transformers(adapter, checkout, tmp_path, by_transformers):
    python = python_with_vllm(checkout)
    settings = ["--temperature", "1", "--top-p", "1", "--max-new-tokens", str(LONGEST), "-k", "4"]
    settings += ["--limit", str(PROBLEMS)]
    command = [python, "-m", "perl", "eval", "--backend", "vllm", "--adapter", adapter, "--tasks", TASK]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, *settings, "--no-lighteval", "--output", "inside"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    inside = perl.evaluation.scoring.results.read_results(tmp_path / "inside")
    here = by_transformers
    for who in ("base", "adapter"):
        assert_same_within_noise(shares(inside, who), shares(here, who))
    assert inside.engine["logp_diff"] < 1e-4
    assert inside.engine["backend"] == "vllm"
    assert inside.task(TASK).protocol_hash == here.task(TASK).protocol_hash
