"""``model.quantization: int8`` and ``fp8``: torchao's codes of the weights, against the numbers that they stand for."""

import gc
import hashlib
import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, TorchAoConfig

import perl
from perl.errors import MissingExtraError, ModelError, PerlError, RecipeError
from perl.evaluation.scoring.results import read_results
from perl.hub.card.check import check_card
from perl.hub.cards import find_card
from perl.methods.base_parameters import is_packed
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.packing.memory import kept_bytes
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import answering_fingerprint, base_fingerprint
from perl.policy.guards import RELOAD_TOLERANCE, check_saved_adapter
from perl.policy.model import check_quantisation, clean_base, load_base
from perl.policy.precision import in_float32
from perl.policy.probe import read_probe
from perl.policy.quantised import keep_codes_only, quantisation_of
from perl.policy.reference import reference_log_probs, token_log_probs
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe.quantisations import QUANTISATIONS, QUANTIZATIONS, in_few_bits
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.sync import make_update
from perl.rollouts.vllm.server_command import server_command
from perl.sandbox import BASE_FOLDER
from perl.training.forecast_text import plan_lines
from perl.training.prepare import prepare, read_recipe
from tests.policy.quantised_recipes import begins_at_its_base, lengths_of_rows, recipe
from tests.policy.test_quantised import of_the_file, trainer

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed, there are no such codes")

CPU = torch.device("cpu")
KINDS = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}
each = pytest.mark.parametrize("name", KINDS)
PROBE = torch.arange(48).reshape(2, 24) % 96
ALL = torch.ones_like(PROBE)


@pytest.fixture(autouse=True)
def _kernels_that_do_not_round(monkeypatch):
    """bitsandbytes, where a test has it for comparison, as on any CPU without AVX512-BF16."""
    if "bitsandbytes" in str(__import__("importlib.util").util.find_spec("bitsandbytes")):
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def quantised(name, dtype="float32"):
    return load_base(ModelSection(quantization=name, dtype=dtype), CPU)


def by_hand(weight):
    """Code times scale in float64."""
    return weight.qdata.double() * weight.scale.double()


def dequantised(base, dtype=torch.float64):
    """An ordinary model with the numbers that the codes stand for."""
    plain = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=dtype).eval()
    with torch.no_grad():
        for layer, module in base.named_modules():
            if is_packed(getattr(module, "weight", None)):
                plain.get_submodule(layer).weight.copy_(by_hand(module.weight))
    return plain


def adapted(base, method):
    """With an adapter that starts as the seed has it, its numbers moved by the seed too."""
    torch.manual_seed(0)
    policy = attach_adapter(base, adaptation(PeftSection(method=method)))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.dtype))
    return policy


def log_probs(policy):
    logp_BTV = policy(PROBE).logits[:, :-1].log_softmax(-1)
    return logp_BTV.gather(-1, PROBE[:, 1:, None])[..., 0]


def gradients(policy):
    policy.train()
    log_probs(policy).sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


