"""The card of an adapter says what is known of it, in numbers as given, and nothing else."""

import json
import re
import statistics
from dataclasses import MISSING, fields, replace

import pytest
import yaml

from perl.evaluation.scoring.metrics import Difference
from perl.evaluation.scoring.table import judged_together
from perl.hub.card.card_facts import CardFacts, PromptFormat, Serving, public_results
from perl.hub.card.facts import Licence, label
from perl.hub.card.render import headline, references, render_card, reservations
from perl.recipe.sections import AnsweredQuestion, PromptsSection
from perl.sandbox import BASE_NAME, COPYIST_NAME
from tests.evaluations import results, rows, task_result
from tests.oracles.mean_intervals import difference_ends

BASE, LORA = ["0000", "1000", "1100", "1111"] * 5, ["1100", "1110", "1111", "1111"] * 5
RESULTS = public_results(results(task_result("sums", BASE, LORA), base="owner/base-7b"), "me/my-adapter")
FULL = CardFacts(
    base="owner/base-7b",
    revision="0123abcd",
    name="my-adapter",
    repo_id="me/my-adapter",
    quantization="nf4",
    loader="AutoModelForImageTextToText",
    method="dora",
    licence=Licence("mit"),
    dataset="someone/problems",
    dataset_version="split train, revision 4567",
    trainable_parameters=77_824,
    total_parameters=1_000_000,
    step=123,
    seed=4711,
    loss="cispo",
    algorithm="sapo",
    overridden={"beta": 0.25},
    ratio_level="sequence",
    settings={"rank": 16, "learning rate": "1e-05"},
    rewards={"accuracy": 1.0, "format": 0.2},
    reward_first=0.125,
    reward_last=0.875,
    unrewarded=(2, 40),
    rewards_changed=(64,),
    teacher_kl=(0.5, 0.125),
    teacher_sees={"hint": "It is {answer}.", "system_prompt": "Think < twice."},
    seconds=3661.4,
    tokens=123_456_789,
    hardware="8 x NVIDIA H100",
    reload_difference=1.5e-6,
    results=RESULTS,
    curves=(("step", "reward"), ("1", "0.125"), ("123", "0.875")),
    asking=PromptFormat(
        True, "Think.", "Solve {prompt}!", {"thinking": False}, {"temperature": 0.6, "max_new_tokens": 99}
    ),
    serving=Serving("adapter", 64),
    recipe=True,
    local=("mine.jsonl",),
    checkpoints=(64, 128),
    tags=("math",),
    versions={"torch": "2.13.0", "peft": "0.21.2"},
)
# What each fact that may be unknown looks like on the card.
SHOWN = {
    "revision": ["(revision `0123abcd`)", 'revision="0123abcd"', "--revision 0123abcd"],
    "quantization": ["loaded (nf4, by bitsandbytes)", "BitsAndBytesConfig", ", quantization_config=nf4)"],
    "loader": ["import AutoModelForImageTextToText, ", "= AutoModelForImageTextToText.from_pretrained("],
    "name": ["# my-adapter"],
    "repo_id": ['"me/my-adapter"', "hf download me/my-adapter perl_recipe.yaml", "my-adapter=me/my-adapter"],
    "method": ["A dora adapter", "| method | dora |", "- dora\n", "arXiv:2402.09353"],
    "licence": ["license: mit"],
    "dataset": ["on `someone/problems`", "- someone/problems\n", "| data | someone/problems"],
    "dataset_version": ["split train, revision 4567 |"],
    "trainable_parameters": ["| trainable parameters | 77,824"],
    "total_parameters": ["(7.78 % of all)"],
    "step": ["| optimizer steps | 123 |"],
    "seed": ["| seed | 4711 |"],
    "loss": ["| loss | cispo |", "arXiv:2506.13585"],
    "algorithm": ["(SAPO)", "- sapo\n", "| algorithm | sapo", "- algorithm SAPO: ", "arXiv:2511.20347"],
    "overridden": ["| algorithm | sapo; overridden: beta 0.25 |"],
    "ratio_level": ["| importance ratio of each | sequence |", "arXiv:2507.18071"],
    "settings": ["| rank | 16 |", "| learning rate | 1e-05 |"],
    "rewards": ["| rewards (weight) | accuracy (1.0), format (0.2) |", "the sum of these rewards and nothing else"],
    "reward_first": ["| mean reward, first and last step | 0.125, 0.875 |"],
    "reward_last": ["| mean reward, first and last step | 0.125, 0.875 |"],
    "unrewarded": ["| steps without any reward | 2 of 40 logged; "],
    "rewards_changed": ["- The code of its rewards was changed while it was trained: after step 64."],
    "teacher_kl": ["| KL to the teacher, first and last step | 0.500, 0.125 nats a token |"],
    "teacher_sees": ['{"hint": "It is {answer}.", "system_prompt": "Think < twice."}'],
    "seconds": ["| wall time, evaluation included | 3,661 s |"],
    "tokens": ["| tokens, prompts included | 123,456,789 |"],
    "hardware": ["| hardware | 8 x NVIDIA H100 |"],
    "reload_difference": ["Round trip verified", "at most 1.5e-06 nats"],
    "results": ["## Results", "| Sums | 20 | 43.8 ± ", "standard error", "model-index:", "eval/results.json"],
    "curves": ["## Learning curves\n\n| step | reward |\n|---:|---:|\n| 1 | 0.125 |\n| 123 | 0.875 |\n"],
    "asking": ["base's chat template", "Think.", "Solve What is 12 * 13?!", "temperature=0.6", '"max_tokens": 99'],
    "serving": ["vllm serve owner/base-7b", "--max-lora-rank 64", "curl http"],
    "recipe": ["perl train perl_recipe.yaml"],
    "local": ["The same run again, for who has what the recipe names and no Hub holds (`mine.jsonl`):"],
    "checkpoints": ["`step-64`, `step-128`"],
    "tags": ["- math\n"],
    "versions": ["Versions: torch 2.13.0, peft 0.21.2."],
}
# What a card shows with other facts, or of how it was written.
NOT_SHOWN = ("version", "perl", "data_version", "chat", "files")
OPTIONAL = [f for f in fields(CardFacts) if f.name not in ("base", *NOT_SHOWN)]
# Facts that others are shown with, and so take with them.
TAKES = {
    "repo_id": {"recipe"},
    "trainable_parameters": {"total_parameters"},
    "reward_first": {"reward_last"},
    "reward_last": {"reward_first"},
    "dataset": {"dataset_version"},
    "algorithm": {"overridden"},
    "serving": {"revision", "repo_id", "asking"},
    "recipe": {"repo_id", "local"},
}
UNFINISHED = ("None", "nan", "TODO", "{{", "{%", "}}", "[More Information Needed]", "<!--", "Undefined", "``")


