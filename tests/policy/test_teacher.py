"""A teacher on the policy's base is the separately loaded one, bit for bit, and leaves the policy as it was."""

import importlib.util
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from perl.errors import ModelError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_base, load_tokenizer
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.policy.teacher import find_teacher, make_teacher, teacher_identity
from perl.recipe.sections import ModelSection, PeftSection, TeacherSection
from perl.sandbox import BASE_FOLDER, BASE_NAME
from tests.a_few_methods import A_FEW
from tests.policy.test_reference import base, move_adapter, policy_log_probs, policy_of
from tests.saved_adapters import save_adapter


def saved_policy(method, folder, seed=7):
    policy = policy_of(method)
    move_adapter(policy, seed)
    write_adapter(policy, folder, BASE_NAME, None, base_fingerprint(policy))
    return policy


def separately_loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    return (model if folder is None else PeftModel.from_pretrained(model, folder)).eval()


@pytest.mark.parametrize("method", A_FEW)
def test_whatever_adapter_is_trained_its_teacher_is_the_separately_loaded_one(method, tmp_path):
    save_adapter(tmp_path / "teacher", seed=3)
    policy = policy_of(method)
    move_adapter(policy)
    before, fingerprint = policy_log_probs(policy), base_fingerprint(policy)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    random = torch.get_rng_state()
    of_base = make_teacher(policy, None)
    of_adapter = make_teacher(policy, find_teacher(str(tmp_path / "teacher"), BASE_NAME, None))
    assert torch.equal(torch.get_rng_state(), random)
    for teacher, folder in ((of_base, None), (of_adapter, tmp_path / "teacher")):
        expected = policy_log_probs(separately_loaded(folder))
        assert torch.equal(policy_log_probs(teacher), expected)
        assert not any(p.requires_grad for p in teacher.parameters())
        assert not teacher.training
        assert (expected - before).abs().max() > 1e-3
    assert torch.equal(policy_log_probs(policy), before)
    assert base_fingerprint(policy) == fingerprint == base_fingerprint(of_adapter)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("method", ["dora", "pissa", "vera"])
def test_a_teacher_of_any_method_is_the_separately_loaded_one(method, tmp_path):
    saved_policy(method, tmp_path)
    saved = find_teacher(str(tmp_path), BASE_NAME, load_tokenizer(ModelSection()))
    found = policy_log_probs(make_teacher(policy_of("lora"), saved))
    plain = policy_log_probs(separately_loaded(tmp_path))
    assert torch.equal(found, policy_log_probs(continue_adapter(base(), saved).eval()))
    # An anchored start adds up its two halves in another order than plain PEFT, which has them as one.
    assert (found - plain).abs().max() <= (1e-4 if METHODS[method].starts else 0.0)


def test_a_teacher_shares_the_base_and_what_the_policy_learns_does_not_reach_it(tmp_path):
    policy = saved_policy("lora", tmp_path)
    teacher = make_teacher(policy, find_teacher(str(tmp_path), BASE_NAME, None))
    own = {p.data_ptr() for p in policy.parameters()}
    new = sum(p.numel() for p in teacher.parameters() if p.data_ptr() not in own)
    assert new == sum(p.numel() for name, p in teacher.named_parameters() if "lora_" in name)  # no second base
    before = policy_log_probs(teacher)
    assert torch.equal(before, policy_log_probs(policy))
    move_adapter(policy, seed=5)
    assert torch.equal(policy_log_probs(teacher), before)
    assert not torch.equal(policy_log_probs(policy), before)