@each
@pytest.mark.parametrize(("bias", "base", "autocast"), [(True, "float32", "bfloat16"), (False, "bfloat16", "float16")])
def test_under_autocast_a_layer_is_an_ordinary_one_of_its_numbers(name, bias, base, autocast):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=bias, dtype=getattr(torch, base)))
    torchao.quantize_(layers, KINDS[name](set_inductor_config=False))
    keep_codes_only(layers)
    [layer] = layers
    layer.weight.requires_grad_(False)
    rows, slopes = torch.randn(4, 32, dtype=getattr(torch, base)), torch.randn(4, 16)
    plain = torch.nn.Linear(32, 16, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(by_hand(layer.weight))
        if bias:
            plain.bias.copy_(layer.bias)
    found = []
    for one, dtype in ((layer, rows.dtype), (plain, torch.float64)):
        given = rows.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", dtype=getattr(torch, autocast), enabled=one is layer):
            result = one(given)
        (result.double() * slopes.double()).sum().backward()
        found.append((result, given.grad, one.bias.grad if bias else torch.zeros(1)))
    assert found[0][0].dtype == getattr(torch, autocast)
    assert found[0][1].dtype == rows.dtype
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=0.02, atol=0.02)
    with torch.no_grad(), torch.autocast("cpu", dtype=getattr(torch, autocast)):
        assert layer(rows).dtype == getattr(torch, autocast)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_is_the_one_of_the_numbers_its_codes_stand_for(name, dtype):
    base = quantised(name, dtype)
    layer = base.model.layers[0].mlp.up_proj
    assert layer.weight.qdata.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]
    assert type(base.lm_head) is torch.nn.Linear
    assert not is_packed(base.model.embed_tokens.weight)
    assert quantisation_of(base) == name
    ordinary = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float64)
    weight = ordinary.model.layers[0].mlp.up_proj.weight
    spacing = weight.abs().amax(1) / {"int8": 127.5, "fp8": 16}[name]  # of whole numbers, or of three bits at the top
    assert ((by_hand(layer.weight) - weight).abs().amax(1) <= 0.6 * spacing).all()
    with torch.no_grad(), in_float32(base):
        torch.testing.assert_close(log_probs(base).double(), log_probs(dequantised(base)), rtol=0, atol=5e-5)
    with torch.no_grad():
        assert (log_probs(base).double() - log_probs(ordinary)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "method"),
    [("int8", "lora"), ("fp8", "dora"), ("int8", "pissa"), ("fp8", "oft"), ("int8", "lokr"), ("fp8", "vera")],
)
def test_policy_reference_divergence_gradient_and_merged_weights_are_those_of_plain_weights(name, method):
    """Against the same adapter in float64 on an ordinary base with code times scale."""
    base = quantised(name)
    untouched, alike = dequantised(base), dequantised(base)
    policy, plain = adapted(base, method), adapted(alike, method)
    plain.double()
    with torch.no_grad():
        ours, expected = token_log_probs(policy.eval(), PROBE, ALL), log_probs(plain.eval())
        reference, of_base = reference_log_probs(policy, PROBE, ALL), log_probs(untouched)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(reference.double(), of_base, rtol=0, atol=1e-4)
    ratio = of_base - expected
    k3 = (ratio.exp() - ratio - 1).mean()  # Schulman's estimate of the KL divergence
    ratio = reference - ours
    assert (ratio.exp() - ratio - 1).mean().item() == pytest.approx(k3.item(), rel=1e-3)
    assert k3 > 1e-4
    for (key, found), wanted in zip(gradients(policy).items(), gradients(plain).values(), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item(), msg=key)
    sent, exact = (make_update(one, "merged", "v1").tensors for one in (policy, plain))
    assert sent.keys() == exact.keys()
    for key, tensor in sent.items():
        torch.testing.assert_close(tensor.double(), exact[key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("method", "name", "dtype"),
    [
        *(("lora", "int8", "bfloat16"), ("pissa", "fp8", "float32"), ("hra", "fp8", "bfloat16")),
        *(
            pytest.param(method, name, dtype, marks=pytest.mark.nightly)
            for method in METHODS
            for name, dtype in (("int8", "float32"), ("fp8", "bfloat16"))
        ),
    ],
)
def test_the_table_of_methods_says_what_stands_on_it(name, method, dtype, tmp_path):
    row = METHODS[method]
    if row.off_quantised(name):
        if not row.trains_the_bases:
            with pytest.raises((PerlError, NotImplementedError, AssertionError)):
                gradients(adapted(quantised(name, dtype), method))
        return
    begins_at_its_base(attach_adapter(quantised(name, dtype), adaptation(PeftSection(method=method))))
    policy = adapted(quantised(name, dtype), method)
    before = base_fingerprint(policy)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients(policy).values())
    write_adapter(policy, tmp_path / "adapter", "sandbox:base", None)
    assert check_saved_adapter(policy, tmp_path / "adapter", PROBE) <= RELOAD_TOLERANCE
    assert base_fingerprint(policy) == before


