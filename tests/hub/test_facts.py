"""What a card says of a run is what lies in the run folder, and nothing of the machine."""

import json
from dataclasses import replace

import pytest
from huggingface_hub import constants, parse_eval_result_entries

from perl.errors import PerlError, RecipeError
from perl.evaluation.scoring.task import Task, all_tasks
from perl.hub.card.candidate import RunAdapter, base_licence, find_candidate
from perl.hub.card.card_facts import CardFacts, Serving, facts_from_files, serving_of
from perl.hub.card.eval_results import BENCHMARKS, eval_result_files, model_index
from perl.hub.card.facts import Licence, RunFacts, read_run_facts
from perl.hub.push.package import package_candidate
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.recipe import load_recipe
from perl.recipe.plain_yaml import plain_value
from perl.recipe.sections import PeftSection
from perl.run.folder import Run
from tests.evaluations import results, task_result
from tests.hub.card_runs import make_run, scores

BASE_CARD = "---\nlicense: other\nlicense_name: theirs\nlicense_link: https://example.org/licence\n---\n"


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Run:
    return make_run(
        tmp_path_factory.mktemp("facts") / "a-run", data={"train": {"name": "sandbox:addition", "limit": 99}}
    )


@pytest.fixture
def run(made) -> Run:
    return Run.read(made.path)


def card_facts(candidate: RunAdapter, repo_id: str | None = None) -> CardFacts:
    """What a run tells of one of its adapters, as its card shows it."""
    return facts_from_files(package_candidate(candidate, repo_id).files)


def test_everything_comes_from_the_run_folder_and_its_recipe(run):
    facts = card_facts(find_candidate(run), "me/my-adapter")
    assert (facts.base, facts.revision, facts.repo_id, facts.name) == ("sandbox:base", None, *["me/my-adapter"] * 2)
    assert (facts.method, facts.loss, facts.seed, facts.step) == ("lora", "dapo", 3, 50)
    assert (facts.dataset, facts.dataset_version) == ("sandbox:addition", "the first 99 rows")
    assert (facts.trainable_parameters, facts.total_parameters) == (1234, 800_000)
    assert (facts.reward_first, facts.reward_last, facts.tokens) == (0.01, 0.5, 50_000)
    assert (facts.seconds, facts.hardware, facts.reload_difference) == (36.4, "2 x processor", 1.5e-6)
    assert facts.rewards == {"accuracy": 1.0, "format": 0.2}
    assert facts.licence == Licence("apache-2.0")
    assert [row[0] for row in facts.curves] == ["step", "1", "8", "15", "22", "29", "36", "43", "50"]
    assert [float(row[1]) for row in facts.curves[1:]] == [int(row[0]) / 100 for row in facts.curves[1:]]
    assert facts.serving == Serving("adapter", 8)
    assert facts.recipe
    assert facts.results.subject["name"] == "me/my-adapter"
    assert facts.asking.chat is True
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert facts.asking.sampling == {**drawn, "max_new_tokens": 16}
    assert facts.asking.example == "579+556="
    # Of an earlier step nothing that happened later.
    early = replace(find_candidate(run), which=20, step=20, results=None, results_folder=None)
    facts = card_facts(early)
    assert (facts.step, facts.reward_last, facts.tokens) == (20, 0.2, 20_000)
    assert (facts.seconds, facts.reload_difference, facts.results) == (None, None, None)
    # The recipe names the repository, the folder the run.
    facts = card_facts(find_candidate(run))
    assert (facts.name, facts.repo_id) == ("a-run", None)
    text = (run.path / "recipe.yaml").read_text()
    (run.path / "recipe.yaml").write_text(text.replace("repo_id: null", "repo_id: her/adapter"))
    try:
        assert card_facts(find_candidate(run)).repo_id == "her/adapter"
    finally:
        (run.path / "recipe.yaml").write_text(text)


def test_what_is_unknown_cut_short_or_of_another_adapter_gives_no_facts_and_a_broken_recipe_is_an_error(tmp_path):
    changed = make_run(tmp_path / "changed")
    with changed.metrics.open("a") as log:
        log.write('{"step": 51, "rew')
    changed.samples.write_text('{"step": 1, "prom')  # a line that a kill cut short does no harm
    facts = card_facts(find_candidate(changed))
    assert (facts.reward_last, facts.asking.chat) == (0.5, None)
    scores("f" * 64).write(changed.path / "eval")
    facts = card_facts(find_candidate(changed))
    assert facts.results is None
    (changed.path / "recipe.yaml").write_text("modle: 3\n")
    with pytest.raises(RecipeError, match="the run's recipe cannot be read"):
        card_facts(find_candidate(changed))
    bare = Run(tmp_path / "bare", {"base": str(tmp_path / "someone" / "tiny"), "method": "lora"})
    bare.path.mkdir()
    facts = card_facts(RunAdapter(bare, "final", bare.adapter, 0, "0" * 64, None, None))
    assert (facts.base, facts.name) == ("tiny", "bare")
    known = {"version", "perl", "base", "name", "method", "step", "seconds"}
    empty = {n: v for n, v in vars(facts).items() if n not in known and v not in (None, (), {}, False)}
    assert empty == {}


