"""vLLM, in this process or on servers, scores base and adapter as transformers does, or says why it cannot."""

import collections
import concurrent.futures
import json
import math
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from statistics import fmean, stdev

import httpx2
import pytest
import torch

import perl
from perl.errors import BrokenPromiseError, PerlError, RolloutError
from perl.evaluation.request import EvalSettings
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import Update
from perl.rollouts.sync import make_update
from perl.rollouts.vllm.servers import ServerPool
from tests import warm
from tests.ports import free_port
from tests.rollouts.test_vllm_engine import python_with_vllm
from tests.servers import LORA, VllmProcess, absent

TASK = "sandbox:addition"
LONGEST, PROBLEMS = 60, 60
# How far the adapters are from the base: half of what they write is still an answer, so that scores say something.
NOISE = 0.03
WARM = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": LONGEST}


def policy_of(method: str, noise: float = NOISE, **settings) -> torch.nn.Module:
    torch.manual_seed(1)
    base = load_base(ModelSection(), torch.device("cpu"))
    policy = attach_adapter(base, adaptation(PeftSection(method=method, **settings)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += noise * torch.randn(parameter.shape)
    return policy.eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Folder of an adapter of random numbers, written once."""
    made = {}

    def adapter(method: str, **settings) -> str:
        key = (method, *settings.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("adapters") / "-".join([method, *map(str, settings.values())])
            write_adapter(policy_of(method, **settings), made[key], "sandbox:base", None)
        return str(made[key])

    return adapter


@pytest.fixture(scope="module")
def pair(own_servers) -> list[VllmProcess]:
    """Two servers for tests that kill them, or change their weights; what they are asked for waits in a queue."""
    return own_servers(2, flags=(*LORA, "--max-num-seqs", "64"))


def evaluated(output, *servers: str, adapter: str | None = None, base: str | None = None, k: int = 4, **settings):
    """Results from servers; from transformers if none is named."""
    backend = "vllm-server" if servers else "transformers"
    chosen = EvalSettings(backend=backend, servers=servers, lighteval=False, **{"limit": PROBLEMS, **WARM, **settings})
    return perl.evaluate(
        adapter, base, [TASK], None if chosen.preset == "greedy" else k, output=output, settings=chosen
    )


GREEDY = {"preset": "greedy", "temperature": None, "top_p": None}


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory):
    """Results from transformers with their folder; the same request is carried out once."""
    made = {}

    def by_transformers(**request):
        key = repr(sorted(request.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("by_transformers")
            made[key] = evaluated(folder, **request), folder
        return made[key]

    return by_transformers


def lines_of(folder: Path) -> list[dict]:
    """Samples as they are on the disk; a line under way is none."""
    path = folder / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def count_of(folder: Path) -> int:
    path = folder / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def texts(folder: Path, results, who: str) -> dict[str, str]:
    """What each problem was answered with."""
    key = results.task(TASK).samples[who]
    return {line["problem"]: line["text"] for line in lines_of(folder) if line["policy"] == key}


def shares(results, who: str) -> list[float]:
    return [fmean(getattr(problem, who)) for problem in results.task(TASK).problems]


def assert_same_within_noise(one: list[float], other: list[float]) -> None:
    """Of two draws of one policy on the same problems."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    assert abs(fmean(one) - fmean(other)) <= 4 * stdev(differences) / math.sqrt(len(differences))


def assert_mostly_same(one: dict[str, str], other: dict[str, str]) -> None:
    """Rounding may tip a token now and then."""
    assert set(one) == set(other)
    assert fmean(one[problem] == other[problem] for problem in one) >= 0.95


def asked(url: str, path: str) -> dict:
    return httpx2.get(url + path, trust_env=False).json()


def models(url: str) -> list[str]:
    return [card["id"] for card in asked(url, "/v1/models")["data"]]


def wait_until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def measured(url: str, name: str) -> float:
    """What a server says of itself."""
    lines = httpx2.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))