def without(facts: CardFacts, *names: str) -> CardFacts:
    unknown = {f.name: f.default if f.default is not MISSING else f.default_factory() for f in OPTIONAL}
    return replace(facts, **{name: unknown[name] for name in names})


def front_matter_of(card: str) -> dict:
    start, front_matter, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front_matter)


def assert_finished(card: str) -> None:
    """Nothing is left to fill in, no part is empty, and every table has rows of equal width under its head."""
    body = card.replace("```", "'''")
    assert [mark for mark in UNFINISHED if mark in body.replace("}}'", "'")] == []  # JSON ends so
    assert front_matter_of(card)["library_name"] == "peft"
    assert len(re.findall(r"^# ", card.split("'''")[0], re.MULTILINE)) >= 1
    for table in re.findall(r"(?:^\|.*\|\n)+", card, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
        assert len(table.splitlines()) > 2, f"an empty table:\n{table}"
    parts = re.split(r"^## .*\n", body, flags=re.MULTILINE)[1:]
    assert all(part.strip() for part in parts)
    assert "\n\n\n" not in body
    assert re.findall(r"\n'''\w+\n\s*'''", body) == []


def python_block(card: str) -> str:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]


def test_a_card_shows_every_fact_and_an_unknown_one_is_left_out_and_takes_no_other_with_it():
    card = render_card(FULL)
    assert set(SHOWN) == {f.name for f in OPTIONAL}
    missing = [text for texts in SHOWN.values() for text in texts if text not in card]
    assert missing == []
    assert_finished(card)
    for name in SHOWN:
        card = render_card(without(FULL, name))
        assert [text for text in SHOWN[name] if text in card] == [], name
        assert_finished(card)
        others = {other for other in SHOWN if other != name} - TAKES.get(name, set())
        assert [other for other in others if not all(text in card for text in SHOWN[other])] == [], name
    card = render_card(CardFacts(base="owner/base-7b"))
    assert_finished(card)
    assert re.findall(r"^## (.*)", card, re.MULTILINE) == ["Use it", "Citation"]


