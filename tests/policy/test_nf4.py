"""``model.quantization: nf4``: a run on a base in 4 bits, from plan to Hub, and what such a base cannot carry."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import perl
from perl import PeftRLConfig
from perl.errors import MissingExtraError, ModelError, PerlError, RecipeError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.drawing.subject import find_subject
from perl.evaluation.scoring.results import read_results
from perl.hub.card.check import check_card
from perl.hub.cards import find_card
from perl.hub.push.publish import push_run, wanted_push
from perl.hub.zoo_entries.adding import add
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.export import export
from perl.policy.fingerprint import answering_fingerprint, base_fingerprint
from perl.policy.model import load_base, quantising
from perl.policy.name import adapter_policy_name
from perl.policy.probe import read_probe
from perl.policy.quantised import half_precision, quantisation_of
from perl.policy.saved.adapter import CONFIG, WEIGHTS, find_adapter
from perl.recipe.sections import ModelSection, PeftSection
from perl.run.folder import Run
from perl.sandbox import BASE_FOLDER
from perl.training.forecast_text import plan_lines
from perl.training.prepare import prepare, read_recipe
from tests.policy.quantised_recipes import begins_at_its_base, recipe
from tests.policy.test_quantised import of_the_file, trainer
from tests.rollouts.policies import ON_NF4

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed, there is no quantised base")

CPU, REPO = torch.device("cpu"), "user/adapter"
AS_QLORA = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


@pytest.fixture(autouse=True)
def _kernels_that_do_not_round(monkeypatch):
    """bitsandbytes as on any CPU without AVX512-BF16, where it would compute in bfloat16 whatever it is told."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return perl.train(recipe(), output_dir=tmp_path_factory.mktemp("runs") / "on-nf4")


@pytest.fixture
def copied(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "on-nf4")
    return Run.read(tmp_path / "on-nf4")


def loaded(folder, how=None):
    """The adapter as others load it, by plain transformers and PEFT."""
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32, quantization_config=how)
    return PeftModel.from_pretrained(base, str(folder)).eval()


def log_probs(policy, ids_BT):
    with torch.no_grad():
        logp_BTV = policy(ids_BT).logits[:, :-1].float().log_softmax(-1)
    return logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]


def header(adapter):
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        return file.metadata()


def test_the_run_says_on_which_base_it_was_trained_and_scored(run):
    facts, results = run.facts, read_results(run.path / "eval")
    subject, version = results.subject, importlib.metadata.version("bitsandbytes")
    assert facts["versions"]["bitsandbytes"] == results.versions["bitsandbytes"] == version
    assert facts["quantization"] == subject["base_quantization"] == "nf4"
    assert facts["fingerprint"]["source"] == of_the_file(torch.float32)
    assert subject["base_sha256"] == facts["fingerprint"]["base"] != of_the_file(torch.float32)
    config = (run.adapter / CONFIG).read_bytes()
    digest = hashlib.sha256((run.adapter / WEIGHTS).read_bytes()).hexdigest()
    assert subject["policy"] == adapter_policy_name(config, digest, facts["fingerprint"]["base"])
    said = header(run.adapter)
    assert (said["base_sha256"], said["base_quantization"]) == (of_the_file(torch.float32), "nf4")


def test_what_others_load_on_the_base_in_4_bits_is_what_was_trained(run):
    probe = read_probe(run.path)
    there, elsewhere = (log_probs(loaded(run.adapter, how), probe.input_ids_BT) for how in (AS_QLORA, None))
    torch.testing.assert_close(probe.log_probs_BT, there, rtol=0, atol=1e-5)
    assert run.facts["reload_difference"] < 1e-5
    on_the_ordinary_base = (elsewhere - probe.log_probs_BT).abs().max().item()
    assert on_the_ordinary_base > 1e-2
    assert probe.difference(elsewhere) == pytest.approx(on_the_ordinary_base)