@pytest.mark.parametrize("name", [*KINDS, "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_magnitudes_of_dora_begin_as_the_lengths_of_the_rows(name, dtype):
    policy = attach_adapter(quantised(name, dtype), adaptation(PeftSection(method="dora")))
    pairs = list(lengths_of_rows(policy))
    assert len(pairs) > 10
    for magnitudes, lengths in pairs:
        torch.testing.assert_close(magnitudes, lengths, rtol=1e-6, atol=0)


@each
def test_between_the_passes_there_are_codes_only(name):
    """torchao's own layers would leave every weight as numbers for the gradient."""
    own = quantised(name)
    theirs = AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, dtype=torch.float32, quantization_config=TorchAoConfig(KINDS[name](set_inductor_config=False))
    )
    layers = [m.weight for m in own.modules() if is_packed(getattr(m, "weight", None))]
    numbers = 4 * sum(weight.numel() for weight in layers)
    kept = []
    for base in (own, theirs):
        policy = adapted(base, "lora")
        kept.append(kept_bytes(lambda policy=policy: policy(PROBE).logits, policy))
        gc.collect()
    first = own.model.layers[0].mlp.gate_proj.weight.numel()  # nothing below the first layers has a gradient
    assert kept[1] - kept[0] > numbers - 8 * 4 * first
    assert torch.equal(log_probs(own), log_probs(theirs))


@each
def test_the_name_of_the_base_is_counted_from_checkpoint_and_word(name):
    base = quantised(name)
    facts = {"source": of_the_file(torch.float32), "quantisation": {"weights": name}}
    assert answering_fingerprint(base) == hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    as_the_compiler_has_it = AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, dtype=torch.float32, quantization_config=TorchAoConfig(KINDS[name](set_inductor_config=False))
    )
    assert answering_fingerprint(as_the_compiler_has_it) == answering_fingerprint(base)
    per_tensor = {"granularity": torchao.PerTensor(), "set_inductor_config": False}
    other = AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, dtype=torch.float32, quantization_config=TorchAoConfig(KINDS[name](**per_tensor))
    )
    assert re.fullmatch(r"(Int|Float)8WeightOnly-[0-9a-f]{8}", quantisation_of(other))
    assert answering_fingerprint(other) != answering_fingerprint(base)
    clean = clean_base(base)
    assert base_fingerprint(clean) == base_fingerprint(base)
    with torch.no_grad():
        base.model.layers[0].mlp.up_proj.weight.qdata[0].fill_(0)
    assert base_fingerprint(clean) != base_fingerprint(quantised(name))


@pytest.fixture(scope="module", params=["int8", pytest.param("fp8", marks=pytest.mark.nightly)])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / f"on-{request.param}"
    return request.param, perl.train(
        recipe(quantization=request.param, train={**recipe()["train"], "beta": 0.1}), output_dir=folder
    )


def loaded(adapter, name):
    """As others load it, by plain transformers and PEFT; on the ordinary base without a name."""
    how = {} if name is None else {"quantization_config": TorchAoConfig(KINDS[name](set_inductor_config=False))}
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32, **how)
    return PeftModel.from_pretrained(base, str(adapter)).eval()


def test_a_run_says_on_which_base_it_was_trained_and_others_load_it_there(run, capsys):
    name, done = run
    subject, probe = read_results(done.path / "eval").subject, read_probe(done.path)
    assert done.facts["quantization"] == subject["base_quantization"] == name
    assert done.facts["fingerprint"]["source"] == of_the_file(torch.float32)
    assert subject["base_sha256"] == done.facts["fingerprint"]["base"] != of_the_file(torch.float32)
    assert done.facts["versions"]["torchao"]
    assert "bitsandbytes" not in done.facts["versions"]
    assert done.facts["reload_difference"] < 1e-5
    with safe_open(done.adapter / WEIGHTS, framework="pt") as file:
        said = file.metadata()
    assert (said["base_sha256"], said["base_quantization"]) == (of_the_file(torch.float32), name)
    there, elsewhere = (
        token_log_probs(loaded(done.adapter, how), probe.input_ids_BT, torch.ones_like(probe.input_ids_BT))
        for how in (name, None)
    )
    torch.testing.assert_close(probe.log_probs_BT, there, rtol=0, atol=1e-5)
    assert (elsewhere - probe.log_probs_BT).abs().max() > 1e-3
    card = done.card.read_text()
    assert f"trained and scored on this base quantised as it was loaded ({name}, by torchao)" in card
    assert f"Base: sandbox:base in 8 bits ({name})" in card
    assert "--quantization torchao --hf-overrides" in card
    found = find_card(str(done.path))
    assert [str(mistake) for mistake in check_card(found.files, found.weights_sha256, found.counted).mistakes] == []
    names = {}
    code = card.partition("```python\n")[2].partition("```")[0].replace("path/to/this/folder", str(done.adapter))
    exec(code, names)  # noqa: S102 (it is what a reader runs)
    assert capsys.readouterr().out.strip()
    assert answering_fingerprint(names["model"]) == done.facts["fingerprint"]["base"]


