"""The parity check tells an engine from the base and from anything else; the policy is itself again after it."""

import math
import re
import statistics
from dataclasses import replace

import pytest
import torch

from perl.errors import BrokenPromiseError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import ExpectedLogProbs, Sampled
from perl.rollouts.parity_check import ParityCheck
from tests.oracles.sampling import plain_log_probs
from tests.rollouts.policies import perturbed

PROMPT = [9, 4, 13, 5, 10, 15, 22, 31]


def policy_with(method="lora", scale=0.0, dtype="float32"):
    """A policy some way from its base."""
    settings = {"rank": 8} if "rank" in METHODS[method].settings else {}
    base = load_base(ModelSection(dtype=dtype), torch.device("cpu"))
    return perturbed(attach_adapter(base, adaptation(PeftSection(method=method, **settings))), scale)


def written(policy, parity, offset=0.0):
    """What an engine with this policy writes, token by token, and the log-probabilities it reports."""
    generator, temperature = torch.Generator().manual_seed(1), parity.sampling.temperature
    completions = []
    for _ in range(parity.request.count):
        tokens, log_probs = list(parity.request.prompt_ids), []
        for position in range(parity.sampling.max_completion_length):
            with torch.no_grad():
                logits = policy(torch.tensor([tokens])).logits[0, -1].float()
            log_p = torch.log_softmax(logits / temperature, dim=-1)
            tokens.append(int(torch.multinomial(log_p.exp(), 1, generator=generator)))
            log_probs.append(float(log_p[tokens[-1]]) + offset * (-1) ** position)
        completions.append(Sampled(tuple(tokens[len(PROMPT) :]), tuple(log_probs), "v"))
    return completions


def written_by_base(policy, parity):
    with policy.disable_adapter():
        return written(policy, parity)


def mean_difference(policy, parity, completions):
    """Of what an engine reported from a plain forward pass, in nats."""
    gaps = []
    for sampled in completions:
        mine = plain_log_probs(policy, (*PROMPT, *sampled.token_ids), parity.sampling.temperature)[len(PROMPT) - 1 :]
        gaps += [abs(one - float(other)) for one, other in zip(sampled.log_probs, mine, strict=True)]
    return statistics.fmean(gaps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_difference_is_the_mean_over_tokens_of_the_worst_copy(temperature):
    policy = policy_with(scale=0.05)
    parity = ParityCheck(policy, PROMPT, temperature, tolerance=2e-3)
    answers = {"one": written(policy, parity), "two": written(policy, parity, offset=1e-3)}
    expected = {name: mean_difference(policy, parity, completions) for name, completions in answers.items()}
    differences, failures = parity.compare(answers)
    assert differences == pytest.approx(expected, abs=2e-6)
    assert failures == {}
    assert parity.check(answers) == pytest.approx(expected["two"], abs=2e-6)
    assert expected["two"] == pytest.approx(1e-3, rel=0.02)
    # Before the first step base and policy are one.
    fresh = policy_with()
    parity = ParityCheck(fresh, PROMPT)
    assert parity.check({"one": written_by_base(fresh, parity)}) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_proof_holds_the_likeliest_tokens_of_a_plain_forward_pass_at_the_temperature(temperature):
    policy = policy_with(scale=0.05)
    proof = ParityCheck(policy, PROMPT, temperature).proof()
    with torch.no_grad():
        logits_TV = policy(torch.tensor([proof.token_ids])).logits[0].double() / temperature
    log_probs_TV = logits_TV - logits_TV.logsumexp(dim=-1, keepdim=True)
    assert len(proof.log_probs) == len(proof.token_ids)
    for row, expected_V in zip(proof.log_probs, log_probs_TV, strict=True):
        assert set(row) == set(expected_V.argsort(descending=True)[: len(row)].tolist())
        assert row == pytest.approx({token: float(expected_V[token]) for token in row}, abs=1e-4)
    assert proof.difference(proof.log_probs) == 0.0


def test_the_difference_from_a_proof_is_weighted_by_the_policys_probabilities():
    probabilities = ({3: 0.5, 4: 0.25}, {3: 0.8, 7: 0.1})
    proof = ExpectedLogProbs(
        (1, 2), tuple({t: math.log(p) for t, p in row.items()} for row in probabilities), 1.0, 1e-4
    )
    # Token 4 is missing in the first answer, where the last known token has probability 0.125: at most as likely.
    found = [{3: math.log(0.4), 9: math.log(0.125)}, {3: math.log(0.8), 7: math.log(0.2)}]
    assert proof.prompts == [(1,), (1, 2)]
    weighted = 0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.125) + 0.1 * math.log(2)
    assert proof.difference(found) == pytest.approx(weighted / (0.5 + 0.25 + 0.8 + 0.1), rel=1e-12)


