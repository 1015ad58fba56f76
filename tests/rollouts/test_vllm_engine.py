"""vLLM in the trainer's process answers like the policy it was given last, and leaves the process as it was.

The engine runs in the environment that has vLLM (``in_process.py``); its numbers are compared with transformers' here.
"""

import copy
import os
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from peft import get_peft_model_state_dict

from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import EngineSampling, Request, Update
from perl.rollouts.sync import make_update
from perl.rollouts.vllm.in_process import BASE
from perl.sandbox import BASE_FOLDER
from tests.oracles.sampling import likeliest_completion, plain_log_probs
from tests.packing.families import make

# Sizes that vLLM's kernels for CPUs take.
ROUTED = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "vocab_size": 128}
ROUTED |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).with_name("in_process.py")
TOLERANCE = 1e-3
RANK, LENGTH, END = 4, 320, 1
COLD = EngineSampling(temperature=0.7, max_completion_length=12, end_token_ids=(END,))
# vLLM refuses several completions at temperature 0.
LIKELIEST = EngineSampling(temperature=1.0, max_completion_length=48, end_token_ids=(END,), top_k=1)


def python_with_vllm(checkout: Path) -> str:
    """The Python of the environment that has vLLM and this package; the test is skipped without one."""
    environment = Path(os.environ.get("PERL_VLLM_ENV") or checkout / ".venv-vllm")
    python = environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {environment}: make vllm-env")
    absent = "import importlib.util as u; print(*[n for n in ('vllm', 'perl', 'trl', 'peft') if not u.find_spec(n)])"
    found = subprocess.run([python, "-c", absent], capture_output=True, text=True, check=True).stdout.split()
    if found:
        pytest.skip(f"{environment} has no {', '.join(found)}: make vllm-env")
    return str(python)


def moved(policy: torch.nn.Module, seed: int, scale: float = 0.05) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return policy.eval()


def policy_of(method: str, seed: int, **settings) -> torch.nn.Module:
    torch.manual_seed(seed)
    base = load_base(ModelSection(), torch.device("cpu"))
    return moved(attach_adapter(base, adaptation(PeftSection(method=method, rank=RANK, **settings))), seed)


def as_peft_saves(policy: torch.nn.Module, name: str) -> Update:
    """PEFT's own tensors, which are the policy's, and its config: alpha is not the rank."""
    config = policy.peft_config["default"].to_dict()
    assert config["lora_alpha"] != config["r"]
    config["target_modules"] = sorted(config["target_modules"])
    return Update(name, "adapter", get_peft_model_state_dict(policy), config)


def ids_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.fixture(scope="module")
def policies() -> dict[str, list[torch.nn.Module]]:
    """The policy of each version, the base first."""
    lora = policy_of("lora", 1)
    later = moved(copy.deepcopy(lora), 2)
    dora = policy_of("dora", 4)
    base = load_base(ModelSection(), torch.device("cpu")).eval()
    return {
        "adapters": [base, lora, later, policy_of("pissa", 3)],
        "merged": [base, dora, moved(copy.deepcopy(dora), 5)],
    }


@pytest.fixture(scope="module")
def routed() -> dict[str, list[torch.nn.Module]]:
    """Models with experts: the base; one matrix of the first layer's changed; both of every layer's."""
    found = {}
    for name in ("Qwen3Moe", "Mixtral", "GptOss"):
        found[name] = [make(name, **ROUTED).eval()]
        for parts in (["layers.0.mlp.experts.down_proj"], ["experts.gate_up_proj", "experts.down_proj"]):
            kwargs = {"target_parameters": parts}
            section = PeftSection(method="lora", rank=RANK, target_modules=["q_proj"], kwargs=kwargs)
            found[name].append(moved(attach_adapter(make(name, **ROUTED), adaptation(section)), 6, scale=0.2))
    return found