def test_a_run_that_was_stopped_ends_like_one_that_was_not(run, copied):
    for left in ("adapter", "eval", "checkpoints/checkpoint-4"):
        shutil.rmtree(copied.path / left)
    copied.record(status="interrupted")
    again = perl.train(recipe(), output_dir=copied.path)
    assert (again.adapter / WEIGHTS).read_bytes() == (run.adapter / WEIGHTS).read_bytes()
    assert again.facts["fingerprint"] == run.facts["fingerprint"]
    assert again.facts["eval"] == run.facts["eval"]


def test_a_run_goes_on_with_no_other_base_and_its_type_is_named(copied):
    copied.record(status="interrupted", fingerprint={**copied.facts["fingerprint"], "base": of_the_file(torch.float32)})
    copied.record(base_dtype="float16")
    said = r"was started with other weights of sandbox:base: .* in float16, here in float32 \(model\.dtype=float16"
    with pytest.raises(PerlError, match=said):
        perl.train(recipe(), output_dir=copied.path)


def scored(adapter, output, quantization="auto"):
    settings = EvalSettings(preset="base", max_new_tokens=24, limit=4, lighteval=False, quantization=quantization)
    return perl.evaluate(adapter, tasks=["sandbox:addition"], k=1, output=output, settings=settings).subject


def test_an_adapter_is_scored_on_the_base_that_it_was_trained_on_unless_someone_says_otherwise(run, tmp_path, caplog):
    own, base = read_results(run.path / "eval").subject, run.facts["fingerprint"]["base"]
    shutil.copytree(run.adapter, tmp_path / "alone")
    for adapter in (run.path, run.path / "checkpoints" / "checkpoint-4", tmp_path / "alone"):
        assert find_subject(str(adapter)).base.quantization == "nf4"
    assert find_subject(str(tmp_path / "alone"), "sandbox:base", quantization="none").base.quantization is None
    said = "alone was trained on a base quantised to nf4, and is scored on the ordinary base [PRL302]"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    there = scored(tmp_path / "alone", tmp_path / "there")
    assert (there["base_sha256"], there["policy"], there["base_quantization"]) == (base, own["policy"], "nf4")
    ordinary = scored(tmp_path / "alone", tmp_path / "ordinary", "none")
    assert ordinary["base_sha256"] == of_the_file(torch.float32)
    assert ordinary["policy"] != own["policy"]
    assert "base_quantization" not in ordinary