def test_an_engine_that_does_not_answer_like_the_policy_is_named_with_what_is_wrong():
    policy = policy_with(scale=0.05)
    parity, hot = ParityCheck(policy, PROMPT), ParityCheck(policy, PROMPT, 0.7)
    own, of_base = written(policy, parity), written_by_base(policy, parity)
    apart = mean_difference(policy, parity, of_base) / 4
    of_another_base = [replace(s, log_probs=tuple(p - apart for p in s.log_probs)) for s in of_base]
    neither, nothing = "two does not answer like the policy", [Sampled((5,) * 16, (None,) * 16, "v")]
    rows = [
        (parity, of_base, "two answers like the base, not like the policy", "the adapter is not applied"),
        (parity, written(policy_with(scale=0.2), parity), neither, ""),
        (parity, of_another_base, neither, "the same base"),
        (hot, own, neither, "processed_logprobs"),  # log-probabilities without the temperature
        (parity, nothing, neither, ""),
        (parity, [Sampled((5,) * 16, (math.nan,) * 16, "v")], neither, ""),
    ]
    for check, answer, start, words in rows:
        with pytest.raises(BrokenPromiseError) as raised:
            check.check({"one": written(policy, check), "two": answer})
        line = str(raised.value)
        assert start in line
        assert words in line
        assert "\n" not in line
        if answer is not nothing and "nan" not in line:
            (said,) = re.findall(r"differ by (\S+) nats", line)
            assert float(said) == pytest.approx(mean_difference(policy, check, answer), rel=0.06)  # of two digits
    (said,) = re.findall(r"from the base's by (\S+);", refused(parity, of_base))
    assert float(said) <= 1e-5


def refused(parity, answer):
    with pytest.raises(BrokenPromiseError) as raised:
        parity.check({"two": answer})
    return str(raised.value)


def test_the_tolerance_is_what_rounding_explains_in_the_type_that_the_policy_computes_in_unless_it_is_given():
    # 2.5 spacings of the type for each square root of the number of layers, which is 4; never less than 1e-4 nats.
    in_single, in_half = max(1e-4, 2.5 * 2**-23 * math.sqrt(4)), max(1e-4, 2.5 * 2**-7 * math.sqrt(4))
    assert ParityCheck(policy_with(), PROMPT).tolerance == pytest.approx(in_single, rel=1e-12)
    assert ParityCheck(policy_with(dtype="bfloat16"), PROMPT).tolerance == pytest.approx(in_half, rel=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        assert ParityCheck(policy_with(), PROMPT).tolerance == pytest.approx(in_half, rel=1e-12)
    assert ParityCheck(policy_with(), PROMPT, tolerance=0.5).tolerance == 0.5


@pytest.mark.parametrize("method", ["lora", "dora", "pissa", "adalora", "vera", "full"])
def test_every_method_gets_far_from_its_base_and_comes_back_bit_for_bit(method):
    policy = load_base(ModelSection(), torch.device("cpu")) if method == "full" else policy_with(method)
    parity = ParityCheck(policy, PROMPT)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    as_base = written(policy, parity) if method == "full" else written_by_base(policy, parity)
    with parity.far_from_base():
        if method != "full":
            assert [s.token_ids for s in written_by_base(policy, parity)] == [s.token_ids for s in as_base]
        with pytest.raises(BrokenPromiseError, match="like the policy"):
            parity.check({"one": as_base})
        assert parity.check({"one": written(policy, parity)}) <= 1e-4
    after = policy.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