def give_away(url: str, folder: Path, noise: float, version: str) -> None:
    """Puts other weights than the base's on a server, as somebody does who does not clean up, and names them."""
    pool = ServerPool([url], folder)
    given = make_update(policy_of("dora", noise), "merged", f"t{uuid.uuid4().hex[:8]}")
    pool.foreign_weights()
    pool.load(Update(given.name, given.form, given.tensors))
    pool.close()
    answer = httpx2.post(f"{url}/update_weight_version", json={"new_version": version}, trust_env=False)
    assert answer.is_success


def test_base_and_adapter_score_on_a_server_as_with_transformers(lone_server, adapter, tmp_path, by_transformers):
    lora = adapter("lora")
    served = evaluated(tmp_path / "served", lone_server, adapter=lora)
    here, _ = by_transformers(adapter=lora)
    for who in ("base", "adapter"):
        assert_same_within_noise(shares(served, who), shares(here, who))
    assert served.task(TASK).protocol_hash == here.task(TASK).protocol_hash
    assert here.task(TASK).difference.high < 0  # so that one taken for the other would show
    assert served.task(TASK).difference.high < 0
    assert served.engine["logp_diff"] < 1e-4
    assert here.engine["logp_diff"] is None
    assert served.engine["backend"] == "vllm-server"


def test_greedy_answers_of_a_server_are_those_of_transformers_for_base_and_adapter(
    lone_server, adapter, tmp_path, by_transformers
):
    lora = adapter("lora")
    served = evaluated(tmp_path / "served", lone_server, adapter=lora, **GREEDY)
    here, folder = by_transformers(adapter=lora, **GREEDY)
    for who in ("base", "adapter"):
        assert_mostly_same(texts(tmp_path / "served", served, who), texts(folder, here, who))
    base, trained = (texts(folder, here, who) for who in ("base", "adapter"))
    assert fmean(base[problem] == trained[problem] for problem in base) < 0.8


def test_afterwards_the_server_knows_the_adapter_no_longer_and_the_disk_neither(lone_server, adapter, tmp_path):
    before = set(models(lone_server))
    evaluated(tmp_path / "out", lone_server, adapter=adapter("lora"), limit=3, k=2)
    assert not [name for name in set(models(lone_server)) - before if (tmp_path / "out" / "sync" / name).exists()]
    assert {name for name in models(lone_server) if name.endswith(("-probe", "-adapter"))} <= before
    assert not (tmp_path / "out" / "sync").exists()


@pytest.mark.parametrize("who", ["base", "adapter"])
def test_a_policy_alone_is_scored_by_a_server_as_with_transformers(
    lone_server, adapter, tmp_path, who, by_transformers
):
    subject = {"base": "sandbox:base"} if who == "base" else {"adapter": adapter("lora"), "with_base": False}
    served = evaluated(tmp_path / "served", lone_server, **subject)
    here, _ = by_transformers(adapter=adapter("lora"))  # where each is scored beside the other as alone
    assert_same_within_noise(shares(served, who), shares(here, who))
    assert served.engine["logp_diff"] < 1e-4
    task = served.task(TASK)
    assert (task.base is None, task.adapter is None) == (who == "adapter", who == "base")


def test_completions_of_a_single_token_can_be_asked_for(adapter, tmp_path, lone_server):
    results = evaluated(tmp_path / "out", lone_server, adapter=adapter("lora"), limit=3, k=1, max_new_tokens=1)
    assert results.task(TASK).adapter.mean_tokens == 1