def test_the_numbers_of_a_card_are_those_of_the_bits_and_the_facts():
    """Accuracy and its standard error over the problems, counted from the marks; shares, rounded seconds and sums."""
    card = render_card(FULL)
    row = next(line for line in card.splitlines() if line.startswith("| Sums |"))
    shown = re.findall(r"([\d.]+) ± ([\d.]+)", row)[:2]
    for marks, (mean, error) in zip((BASE, LORA), shown, strict=True):
        shares = [problem.count("1") / len(problem) for problem in marks]
        assert float(mean) == pytest.approx(100 * statistics.mean(shares), abs=0.051)
        assert float(error) == pytest.approx(100 * statistics.stdev(shares) / len(shares) ** 0.5, abs=0.051)
    share = float(re.search(r"\(([\d.]+) % of all\)", card)[1])
    assert share == pytest.approx(100 * FULL.trainable_parameters / FULL.total_parameters, abs=0.0051)
    seconds = int(re.search(r"wall time, evaluation included \| ([\d,]+) s", card)[1].replace(",", ""))
    assert abs(seconds - FULL.seconds) <= 0.5


def test_the_front_matter_says_what_it_is_and_of_what_of_an_adapter_and_of_a_whole_model():
    found = front_matter_of(render_card(FULL))
    index = found.pop("model-index")
    assert found == {
        "base_model": "owner/base-7b",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "mit",
        "datasets": ["someone/problems"],
        "tags": ["perl-rl", "reinforcement-learning", "sapo", "dora", "base_model:adapter:owner/base-7b", "math"],
    }
    assert [model["name"] for model in index] == ["my-adapter"]
    found = front_matter_of(render_card(replace(FULL, licence=Licence("other", "theirs", "https://example.org/l"))))
    assert (found["license"], found["license_name"]) == ("other", "theirs")
    assert found["license_link"] == "https://example.org/l"
    card = render_card(replace(FULL, method="full", serving=None))
    found = front_matter_of(card)
    assert (found["base_model_relation"], found["library_name"]) == ("finetune", "transformers")
    assert "peft" not in python_block(card)
    assert "A model trained from `owner/base-7b`" in card
    assert "vllm serve me/my-adapter" in card


def test_a_place_of_this_machine_is_named_by_its_last_part_and_is_no_base_model_or_data_set(tmp_path, monkeypatch):
    for base in (BASE_NAME, "tiny"):
        found = front_matter_of(render_card(replace(FULL, base=base)))
        assert "base_model" not in found
        assert "base_model_relation" not in found
        assert not any(tag.startswith("base_model") for tag in found["tags"])
        assert ("sandbox" in found["tags"]) == (base == BASE_NAME)
    card = render_card(replace(FULL, base=COPYIST_NAME, revision=None))
    assert "sandbox-copyist" in front_matter_of(card)["tags"]
    assert 'base = AutoModelForImageTextToText.from_pretrained(model_folder("sandbox:copyist"), dtype=' in python_block(
        card
    )
    assert "from perl.sandbox import model_folder  # sandbox:copyist comes with perl-rl" in python_block(card)
    assert "vllm serve \"$(python -c 'from perl.sandbox import model_folder; print(model_folder(" in card
    for dataset in ("train.jsonl", "data/train.parquet", "sandbox:chain"):
        card = render_card(replace(FULL, dataset=dataset))
        assert "datasets" not in front_matter_of(card), dataset
        assert f"on `{dataset}`" in card
    (tmp_path / "models" / "tiny").mkdir(parents=True)  # a folder that looks like a name on the Hub
    monkeypatch.chdir(tmp_path)
    assert label("models/tiny") == "tiny"
    card = render_card(replace(FULL, base=label("models/tiny"), revision=None))
    assert "base_model" not in front_matter_of(card)
    # What is published was labelled where it was written; where it is read another folder may have that name.
    monkeypatch.chdir(tmp_path / "models")
    assert label("models/tiny") == "models/tiny"
    found = public_results(results(task_result("sums", BASE, LORA), base="/data/somebody/tiny", name="runs/x"), "mine")
    card = render_card(CardFacts(base="tiny", results=found))
    assert "somebody" not in card
    assert "Base: tiny@r1; adapter: mine, sha256" in card