def test_data_is_named_with_its_version(run):
    whole = {"name": "a/b", "subset": "main", "split": "train"}
    text = (run.path / "recipe.yaml").read_text()
    for train, version, shown in (
        (whole, "0" * 40, f"subset main, split train, revision {'0' * 40}"),
        ({"name": "rows.jsonl"}, "0" * 64, f"sha256 {'0' * 64}"),
        ({"name": "a/b"}, None, None),
    ):
        (run.path / "recipe.yaml").write_text(load_recipe({"data": {"train": train}}).to_yaml())
        changed = json.loads(json.dumps(run.facts)) | {"data": {"train": version, "eval": None}}
        facts = card_facts(find_candidate(Run(run.path, changed)))
        assert (facts.dataset, facts.dataset_version) == (train["name"], shown)
        assert facts.asking.example == "What is 12 * 13?"
    (run.path / "recipe.yaml").write_text(text)


def test_how_an_adapter_is_served_is_what_the_table_of_methods_says():
    for name, method in METHODS.items():
        if method.config:
            serving = serving_of(adaptation(PeftSection(method=name)).config, method)
            assert serving.form == {"lora": "adapter", "low_rank": "lora"}.get(method.delta, "merged"), name
            assert (serving.rank is None) == (serving.form == "merged"), name


def test_the_licence_is_that_of_the_base(hub, monkeypatch):
    hub.create("owner/base", {"README.md": b"---\nlicense: mit\n---\n"})
    hub.create("owner/other", {"README.md": BASE_CARD.encode()})
    hub.create("owner/silent", {"README.md": b"# a model\n"})
    for base, expected in (
        ("owner/base", Licence("mit")),
        ("owner/other", Licence("other", "theirs", "https://example.org/licence")),
        ("owner/silent", None),
        ("owner/absent", None),
        ("sandbox:base", Licence("apache-2.0")),
        ("tiny", None),
    ):
        assert base_licence(base, None) == expected, base
    hub.create("owner/later", {"README.md": b"---\nlicense: mit\n---\n"})
    hub.faults.fail(1, status=500, times=9)
    assert base_licence("owner/later", None) is None  # a Hub that does not answer leaves it open
    hub.faults.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert base_licence("owner/base", None) is None  # offline nobody is asked


def benchmark(name, repository, problems, **changes):
    known = all_tasks().get(name)
    data = {"source": repository, "revision": known.revision if known else None, "sha256": "a" * 64}
    result = task_result(name, None, ["110", "111"], data=data)
    title = known.title if known else name
    return replace(result, **{"title": title, "adapter": replace(result.adapter, n=problems), **changes})


def test_only_whole_benchmarks_that_the_hub_knows_become_its_files_which_its_own_reader_reads(monkeypatch):
    whole = benchmark("gsm8k", "openai/gsm8k", 1319)
    part = benchmark("gpqa_diamond", "Idavidrein/gpqa", 197)
    other = benchmark("aime24", "HuggingFaceH4/aime_2024", 30)
    files = eval_result_files(results(whole, part, other))
    assert list(files) == [".eval_results/gsm8k.yaml"]
    value = round(100 * (2 / 3 + 3 / 3) / 2, 2)  # of "110" and "111"
    protocol = "temperature 0.6, top_p 0.95, max_new_tokens 512, k 4, no system prompt"
    assert plain_value(files[".eval_results/gsm8k.yaml"]) == [
        {
            "dataset": {"id": "openai/gsm8k", "task_id": "gsm8k", "revision": all_tasks()["gsm8k"].revision},
            "value": pytest.approx(value),
            "notes": f"avg@3; {protocol}; perl eval, protocol {whole.protocol_hash}",
        }
    ]
    names = {"Idavidrein/gpqa": "gpqa_diamond", "openai/gsm8k": "gsm8k"}
    for repository, known in BENCHMARKS.items():
        name = names.get(repository, "any")
        defined = all_tasks() | {"any": Task("any", "any", repository, "test", "any.jsonl", "", known.subset)}
        monkeypatch.setattr("perl.hub.card.eval_results._definitions", lambda defined=defined: defined)
        files = eval_result_files(results(benchmark(name, repository, known.problems)))
        (entry,) = parse_eval_result_entries(plain_value(files[f".eval_results/{name}.yaml"]))
        assert (entry.dataset_id, entry.task_id, entry.value) == (repository, known.task_id, value)
    monkeypatch.undo()
    # What a results file calls a benchmark is none unless its task is.
    other_revision = {"source": "openai/gsm8k", "revision": "b" * 40, "sha256": "a" * 64}
    for name, repository, changes in (
        ("aime24", "MathArena/aime_2026", {}),
        ("any", "MathArena/aime_2026", {}),
        ("gsm8k", "openai/gsm8k", {"title": "gsm8k (held out)"}),
        ("gsm8k", "gsm8k_test.jsonl", {}),
        ("gsm8k", "openai/gsm8k", {"data": other_revision}),
    ):
        count = BENCHMARKS["MathArena/aime_2026" if "MathArena" in repository else "openai/gsm8k"].problems
        found = results(benchmark(name, repository, count, **changes))
        assert eval_result_files(found) == {}, (name, repository, changes)
        if name == "aime24":
            assert {entry.dataset_type for entry in model_index(found)} == {"aime24.jsonl"}
    assert eval_result_files(results(benchmark("mine", "Idavidrein/gpqa", 198))) == {}  # another subset


@pytest.mark.parametrize(
    "overridden", [{"seed": 3}, {"beta": "](x)"}, {"beta": float("inf")}, {"beta": [1]}, {"beta": "a b"}]
)
def test_an_override_that_is_no_setting_or_no_plain_value_is_refused(overridden):
    facts = json.loads(RunFacts(base="sandbox:base", algorithm="gspo").to_json()) | {"overridden": overridden}
    with pytest.raises(PerlError, match=r"perl_run\.json: overridden"):
        read_run_facts(json.dumps(facts).encode())
