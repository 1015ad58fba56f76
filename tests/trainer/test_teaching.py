"""A step with a teacher is that of two separate models and a whole softmax, however its rows are run."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import DataError, ModelError, RecipeError
from perl.packing.micro_batches import TAUGHT_IDS
from perl.policy.fingerprint import base_fingerprint
from perl.policy.save_adapter import write_adapter
from perl.run.files import sha256_of
from perl.trainer.publishing import write_card
from tests.oracles.distillation import divergences
from tests.oracles.rollouts import GENERATIONS, LONGEST, MIXED, ROWS, Group, rollout_function, rollout_table
from tests.oracles.two_trainers import ADAPTERS, QUIET, RATES, STEPS, base, norm, relative_difference, tokenizer, train
from tests.trainer import distributed_checkpoints as checkpoints
from tests.trainer.test_resumed_processes import run

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # TRL uses the old names
RELATIVE = 1e-5
HINT = "t5 t9 t17"
TAUGHT = {"algorithm": "opd", "teacher_hint": HINT}
BY_LENGTH = {"reward_funcs": lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
ALONE = {"reward_weights": [0.0], "gradient_accumulation_steps": 2, "learning_rate": 0.5}
MANY_PASSES = {"train_tokens_per_microbatch": 60}


def adapted(adapter="lora", seed=23, offset=0.3):
    model = copy.deepcopy(base(torch.float32))  # made with a seed of its own
    torch.manual_seed(seed)
    model = get_peft_model(model, copy.deepcopy(ADAPTERS[adapter]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += offset * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def saved(tmp_path):
    """Another LoRA, on all layers, as a run would leave it."""
    policy = adapted("lora everywhere", offset=0.1)
    write_adapter(policy, tmp_path / "teacher", "", None, base_fingerprint(policy))
    return str(tmp_path / "teacher")


def rows_of_step(step, hint=None, tools=False):
    """(prompt, prompt of the teacher, completion, mask) of each row."""
    table, size = rollout_table(MIXED), len(MIXED[0])
    found = []
    for name in list(table)[step * size : (step + 1) * size]:
        group = table[name]
        ids = tokenizer()(text=f"{hint}\n{name}")["input_ids"] if hint else group.prompt_ids
        masks = group.tool_mask if tools else [[1] * len(c) for c in group.completion_ids]
        found += [(group.prompt_ids, ids, c, m) for c, m in zip(group.completion_ids, masks, strict=True)]
    return found


def plain_update(pages, teacher, options, *, adapter="lora", hint=None, weight=1.0, top_k=0, tools=False):
    """What plain SGD adds on the mean divergence of all tokens of a step, from the first page on."""
    student = adapted(adapter)
    own = dict(student.named_parameters())
    with torch.no_grad():
        for name, tensor in pages[0].items():
            own[name].copy_(tensor)
    trained = {name: p for name, p in own.items() if p.requires_grad}
    temperature = options.get("temperature", 1.0)
    means = []
    for step in range(STEPS):
        rows = rows_of_step(step, hint, tools)
        found = divergences(student, teacher, [row[:3] for row in rows], temperature, top_k)
        masks = [torch.tensor(row[3]) for row in rows]
        tokens = sum(int(mask.sum()) for mask in masks)
        mean = sum((kl * mask).sum() for kl, mask in zip(found, masks, strict=True)) / tokens
        means.append(mean.item())
        gradients = torch.autograd.grad(weight * mean, list(trained.values()))
        with torch.no_grad():
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter -= options["learning_rate"] * gradient
    return {name: p.detach() - pages[0][name] for name, p in trained.items()}, means


def assert_plain(ours, expected, means):
    assert norm(expected) > 0.01 * norm(ours.pages[0])
    assert relative_difference(ours.update(), expected) <= RELATIVE
    logged = [entry for entry in ours.history if "teacher/kl" in entry and "train_runtime" not in entry]
    assert [entry["teacher/kl"] for entry in logged] == pytest.approx(means, rel=1e-5)
    assert all(0 <= entry["teacher/agreement"] < 1 for entry in logged)
    assert all(entry["rows/trained_fraction"] == 1 for entry in logged)


WAYS = {
    "many passes": MANY_PASSES,
    "padded": {"padding_free": False},
    "as TRL cuts": {"train_tokens_per_microbatch": 0},
    "prompts apart": {"share_prompts": False, **MANY_PASSES},
    "recomputed": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_teachers_adapter_gives_the_update_of_two_models(way, saved):
    options = {**ALONE, "temperature": 0.7}
    ours = train(PeftGRPOTrainer, teacher_adapter=saved, tools=True, **options, **WAYS[way])
    assert_plain(ours, *plain_update(ours.pages, adapted("lora everywhere", offset=0.1), options, tools=True))


def test_an_adapter_with_a_hint_a_weight_and_few_tokens_gives_the_update_of_two_models(saved):
    settings = {"teacher_adapter": saved, "teacher_hint": HINT, "teacher_weight": 1.7, "teacher_top_k": 5}
    ours = train(PeftGRPOTrainer, **settings, **ALONE, **MANY_PASSES)
    plain = {"hint": HINT, "weight": 1.7, "top_k": 5}
    assert_plain(ours, *plain_update(ours.pages, adapted("lora everywhere", offset=0.1), ALONE, **plain))


def test_a_hint_and_the_base_give_the_update_of_two_models():
    ours = train(PeftGRPOTrainer, teacher_hint=HINT, **ALONE, padding_free=False)
    assert_plain(ours, *plain_update(ours.pages, base(torch.float32), ALONE, hint=HINT))


@pytest.mark.parametrize("adapter", ["dora", "ia3"])
def test_students_of_other_methods_learn_from_a_lora(adapter, saved):
    options = {**ALONE, "learning_rate": RATES[adapter]}
    ours = train(PeftGRPOTrainer, teacher_adapter=saved, adapter=adapter, **options)
    teacher = adapted("lora everywhere", offset=0.1)
    assert_plain(ours, *plain_update(ours.pages, teacher, options, adapter=adapter))


def test_rewards_and_a_teacher_add_up(saved):
    options = {"gradient_accumulation_steps": 2, "loss_type": "dapo", "max_steps": 1, "learning_rate": 0.5}
    rewards = train(PeftGRPOTrainer, **options)
    alone = train(PeftGRPOTrainer, teacher_adapter=saved, **{**options, **ALONE})
    both = train(PeftGRPOTrainer, teacher_adapter=saved, **options, **MANY_PASSES)
    expected = {name: tensor + rewards.update()[name] for name, tensor in alone.update().items()}
    assert relative_difference(both.update(), expected) <= RELATIVE
    assert relative_difference(both.update(), alone.update()) > 0.01


def test_a_teacher_leaves_what_is_trained_without_one_as_it_is(saved, tmp_path):
    """Not even a random number is drawn for it."""
    states = []
    for adapter in (None, saved):
        torch.manual_seed(3)
        make(tmp_path, teacher_hint=HINT, teacher_adapter=adapter)  # the base with a hint draws nothing
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    options = {**ALONE, "reward_weights": [1.0], "max_steps": 1}
    with_one, without = train(PeftGRPOTrainer, teacher_adapter=saved, **options), train(PeftGRPOTrainer, **options)
    assert relative_difference(with_one.pages[0], without.pages[0]) == 0


def test_an_evaluation_has_the_teachers_divergence_too(saved, tmp_path):
    table = rollout_table(MIXED)
    trainer = make(
        tmp_path,
        rows={"prompt": list(table)},
        held={"prompt": list(table)[:4]},
        rollout_func=rollout_function(table, log_probs=False, tools=False),
        **{**EVALUATED, "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS},
        **{"max_steps": 1, "num_generations": GENERATIONS, "algorithm": "opd"},
        teacher_adapter=saved,
        teacher_hint=HINT,
    )
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "eval_teacher/kl" in entry]
    assert entry["eval_teacher/kl"] > 0
    assert entry["eval_loss"] == pytest.approx(entry["eval_teacher/kl"], rel=1e-4)


def test_the_card_of_a_script_says_who_taught(saved, tmp_path):
    trainer = make(tmp_path / "run", teacher_adapter=saved, teacher_hint=HINT)
    trainer.save_adapter(tmp_path / "run" / "adapter")
    write_card(trainer, tmp_path / "run" / "adapter")
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "| teacher | the base with another adapter, a hint; KL over the vocabulary x 1 |" in card
    assert "| teacher adapter | teacher |" in card
    assert f"| teacher adapter SHA-256 | {sha256_of(Path(saved) / 'adapter_model.safetensors')} |" in card
    assert str(tmp_path) not in card


def make(folder, *, rows=None, held=None, **options):
    rollout = options.pop("rollout_func", None)
    return PeftGRPOTrainer(
        model=options.pop("model", None) or copy.deepcopy(base(torch.float32)),
        reward_funcs=options.pop("reward_funcs", None),
        args=PeftRLConfig(
            str(folder), **{**QUIET, "max_completion_length": LONGEST, "per_device_train_batch_size": 8, **options}
        ),
        train_dataset=Dataset.from_dict(rows or {"prompt": ["t3 t4"] * 8, "other": ["x"] * 8}),
        eval_dataset=None if held is None else Dataset.from_dict(held),
        processing_class=tokenizer(),
        rollout_func=rollout,
    )


REFUSED = (
    ({"algorithm": "opd"}, RecipeError, r"teacher: opd has nobody to learn from \(teacher: \{adapter"),
    ({"teacher_hint": "x {answer}"}, DataError, r"teacher\.hint: .*no gold answer.*prompt, other"),
    ({"teacher_adapter": "absent/./x"}, ModelError, r"teacher\.adapter: "),
    ({"teacher_weight": 2.0}, RecipeError, r"teacher_weight: .*needs a teacher"),
    ({"teacher_hint": "x", "teacher_weight": -1.0}, RecipeError, r"teacher_weight: .*greater than 0"),
    ({"teacher_hint": "x", "strategy": "fsdp2"}, RecipeError, r"teacher: .*fsdp2"),
    ({"teacher_hint": "x", "peft_method": "full"}, RecipeError, r"teacher: .*peft\.method full"),
    ({"teacher_hint": "x", "top_entropy_quantile": 0.5}, RecipeError, r"teacher: .*TRL's step"),
    ({**TAUGHT, "scale_rewards": "none"}, RecipeError, "scale_rewards: none changes nothing"),
    ({**TAUGHT, **BY_LENGTH, "reward_weights": [0.0], "epsilon": 0.5}, RecipeError, "epsilon: 0.5 changes nothing"),
    ({**BY_LENGTH, "reward_weights": [0.0]}, RecipeError, "reward_weights: every reward has the weight 0"),
    ({"algorithm": "ppo", "teacher_hint": HINT}, RecipeError, ".*critic"),
    ({**TAUGHT, **BY_LENGTH, "num_generations": 1}, RecipeError, "num_generations: must be greater than or equal"),
)


@pytest.mark.parametrize(("options", "kind", "line"), REFUSED)
def test_what_cannot_be_is_one_line(options, kind, line, tmp_path):
    with pytest.raises(kind) as caught:
        make(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert re.match(line, str(caught.value)), str(caught.value)


def test_without_rewards_one_completion_of_a_prompt_is_enough(tmp_path):
    trainer = make(tmp_path, **TAUGHT, num_generations=1, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["teacher/kl"] > 0


SAME = r"^teacher: is the policy itself, asked what the policy is asked[^\n]*"


def test_a_teacher_that_is_the_policy_is_refused_where_nothing_else_teaches(tmp_path):
    for options in ({}, {"peft_method": "pissa"}, {"bf16": True}):
        with pytest.raises(RecipeError, match=SAME):
            make(tmp_path, algorithm="opd", teacher_hint="{prompt}", **options)
    make(tmp_path, algorithm="opd", teacher_hint="{prompt}", peft_kwargs={"init_lora_weights": False})
    fresh = get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(ADAPTERS["lora"]))
    write_adapter(fresh, tmp_path / "untrained", "", None, base_fingerprint(fresh))
    taught = {"teacher_adapter": str(tmp_path / "untrained")}
    trainer = make(tmp_path, algorithm="opd", max_steps=2, **taught)
    with pytest.raises(RecipeError, match=SAME + r"KL [\de.+-]+ nats"):  # which only its numbers tell
        trainer.train()
    make(
        tmp_path, max_steps=1, algorithm="opd", entropy_weight=0.1, **taught
    ).train()  # which has a gradient of its own
    with pytest.raises(RecipeError, match=SAME):  # a KL term has none where the policy is its reference
        make(tmp_path, algorithm="opd", beta=0.1, **taught).train()
    evaluated = make(tmp_path, algorithm="opd", held={"prompt": ["t3 t4"] * 8}, **taught, **EVALUATED)
    assert evaluated.evaluate()["eval_teacher/kl"] < 1e-6  # which trains nothing
    make(tmp_path, teacher_hint="{prompt}", **BY_LENGTH).train()


NO_ROOM = r"^teacher\.hint: [^\n]*more than the model's 64[^\n]*$"


def test_a_hint_that_leaves_no_room_is_one_line_before_training(tmp_path):
    """Also where only a problem of an evaluation has one."""
    with pytest.raises(ModelError, match=NO_ROOM):
        make(tmp_path, teacher_hint=" ".join(["t7"] * 60))
    rows = {"prompt": ["t3 t4"] * 8, "solution": ["t3"] * 8}
    given = {"teacher_hint": "{answer}", "rows": rows}
    long = {"prompt": ["t3", " ".join(["t7"] * 40)], "solution": ["t3"] * 2}
    with pytest.raises(ModelError, match=NO_ROOM):
        make(tmp_path, **given, held=long, **EVALUATED)
    bare = {"prompt": ["t3 t4"] * 8}
    with pytest.raises(DataError, match=r"^teacher\.hint: [^\n]*no gold answer[^\n]*$"):
        make(tmp_path, **given, held=bare, **EVALUATED)
    make(tmp_path, **given, held=bare)  # which are not evaluated


def test_rollouts_of_other_prompts_than_the_datas_have_no_hint(saved, tmp_path):
    table = {"t3 t4": Group([9, 10], [[5, 6]] * GENERATIONS, [1.0] * GENERATIONS, [])}
    trainer = hinted(tmp_path, table)
    with pytest.raises(RecipeError, match=r"^teacher: [^\n]*rollout_func has asked[^\n]*prompt_ids[^\n]*$"):
        trainer.train()
    hinted(tmp_path, {"t3 t4": replace(table["t3 t4"], prompt_ids=[3, 4])}).train()
    hinted(tmp_path, table, teacher_hint=None, teacher_adapter=saved).train()


def hinted(folder, table, **options):
    rollout = rollout_function(table, log_probs=False, tools=False)
    options = {"teacher_hint": HINT, "max_steps": 1, "num_generations": GENERATIONS, **options}
    rows = {"prompt": list(table) * 8}
    return make(folder, rows=rows, rollout_func=rollout, per_device_train_batch_size=GENERATIONS, **options)


SHARED = {"num_iterations": 2, "save_steps": 3}


def test_a_resumed_training_ends_like_one_that_was_never_interrupted(saved, tmp_path):
    """From among rollouts that several steps share."""
    given = {"teacher_adapter": saved, "teacher_hint": HINT, "beta": 0.0, "gradient_accumulation_steps": 4, **SHARED}
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{SHARED['save_steps']}")
    whole = checkpoints.run(tmp_path, checkpoints.Job("whole", options=given))
    assert f"0/{TAUGHT_IDS}" in load_file(Path(checkpoint) / "rollouts-rank0.safetensors")
    resumed = checkpoints.run(tmp_path, checkpoints.Job("resumed", resume=checkpoint, options=given))
    assert resumed["log"] == whole["log"]
    assert resumed["numbers"] == whole["numbers"]
    tensors = [load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "resumed")]
    assert relative_difference(*tensors) == 0
    for changed in ({"teacher_hint": "t6"}, {"teacher_adapter": None}, {"teacher_adapter": None, "teacher_hint": None}):
        job = checkpoints.Job("other", resume=checkpoint, options={**given, **changed})
        refused = checkpoints.run(tmp_path, job)["refused"]
        assert refused.startswith("teacher: ")
        assert "was written with teacher" in refused
        assert "\n" not in refused


@pytest.mark.nightly
def test_two_processes_learn_as_one_from_the_begin_and_from_its_checkpoint(saved, tmp_path):
    """Among rollouts that several steps share, so that the teacher's prompts are divided anew too."""
    given = {"teacher_adapter": saved, "teacher_hint": HINT, "beta": 0.0, **SHARED}
    job = {"method": "lora", "strategy": "ddp", "options": given}
    run(tmp_path, 1, [{"name": "one", **job}])
    resumed = {"name": "on", **job, "resume": str(tmp_path / "one" / "checkpoint-3")}
    run(tmp_path, 2, [{"name": "two", **job}, resumed])
    one, two, on = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "two", "on"))
    assert relative_difference(two, one) <= RELATIVE
    assert relative_difference(on, one) <= RELATIVE
