"""The parity check tells an engine from the base and from anything else; the policy is itself again after it."""

import math

import pytest
import torch

from perl.errors import BrokenPromiseError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.policy.precision import tolerance_of
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.engine import Proof, Sampled
from perl.rollouts.parity_check import LENGTH, ParityCheck

PROMPT = [9, 4, 13, 5, 10, 15, 22, 31]


def policy_with(method="lora", scale=0.0, dtype="float32"):
    """A policy some way from its base."""
    settings = {"rank": 8} if "rank" in METHODS[method].settings else {}
    policy = attach_adapter(
        load_base(ModelSection(dtype=dtype), torch.device("cpu")), adaptation(PeftSection(method=method, **settings))
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    return policy.eval()


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_difference_is_the_mean_over_tokens_of_the_worst_copy(temperature):
    policy = policy_with(scale=0.05)
    parity = ParityCheck(policy, PROMPT, temperature)
    own, off = written(policy, parity), written(policy, parity, offset=1e-3)
    parity.tolerance = 2e-3
    assert parity.check({"one": own}) < 1e-5
    assert parity.check({"one": own, "two": off}) == pytest.approx(1e-3, rel=0.02)


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
    proof = Proof((1, 2), tuple({t: math.log(p) for t, p in row.items()} for row in probabilities), 1.0, 1e-4)
    # Token 4 is missing in the first answer, where the last known token has probability 0.125: at most as likely.
    found = [{3: math.log(0.4), 9: math.log(0.125)}, {3: math.log(0.8), 7: math.log(0.2)}]
    weighted = 0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.125) + 0.1 * math.log(2)
    assert proof.difference(found) == pytest.approx(weighted / (0.5 + 0.25 + 0.8 + 0.1), rel=1e-12)


def test_an_engine_that_answers_like_the_base_is_called_that():
    policy = policy_with(scale=0.05)
    parity = ParityCheck(policy, PROMPT)
    with pytest.raises(BrokenPromiseError, match="two answers like the base, not like the policy") as raised:
        parity.check({"one": written(policy, parity), "two": written_by_base(policy, parity)})
    assert "the adapter is not applied" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_engine_that_answers_like_neither_is_called_that():
    policy = policy_with(scale=0.05)
    parity = ParityCheck(policy, PROMPT)
    with pytest.raises(BrokenPromiseError, match="one does not answer like the policy"):
        parity.check({"one": written(policy_with(scale=0.2), parity)})


def test_log_probabilities_without_the_temperature_are_no_agreement():
    policy = policy_with(scale=0.05)
    hot, plain = ParityCheck(policy, PROMPT, 0.7), ParityCheck(policy, PROMPT)
    with pytest.raises(BrokenPromiseError, match="processed_logprobs"):
        hot.check({"one": written(policy, plain)})


def test_missing_and_non_finite_log_probabilities_are_no_agreement():
    policy = policy_with(scale=0.05)
    parity = ParityCheck(policy, PROMPT)
    for nothing in (None, float("nan")):
        with pytest.raises(BrokenPromiseError, match="does not answer like the policy"):
            parity.check({"one": [Sampled((5,) * 16, (nothing,) * 16, "v")]})


def test_before_the_first_step_base_and_policy_are_one_and_agree():
    policy = policy_with()
    parity = ParityCheck(policy, PROMPT)
    assert parity.check({"one": written_by_base(policy, parity)}) <= 1e-5


def test_the_tolerance_is_that_of_the_type_that_the_policy_computes_in_unless_it_is_given():
    assert ParityCheck(policy_with(), PROMPT).tolerance == tolerance_of(torch.float32, 4)
    assert ParityCheck(policy_with(dtype="bfloat16"), PROMPT).tolerance == tolerance_of(torch.bfloat16, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert ParityCheck(policy_with(), PROMPT).tolerance == tolerance_of(torch.bfloat16, 4)
    assert ParityCheck(policy_with(), PROMPT, tolerance=0.5).tolerance == 0.5


def test_no_more_tokens_are_asked_for_than_a_completion_of_the_run_has():
    assert ParityCheck(policy_with(), PROMPT, longest=3).sampling.max_completion_length == 3
    assert ParityCheck(policy_with(), PROMPT, longest=500).sampling.max_completion_length == LENGTH


@pytest.mark.parametrize("method", sorted(METHODS))
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
