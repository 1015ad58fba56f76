"""The user's reward functions: a sample that one cannot score is None, counted and named; the others keep theirs."""

import asyncio
import functools
import gc
import importlib
import inspect
import json
import math
import random
import sys
import warnings
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch

from perl.errors import PerlError, RecipeError, RewardError
from perl.rewards.custom import Failures, guarded, is_async
from perl.run.code import code_digest
from tests.rewards.loggers import Log


def lengths(completions, **_):
    """Characters; fails for the batch as a whole if one is not text."""
    return [len(text) for text in completions]


def test_values_of_a_function_that_can_score_are_its_own(failures, lines):
    calls = []

    def function(**others):
        calls.append(others)
        return [1, None, True, 0.5]

    log = Log()
    answer, state = [1, 2, 3, 4], object()
    reward = guarded(function, failures)
    scored = reward(completions=["a"] * 4, prompts=["p"] * 4, answer=answer, trainer_state=state, **log.arguments())
    assert scored == [1.0, None, 1.0, 0.5]
    assert [type(value) for value in scored] == [float, type(None), float, float]
    assert len(calls) == 1
    assert calls[0]["answer"] is answer
    assert calls[0]["trainer_state"] is state
    assert (failures, lines()) == (Failures("own", most=2), [])
    assert log.metrics == {"reward/own/failed_frac": [0.0]}


@pytest.mark.parametrize(
    "values",
    [
        iter([1, 2]),
        torch.tensor([1, 2]),
        [numpy.float32(1), torch.tensor(2.0)],
        [Fraction(1), numpy.int64(2)],
    ],
    ids=["iterator", "torch", "scalars", "fraction"],
)
def test_numbers_come_in_any_type(failures, values):
    scored = guarded(lambda **_: values, failures)(completions=["a", "b"])
    assert scored == [1.0, 2.0]
    assert [type(value) for value in scored] == [float, float]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "TypeError: returned NoneType, not a list of numbers"),
        ("1", "TypeError: returned str"),
        ([1.0, 2.0], "ValueError: returned 2 rewards for 1 samples"),
        (["1"], "TypeError: returned '1', which is not a number"),
        ([math.nan], "ValueError: returned nan, which is not finite"),
        ([10**400], "OverflowError"),
        ([torch.tensor([1.0, 2.0])], ""),  # torch has changed the type of its error
    ],
)
def test_what_is_no_reward_is_none_and_is_said(failures, lines, values, words):
    calls = []
    reward = guarded(lambda **_: calls.append(1) or values, failures)
    assert reward(completions=["a"], prompts=["2+2?"]) == [None]
    assert len(calls) == 1, "a batch of one sample is not scored twice"
    assert failures.count == 1
    assert failures.newest.startswith(f"reward own: {words}")
    assert failures.newest.endswith(" for the prompt '2+2?'")
    assert lines() == [failures.newest]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_the_samples_at_fault_are_none_and_their_fraction_is_logged_for_every_batch(failures, asynchronous):
    calls = []

    def counted(completions, **others):
        calls.append(len(completions))
        return lengths(completions, **others)

    async def awaited(completions, **others):
        await asyncio.sleep(0)
        return counted(completions, **others)

    reward = guarded(awaited if asynchronous else counted, failures)
    assert inspect.iscoroutinefunction(reward) is asynchronous
    failed = 0
    for size in (1, 2, 4, 7, 0, 5, 1):
        completions = [random.choice(["a", "four", "", None, 4]) for _ in range(size)]
        bad = [not isinstance(text, str) for text in completions]
        calls.clear()
        log = Log()
        scored = reward(completions=completions, prompts=[""] * size, **log.arguments())
        scored = asyncio.run(scored) if asynchronous else scored
        assert scored == [None if fault else float(len(text)) for text, fault in zip(completions, bad, strict=True)]
        again = [1] * size if any(bad) and size > 1 else []
        assert calls == ([size, *again] if size else [])
        failed += sum(bad)
        assert failures.count == failed
        assert failures.too_many is (failed > failures.most)
        assert list(log.metrics) == ["reward/own/failed_frac"] * bool(size)
        if size:
            assert log.metrics["reward/own/failed_frac"][-1] == sum(bad) / size
    assert failed > failures.most


def test_a_sample_alone_has_its_own_row_of_every_column(failures):
    calls = []

    def function(**arguments):
        calls.append(arguments)
        raise KeyError(arguments["completions"][0])

    columns = {
        "completions": ["a", "b", "c"],
        "prompts": ["p"] * 3,
        "answer": (1, 2, 3),
        "whole": [1, 2],
        "text": "xyz",
    }
    assert guarded(function, failures)(**columns) == [None] * 3
    assert calls[0] == columns
    assert calls[1:] == [
        {"completions": [c], "prompts": ["p"], "answer": (row + 1,), "whole": [1, 2], "text": "xyz"}
        for row, c in enumerate("abc")
    ]


def test_at_most_three_failures_of_a_batch_are_lines_and_the_others_a_number(failures, lines):
    counted, said = 0, 0
    for number in (0, 1, 3, 4, 100):
        batch = ["a"] * 5 + [None] * number
        guarded(lengths, failures)(completions=batch, prompts=[f"prompt {row}" for row in range(len(batch))])
        counted += number
        found = lines()[said:]
        said += len(found)
        assert failures.count == counted
        assert len(found) == min(number, 3) + (number > 3)
        assert [line.rpartition(" ")[2] for line in found[:3]] == [f"{row}'" for row in range(5, 5 + min(number, 3))]
        assert found[3:] == [f"reward own: and {number - 3} more"] * (number > 3)
        if number:
            assert failures.newest.endswith(f" for the prompt 'prompt {4 + number}'")


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        ([[{"role": "user", "content": f"question {row}"}] for row in range(2)], " for the prompt 'question 1'"),
        (["", "a\nlong  prompt " + "x" * 1000], f" for the prompt {'a long prompt ' + 'x' * 46!r}"),
        (None, " for sample 1"),
    ],
    ids=["chat", "long", "none"],
)
def test_a_failed_sample_is_named_in_one_line_by_its_prompt_or_else_by_its_row(failures, lines, prompts, shown):
    given = {} if prompts is None else {"prompts": prompts}
    assert guarded(lengths, failures)(completions=["a", None], **given) == [1.0, None]
    assert failures.newest.endswith(shown)
    (line,) = lines()
    assert line == failures.newest
    assert "TypeError" in line
    assert "\n" not in line
    assert len(line) < 400


