"""A process reward model's scores are those of a plain forward pass, read where each step ends."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from perl.errors import ModelError
from perl.rewards.process.reward import process_reward
from tests.oracles.tiny_prm import TAG, save_tiny_prm, shepherd_tokenizer
from tests.rewards.prm_cases import COMPLETIONS, PROMPTS, STEPS, random_rows, token_oracle


def message(text, role="assistant"):
    return [{"role": role, "content": text}]


def test_a_class_is_read_after_each_separator(token_prm):
    tokenizer = AutoTokenizer.from_pretrained(token_prm)
    expected = [
        token_oracle(token_prm, tokenizer.encode(prompt), steps, "\n\n")
        for prompt, steps in zip(PROMPTS, STEPS, strict=True)
    ]
    means = {"min": min, "last": lambda scores: scores[-1], "product": math.prod, "mean": statistics.fmean}
    for aggregation, number in means.items():
        rewards = process_reward(token_prm, aggregation=aggregation)(PROMPTS, COMPLETIONS)
        assert rewards == pytest.approx([number(scores) for scores in expected], abs=1e-6)
    assert max(map(max, expected)) - min(map(min, expected)) > 0.05  # the scores are not all alike


def test_a_row_begins_with_the_first_token_of_a_tokenizer_that_has_one():
    torch.manual_seed(3)
    folder = save_tiny_prm(Path("first"), "token", shepherd_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer.encode("2+2=", add_special_tokens=False)]
    assert ids == tokenizer.encode("2+2=")
    # Every step and separator by itself, as training has them: each begins with a space.
    model = AutoModelForTokenClassification.from_pretrained(folder)
    ends = []
    for step in STEPS[0]:
        ids += tokenizer.encode(step, add_special_tokens=False) + tokenizer.encode("\n\n", add_special_tokens=False)
        ends.append(len(ids) - 1)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].softmax(-1)[ends, 1]
    assert process_reward(folder)(["2+2="], COMPLETIONS[:1]) == pytest.approx([expected.min().item()], abs=1e-6)


def test_a_special_token_after_each_step_is_read_where_it_stands_in_the_whole_text(token_prm):
    """As Qwen2.5-Math-PRM: a chat, ``<extra_0>`` after each paragraph."""
    tokenizer = AutoTokenizer.from_pretrained(token_prm)
    model = AutoModelForTokenClassification.from_pretrained(token_prm)
    (separator,) = tokenizer.encode("<extra_0>")
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        chat = [*message(prompt, "user"), *message("<extra_0>".join(steps) + "<extra_0>")]
        ids = torch.tensor([tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]])
        with torch.no_grad():
            expected.append(model(ids).logits.softmax(-1)[0, ids[0] == separator, 1].min().item())
    reward = process_reward(token_prm, **{"step_token": "<extra_0>"})
    assert reward([message(prompt, "user") for prompt in PROMPTS], COMPLETIONS) == pytest.approx(expected, abs=1e-6)


def shepherd_oracle(folder, text, tokens=("+", "-")):
    """The few lines of the Math-Shepherd model card."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    candidates = tokenizer.encode(" ".join(tokens))[1:]
    tag = tokenizer.encode(TAG)[-1]
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        scores = model(ids).logits[:, :, candidates].softmax(-1)[:, :, 0]
    return scores[ids == tag].tolist()


def test_a_causal_model_is_read_as_math_shepherd_is(causal_prm):
    expected = [
        shepherd_oracle(causal_prm, f"{prompt.strip()} " + "\n".join(f"{step} {TAG}" for step in steps))
        for prompt, steps in zip(PROMPTS, STEPS, strict=True)
    ]
    assert [len(scores) for scores in expected] == [2, 3, 1]
    assert max(map(max, expected)) - min(map(min, expected)) > 0.05
    for aggregation, number in {"min": min, "mean": lambda scores: sum(scores) / len(scores)}.items():
        rewards = process_reward(causal_prm, aggregation=aggregation)(PROMPTS, COMPLETIONS)
        assert rewards == pytest.approx([number(scores) for scores in expected], abs=1e-6)


