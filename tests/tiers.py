"""Which tests ``make check`` runs: those that compute, and start no training, server or process.

folders and files -> marker quick

A file that is not named here is for ``make test``; so is a test with a fixture that starts something. With ``-m quick``
the other files are not even read, which would take longer than the quick tests themselves.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
QUICK = (
    *("algorithms", "recipe", "rewards/verifier", "sandbox"),
    *(f"test_{name}.py" for name in ("architecture", "data", "intervals", "tiers")),
    *(
        "cli/test_visible_output.py",
        "launch/test_launched.py",
        "reports/test_report_data.py",
        "launch/test_same_run.py",
        "run/test_devices.py",
        "training/test_costs.py",
        "training/test_benchmark_scores.py",
        "run/test_progress.py",
    ),
    *(f"evaluation/test_{name}.py" for name in ("compare", "output_folder", "metrics", "protocol", "questions")),
    *(f"evaluation/test_{name}.py" for name in ("recount", "results", "samples", "score", "table")),
    *(f"methods/test_{name}.py" for name in ("butterflies", "decompositions", "optim", "settings")),
    *(f"packing/test_{name}.py" for name in ("attention", "head", "micro_batches", "rows", "step_flops")),
    *(f"rewards/test_{name}.py" for name in ("accuracy", "answers", "countdown", "lengths", "shaping")),
    *(f"rollouts/test_{name}.py" for name in ("gap",)),
    *(f"trainer/test_{name}.py" for name in ("config", "logs_of_callbacks")),
    *(f"zoo/test_{name}.py" for name in ("entry", "ranking", "summary", "table")),
)
# In these folders, of thousands of answers or of a model's weights.
LONGER = ("rewards/verifier/test_public_answers.py", "sandbox/test_base.py", "sandbox/test_copyist.py")
# Single tests that start a Python of their own, or import all there is.
STARTS_A_PROCESS = {
    "test_no_module_hides_a_public_function",
    "test_a_recipe_is_checked_without_importing_what_trains_it",
    "test_both_ends_of_the_supported_range_of_math_verify_give_the_same_verdicts",
}
# What starts a process, a server or a Hub.
STARTING_FIXTURES = {"perl_command", "hub", "vllm_server", "lone_server", "own_servers"}


def is_quick_file(path: Path) -> bool:
    """Whether its tests are quick unless they start something."""
    if not path.is_relative_to(TESTS):
        return False
    name = path.relative_to(TESTS).as_posix()
    return name not in LONGER and any(name == quick or name.startswith(f"{quick}/") for quick in QUICK)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For the quick tier only its files are read."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return None if is_quick_file(collection_path) else True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the quick tests, before those without a wanted marker are left out."""
    for item in items:
        starts = STARTING_FIXTURES & set(getattr(item, "fixturenames", ())) or _name(item) in STARTS_A_PROCESS
        if is_quick_file(item.path) and not starts and item.get_closest_marker("nightly") is None:
            item.add_marker("quick")


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name


# Lines of each failure that are shown again at the end; with a line for its name, four failures fill a screen.
LAST_LINES = 9


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Says once more, below all else, which tests failed and why: what one reads first of a long output."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    failed = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())] if reporter else []
    if hasattr(config, "workerinput") or not failed:
        return
    reporter.write_sep("=", f"{len(failed)} failed; the first of them", red=True)
    for report in failed[:4]:
        reporter.write_line(f"{report.nodeid} ({report.when})", red=True)
        for line in report.longreprtext.splitlines()[-LAST_LINES:]:
            reporter.write_line(f"    {line[:200]}")
