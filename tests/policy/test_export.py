"""What is exported is the adapter: a plain LoRA for plain PEFT, or a model for transformers; or it is refused."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from perl.cli.commands import run
from perl.errors import ModelError, PerlError, RunFolderError
from perl.methods.registry import METHODS
from perl.policy.attach import attach_adapter
from perl.policy.export import export, merge
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_base, load_tokenizer
from perl.policy.reference import token_log_probs
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe import Recipe
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER
from tests.a_few_methods import each, few_layers
from tests.packing.families import make
from tests.rollouts.policies import PROBE, base, fresh, perturbed

pytestmark = [
    # PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    # PEFT's advice about training one of two tied weights, which is what some tests are about.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

ADAPTERS = [name for name, method in METHODS.items() if method.config]
LOW = [name for name in ADAPTERS if METHODS[name].delta in ("lora", "low_rank")]
# Largest rank of a LoRA with the same function, where the method's is 4 and the LoRA's is not.
RANKS = {"pissa": 8, "milora": 8, "olora": 8, "adalora": 6, "loha": 16, "gralora": 8}


def named(name):
    return load_base(ModelSection(name=name), torch.device("cpu"))


def tiny(tied: bool) -> str:
    """A small model with attention biases, on disk."""
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained("tiny")
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained("tiny")
    return "tiny"


def policy_of(method, model=None, **settings) -> PeftModel:
    """A policy that is no longer the base."""
    return perturbed(fresh(method, model, **{**few_layers(method), **settings}))


def saved(policy, base_name="sandbox:base") -> str:
    write_adapter(policy, Path("adapter"), base_name, None, base_fingerprint(policy))
    return "adapter"


def log_probs(model):
    with torch.no_grad():
        return token_log_probs(model.eval(), PROBE, torch.ones_like(PROBE))


def same(one, other, tolerance=1e-4):
    torch.testing.assert_close(log_probs(one), log_probs(other), rtol=0, atol=tolerance)


def loaded(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


@pytest.mark.parametrize("method", each(ADAPTERS))
def test_a_lora_is_the_adapter_or_refused_and_a_merged_model_always_is(method):
    policy = policy_of(method)
    source = saved(policy)
    assert (log_probs(policy) - log_probs(base())).abs().max() > 0.02
    done = export(source, "merged")
    assert (done.path, done.form, done.largest_rank) == (Path("adapter-merged"), "merged", None)
    same(loaded("adapter-merged"), policy)
    try:
        done = export(source, "lora")
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert (done.path, done.form) == (Path("adapter-lora"), "lora")
        assert done.difference <= 1e-4
        assert type(PeftConfig.from_pretrained("adapter-lora")) is LoraConfig
        same(PeftModel.from_pretrained(base(), "adapter-lora"), policy)
    if method in LOW:
        assert not refusal
        assert done.largest_rank == RANKS.get(method, 4)
    elif refusal:
        said = r"has no low rank: the best factors of rank \d+ leave out \d+\.\d% of model\.layers\.\d\."
        said = r"changes model\.\S*norm, which is no linear layer" if method == "ln_tuning" else said
        assert re.search(said, refusal)
        assert "use --as merged" in refusal
        assert len(refusal.splitlines()) == 1


def test_an_older_export_is_replaced_and_a_refusal_leaves_it_and_the_source_is_only_read():
    Path("there").mkdir()
    Path("there/older").touch()
    for method in ("dora", "ln_tuning"):
        with pytest.raises(ModelError):
            export(saved(policy_of(method)), "lora", "there")
        assert sorted(path.name for path in Path().iterdir()) == ["adapter", "there"]
        assert [path.name for path in Path("there").iterdir()] == ["older"]
    source = saved(policy_of("lora"))
    before = {path.name: path.read_bytes() for path in Path(source).iterdir()}
    for form in ("lora", "merged"):
        Path("there/older").touch()
        assert export(source + "/", form, "there").path == Path("there")
        assert sorted(path.name for path in Path().iterdir()) == ["adapter", "there"]
        assert not Path("there/older").exists()
        assert {path.name: path.read_bytes() for path in Path(source).iterdir()} == before


@pytest.mark.parametrize("made", ["hra", "in bfloat16", "by another program"])
def test_the_lora_belongs_to_the_base_that_it_was_trained_or_compared_on_and_names_no_path(made):
    on = load_base(ModelSection(dtype="bfloat16" if "bfloat16" in made else "float32"), torch.device("cpu"))
    known = base_fingerprint(on), str(on.dtype).removeprefix("torch.")
    policy = policy_of("hra" if made == "hra" else "lora", on)
    source = saved(policy)
    if made == "by another program":  # whose header names no base
        write_adapter(policy, Path("adapter"), "sandbox:base", None)
    for form in ("lora", "merged"):
        assert export(source, form).difference <= 1e-4
    found = find_adapter("adapter-lora")
    assert (found.base_fingerprint, found.base_dtype) == known
    config = json.loads(Path("adapter-lora/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["peft_type"]) == ("sandbox:base", "LORA")
    assert str(BASE_FOLDER.parent) not in json.dumps(config)
    tensors = load_file("adapter-lora/adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 4
    assert all(re.fullmatch(r"base_model\.model\.\S+_proj\.lora_[AB]\.weight", name) for name in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    exact = load_base(ModelSection(dtype=known[1]), torch.device("cpu")).float()  # the numbers of its base
    same(PeftModel.from_pretrained(exact, "adapter-lora"), policy.float())


def test_ranks_patterns_whole_modules_and_single_tokens_go_along():
    for method, kwargs in (
        ("lora", {"rank_pattern": {"down_proj": 7, "layers.1.self_attn.q_proj": 2}}),
        ("vera", {"modules_to_save": ["norm"]}),
        ("lora", {"trainable_token_indices": [6, 9]}),
    ):
        policy = policy_of(method, kwargs=kwargs)
        done = export(saved(policy), "lora")
        same(PeftModel.from_pretrained(base(), "adapter-lora"), policy)
        if "rank_pattern" in kwargs:
            tensors = load_file("adapter-lora/adapter_model.safetensors")
            assert {len(t) for name, t in tensors.items() if "lora_A" in name} == {2, 4, 7}
            assert done.largest_rank == 7
        if "trainable_token_indices" in kwargs:
            export("adapter", "merged")
            same(loaded("adapter-merged"), policy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merged_model_is_added_up_first_and_rounded_once(dtype):
    policy = policy_of("lora")
    export(saved(policy), "merged", dtype=dtype)
    expected = copy.deepcopy(policy).double().merge_and_unload().state_dict()
    model = loaded("adapter-merged", dtype="auto")
    assert model.config.dtype == getattr(torch, dtype)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype))


def test_a_merged_model_is_whole():
    export(saved(policy_of("lora")), "merged", dtype="bfloat16")
    folder = Path("adapter-merged")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(BASE_FOLDER).get_vocab()
    assert AutoConfig.from_pretrained(folder).tie_word_embeddings
    # The weights that no adapter touched are the published ones, bit for bit.
    published, merged = load_file(BASE_FOLDER / "model.safetensors"), load_file(folder / "model.safetensors")
    assert merged.keys() == published.keys()
    changed = {name for name, tensor in published.items() if not torch.equal(tensor, merged[name])}
    assert changed == {
        f"model.layers.{i}.{part}.weight" for i in range(4) for part in ("self_attn.q_proj", "mlp.down_proj")
    }


def test_parameters_of_experts_are_merged_all_of_them_and_are_no_lora():
    """Those of one module have layers of one name, one around the other."""
    tokenizer = load_tokenizer(ModelSection())
    make("Qwen3Moe", vocab_size=len(tokenizer)).save_pretrained("experts")
    tokenizer.save_pretrained("experts")
    base = load_base(ModelSection(name="experts"), torch.device("cpu"))
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, task_type="CAUSAL_LM")
    policy = attach_adapter(base, config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    write_adapter(policy, Path("adapter"), "experts", None)
    assert export("adapter", "merged").difference <= 1e-4
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in ("experts", "adapter-merged"))
    assert before.keys() == after.keys()
    changed = {name.rpartition("layers.")[2][2:] for name in after if not torch.equal(before[name], after[name])}
    experts = {f"mlp.experts.{i}.{part}_proj.weight" for i in range(4) for part in ("gate", "up", "down")}
    assert changed == {*experts, "self_attn.q_proj.weight"}
    with pytest.raises(ModelError, match=r"--as: .*mlp.experts, which is no linear layer.*--as merged"):
        export("adapter", "lora")


def test_merging_leaves_the_policy_and_its_base_alone():
    policy = policy_of("dora", kwargs={"modules_to_save": ["embed_tokens"]})
    before, config = log_probs(policy), copy.deepcopy(policy.get_base_model().config.to_dict())
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    fingerprint = base_fingerprint(policy)
    merged = merge(policy, torch.bfloat16)
    assert next(merged.parameters()).dtype == torch.bfloat16
    merged.save_pretrained("merged")
    assert torch.equal(log_probs(policy), before)
    assert base_fingerprint(policy) == fingerprint
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.state_dict().items())
    assert policy.get_base_model().config.to_dict() == config


@pytest.mark.parametrize(
    ("trained", "tied"),
    [
        ({"kwargs": {"modules_to_save": ["embed_tokens"]}}, True),
        ({"kwargs": {"modules_to_save": ["lm_head"]}}, False),
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["lm_head"]}, True),
        ({"target_modules": ["q_proj", "down_proj"]}, True),
    ],
    ids=str,
)
def test_a_merged_model_whose_embeddings_were_trained_is_right_tied_or_not(trained, tied):
    """One whose embeddings were not trained stays tied."""
    name = tiny(tied)
    policy = policy_of("lora", named(name), **trained)
    export(saved(policy, name), "merged", base=name)
    model = loaded("adapter-merged")
    same(model, policy)
    of_embeddings = "embed_tokens" in str(trained) or "lm_head" in str(trained)
    assert model.config.tie_word_embeddings == (tied and not of_embeddings)
    assert ("lm_head.weight" in load_file("adapter-merged/model.safetensors")) == (of_embeddings or not tied)
    for part, merged, published in (
        ("embed_tokens", model.get_input_embeddings(), named(name).get_input_embeddings()),
        ("lm_head", model.get_output_embeddings(), named(name).get_output_embeddings()),
    ):
        assert torch.equal(merged.weight, published.weight) is (part not in str(trained))


def test_a_change_of_biases_is_no_lora_even_where_that_of_the_weight_is():
    name = tiny(tied=False)
    model = named(name)
    with torch.no_grad():  # so that scaling the outputs of this layer is a change of its bias alone
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    model.save_pretrained("tiny")
    policy = policy_of("ia3", named(name), target_modules=["k_proj"])
    with pytest.raises(ModelError, match=r"ia3 changes the bias of model\.layers\.0\.self_attn\.k_proj") as caught:
        export(saved(policy, name), "lora", base=name)
    assert len(str(caught.value).splitlines()) == 1
    export("adapter", "merged", base=name)
    same(loaded("adapter-merged"), policy)


def test_a_run_is_exported_with_the_base_of_its_recipe_and_what_holds_none_is_refused():
    policy = policy_of("lora")
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text(Recipe.load("quickstart").to_yaml())
    Path("run/run.json").write_text(json.dumps({"method": "lora"}))
    Path(saved(policy)).rename("run/adapter")
    assert export("run", "lora").path == Path("run-lora")
    same(PeftModel.from_pretrained(base(), "run-lora"), policy)
    Path("run/checkpoints").mkdir()
    write_adapter(policy, Path("run/checkpoints/checkpoint-1"), "a folder's last part", None)
    export("run/checkpoints/checkpoint-1", "lora", "of-a-checkpoint")
    same(PeftModel.from_pretrained(base(), "of-a-checkpoint"), policy)
    for name, content in (
        *(("empty", None), ("broken", b"nonsense")),
        ("full", json.dumps({"method": "full"}).encode()),
    ):
        Path(name).mkdir()
        if content is not None:
            (Path(name) / "run.json").write_bytes(content)
    for source, words in (
        ("absent", "no such folder"),
        ("empty", "adapter_config.json is absent"),
        ("broken", "holds no run: run.json: Expecting value"),
    ):
        with pytest.raises(PerlError) as caught:
            export(source, "lora")
        (said,) = str(caught.value).splitlines()
        assert words in said
    with pytest.raises(RunFolderError, match=r"^full: trained the model itself, there is no adapter to export$"):
        export("full", "lora")


def test_the_base_that_is_named_takes_the_place_of_the_adapters_own():
    policy = policy_of("lora")
    source = saved(policy, "someone/else")
    with pytest.raises(ModelError) as caught:
        export(source, "lora")
    assert "someone/else" in str(caught.value)
    export(source, "lora", base="sandbox:base")
    same(PeftModel.from_pretrained(base(), "adapter-lora"), policy)
    assert PeftConfig.from_pretrained("adapter-lora").base_model_name_or_path == "sandbox:base"
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ModelError, match=r"^--base: adapter does not say which base it belongs to .*name it"):
        export(source, "lora")


def test_an_adapter_of_another_base_or_with_non_finite_numbers_is_refused():
    source = saved(policy_of("lora"))
    for form in ("lora", "merged"):
        with pytest.raises(PerlError) as caught:
            export(source, form, base=tiny(tied=False))
        assert len(str(caught.value).splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["adapter", "tiny"]
    file = Path(source) / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, file)
    for form in ("lora", "merged"):
        with pytest.raises(PerlError, match="has weights that are not finite"):
            export(source, form)
    assert sorted(path.name for path in Path().iterdir()) == ["adapter", "tiny"]


def test_the_command_writes_what_it_says_or_refuses_with_a_line(capsys):
    policy = policy_of("pissa")
    assert (
        run(["export", saved(policy, "someone/else"), "--as", "lora", "--base", "sandbox:base", "-o", "mine"], "perl")
        == 0
    )
    said = r"lora     mine  \(rank up to 8, log-probabilities differ by at most \d\.\de[-+]\d\d nats\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    same(PeftModel.from_pretrained(base(), "mine"), policy)
    assert run(["export", saved(policy_of("dora")), "--as", "lora"], "perl") == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "the update of dora has no low rank" in said.err