def test_vllm_in_this_process_is_no_engine_for_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    with pytest.raises(
        PerlError, match=r"--backend: vLLM in this process holds the ordinary base.*--quantization none"
    ):
        plan_evaluation(str(run.path), None, ["sandbox:addition"], 1, None, tmp_path, EvalSettings(backend="vllm"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = plan_evaluation(str(run.path), None, ["sandbox:addition"], 1, None, tmp_path, EvalSettings())
    assert found.engine.backend == "transformers"


def wrong_with(run):
    """What `perl card --check` says of a run's card."""
    found = find_card(str(run.path))
    return [str(problem) for problem in check_card(found.files, found.weights_sha256, found.counted).mistakes]


def test_the_card_says_it_its_snippet_loads_that_base_and_scores_of_another_are_found(run, copied, capsys):
    card = run.card.read_text()
    assert "trained and scored on this base quantised as it was loaded (nf4, by bitsandbytes)" in card
    assert "Base: sandbox:base in 4 bits (nf4); adapter: on-nf4" in card
    assert "base_quantization: nf4" in card.partition("\n---\n")[0]  # beside each score that the Hub reads
    assert "vllm serve" in card
    assert "--quantization bitsandbytes --enable-lora" in card
    assert "merge_and_unload" not in card
    assert wrong_with(run) == []
    found = {}
    code = card.partition("```python\n")[2].partition("```")[0].replace("path/to/this/folder", str(run.adapter))
    torch.manual_seed(0)
    exec(code, found)  # noqa: S102 (it is what a reader runs)
    assert capsys.readouterr().out.strip()
    assert answering_fingerprint(found["model"]) == run.facts["fingerprint"]["base"]
    probe = read_probe(run.path)
    assert probe.difference(log_probs(found["model"], probe.input_ids_BT)) < 1e-5
    file = copied.path / "eval" / "results.json"
    facts = json.loads(file.read_text())
    del facts["perl"]["subject"]["base_quantization"]
    file.write_text(json.dumps(facts))
    said = wrong_with(copied)
    assert any("perl_run.json: quantization: says nf4, eval/results.json says None" in line for line in said), said


@pytest.mark.usefixtures("hub")
def test_it_is_pushed_and_found_again_with_its_base(run, copied, tmp_path):
    _, difference = push_run(copied, wanted_push(copied, REPO))
    assert difference < 1e-5
    found, probe = find_adapter(REPO), read_probe(run.path)
    assert found.base_quantization == "nf4"
    there = log_probs(loaded(found.folder, AS_QLORA), probe.input_ids_BT)
    torch.testing.assert_close(there, probe.log_probs_BT, rtol=0, atol=1e-5)
    assert find_subject(REPO).base.quantization == "nf4"
    entry = add(copied.path, tmp_path / "zoo")
    assert (entry.base, entry.base_quantization, entry.on_base) == ("sandbox:base", "nf4", "sandbox:base (nf4)")
    assert entry.base_sha256 == run.facts["fingerprint"]["base"]
    assert entry.settings["base loaded as"] == "nf4"


def test_it_is_continued_on_the_ordinary_base_which_the_new_run_names(run, tmp_path):
    train = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 4}
    train |= {"entropy_weight": 0.1}  # whatever its completions' rewards, it has a gradient
    again = recipe(quantization=None, peft={"adapter": str(run.path)}, train=train)
    continued = perl.train(again, output_dir=tmp_path / "run")
    settings, subject = continued.facts["settings"], read_results(continued.path / "eval").subject
    assert settings["continued base loaded as"] == "nf4"
    assert continued.facts["quantization"] is subject.get("base_quantization") is None
    assert subject["base_sha256"] == of_the_file(torch.float32)
    assert "base_quantization" not in header(continued.adapter)
    assert "| continued base loaded as | nf4 |" in continued.card.read_text()
    assert wrong_with(continued) == []
    probe = read_probe(continued.path)
    there = log_probs(loaded(continued.adapter), probe.input_ids_BT)
    torch.testing.assert_close(there, probe.log_probs_BT, rtol=0, atol=1e-5)


def test_it_is_exported_for_the_ordinary_base_and_says_so(run, tmp_path, caplog):
    done = export(run.path, "merged", tmp_path / "merged")
    assert "trained on a base quantised to nf4; the export is for the unquantised base" in caplog.text
    assert done.difference < 1e-4
    merged = AutoModelForCausalLM.from_pretrained(done.path)
    ids = torch.arange(40).reshape(2, 20)
    torch.testing.assert_close(log_probs(merged, ids), log_probs(loaded(run.adapter), ids), rtol=0, atol=1e-4)
    as_lora = export(run.path, "lora", tmp_path / "lora")
    assert as_lora.difference < 1e-4
    assert header(as_lora.path)["base_sha256"] == of_the_file(torch.float32)
    assert "base_quantization" not in header(as_lora.path)
    assert find_subject(str(as_lora.path)).base.quantization is None
    torch.testing.assert_close(log_probs(loaded(as_lora.path), ids), log_probs(merged, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        *("lora", "dora", "oft", "road", "vera"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ON_NF4 if not METHODS[name].off_quantised("nf4")),
    ],
)
def test_every_method_that_stands_on_it_begins_there_and_computes_in_half_precision(method):
    section = ModelSection(quantization="nf4", dtype="bfloat16")
    how = adaptation(PeftSection(method=method))
    policy = attach_adapter(load_base(section, CPU), how)
    begins_at_its_base(policy)
    ids_BT = torch.arange(48).reshape(2, 24) % 96
    logits = policy.train()(ids_BT).logits
    assert logits.dtype == torch.bfloat16
    logits.float().log_softmax(-1).square().sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.requires_grad]
    assert any(g is not None and g.any() for g in gradients)
    assert all(g is None or g.isfinite().all() for g in gradients)
    plain = get_peft_model(load_base(section, CPU), how.config)
    refuses = pytest.raises(RuntimeError, match="dtype") if METHODS[method].widens_nf4 else contextlib.nullcontext()
    with refuses:
        plain(ids_BT)


