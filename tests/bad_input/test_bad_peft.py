"""A mistake in what is asked of the adapter is one line that says what is wrong and where, before weights load."""

from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from perl.cli.commands import run
from perl.methods.registry import REFUSED_TYPES
from perl.sandbox import BASE_FOLDER

LINEAR_LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def test_methods_types_and_arguments_that_do_not_exist_or_cannot_be_trained_are_named_with_nearest_or_reason(refuses):
    assert REFUSED_TYPES
    refuses([
        *((f"peft:\n  type: {kind}\n", f"recipe.yaml:3: peft.type: {kind} cannot be trained: {reason}\n")
          for kind, reason in list(REFUSED_TYPES.items())[:2]),
        ("peft:\n  method: rslroa\n", "recipe.yaml:3: peft.method: no method 'rslroa' (did you mean rslora?)\n"),
        ("peft: {kwargs: {use_rslor: true}}\n", "", "peft.kwargs.use_rslor", "did you mean use_rslora?"),
        ("peft:\n  type: C3B\n", "recipe.yaml:3: peft.type: PEFT has no type 'C3B' (did you mean C3A?)\n"),
    ])  # fmt: skip


def test_arguments_of_the_adapter_that_peft_or_the_method_refuses(refuses):
    kwargs = (
        "init_lora_weights: pissa_niter_4",  # a method of its own
        "init_lora_weights: loftq",  # it would write to the base
        "task_type: SEQ_CLS",
        "layer_replication: [[0, 2], [1, 2]]",
        "rank_pattern: {q_prj: 2}",
        "bias: all",  # biases of the base itself
        "layers_to_transform: [0]",  # PEFT wants target_modules as a list with it
    )
    of_methods = (("ia3", "alpha", 4), ("hra", "dropout", 0.1), ("full", "rank", 4))
    of_a_type = (
        ("blok_size: 32", "did you mean block_size?"),
        ("block_size: 31", "PEFT refuses"),
        ("block_size: 32, method: dora", "peft.method: is not read beside peft.type"),
    )
    refuses([
        *((f"peft: {{kwargs: {{{further}}}}}\n", "recipe.yaml:2: peft") for further in kwargs),
        *((f"peft:\n  method: {method}\n  {name}: {value}\n",
           f"recipe.yaml:4: peft.{name}: {method} has no {name} (leave it out)\n")
          for method, name, value in of_methods),
        *((f"peft: {{type: C3A, {further}}}\n", "recipe.yaml:2: peft.", words) for further, words in of_a_type),
    ])  # fmt: skip


CONFIGS = (
    ("nonsense", "Expecting value"),
    ("[1]", "not a mapping"),
    ("{}", "adapter_config.json names no peft_type"),
    ('{"peft_type": "LORRA"}', "PEFT has no type 'LORRA'"),
    ('{"peft_type": "LORA"}', "header"),  # its weights are no safetensors
)


def test_an_adapter_to_continue_that_is_absent_unreadable_or_of_another_base(refuses):
    rows = []
    for i, (config, words) in enumerate(CONFIGS):
        Path(f"broken{i}").mkdir()
        Path(f"broken{i}/adapter_config.json").write_text(config, encoding="utf-8")
        Path(f"broken{i}/adapter_model.safetensors").write_bytes(b"nonsense")
        rows.append((f"broken{i}", f"broken{i} cannot be read: ", words))
    other = Qwen3ForCausalLM(Qwen3Config.from_pretrained(BASE_FOLDER, hidden_size=64))
    get_peft_model(other, LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained("narrow")
    rows += [
        ("narrow", "narrow does not fit this base, it was made for another one: ", "4 x 64 there, 4 x 128 here"),
        ("absent/folder/adapter", "absent/folder/adapter: no such folder"),
        ("weightless", "weightless holds no adapter: adapter_config.json is absent\n"),
    ]
    what, hint = "comes from the adapter that is continued", "leave it out, or rank: null if it is inherited"
    refuses([
        *((f"peft:\n  adapter: {name}\n", f"recipe.yaml:3: peft.adapter: {start}", *words)
          for name, start, *words in rows),
        ("peft:\n  adapter: anywhere\n  rank: 4\n", f"recipe.yaml:4: peft.rank: {what} ({hint})\n"),
    ])  # fmt: skip


def test_target_modules_that_match_nothing_or_can_carry_no_adapter_are_named_with_those_that_can(refuses):
    rows = (
        ("[query_key_value]", "query_key_value match no module of Qwen3ForCausalLM"),
        ("'.*attn_proj'", ".*attn_proj match no module of Qwen3ForCausalLM"),
        ("[input_layernorm]", ""),
        ("'.*attn.*'", ""),
    )
    refuses(
        (f"peft: {{target_modules: {targets}}}\n", f"recipe.yaml:2: peft.target_modules: {start}", LINEAR_LAYERS)
        for targets, start in rows
    )


def test_what_the_plan_trains_is_counted(capsys):
    """LoRA of rank 16: a row of A and a column of B for each rank, of every linear layer that is matched.

    A type of PEFT that has no row here is no mistake: C3A has inputs x outputs / block_size numbers a layer.
    """
    sides = {"q": (128, 128), "k": (128, 64), "v": (128, 64), "o": (128, 128)} | {
        n: (128, 384) for n in ("g", "u", "d")
    }
    lora, c3a = (
        {name: f(*pair) for name, pair in sides.items()} for f in (lambda i, o: 16 * (i + o), lambda i, o: i * o // 32)
    )
    for setting, matched in (
        ("target_modules=[q_proj, v_proj]", [lora["q"], lora["v"]]),
        ("target_modules='.*self_attn.*_proj'", [lora[name] for name in "qkvo"]),
        ("target_modules=all-linear", lora.values()),
        ("type=C3A", c3a.values()),
    ):
        settings = [f"peft.{setting}", *(["peft.block_size=32"] if "C3A" in setting else [])]
        assert run(["train", "sound.yaml", "--dry-run", *settings], "perl") == 0
        printed = capsys.readouterr().out
        trained = next(line for line in printed.splitlines() if line.startswith("# trained "))
        assert int(trained.split()[2].replace(",", "")) == 4 * sum(matched), setting
        assert ("block_size 32" in printed) == ("C3A" in setting)