CHOICES = {
    "plain": {},
    "memory": {"memory": True, "floor": 1e-5},
    "refill": {"refill": 0.25},
    "curriculum": {"curriculum": "[a](https://nobody.example) | **level**", "curriculum_until": 1},
    "all": {"memory": True, "refill": 100, "curriculum": "level"},
}


def cited(method, loss, ratio_level=None, **more):
    return references(CardFacts(base="any", method=method, loss=loss, ratio_level=ratio_level, **more))


def test_only_papers_of_what_was_done_are_cited():
    assert cited("lora", "grpo", "token") == cited("lora", "grpo") == cited("lora", None)
    # TRL's BNPO is another loss than the paper of that name.
    assert [what for what, _ in cited(None, "bnpo")] == ["group-relative advantages (GRPO)"]
    assert [what for what, _ in cited("nobody's", "dapo", "sequence")] == [
        "group-relative advantages (GRPO)",
        "loss DAPO",
        "importance ratio of the whole sequence (GSPO)",
    ]
    shown = {name: PromptsSection(**values).shown for name, values in CHOICES.items()}
    papers = {
        name: {what for what, _ in cited(None, "grpo", settings={"prompts": text})} for name, text in shown.items()
    }
    added = {name: sorted(what.split(" (")[0] for what in found - papers["plain"]) for name, found in papers.items()}
    both = ["prompts that rest", "refilled groups"]
    assert added == {"plain": [], "memory": both[:1], "refill": both[1:], "curriculum": [], "all": both}
    assert len(cited(None, "grpo", algorithm="dapo", settings={"prompts": shown["refill"]})) == len(
        cited(None, "grpo", algorithm="dapo")
    )  # the same paper


def test_special_characters_come_through_and_keep_the_table_whole():
    card = render_card(replace(FULL, settings={"target_modules": r".*\.(q_proj|v_proj)", "rank": "8\n| x"}))
    assert_finished(card)
    assert "q_proj" in card
    assert "v_proj" in card
    card = render_card(replace(FULL, name='a: "b" & <c>', method="x: y"))
    assert '# a: "b" & <c>' in card
    assert "x: y" in front_matter_of(card)["tags"]
    task = task_result("sums", BASE, LORA, protocol_hash="1234567890e12345")  # which could be a number
    card = render_card(replace(FULL, results=public_results(results(task), "me")))
    assert card.count("protocol: '1234567890e12345'") == 3


def test_the_snippets_load_the_base_at_its_revision_and_ask_as_training_asked_and_no_name_leaves_them():
    for changed, line in (
        ({}, 'from_pretrained("owner/base-7b", revision="0123abcd", dtype="bfloat16")'),
        ({"revision": None}, 'from_pretrained("owner/base-7b", dtype="bfloat16")'),
        ({"base": "tiny", "revision": None, "results": None}, 'from_pretrained("tiny", dtype="auto")'),
    ):
        block = python_block(render_card(replace(FULL, quantization=None, loader=None, **changed)))
        assert f"base = AutoModelForCausalLM.{line}\n" in block
        compile(block, "card", "exec")
    name = "x\"); import os; os.abort() #'; rm -rf ~"
    card = render_card(replace(FULL, base=name, repo_id=None, name=name, revision='"'))
    block = python_block(card)
    compile(block, "card", "exec")
    assert json.dumps(name) in block
    assert f"vllm serve '{name.replace(chr(39), chr(39) + chr(34) + chr(39) + chr(34) + chr(39))}'" in card
    card = render_card(FULL)
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Solve What is 12 * 13?!"}]
    assert f"messages = {json.dumps(messages)}\n" in card
    assert "return_tensors=\"pt\", **{'thinking': False}\n" in card
    (body,) = re.findall(r"-d '(.*)'\n", card)
    assert json.loads(body) == {
        "model": "my-adapter",
        "messages": messages,
        "temperature": 0.6,
        "max_tokens": 99,
        "chat_template_kwargs": {"thinking": False},
    }
    shown = [AnsweredQuestion(prompt="1+1", answer="2")]
    card = render_card(replace(FULL, asking=PromptFormat(system_prompt="Think.", examples=shown)))
    turns = [("system", "Think."), ("user", "1+1"), ("assistant", "2"), ("user", "What is 12 * 13?")]
    assert f"messages = {json.dumps([{'role': role, 'content': text} for role, text in turns])}\n" in card
    plain = render_card(replace(FULL, asking=PromptFormat(False, prompt_template="{{{prompt}}} {column}:")))
    assert 'prompt = "{What is 12 * 13?} {column}:"\n' in plain
    assert "apply_chat_template" not in plain
    assert "curl http://localhost:8000/v1/completions" in plain