@pytest.fixture(scope="module")
def given(policies, routed, tmp_path_factory) -> dict:
    served = {name: tmp_path_factory.mktemp(name) for name in routed}
    for name, (base, *_) in routed.items():
        base.save_pretrained(served[name])
    _, lora, later, pissa = policies["adapters"]
    first = as_peft_saves(lora, "v1")
    stranger = {name.replace("q_proj", "x_proj"): tensor for name, tensor in first.tensors.items()}
    return {
        "model": str(BASE_FOLDER),
        "length": LENGTH,
        "rank": 2 * RANK,
        "text": ids_of(40, 6),
        "long_prompt": ids_of(200, 7),
        "sampling": COLD,
        "likeliest": LIKELIEST,
        "requests": [Request(ids_of(length, length), count) for length, count in ((9, 3), (5, 1), (7, 2), (3, 1))],
        "adapters": [first, make_update(later, "adapter", "v2"), make_update(pissa, "adapter", "v3")],
        "stranger": Update("v4", "adapter", stranger, first.config),
        "merged": [make_update(dora, "merged", f"m{i}") for i, dora in enumerate(policies["merged"][1:])],
        "experts": {
            name: (str(served[name]), [make_update(policy, "merged", f"e{i}") for i, policy in enumerate(changed)])
            for name, (_, *changed) in routed.items()
        },
    }


def run(python: str, folder: Path, given: dict, *launcher: str) -> None:
    torch.save(given, folder / "given.pt")
    environment = dict(os.environ)
    # As many threads as there are processors, which vLLM would change; nothing compiled, which takes longer.
    del environment["OMP_NUM_THREADS"]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [python, *launcher, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def found(given, tmp_path_factory) -> dict:
    """What the script found; it runs once, whatever the number of test processes."""
    python = python_with_vllm(Path(__file__).resolve().parents[2])
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "vllm-in-process"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "found.pt").exists():
            run(python, folder, given)
    return torch.load(folder / "found.pt", weights_only=False)


def close(actual, expected) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=0, atol=TOLERANCE)


def close_to_policy(written, policy: torch.nn.Module, given: dict) -> None:
    """What the engine's only copy wrote after the text has the policy's log-probabilities."""
    assert list(written) == ["vllm"]
    for completion in written["vllm"]:
        whole = plain_log_probs(policy, (*given["text"], *completion.token_ids), COLD.temperature)
        close(completion.log_probs, whole[-len(completion.token_ids) :])


def apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().mean()) > 50 * TOLERANCE


@pytest.mark.parametrize(("form", "versions"), [("adapters", 4), ("merged", 3)])
def test_every_version_answers_like_its_policy(found, given, policies, form, versions):
    answers = found["adapters"]["answers"] if form == "adapters" else found["merged"]
    expected = [plain_log_probs(policy, given["text"]) for policy in policies[form]]
    assert len(answers) == versions == len(expected)
    for number, answer in enumerate(answers):
        assert answer.get("kept", number == 0 or form == "merged")  # the update is copied and not changed
        close_to_policy(answer["written"], policies[form][number], given)
    for i, own in enumerate(expected):
        assert all(apart(own, other) for other in expected[:i])


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_experts_with_merged_weights_answer_like_the_policy_each_time_they_are_loaded(found, given, routed, name):
    assert len(found["experts"][name]) == len(routed[name])
    for written, policy in zip(found["experts"][name], routed[name], strict=True):
        close_to_policy(written, policy, given)
    base, *changed = (plain_log_probs(policy, given["text"]) for policy in routed[name])
    assert all(apart(base, other) for other in changed)


@pytest.mark.parametrize("form", ["adapters", "merged"])
def test_no_version_samples_from_what_was_kept_of_the_prompt_under_another(found, given, policies, form):
    assert 0 < found["adapters"]["cached_prefix"] < len(given["long_prompt"])  # else nothing would be kept
    answers = found["adapters"]["answers"] if form == "adapters" else found["merged"]
    names = [BASE, *(update.name for update in given[form])]
    for answer, policy, name in zip(answers, policies[form], names, strict=True):
        ((one, two),) = answer["sampled"]
        for completion in (one, two):
            assert completion.version == name
            assert 1 <= len(completion.token_ids) <= COLD.max_completion_length
            whole = plain_log_probs(policy, (*given["long_prompt"], *completion.token_ids), COLD.temperature)
            close(completion.log_probs, whole[-len(completion.token_ids) :])