@pytest.mark.parametrize("method", ["dora", "ia3"])
def test_an_adapter_sent_as_weights_scores_as_with_transformers_and_leaves_the_base_behind(
    pair, adapter, tmp_path, method, by_transformers
):
    url, folder = pair[0].url, adapter(method, noise=0.25 if method == "ia3" else NOISE)
    served = evaluated(tmp_path / "served", url, adapter=folder)
    here, written = by_transformers(adapter=folder)
    for who in ("base", "adapter"):
        assert_same_within_noise(shares(served, who), shares(here, who))
    assert here.task(TASK).difference.high < 0
    assert served.engine["logp_diff"] < 1e-4
    # As anyone finds it who knows nothing of us: asked by hand, without an evaluation that would put it in order.
    assert asked(url, "/weight_info")["weight_version"].endswith("-restored")
    line = next(line for line in lines_of(written) if line["policy"] == here.task(TASK).samples["base"])
    greedy, answers = by_transformers(base="sandbox:base", **GREEDY)
    assert greedy_text_of(url, line["problem"]) == texts(answers, greedy, "base")[line["problem"]]


def greedy_text_of(url: str, problem: str) -> str:
    tokenizer = perl_tokenizer()
    question = next(q for q in sandbox_questions() if q.id == problem)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question.text}], add_generation_prompt=True, return_dict=False
    )
    body = {"model": models(url)[0], "prompt": ids, "max_tokens": LONGEST, "temperature": 0.0, "return_token_ids": True}
    written = httpx2.post(f"{url}/v1/completions", json=body, trust_env=False).json()["choices"][0]["token_ids"]
    return tokenizer.decode(written, skip_special_tokens=True)


def perl_tokenizer():
    from perl.policy.model import load_tokenizer

    return load_tokenizer(ModelSection())


def sandbox_questions():
    from perl.evaluation.task import find_tasks
    from perl.evaluation.task_data import load_task_data

    return load_task_data(find_tasks([TASK])[0]).questions


def test_weights_that_a_stopped_evaluation_left_are_replaced_by_the_bases_before_anything_is_scored(
    pair, adapter, tmp_path, by_transformers
):
    url = pair[0].url
    give_away(url, tmp_path / "given", 0.1, "somebody")
    served = evaluated(tmp_path / "served", url, adapter=adapter("lora"), **GREEDY)
    here, folder = by_transformers(adapter=adapter("lora"), **GREEDY)
    for who in ("base", "adapter"):
        assert_mostly_same(texts(tmp_path / "served", served, who), texts(folder, here, who))


def test_a_server_with_another_model_under_the_same_name_is_refused_before_anything_is_scored(
    pair, adapter, tmp_path, by_transformers
):
    url = pair[0].url
    give_away(url, tmp_path / "given", 0.1, "default")  # it does not say that these are not the base's
    for subject in ({"adapter": adapter("lora")}, {"base": "sandbox:base"}):
        with pytest.raises(BrokenPromiseError, match=r"does not answer like the policy.*--server-command") as raised:
            evaluated(tmp_path / "out", url, **subject)
        assert "\n" not in str(raised.value)
        assert "rollout.tolerance" not in str(raised.value)
        assert lines_of(tmp_path / "out") == []
    pair[0].restart()
    served = evaluated(tmp_path / "served", url, base="sandbox:base", **GREEDY)
    here, folder = by_transformers(base="sandbox:base", **GREEDY)
    assert_mostly_same(texts(tmp_path / "served", served, "base"), texts(folder, here, "base"))


@pytest.fixture(scope="module")
def poor_server(own_servers) -> str:
    """Address of a server that can be given nothing and reports raw log-probabilities."""
    (server,) = own_servers(flags=("--logprobs-mode", "raw_logprobs"), variables={})
    return server.url


@pytest.mark.parametrize(
    ("method", "settings", "error", "flag"),
    [
        ("lora", {}, PerlError, "--enable-lora"),
        ("dora", {}, PerlError, "VLLM_SERVER_DEV_MODE=1"),
        (None, {"temperature": 0.6}, BrokenPromiseError, "processed_logprobs"),
        (None, {"limit": 3}, None, None),  # at temperature 1 raw log-probabilities are those of what is drawn
    ],
    ids=["lora", "dora", "base, cold", "base, at 1"],
)
def test_a_server_that_lacks_what_an_evaluation_needs_is_refused_before_anything_is_scored(
    poor_server, adapter, tmp_path, method, settings, error, flag
):
    subject = {"base": "sandbox:base"} if method is None else {"adapter": adapter(method)}
    if error is None:
        assert evaluated(tmp_path / "out", poor_server, **subject, **settings).engine["logp_diff"] < 1e-4
        return
    with pytest.raises(error, match=flag) as raised:
        evaluated(tmp_path / "out", poor_server, **subject, **settings)
    assert method is None or (raised.value.exit_code, "\n" in str(raised.value)) == (2, False)
    assert lines_of(tmp_path / "out") == []


