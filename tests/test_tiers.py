"""The three tiers of tests name files and tests that exist, and CI runs what it says."""

import re

from tests.conftest import CHECKOUT
from tests.tiers import LONGER, QUICK, STARTS_A_PROCESS, TESTS, is_quick_file


def test_the_quick_files_and_the_single_tests_that_are_left_out_exist():
    assert [name for name in (*QUICK, *LONGER) if not (TESTS / name).exists()] == []
    quick = [path for path in TESTS.rglob("test_*.py") if is_quick_file(path)]
    assert len(quick) >= 50
    assert not any(is_quick_file(TESTS / name) for name in LONGER)
    text = "".join(path.read_text(encoding="utf-8") for path in quick)
    assert STARTS_A_PROCESS - set(re.findall(r"^def (test_\w+)", text, re.MULTILINE)) == set()


def test_each_tier_is_a_target_and_ci_runs_the_promises_and_the_readme():
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    selected = dict(re.findall(r"^([\w-]+): lint.*\n\t.*pytest(.*)$", makefile, re.MULTILINE))
    assert {tier: line.partition(" -m ")[2] for tier, line in selected.items()} == {
        "check": "quick",
        "test": "'not nightly'",
        "test-all": "",
    }
    commands = re.findall(r"^make (?:-j2 )?(\w+)", (CHECKOUT / ".ci" / "run").read_text(), re.MULTILINE)
    assert commands == ["quickstart", "test", "readme", "site"]
    assert "readme: " in makefile
