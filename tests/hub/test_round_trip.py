"""What is published is loaded as others will load it, and is the trained policy."""

import json
import re
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from perl.errors import BrokenPromiseError, PerlError
from perl.hub.card.candidate import find_candidate
from perl.hub.push.package import package_candidate
from perl.hub.push.round_trip import check_files, check_round_trip
from perl.policy.guards import RELOAD_TOLERANCE
from perl.policy.model import load_base
from perl.policy.precision import in_float32
from perl.policy.probe import write_probe
from perl.policy.reference import token_log_probs
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe.sections import ModelSection
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.sandbox import BASE_FOLDER
from tests.hub.push_runs import add_best, add_checkpoint, publishable

CPU = torch.device("cpu")


def stage(candidate, folder="staged"):
    package_candidate(candidate, "user/a").write(candidate.run.path.parent / folder)
    return candidate.run.path.parent / folder


def rewrite(weights, change):
    """The same file with other tensors."""
    with safe_open(weights, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata)


def furthest(run, folder, dtype=torch.float32):
    """Largest difference of a token's log-prob from the probe's, by plain PEFT on the base, computed in float32."""
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=dtype)
    policy = PeftModel.from_pretrained(base, str(folder)).float().eval()
    probe = json.loads((run.path / "probe.json").read_text())
    ids = torch.tensor(probe["input_ids"])
    with torch.no_grad():
        log_probs = policy(ids).logits[:, :-1].log_softmax(-1)
    of_tokens = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return float((of_tokens - torch.tensor(probe["log_probs"])).abs().max())


def test_the_trained_adapter_comes_back_and_any_other_or_tensors_that_peft_would_ignore_are_found():
    run = publishable()
    candidate = find_candidate(run)
    staged = stage(candidate)
    by_hand = furthest(run, staged)
    assert by_hand <= RELOAD_TOLERANCE
    assert check_round_trip(candidate, staged, CPU) == pytest.approx(by_hand, abs=1e-6)
    rewrite(staged / WEIGHTS, lambda tensors: next(iter(tensors.values())).add_(1e-6))
    with pytest.raises(BrokenPromiseError, match="other tensors than the run's"):
        check_round_trip(candidate, staged, CPU)
    fingerprint = run.facts["fingerprint"]
    run.record(fingerprint={**fingerprint, "base": "0" * 64})
    candidate = find_candidate(Run.read(run.path))
    with pytest.raises(PerlError, match="the base sandbox:base is not the one it was trained on"):
        check_round_trip(candidate, stage(candidate, "another base"), CPU)
    rewrite(run.adapter / WEIGHTS, lambda tensors: [t.mul_(1.01) for t in tensors.values()])
    run.record(fingerprint={**fingerprint, "adapter": sha256_of(run.adapter / WEIGHTS)})
    candidate = find_candidate(Run.read(run.path))
    staged = stage(candidate, "another policy")
    with pytest.raises(BrokenPromiseError, match=r"differ from the trained policy's by .* \(at most 1e-04\)") as caught:
        check_round_trip(candidate, staged, CPU)
    shown = float(re.search(r"policy's by (\S+) nats", str(caught.value))[1])
    assert shown == pytest.approx(furthest(run, staged), rel=0.01)
    run = publishable("ignored")
    config = run.adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_modules": ["q_proj"]}))
    candidate = find_candidate(run)
    with pytest.raises(BrokenPromiseError, match=r"PEFT does not load \d+ of its tensors: .*down_proj"):
        check_round_trip(candidate, stage(candidate), CPU)


def test_on_a_half_precision_base_it_is_compared_in_float32():
    run = publishable()
    recipe = run.path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("dtype: auto", "dtype: bfloat16"))
    policy = PeftModel.from_pretrained(load_base(ModelSection(dtype="bfloat16"), CPU), str(run.adapter)).eval()
    ids = torch.arange(40).reshape(2, 20) % 60
    with in_float32(policy):
        write_probe(run.path, ids, token_log_probs(policy, ids, torch.ones_like(ids)))
    candidate = find_candidate(run)
    staged = stage(candidate)
    by_hand = furthest(run, staged, torch.bfloat16)
    assert by_hand <= RELOAD_TOLERANCE
    assert check_round_trip(candidate, staged, CPU) == pytest.approx(by_hand, abs=1e-6)


def test_without_a_probe_the_adapter_must_change_its_base_and_be_numbers():
    run = publishable()
    folder = add_best(run)
    candidate = find_candidate(run, "best")
    assert check_round_trip(candidate, stage(candidate), CPU) is None
    whole = shutil.copytree(folder, "whole")
    for change, said in (
        (lambda tensors: [t.zero_() for name, t in tensors.items() if "lora_B" in name], "changes nothing of its base"),
        (lambda tensors: [t.fill_(float("inf")) for t in tensors.values()], "are non-finite"),
    ):
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        rewrite(folder / WEIGHTS, change)
        candidate = find_candidate(run, "best")
        with pytest.raises(BrokenPromiseError, match=said):
            check_round_trip(candidate, stage(candidate, said), CPU)
    saved = add_checkpoint(run, 10)  # files alone tell numbers from none
    check_files(saved)
    rewrite(saved / WEIGHTS, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    with pytest.raises(BrokenPromiseError, match="holds non-finite numbers"):
        check_files(saved)