def test_what_a_function_logs_counts_once_and_columns_stay_as_long_as_the_batch(failures):
    def function(completions, log_metric, log_extra, **_):
        log_extra("first", [str(text)[0] for text in completions])
        log_metric("characters", sum(len(str(text)) for text in completions))
        return lengths(completions)

    log = Log()
    reward = guarded(function, failures)
    assert reward(completions=["ab", "c"], prompts=["", ""], **log.arguments()) == [2.0, 1.0]
    assert log.columns == {"first": ["a", "c"]}
    assert log.metrics == {"characters": [3], "reward/own/failed_frac": [0.0]}
    assert reward(completions=["de", None, "f"], prompts=[""] * 3, **log.arguments()) == [2.0, None, 1.0]
    assert log.columns == {"first": ["a", "c", "d", None, "f"]}
    assert log.metrics["characters"] == [3, 2, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RecipeError("ours")], ids=repr)
def test_what_is_no_failure_of_the_function_goes_on(failures, error):
    def function(**_):
        raise error

    async def asynchronous(**_):
        raise error

    with pytest.raises(type(error)) as caught:
        guarded(function, failures)(completions=["a", "b"])
    assert caught.value is error
    if isinstance(error, PerlError):  # asyncio.run itself reacts to the others
        with pytest.raises(RecipeError):
            asyncio.run(guarded(asynchronous, failures)(completions=["a", "b"]))
    assert failures.count == 0


def test_a_reward_that_ends_the_process_is_named_instead(failures):
    def function(**_):
        sys.exit(3)

    with pytest.raises(RewardError) as caught:
        guarded(function, failures)(completions=["a", "b"])
    assert failures.name in str(caught.value)
    assert "sys.exit(3)" in str(caught.value)


class Judge:
    """Its objects are async although they are no coroutine functions."""

    async def __call__(self, completions, **_):
        return lengths(completions)

    async def score(self, completions, **_):
        return lengths(completions)

    @staticmethod
    def quick(completions, **_):
        return lengths(completions)


@functools.wraps(Judge.score)
def returns_a_coroutine(**arguments):
    return Judge()(**arguments)


@pytest.mark.parametrize(
    ("function", "asynchronous", "scores"),
    [
        (Judge(), True, [2.0, None]),
        (functools.partial(Judge().score, limit=3), True, [2.0, None]),
        (Judge.quick, False, [2.0, None]),
        (Judge, False, [None, None]),  # though its objects are
    ],
    ids=["object", "partial method", "static", "class"],
)
def test_async_is_what_must_be_awaited(failures, function, asynchronous, scores):
    assert is_async(function) is asynchronous
    reward = guarded(function, failures)
    assert inspect.iscoroutinefunction(reward) is asynchronous  # what TRL asks for
    scored = reward(completions=["ab", None], prompts=["", ""])
    assert (asyncio.run(scored) if asynchronous else scored) == scores
    assert failures.count == scores.count(None)


def test_a_function_that_returns_a_coroutine_is_told_to_be_async(failures, lines):
    assert not is_async(returns_a_coroutine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert guarded(returns_a_coroutine, failures)(completions=["a"], prompts=["2+2?"]) == [None]
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    reason = "TypeError: returned a coroutine; define the function itself with async def"
    assert lines() == [f"reward own: {reason} for the prompt '2+2?'"]


def test_a_failure_names_the_line_of_the_users_code_and_not_of_a_library(failures):
    def raises(**_):
        return json.loads("{")

    guarded(raises, failures)(completions=["a"], prompts=["2+2?"])
    line = raises.__code__.co_firstlineno + 1
    assert failures.newest.startswith(f"reward own: {Path(__file__).name}:{line}: JSONDecodeError: ")

    async def raises_later(**_):
        await asyncio.sleep(0)
        raise OSError("away")

    asyncio.run(guarded(raises_later, failures)(completions=["a"], prompts=["2+2?"]))
    assert f"own: {Path(__file__).name}:{raises_later.__code__.co_firstlineno + 2}: OSError: away" in failures.newest
    guarded(lambda **_: ["no number"], failures)(completions=["a"], prompts=["2+2?"])  # found by us
    assert failures.newest.startswith("reward own: TypeError: ")


def test_the_code_of_a_reward_is_its_file_and_all_that_it_uses_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    files = {
        "judging.py": "import math\nTABLE = 'table.json'\n\ndef reward():\n    import weighing, pack.scale\n",
        "weighing.py": "import deeper\n",
        "pack/scale.py": "from . import near\n",
        **dict.fromkeys(("deeper.py", "pack/near.py", "table.json"), "1\n"),
        "unused.py": "1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    importlib.import_module("judging")
    first, changed = code_digest("judging:reward"), set()
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode())
        assert code_digest("judging:reward") == first
        (tmp_path / name).write_text(f"{text}2\n")
        changed |= {name} if code_digest("judging:reward") != first else set()
        (tmp_path / name).write_text(text)
    assert changed == files.keys() - {"unused.py"}