@pytest.mark.parametrize("positive", [0, "LABEL_2"])
def test_the_class_that_means_right_is_a_number_or_a_label(positive):
    torch.manual_seed(5)
    folder = save_tiny_prm(Path("three"), "token", labels=3)
    ids = AutoTokenizer.from_pretrained(folder).encode("2+2=")
    expected = token_oracle(folder, ids, ["4"], "\n\n", right=int(str(positive)[-1]))
    assert process_reward(folder, positive=positive)(["2+2="], ["4"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["token", "causal"])
def test_no_score_depends_on_the_batch_the_order_or_the_padding(kind, token_prm, causal_prm):
    folder = token_prm if kind == "token" else causal_prm
    prompts, completions = random_rows(20)
    together = process_reward(folder, batch_size=8)(prompts, completions)
    assert len(set(together)) == 20
    one = process_reward(folder, batch_size=1)
    assert one(prompts, completions) == pytest.approx(together, abs=1e-6)
    assert process_reward(folder, batch_size=100)(prompts, completions) == pytest.approx(together, abs=1e-6)
    assert one(prompts[::-1], completions[::-1]) == pytest.approx(together[::-1], abs=1e-6)
    assert [one([p], [c])[0] for p, c in zip(prompts, completions, strict=True)] == pytest.approx(together, abs=1e-6)


def test_chat_messages_are_scored_as_the_text_they_render_to(token_prm, causal_prm):
    """By the model's template, or as lines where it has none."""
    chats = [message(prompt, "user") for prompt in PROMPTS]
    texts = [f"<|user|>{prompt}<|assistant|>" for prompt in PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(token_prm)
    expected = [
        min(token_oracle(token_prm, tokenizer.encode(text), steps, "\n\n"))
        for text, steps in zip(texts, STEPS, strict=True)
    ]
    reward = process_reward(token_prm)
    for prompts, completions in (
        (texts, COMPLETIONS),
        (chats, COMPLETIONS),
        (chats, [message(text) for text in COMPLETIONS]),
    ):
        assert reward(prompts, completions) == pytest.approx(expected, abs=1e-6)
    assert reward(PROMPTS, COMPLETIONS) != pytest.approx(expected, abs=1e-3)
    expected = shepherd_oracle(causal_prm, f"Be brief.\n2+2= 4 {TAG}")
    chat = [*message("Be brief.", "system"), *message("2+2=", "user")]
    assert process_reward(causal_prm)([chat], [message("4")]) == pytest.approx(expected, abs=1e-6)


def test_the_model_stays_as_it_is_and_nothing_around_it_changes(token_prm):
    reward = process_reward(token_prm)
    random_state = torch.get_rng_state()
    model = reward.load().model
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert torch.is_grad_enabled()
    reward(PROMPTS, COMPLETIONS)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        reward(PROMPTS, COMPLETIONS)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert reward.load().model is model
    assert not any(module.training for module in model.modules())
    assert len(before) > 10
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_a_half_precision_checkpoint_is_read_in_float32_on_a_cpu_unless_asked_for(token_prm):
    weights = {name: tensor.bfloat16() for name, tensor in load_file(f"{token_prm}/model.safetensors").items()}
    save_file(weights, f"{token_prm}/model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(token_prm, "config.json").read_text(encoding="utf-8"))
    Path(token_prm, "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(token_prm).encode("2+2=")
    exact = token_oracle(token_prm, ids, ["4"], "\n\n")  # of the rounded weights, in float32
    for asked, got, tolerance in (("auto", torch.float32, 1e-6), ("bfloat16", torch.bfloat16, 0.05)):
        reward = process_reward(token_prm, dtype=asked, device="cpu")
        assert {parameter.dtype for parameter in reward.load().model.parameters()} == {got}
        assert reward(["2+2="], ["4"]) == pytest.approx(exact, abs=tolerance)


def refused(folder, **options):
    reward = process_reward(folder, **options)
    with pytest.raises(ModelError) as caught:
        reward(PROMPTS, COMPLETIONS)
    (problem,) = caught.value.mistakes
    assert "\n" not in str(caught.value)
    assert problem.where.startswith("process_reward.")
    return str(problem)


def without_safetensors(folder):
    weights = Path(folder, "model.safetensors")
    torch.save(load_file(weights), Path(folder, "pytorch_model.bin"))
    weights.unlink()


def damaged(folder):
    weights = Path(folder, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])


@pytest.mark.parametrize(
    ("model", "spoil", "kind", "words"),
    [
        ("nobody/has-this", None, "auto", "nobody/has-this cannot be loaded"),
        ("token_prm", without_safetensors, "auto", "safetensors"),
        ("token_prm", damaged, "auto", "cannot be loaded"),
        ("token_prm", None, "causal", "lm_head.weight"),  # instead of guessing
        ("causal_prm", None, "token", "score."),
    ],
    ids=["absent", "could run code", "damaged", "no head", "no classes"],
)
@pytest.mark.usefixtures("token_prm", "causal_prm")
def test_a_model_with_absent_damaged_or_other_weights_is_refused_in_one_line(model, spoil, kind, words):
    if spoil is not None:
        spoil(model)
    assert words in refused(model, kind=kind)


def test_a_model_of_neither_kind_is_refused_unless_the_recipe_names_its_kind(token_prm):
    """Qwen2.5-Math-PRM's own class is code of its repository."""
    config = json.loads(Path(token_prm, "config.json").read_text(encoding="utf-8"))
    ids = AutoTokenizer.from_pretrained(token_prm).encode("2+2=")
    expected = token_oracle(token_prm, ids, ["4"], "\n\n")
    for architectures, shown in (
        (["Qwen2ForProcessRewardModel"], "Qwen2ForProcessRewardModel"),
        (None, "no known class"),
    ):
        Path(token_prm, "config.json").write_text(
            json.dumps({**config, "architectures": architectures}), encoding="utf-8"
        )
        line = refused(token_prm)
        assert shown in line
        assert "ForTokenClassification or ...ForCausalLM" in line
        assert process_reward(token_prm, kind="token")(["2+2="], ["4"]) == pytest.approx(expected, abs=1e-6)


def test_a_word_that_is_not_one_token_is_refused(causal_prm):
    name = "step_token"
    assert refused(causal_prm, **{name: "++"}).startswith(f"process_reward.{name}: '++' is not one token")
    letters = save_tiny_prm(Path("letters"), "causal")
    words = {"positive": "a", "negative": "b", "step_token": "c"}
    assert process_reward(letters, **words)(["2+2="], ["4"]) != [None]
    unknown = refused(letters, **{**words, name: "€"})  # the tokenizer's only token for any such character
    assert unknown.startswith(f"process_reward.{name}: '€' is not one token")


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (1, {}),
        (2, {"positive": 2}),
        (2, {"positive": "right"}),
        (2, {"device": "cuda:99"}),
    ],
)
def test_a_class_or_a_device_that_is_not_there_is_refused_in_one_line(labels, options):
    folder = save_tiny_prm(Path("classes"), "token", labels=labels)
    what = "device: no device cuda:99: " if "device" in options else "positive: "
    assert refused(folder, **options).startswith(f"process_reward.{what}")