def test_too_long_completions_and_too_high_ranks_are_refused_before_anything_is_scored(lone_server, adapter, tmp_path):
    with pytest.raises(PerlError, match=r"holds 256 tokens.*--max-model-len") as raised:
        evaluated(tmp_path / "long", lone_server, adapter=adapter("lora"), max_new_tokens=500)
    assert (raised.value.exit_code, "\n" in str(raised.value)) == (2, False)
    high = r"rank 64.*rank 128 \(start it with --max-lora-rank 128\)"
    for someones in (False, True):  # that the base is put back first does not make the refusal a server that was lost
        if someones:
            give_away(lone_server, tmp_path / "given", 0.3, "somebody-else")
        with pytest.raises(PerlError, match=high) as raised:
            evaluated(tmp_path / "high", lone_server, adapter=adapter("lora", rank=128), server_timeout=60.0)
        assert (raised.value.exit_code, "\n" in str(raised.value)) == (2, False)
    assert lines_of(tmp_path / "long") + lines_of(tmp_path / "high") == []


def test_where_no_server_answers_the_evaluation_ends_when_it_was_told_to(perl_command, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(RolloutError, match=f"no vLLM server answers, for 1 seconds: {url}"):
        evaluated(tmp_path / "out", url, base="sandbox:base", server_timeout=1.0)
    assert time.monotonic() - started < 30
    command = ["eval", "--base", "sandbox:base", "--tasks", TASK, "--server", url, "--server-timeout", "1", "-q"]
    done = perl_command(*command)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr


def assert_each_once(folder: Path, results, problems: int, k: int) -> None:
    places = [(line["policy"], line["problem"], line["index"]) for line in lines_of(folder)]
    keys = results.task(TASK).samples.values()
    assert len(set(keys)) == 2
    assert len(places) == len(set(places))
    assert collections.Counter(policy for policy, *_ in places) == dict.fromkeys(keys, problems * k)


def test_with_one_of_two_servers_killed_the_evaluation_goes_on_and_each_sample_is_drawn_once(
    pair, adapter, tmp_path, caplog
):
    out, (kept, killed) = tmp_path / "out", pair
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        work = pool.submit(evaluated, out, kept.url, killed.url, adapter=adapter("lora"), k=8, limit=80)
        # Many wait for it: however slow this machine is, it is killed before it has answered them all.
        wait_until(lambda: work.done() or (count_of(out) > 40 and measured(killed.url, "num_requests_waiting") > 50))
        killed.kill()
        results = work.result()
    lost = re.search(rf"{killed.url} is lost .*; (\d+) requests are sent again", caplog.text)
    assert lost
    assert int(lost[1]) > 0  # it was in the middle
    assert_each_once(out, results, 80, 8)
    here = evaluated(tmp_path / "here", adapter=adapter("lora"), limit=80)
    for who in ("base", "adapter"):
        assert_same_within_noise(shares(results, who), shares(here, who))


def test_when_the_last_server_is_killed_the_same_command_goes_on_once_it_is_back(pair, adapter, tmp_path):
    server, out = pair[0], tmp_path / "out"
    options = {"--adapter": adapter("lora"), "--tasks": TASK, "-k": 8, "--limit": 100, "--output": out}
    options |= {"--server": server.url, "--server-timeout": 2, "--max-new-tokens": LONGEST, "--temperature": 1}
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "perl", "eval", *words, "--top-p", "1", "--no-lighteval"]
    first = warm.popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: first.poll() is not None or count_of(out) > 900)
    server.kill()
    _, said = first.communicate(timeout=120)
    before = lines_of(out)
    assert first.returncode == 1
    assert "Traceback" not in said
    assert re.search(r"error: .*no vLLM server answers.*the same command goes on", said.splitlines()[-1])
    assert 900 < len(before) < 1600
    assert not (out / "results.json").exists()
    server.restart()
    second = warm.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    after = {(line["policy"], line["problem"], line["index"]): line for line in lines_of(out)}
    assert all(after[line["policy"], line["problem"], line["index"]] == line for line in before)
    assert_each_once(out, perl.evaluation.results.read_results(out), 100, 8)
    # The server that was started anew wrote what was missing, and little to be compared.
    missing = sum(line["tokens"] for line in after.values()) - sum(line["tokens"] for line in before)
    assert missing <= measured(server.url, "generation_tokens_total") <= missing + 500