def test_the_plan_counts_numbers_and_not_bytes():
    plans = [prepare(read_recipe(recipe(quantization=how))) for how in ("nf4", None)]
    nf4, plain = [(plan.total_parameters, plan.trainable_parameters) for plan in plans]
    assert nf4 == plain
    tensors = load_file(BASE_FOLDER / "model.safetensors")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    linear = [tensor.shape for name, tensor in tensors.items() if "_proj" in name]
    lora = sum(2 * (outputs + inputs) for outputs, inputs in linear)  # of rank 2
    assert plain == (numbers + lora, lora)
    assert next(plan_lines(plans[0])) == f"model    sandbox:base, {numbers:,} parameters, base in 4 bits (nf4)"
    assert "bits" not in next(plan_lines(plans[1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_base_in_4_bits_computes_in_the_type_of_the_rest_which_a_gpu_must_have(dtype, monkeypatch):
    base = load_base(ModelSection(quantization="nf4", dtype=dtype), CPU)
    layer = base.model.layers[0].mlp.up_proj
    asked = getattr(torch, dtype)
    assert layer.compute_dtype == base.dtype == base.lm_head.weight.dtype == asked
    assert (layer.weight.quant_state.quant_type, layer.weight.quant_state.nested) == ("nf4", True)
    assert type(base.lm_head) is torch.nn.Linear
    assert quantisation_of(base) == "nf4"
    found = quantising(ModelSection(quantization="nf4"), CPU)
    assert (found["device_map"], found["dtype"]) == ({"": CPU}, torch.float32)
    assert quantising(ModelSection(), CPU) == {}
    gpu = torch.device("cuda")  # where a recipe leaves the type open
    for has_bfloat16, expected in ((False, torch.float16), (True, asked if asked.itemsize == 2 else torch.bfloat16)):
        how = (lambda **_: True) if has_bfloat16 else (lambda including_emulation=True: including_emulation)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", how)
        assert half_precision(asked, gpu) == expected
        assert half_precision(None, gpu) == (torch.bfloat16 if has_bfloat16 else torch.float16)


def test_the_name_of_a_base_tells_how_it_was_quantised_and_not_in_what_it_computes():
    def named(**changes):
        how = BitsAndBytesConfig(**{**AS_QLORA.to_dict(), **changes})
        base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32, quantization_config=how)
        return answering_fingerprint(base), quantisation_of(base)

    ours, single, fp4 = named(), named(bnb_4bit_use_double_quant=False), named(bnb_4bit_quant_type="fp4")
    assert [word for _, word in (ours, single, fp4)] == ["nf4", "nf4-single", "fp4-double"]
    assert len({name for name, _ in (ours, single, fp4)} | {of_the_file(torch.float32)}) == 4
    assert named(bnb_4bit_compute_dtype="bfloat16") == ours
    ordinary = load_base(ModelSection(), CPU)
    assert answering_fingerprint(ordinary) == base_fingerprint(ordinary)


SERVED = {"backend": "vllm-server", "servers": ["http://a:1"]}
IN_PROCESS = "vLLM in this process holds the ordinary base"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"quantization": "nf5"}, r"model\.quantization: must be one of nf4, int8, fp8, not 'nf5'"),
        (
            {"peft": {"method": "pissa"}},
            r"peft\.method: pissa cannot stand on a base quantised to nf4: it starts on plain",
        ),
        ({"peft": {"method": "full"}}, r"peft\.method: full cannot stand .*: it trains the base's own weights \(lora,"),
        ({"peft": {"method": "ln_tuning"}}, r"peft\.method: ln_tuning cannot stand .* trains the base's own weights"),
        ({"peft": {"kwargs": {"modules_to_save": ["lm_head"]}}}, r"peft\.kwargs\.modules_to_save: trains the base's"),
        ({"rollout": {"backend": "vllm"}}, rf"rollout\.backend: {IN_PROCESS}"),
        ({"rollout": {**SERVED, "sync": "merged"}}, r"rollout\.sync: a quantised base takes no merged weights"),
    ],
    ids=str,
)
def test_what_it_cannot_carry_is_refused_when_the_recipe_is_read(changed, line):
    with pytest.raises(RecipeError, match=line) as refused:
        read_recipe(recipe(**changed))
    assert len(refused.value.mistakes) == 1
    allowed = {name for name, method in METHODS.items() if not method.off_quantised("nf4")}
    # What PEFT can put on it, without what trains the base's own, and what half precision fails with.
    assert allowed == set(ON_NF4) - {"ln_tuning", "shira"}


