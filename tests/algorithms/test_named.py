"""One row makes an algorithm: in recipes, scripts, the plan, on cards, in the documents."""

import importlib.util
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from perl.algorithms.algorithm import Algorithm, neutral
from perl.algorithms.named import ALGORITHMS, find_algorithm, named_facts, shown_settings
from perl.algorithms.overrides import contradictions
from perl.algorithms.registry import LOSSES, Paper
from perl.algorithms.train_fields import train_fields, train_model
from perl.errors import RecipeError
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.facts import RUN_FACTS, RunFacts
from perl.hub.card.render import loss_name, references, render_card
from perl.recipe import load_recipe
from perl.recipe.places import REFUSED
from perl.training.forecast_text import plan_lines
from perl.training.prepare import prepare
from tests.conftest import CHECKOUT

ROWS = list(ALGORITHMS.values())
DEFAULTS = {name: field.default for name, field in train_fields().items()}
# What belongs to the data and the machine, not to an algorithm.
NEVER_SET = {"learning_rate", "num_generations", "prompts_per_step", "per_device_train_batch_size", "max_steps"}
NEVER_SET |= {"gradient_accumulation_steps", "steps_per_generation", "num_iterations", "max_completion_length"}
REINFORCE = {"loss_type": "reinforce"}
# What each name sets, all of it, as its sources have it: a constant that changes must be changed here too.
PUBLISHED = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": True},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "rloo": {**REINFORCE, "advantage_estimator": "rloo", "beta": 0.03, "kl_in_reward": True, "kl_estimator": "k1"},
    "reinforce_pp": {
        **{"loss_type": "dapo", "advantage_estimator": "batch"},
        **{"beta": 0.01, "kl_in_reward": True, "kl_estimator": "k1"},
    },
    "reinforce_pp_baseline": {
        **{"loss_type": "dapo", "advantage_estimator": "group_then_batch"},
        **{"beta": 1e-5, "kl_estimator": "k2", "use_bias_correction_kl": False},
    },
    "maxrl": {**REINFORCE, "advantage_estimator": "maxrl"},
    "dppo": {"loss_type": "dppo", "dppo_divergence": "tv", "dppo_threshold": 0.15, "scale_rewards": "none"},
    "opd": {"loss_type": "dapo"},
    "ppo": {"loss_type": "dapo", "advantage_estimator": "gae", "gae_gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2},
    "bnpo": {"loss_type": "bnpo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "vespo": {
        **{"loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0},
        **{"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    },
    "lite_ppo": {"loss_type": "dapo", "scale_rewards": "batch"},
    "gdpo": {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
    "icepop": {
        **{"loss_type": "grpo", "vllm_importance_sampling_correction": True},
        **{"vllm_importance_sampling_mode": "token_mask"},
        **{"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0},
    },
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4},
    "clip_cov": {
        **{"loss_type": "clip_cov", "epsilon": 1.0, "epsilon_high": 1.0},
        **{"cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    },
    "kl_cov": {"loss_type": "kl_cov", "cov_fraction": 2e-3, "cov_kl_weight": 1.0},
    "opo": {**REINFORCE, "advantage_estimator": "opo"},
    "gpg": {**REINFORCE, "advantage_estimator": "gpg"},
    "remax": {**REINFORCE, "advantage_estimator": "remax"},
    "pass_at_k": {**REINFORCE, "advantage_estimator": "pass_at_k"},
}
# And what every one of them sets besides.
PLAIN = {
    **{"importance_sampling_level": "token", "scale_rewards": "group"},
    **{"multi_objective_aggregation": "sum_then_normalize", "epsilon": 0.2, "epsilon_high": None, "delta": None},
    **{"beta": 0.0, "mask_truncated_completions": False, "top_entropy_quantile": 1.0},
    **{"off_policy_mask_threshold": None, "entropy_coef": 0.0, "use_adaptive_entropy": False},
    **{"advantage_estimator": "group", "kl_estimator": "k3", "kl_in_reward": False, "entropy_weight": 0.0},
}


def unpublished(row: Algorithm) -> dict[str, object]:
    """What a row sets otherwise than its sources: also a value of another type, and a field that is missing."""
    published = PUBLISHED[row.name]
    wrong = {name: value for name, value in row.settings.items() if repr(value) != repr(published.get(name, ...))}
    return wrong | {name: ... for name in published.keys() - row.settings.keys()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_sets_fields_that_exist_to_values_that_a_recipe_takes(row):
    assert set(row.sets) <= set(train_fields()) - set(REFUSED) - NEVER_SET
    taken = train_model(tuple(row.sets)).model_validate(row.sets).model_dump(exclude_unset=True)
    assert taken == row.sets
    assert row.settings["loss_type"] in LOSSES
    assert list(row.sets)[: len(row.settings)] == list(row.settings)
    assert set(neutral()) <= set(row.sets)
    assert set(row.essential) | set(row.least) <= set(row.settings)
    assert all(row.settings[name] >= least for name, least in row.least.items())
    assert row.title
    assert row.equation
    assert row.advantage
    assert row.paper is not None or row.differs
    assert unpublished(row) == {}
    assert row.sets == {**PLAIN, **PUBLISHED[row.name]}


def test_rows_are_told_apart_and_neutral_is_what_the_trainer_does_by_default():
    assert set(PUBLISHED) == set(ALGORITHMS)
    assert [name for name, row in ALGORITHMS.items() if row.name != name] == []
    for one, other in itertools.combinations(ROWS, 2):
        assert one.sets != other.sets, (one.name, other.name)
        assert one.title != other.title
    papers = {row.paper for row in ROWS if row.paper is not None}
    assert len(papers) == len(ROWS) - 3  # one of TRL's, and twice two of one paper
    for column in ("key", "arxiv", "title"):
        assert len({getattr(paper, column) for paper in papers}) == len(papers)
    assert {name: DEFAULTS[name] for name in neutral()} == neutral() == PLAIN


def test_a_name_is_looked_up_without_importing_torch():
    program = (
        "import sys; from perl.algorithms.named import find_algorithm;"
        "find_algorithm('gspo'); from perl.recipe import load_recipe; load_recipe({'algorithm': 'gspo'});"
        "import perl.algorithms.registry, perl.algorithms.estimators;"
        "assert not {'torch', 'trl', 'peft'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "hint"), [("gsop", "did you mean gspo?"), (5, "perl algorithms"), ([], "algorithms")])
def test_an_unknown_name_is_refused_with_the_nearest(name, hint):
    with pytest.raises(RecipeError, match="algorithm: ") as caught:
        find_algorithm(name)
    assert len(caught.value.mistakes) == 1
    assert hint in caught.value.mistakes[0].hint


def test_the_documents_have_the_tables_of_the_rows():
    spec = importlib.util.spec_from_file_location("algorithm_tables", CHECKOUT / "docs" / "algorithm_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text, step = (
        (CHECKOUT / "docs" / page).read_text(encoding="utf-8") for page in ("algorithms.md", "training-step.md")
    )
    assert tables.algorithms_table() in text
    assert tables.losses_table() in step
    assert tables.advantages_table() in step
    assert shown_settings(neutral()) in " ".join(text.split())


def test_only_what_differs_is_overridden_and_trls_two_ways_to_say_the_same_are_the_same():
    row = ALGORITHMS["dr_grpo"]
    assert row.overridden(row.sets) == row.overridden({}) == {}
    assert row.overridden({"scale_rewards": False, "beta": 0, "seed": 3, "epsilon_high": None}) == {}
    changed = {"scale_rewards": True, "beta": 0.1, "epsilon_high": 0.3}
    assert row.overridden(changed) == changed
    assert named_facts(SimpleNamespace(**{**DEFAULTS, "loss_type": "x"})) == {}
    facts = named_facts(SimpleNamespace(**{**DEFAULTS, **row.sets, "algorithm": "dr_grpo", "delta": 2.0}))
    assert facts == {"algorithm": "dr_grpo", "overridden": {"delta": 2.0}}
    assert shown_settings({"a": 3e-4, "b": None, "c": True, "d": "x", "e": 2}) == "a 0.0003, b null, c true, d x, e 2"


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("gspo", {"importance_sampling_level": "token"}, "'sequence'"),
        ("sapo", {"loss_type": "dapo"}, "'sapo'"),
        ("gdpo", {"multi_objective_aggregation": "sum_then_normalize"}, "'normalize_then_sum'"),
        ("lite_ppo", {"scale_rewards": True}, "'batch'"),
        ("cispo", {"epsilon_high": 0.28}, "5 is usual"),
        ("icepop", {"vllm_importance_sampling_correction": False}, "True"),
        ("grpo", {"delta": float("inf")}, "finite"),
        ("rloo", {"advantage_estimator": "group"}, "'rloo'"),
        ("gspo", {"loss_type": "reinforce"}, "importance_sampling_level sequence"),
        ("luspo", {"loss_type": "gmpo"}, "'luspo'"),
        ("lite_ppo", {"advantage_estimator": "rloo"}, "scale_rewards batch"),
    ],
)
def test_an_override_that_leaves_nothing_of_the_algorithm_is_refused(name, given, word):
    (mistake,) = contradictions(ALGORITHMS[name], given, DEFAULTS)
    assert [mistake.where] == list(given)
    assert word in str(mistake)
    assert contradictions(ALGORITHMS[name], {**ALGORITHMS[name].sets, "beta": 0.5}, DEFAULTS) == []
    assert contradictions(ALGORITHMS["grpo"], {"loss_type": "dapo", "scale_rewards": "none"}, DEFAULTS) == []


@pytest.fixture
def toy(monkeypatch) -> Algorithm:
    paper = Paper("nobody2031toy", "Nobody et al.", 2031, "A Toy", "3101.00001")
    settings = {"loss_type": "bnpo", "epsilon": 0.07}
    row = Algorithm("toy", "TOY", paper, settings, "x", "y", "all of it: section 9", "from everything", ("epsilon",))
    monkeypatch.setitem(ALGORITHMS, "toy", row)
    return row


def test_a_row_added_at_run_time_is_an_algorithm_of_recipes_plans_and_cards(toy):
    recipe = load_recipe({"algorithm": "toy", "train": {"beta": 0.1}})
    assert recipe.algorithm == "toy"
    assert {name: recipe.train[name] for name in toy.sets} == {**toy.sets, "beta": 0.1}
    with pytest.raises(RecipeError, match=r"'toi' \(did you mean toy\?\)"):
        load_recipe({"algorithm": "toi"})
    with pytest.raises(RecipeError, match=r"train\.epsilon: .* leaves nothing of toy"):
        load_recipe({"algorithm": "toy", "train": {"epsilon": 0.2}})
    with pytest.raises(RecipeError, match=r"train\.cov_fraction: 0.1 changes nothing: loss_type bnpo"):
        load_recipe({"algorithm": "toy", "train": {"cov_fraction": 0.1}})
    lines = list(plan_lines(prepare(load_recipe("quickstart", ["algorithm=toy", "train.delta=3.0"]))))
    assert "algorithm toy: loss_type bnpo, epsilon 0.07; overridden: delta 3" in lines
    card = render_card(facts_from_files({RUN_FACTS: RunFacts(base="sandbox:base", algorithm="toy").to_json()}))
    assert "learning (TOY)" in card
    assert "- algorithm TOY: Nobody et al. 2031, [arXiv:3101.00001]" in card


def cited(method, loss, ratio_level=None, algorithm=None):
    return references(RunFacts(base="any", method=method, loss=loss, ratio_level=ratio_level, algorithm=algorithm))


def test_a_named_algorithm_is_cited_once_and_an_unnamed_one_as_before():
    without = cited("lora", "grpo", "sequence")
    named = cited("lora", "grpo", "sequence", "gspo")
    assert [what for what, _ in named] == ["method lora", "algorithm GSPO", "group-relative advantages (GRPO)"]
    assert [what for what, _ in without][1:] == [
        "group-relative advantages (GRPO)",
        "importance ratio of the whole sequence (GSPO)",
    ]
    assert [what for what, _ in cited(None, "grpo", "token", "grpo")] == ["algorithm GRPO"]
    assert cited("lora", "bnpo", None, "bnpo") == cited("lora", "bnpo")  # which has no paper
    of_rloo = [what for what, _ in cited(None, "reinforce", "token", "rloo")]
    assert of_rloo == ["algorithm RLOO"]  # no advantage of GRPO's
    assert {loss_name(RunFacts(base="any", loss="grpo", algorithm=name)) for name in (None, "unknown")} == {"GRPO"}