def test_a_script_asks_for_it_in_a_word(tmp_path):
    name = "fp8"
    trained = trainer(tmp_path, quantization=name, max_steps=1)
    trained.train()
    assert {p.dtype for p in trained.policy.parameters() if p.requires_grad} == {torch.float32}
    assert quantisation_of(trained.policy.get_base_model()) == name
    given = trainer(tmp_path, model=AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, dtype=torch.float32, quantization_config=TorchAoConfig(KINDS[name](set_inductor_config=False))
    ), max_steps=1)  # fmt: skip
    given.train()
    for (key, one), other in zip(trained.policy.named_parameters(), given.policy.parameters(), strict=True):
        if one.requires_grad:
            assert torch.equal(one, other), key


def test_what_cannot_be_is_one_line_before_weights_are_loaded(monkeypatch, tmp_path):
    with pytest.raises(RecipeError, match=r"peft\.method: hra cannot stand on a base quantised to fp8: PEFT computes"):
        read_recipe(recipe(quantization="fp8", peft={"method": "hra"}))
    with pytest.raises(RecipeError, match=r"pissa cannot .* nf4: .*\(lora, model\.quantization: int8 or fp8, or leave"):
        read_recipe(recipe(quantization="nf4", peft={"method": "pissa"}))
    with pytest.raises(ModelError, match=r"model\.quantization: fp8 runs on cpu, cuda, and this is xpu \(nf4, another"):
        check_quantisation(ModelSection(quantization="fp8"), torch.device("xpu"))
    with pytest.raises(ModelError, match=r"a base in 8 bits \(fp8\) lies whole on the device"):
        trainer(tmp_path, quantization="fp8", model_init_kwargs={"device_map": "auto"})
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "torchao" else found(name, *a))
    with pytest.raises(
        RecipeError, match=r"model\.quantization: int8 needs the package torchao .*perl-rl\[quantised\]"
    ):
        read_recipe(recipe(quantization="int8"))
    with pytest.raises(MissingExtraError, match=r"perl-rl\[quantised\]"):
        load_base(ModelSection(quantization="int8"), CPU)


def test_plan_and_server_command_know_the_table():
    assert tuple(QUANTISATIONS) == QUANTIZATIONS
    served = {"backend": "vllm-server", "servers": ["http://a:1"]}
    for name, kind in KINDS.items():
        plan = prepare(read_recipe(recipe(quantization=name, rollout=served)))
        assert next(plan_lines(plan)).endswith(f"base in 8 bits ({name})")
        said = server_command(plan.recipe.model, 100, 8000, on_cpu=False, form=plan.form, rank=plan.served_rank)
        overrides = re.search(r"--quantization torchao --hf-overrides '(.*?)' ", said).group(1)
        config = json.loads(json.loads(overrides)["quantization_config_dict_json"])
        from_dict = __import__("torchao.core.config", fromlist=["config_from_dict"]).config_from_dict
        assert from_dict(config) == kind()  # as vLLM reads it
    assert in_few_bits("nf4-single") == " in 4 bits (nf4-single)"
    assert in_few_bits("llm-int8") == " in 8 bits (llm-int8)"
    assert in_few_bits("Float8WeightOnly-0123abcd") == " in 8 bits (Float8WeightOnly-0123abcd)"
    assert in_few_bits("Int4WeightOnly-0123abcd") == " in 4 bits (Int4WeightOnly-0123abcd)"
    assert in_few_bits("awq") == " quantised (awq)"


@pytest.mark.nightly
@each
def test_processes_train_it(name, tmp_path):
    """Though codes cannot be sent from one to the others, as DDP would do when it begins."""
    engine = {"device": "cpu", "threads": 1, "processes": 2}
    (tmp_path / "it.yaml").write_text(json.dumps(recipe(quantization=name, engine=engine, eval={"enabled": False})))
    command = [sys.executable, "-m", "perl", "train", str(tmp_path / "it.yaml"), f"train.output_dir={tmp_path / 'run'}"]
    subprocess.run(command, check=True, timeout=300)
    assert (tmp_path / "run" / "adapter" / WEIGHTS).is_file()