def test_without_bitsandbytes_it_is_refused_with_the_extra_to_install(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else found(name, *a)
    )
    with pytest.raises(
        RecipeError, match=r"model\.quantization: nf4 needs the package bitsandbytes .*perl-rl\[quantised\]"
    ):
        read_recipe(recipe())
    with pytest.raises(MissingExtraError, match=r"perl-rl\[quantised\]"):
        trainer(tmp_path, quantization="nf4")


@pytest.mark.parametrize(
    ("changed", "overrides", "line"),
    [
        (
            {"peft": {"method": "dora"}, "rollout": SERVED},
            [],
            r"dora sends weights after each step, which servers of a quantised base",
        ),
        ({}, ["model.dtype=bfloat16"], r"model\.dtype: this GPU has no bfloat16"),
        (
            {},
            ["model.name=published"],
            r"model\.quantization: .*is published in quantised form already \(bitsandbytes",
        ),
    ],
    ids=["dora", "bfloat16", "quantised again"],
)
def test_what_it_cannot_be_is_refused_before_weights_are_loaded(monkeypatch, changed, overrides, line):
    shutil.copytree(BASE_FOLDER, "published")
    config = json.loads((BASE_FOLDER / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    Path("published/config.json").write_text(json.dumps(config))
    monkeypatch.setattr("perl.training.inputs.has_bfloat16", lambda _: False)
    with pytest.raises(ModelError, match=line):
        prepare(read_recipe(recipe(**changed), overrides))


def test_a_script_is_refused_what_it_cannot_have(tmp_path):
    with pytest.raises(RecipeError, match=r"quantization: no quantization 'nf' \(did you mean nf4"):
        PeftRLConfig(str(tmp_path), quantization="nf", use_cpu=True)
    base = load_base(ModelSection(), CPU)
    with pytest.raises(ModelError, match=r"quantization: is of a base that is loaded by name; a model that is passed"):
        trainer(tmp_path, model=base, quantization="nf4")
    with pytest.raises(ModelError, match=r"quantization: is said twice"):
        trainer(tmp_path, how=AS_QLORA, quantization="nf4")
    with pytest.raises(ModelError, match=r"milora cannot stand on a base quantised to nf4"):
        trainer(tmp_path, model=load_base(ModelSection(quantization="nf4"), CPU), peft_method="milora")
    with pytest.raises(ModelError, match=r"model_init_kwargs: a base in 4 bits \(nf4\) lies whole .*leave device_map"):
        trainer(tmp_path, quantization="nf4", model_init_kwargs={"device_map": "auto"})
    with pytest.raises(RecipeError, match=r"quantization: a base in 4 bits \(nf4\) cannot be in shards, which fsdp2"):
        trainer(tmp_path, quantization="nf4", strategy="fsdp2")