def test_a_teacher_of_another_base_or_tokenizer_is_refused(tmp_path):
    save_adapter(tmp_path / "other", base="somebody/model")
    with pytest.raises(ModelError, match=r"^teacher\.adapter: [^\n]*somebody/model, not for sandbox:base[^\n]*$"):
        find_teacher(str(tmp_path / "other"), BASE_NAME, None)
    save_adapter(tmp_path / "own")
    tokenizer = load_tokenizer(ModelSection())
    vocabulary = tokenizer.get_vocab()
    files = {"own": vocabulary, "more": {**vocabulary, "zz": 500}, "moved": {**vocabulary, "7": 3}}
    for name, vocab in files.items():
        (tmp_path / "own" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        if name == "own":
            find_teacher(str(tmp_path / "own"), BASE_NAME, tokenizer)
            continue
        with pytest.raises(ModelError, match=r"^teacher\.adapter: [^\n]*another tokenizer[^\n]*$"):
            find_teacher(str(tmp_path / "own"), BASE_NAME, tokenizer)
    with pytest.raises(ModelError, match=r"^teacher\.adapter: "):
        find_teacher(str(tmp_path / "absent"), BASE_NAME, None)


def test_an_adapter_of_other_weights_of_the_same_base_is_refused(tmp_path):
    policy = policy_of("lora")
    write_adapter(policy, tmp_path, BASE_NAME, None, "0" * 64)
    with pytest.raises(ModelError, match=r"^teacher\.adapter: [^\n]*was trained on other weights[^\n]*$"):
        make_teacher(policy, find_teacher(str(tmp_path), BASE_NAME, None))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_prompts_before_rows_and_adapters_on_the_head_are_refused(tmp_path):
    get_peft_model(base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^teacher\.adapter: [^\n]*PROMPT_TUNING"):
        find_teacher(str(tmp_path), None, None)
    on_head = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head", "q_proj"])
    with pytest.raises(ModelError, match=r"^peft: [^\n]*on the head[^\n]*$"):
        make_teacher(attach_adapter(base(), on_head), None)
    get_peft_model(base(), on_head).save_pretrained(tmp_path / "head", save_embedding_layers=False)
    with pytest.raises(ModelError, match=r"^teacher\.adapter: [^\n]*on the head[^\n]*$"):
        make_teacher(policy_of("lora"), find_adapter(str(tmp_path / "head")))


def test_without_a_base_there_is_no_teacher():
    with pytest.raises(ModelError, match="no teacher is left"):
        make_teacher(base(), None)
    biases = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    policy = attach_adapter(base(), biases)
    policy.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match="trains tensors of the base"):
        make_teacher(policy, None)


def test_a_teacher_is_another_one_by_its_numbers_its_hint_and_its_system_prompt(tmp_path):
    save_adapter(tmp_path / "a", seed=1)
    save_adapter(tmp_path / "b", seed=1)
    save_adapter(tmp_path / "c", seed=2)
    a, b, c = (find_adapter(str(tmp_path / name)) for name in "abc")
    section = TeacherSection(adapter="x")
    assert teacher_identity(section, a) == teacher_identity(TeacherSection(adapter="y", weight=2.0), b)
    others = [
        (section, c),
        (section, None),
        (TeacherSection(hint="h"), None),
        (TeacherSection(system_prompt="h"), None),
    ]
    others.append((TeacherSection(adapter="x", hint="h"), a))
    assert len({teacher_identity(*one) for one in [*others, (section, a)]}) == 6


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_base_in_four_bits_has_its_teachers_too(tmp_path, monkeypatch):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # which rounds whatever it is told

    def packed():
        return load_base(ModelSection(quantization="nf4", dtype="float32"), torch.device("cpu"))

    save_adapter(tmp_path / "lora", seed=3)
    policy = attach_adapter(packed(), adaptation(PeftSection(rank=4))).eval()
    move_adapter(policy)
    before, saved = policy_log_probs(policy), find_teacher(str(tmp_path / "lora"), BASE_NAME, None)
    expected = [(None, packed()), (saved, continue_adapter(packed(), saved).eval())]
    for one, model in expected:
        assert torch.equal(policy_log_probs(make_teacher(policy, one)), policy_log_probs(model))
    assert torch.equal(policy_log_probs(policy), before)
    saved_policy("loha", tmp_path / "loha")
    with pytest.raises(ModelError, match=r"^teacher\.adapter: [^\n]*loha[^\n]*$"):
        make_teacher(policy, find_teacher(str(tmp_path / "loha"), BASE_NAME, None))


def test_modules_that_a_teacher_saves_whole_are_its_own(tmp_path):
    policy = attach_adapter(base(), adaptation(PeftSection(rank=4, kwargs={"modules_to_save": ["norm"]}))).eval()
    move_adapter(policy, 9)
    write_adapter(policy, tmp_path, BASE_NAME, None, base_fingerprint(policy))
    student = policy_of("lora and whole modules")
    move_adapter(student, 4)
    teacher = make_teacher(student, find_teacher(str(tmp_path), BASE_NAME, None))
    expected = policy_log_probs(separately_loaded(tmp_path))
    assert torch.equal(policy_log_probs(teacher), expected)