def test_a_request_gets_its_completions_and_is_told_of_them_while_others_run(found, given, policies):
    policy, longest, adapters = policies["adapters"][-1], LIKELIEST.max_completion_length, found["adapters"]
    expected = [likeliest_completion(policy, request.prompt_ids, longest, (END,)) for request in given["requests"]]
    assert [[c.token_ids for c in group] for group in adapters["result"]] == [
        [ids] * request.count for ids, request in zip(expected, given["requests"], strict=True)
    ]
    assert len({len(ids) for ids in expected}) == len(expected)  # so that there is one order
    shortest_first = sorted(range(len(expected)), key=lambda i: len(expected[i]))
    assert [position for position, *_ in adapters["told"]] == shortest_first
    assert [group for _, group, *_ in adapters["told"]] == [adapters["result"][i] for i in shortest_first]
    under_way = [sum(given["requests"][i].count for i in shortest_first[k:]) for k in range(1, len(expected) + 1)]
    assert [running for _, _, running, _ in adapters["told"]] == under_way
    (greedy,) = adapters["seeded"]["greedy"]  # at temperature 0 as with one token to choose from
    assert greedy == expected[0][: COLD.max_completion_length]


def test_what_was_given_up_or_refused_leaves_nothing_behind(found):
    adapters = found["adapters"]
    lengths = [max(len(completion.token_ids) for completion in group) for group in adapters["result"]]
    assert adapters["given_up"] == lengths.index(min(lengths))
    assert adapters["left"] == 0
    assert str(LENGTH) in adapters["refused"]
    assert adapters["again"] == adapters["result"]
    assert adapters["nothing"] == []  # of no requests


def test_the_trainers_process_stays_as_it_was_also_for_whoever_is_told_of_a_group(found):
    (_, before), *later = found["adapters"]["process"]
    assert [when for when, _ in later] == ["built", "sampled", "loaded", "closed"]
    for when, state in later:
        changed = {name: (before[name], value) for name, value in state.items() if value != before[name]}
        # vLLM makes a group of one process for itself, and takes it away again.
        assert changed == ({} if when == "closed" else {"group": (False, True)})
    told = found["adapters"]["told"]
    assert [state for *_, state in told] == [found["adapters"]["before"]] * len(told)


def test_an_engine_draws_with_its_own_seed_and_a_completion_that_has_one_with_that(found):
    ((one, two),) = first = found["adapters"]["answers"][0]["sampled"]
    assert first == found["merged"][0]["sampled"]  # the same seed, in a process that drew other numbers in between
    assert first != found["adapters"]["drawn_again"]
    assert one != two
    seeded = found["adapters"]["seeded"]
    assert seeded["alone"] == seeded["one by one"] == seeded["among"]  # alone and beside others
    assert len(set(seeded["alone"])) > 1
    assert seeded["other"] != seeded["alone"]


def test_an_engine_that_refused_layers_it_does_not_have_and_slept_answers_with_the_version_before(
    found, policies, given
):
    assert "x_proj" in found["adapters"]["stranger"]
    assert "merged" in found["adapters"]["stranger"]
    close_to_policy(found["adapters"]["rested"], policies["adapters"][-1], given)


def test_processes_of_one_run_have_an_engine_each_and_keep_their_group(given, policies, tmp_path):
    python = python_with_vllm(Path(__file__).resolve().parents[2])
    run(python, tmp_path, given, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    one, two = (torch.load(tmp_path / f"found-{rank}.pt", weights_only=False) for rank in (0, 1))
    for answer, policy in ((one, policies["adapters"][1]), (two, policies["adapters"][2])):
        close_to_policy(answer["written"], policy, given)
        close_to_policy(answer["of_the_base"]["written"], policies["adapters"][0], given)
    assert one["of_the_base"]["sampled"] != two["of_the_base"]["sampled"]
    assert (one["sum"], two["sum"]) == (3.0, 3.0)