LORA_SERVED = "vllm serve B --enable-lora --max-lora-rank {} --lora-modules my-adapter={}"
SERVED = {
    Serving("adapter", 16): [LORA_SERVED.format(16, "me/my-adapter")],
    Serving("lora", 256): [
        "perl export me/my-adapter --as lora -o my-adapter-lora",
        LORA_SERVED.format(256, "my-adapter-lora"),
    ],
    Serving("merged"): [
        "perl export me/my-adapter --as merged -o merged",
        "vllm serve merged --served-model-name my-adapter",
    ],
}


@pytest.mark.parametrize(("serving", "lines"), SERVED.items())
def test_vllm_is_given_what_it_takes(serving, lines):
    shown = "\n".join(lines).replace("serve B", "serve owner/base-7b --revision 0123abcd")
    assert f"```bash\n{shown}\n```" in render_card(replace(FULL, serving=serving, quantization=None))
    quantised = shown.replace("0123abcd", "0123abcd --quantization bitsandbytes")
    assert f"```bash\n{quantised}\n```" in render_card(replace(FULL, serving=serving))


MARKS = ["0000", "1000", "1100", "1111"] * 5, ["1100", "1110", "1111", "1111"] * 5
BETTER = task_result("sums", *MARKS)


def test_a_difference_is_shown_unless_its_p_value_denies_it():
    assert "does not tell them apart" not in headline(judged_together([BETTER]))
    assert reservations(judged_together([BETTER])) == []
    shown = re.search(r"a difference of (\S+) \[(\S+), (\S+)\]\.$", headline(judged_together([BETTER]))).groups()
    expected = [100 * value for value in difference_ends(*(rows(texts) for texts in MARKS))]
    assert [float(text) for text in shown] == pytest.approx(expected, abs=0.0501)
    denied = judged_together([replace(BETTER, difference=Difference(0.125, 0.056, 0.006, 0.244, 0.125))])
    assert headline(denied).endswith("a difference of +12.5 [+0.6, +24.4], which does not tell them apart.")
    assert any("p value" in line for line in reservations(denied))
    loss = judged_together([replace(BETTER, difference=Difference(-0.125, 0.056, -0.244, -0.006, 0.125))])
    assert not any("worse" in line for line in reservations(loss))


def test_of_several_tasks_a_difference_must_be_as_rare_as_one_of_so_many():
    """Nine wins of ten and no loss, p = 2 / 2**9, among eleven tasks: 0.043; among fourteen: 0.055."""
    won = task_result("won", ["00"] * 10, ["11"] * 9 + ["00"])
    alike = task_result("alike", ["10", "01", "11"], ["01", "11", "10"])
    for count, told in ((1, True), (11, True), (14, False)):
        others = (replace(alike, name=f"alike-{i}", title=f"Alike {i}") for i in range(1, count))
        found = judged_together([won, *others])
        sentence = headline(found).split(" On ")[0]
        assert ("does not tell them apart" not in sentence) is told
        assert any(line.startswith("On Won it cannot be told") for line in reservations(found)) is not told
    assert "corrected for 14 tasks" in reservations(found)[0]