def test_vllm_in_this_process_scores_as_transformers(adapter, checkout, tmp_path, by_transformers):
    python = python_with_vllm(checkout)
    settings = ["--temperature", "1", "--top-p", "1", "--max-new-tokens", str(LONGEST), "-k", "4"]
    settings += ["--limit", str(PROBLEMS)]
    command = [python, "-m", "perl", "eval", "--backend", "vllm", "--adapter", adapter("lora"), "--tasks", TASK]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, *settings, "--no-lighteval", "--output", "inside"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    inside = perl.evaluation.results.read_results(tmp_path / "inside")
    here, _ = by_transformers(adapter=adapter("lora"))
    for who in ("base", "adapter"):
        assert_same_within_noise(shares(inside, who), shares(here, who))
    assert inside.engine["logp_diff"] < 1e-4
    assert inside.engine["backend"] == "vllm"
    assert inside.task(TASK).protocol_hash == here.task(TASK).protocol_hash


@pytest.mark.parametrize(
    ("method", "named", "not_named"),
    [
        ("lora", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=True", "--enable-lora", "--max-lora-rank 32"], ["DEV_MODE"]),
        ("dora", ["VLLM_SERVER_DEV_MODE=1"], ["lora", "LORA"]),
        (None, [], ["DEV_MODE", "lora", "LORA"]),
    ],
)
def test_the_command_for_a_server_names_what_this_evaluation_needs(perl_command, adapter, method, named, not_named):
    settings = {"rank": 24} if method == "lora" else {}  # vLLM knows no rank between 16 and 32
    subject = ["--base", "sandbox:base"] if method is None else ["--adapter", adapter(method, **settings)]
    options = ["--tasks", TASK, "--max-new-tokens", "77", "--server", "http://gpu1:8123", "--server-command"]
    done = perl_command("eval", *subject, *options)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    longest = max(
        len(
            perl_tokenizer().apply_chat_template(
                [{"role": "user", "content": question.text}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in sandbox_questions()
    )
    model = re.escape(str(perl.sandbox.BASE_FOLDER))
    assert re.search(rf"--model {model} --port 8123 --max-model-len {longest + 77} ", line)
    assert "--logprobs-mode processed_logprobs" in line
    for words in named:
        assert words in line
    assert [words for words in not_named if words in line] == []


def test_a_server_that_was_started_by_the_command_serves_the_evaluation(perl_command, adapter, tmp_path):
    if absent():
        pytest.skip(absent())
    port = free_port()
    settings = ["--adapter", adapter("lora"), "--tasks", TASK, "--max-new-tokens", str(LONGEST), "--limit", "3"]
    settings += ["--server", f"http://127.0.0.1:{port}", "--backend", "vllm-server", "--no-lighteval"]
    words = perl_command("eval", *settings, "--server-command").stdout.split()
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program = words[len(variables) :]
    assert program[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    flags = [flag for flag in program[3:] if flag != "--enforce-eager"]
    server = VllmProcess(tmp_path / "server", tuple(flags), variables, port)
    try:
        server.wait()
        done = perl_command("eval", *settings, "-k", "2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        server.kill()
