"""Counting results again: the same figures from samples and from published samples, and forgers' edits."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.recounting.files import (
    find_golds,
    published_samples,
    read_published,
    recount_folder,
    recount_published,
)
from perl.evaluation.recounting.recount import KeptSamples, recount, with_figures
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import RESULTS, SAMPLES, Results, TaskResult, read_results
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.scoring.score import HASHED
from perl.evaluation.scoring.task import all_tasks
from perl.evaluation.tasks.task_data import load_task_data
from perl.policy.name import policy_name
from perl.rewards.verifier import check_all, verifier_version
from perl.types import Verdict
from tests.evaluation.forgeries import FORGERIES, TASK

K, COUNT = 4, 8
KEYS = {"base": "b" * 16, "adapter": "a" * 16}
# Whether the completions of each problem are right; the last one of a problem gives no answer where it is "-".
BASE = ["0000", "100-", "1100", "1111", "0001", "10-0", "0100", "0110"]
ADAPTER = ["1100", "1110", "1111", "1111", "010-", "1101", "1110", "1111"]


def evaluation(folder, base=BASE, adapter=ADAPTER, wrong=lambda gold, index: str(int(gold) + 1 + index)):
    """A sandbox task's results and samples, judged by the verifier, written into a folder.

    The samples of the second policy stand after the first's.
    """
    protocol = Protocol(preset="recipe", max_new_tokens=64, k=K)
    data = load_task_data(all_tasks()[TASK], None, COUNT)
    groups = {}
    for who, marks in (("base", base), ("adapter", adapter)):
        rows = []
        for question, row in zip(data.questions, marks, strict=True):
            answers = [question.gold if mark == "1" else wrong(question.gold, i) for i, mark in enumerate(row)]
            texts = ["so I think" if m == "-" else f"it is \\boxed{{{a}}}" for m, a in zip(row, answers, strict=True)]
            verdicts = check_all([question.gold] * K, texts)
            rows.append([])
            for i, (text, v) in enumerate(zip(texts, verdicts, strict=True)):
                place = (TASK, question.id, i)
                rows[-1].append(Sample(*place, protocol.seed_of(*place), text, 20 + i, i == 5, v.status, v.extracted))
        groups[who] = rows
    facts = {"task": TASK, "task_version": data.task.version, "prompt": data.task.prompt, "data": data.sha256}
    empty = TaskResult(
        name=TASK,
        title=data.task.title,
        protocol_hash=protocol.hash({**facts, "max_new_tokens": 64}),
        max_new_tokens=64,
        data={"source": data.source, "revision": None, "sha256": data.sha256},
        samples=KEYS,
    )
    digests = ("1" * 64, "2" * 64, "3" * 64)
    subject = {
        "name": "a-run", "base": "sandbox:base", "base_revision": None, "base_sha256": digests[0],
        "adapter_sha256": digests[1], "adapter_config_sha256": digests[2], "policy": policy_name(*digests),
        "chat_template": None,
    }  # fmt: skip
    engine = {"backend": "transformers", "dtype": "float32", "device": "cpu", "logp_diff": None}
    results = Results(subject, protocol, engine, {}, 1.0, (with_figures(empty, groups, (3,)),), verifier_version())
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder)
    for who, rows in groups.items():
        SampleFile(folder / SAMPLES).append(KEYS[who], [sample for row in rows for sample in row])
    return results


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "eval"
    evaluation(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "eval")


def publish(folder):
    """The folder as it is published: its samples without texts."""
    (folder / SAMPLES).write_bytes(published_samples(read_results(folder), folder / SAMPLES))


def said(folder) -> str:
    """What counting a folder again says, a line each; of results that cannot be read what is said of those."""
    try:
        return "\n".join(map(str, recount_folder(folder).mistakes))
    except PerlError as error:
        return str(error)


def test_honest_results_are_the_same_from_texts_and_from_verdicts_and_nothing_is_counted_without_samples(folder):
    written = read_results(folder)
    whole = recount_folder(folder)
    assert (whole.mistakes, whole.results, whole.basis, whole.reported) == ((), written, {TASK: "texts"}, ())
    publish(folder)
    public = recount_folder(folder)
    assert (public.mistakes, public.results, public.basis) == ((), written, {TASK: "verdicts"})
    assert public.reported == ("which completions are right",)
    results, samples = (folder / RESULTS).read_bytes(), (folder / SAMPLES).read_bytes()
    assert recount_published(results, samples, "someone/it").basis == {TASK: "verdicts"}
    (folder / SAMPLES).unlink()
    for count in (lambda: recount_folder(folder), lambda: recount_published(results, None, "someone/it")):
        with pytest.raises(PerlError, match=r"cannot be counted again, there is no samples\.jsonl"):
            count()


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_shown_from_the_samples_unless_everything_was_forged_together(folder, name):
    forgery, published = FORGERIES[name], folder.parent / "published"
    shutil.copytree(folder, published)
    forgery.edit(folder)
    assert said(folder) == "" if forgery.said is None else re.search(forgery.said, said(folder)), said(folder)
    if forgery.said and not forgery.texts:
        publish(published)
        forgery.edit(published)
        assert re.search(forgery.said, said(published)), said(published)


def test_published_lines_have_no_texts_and_long_answers_only_as_a_hash(tmp_path):
    long = "7" * 300
    results = evaluation(tmp_path / "eval", wrong=lambda gold, index: long if index < 2 else f"{gold}9")
    assert results.task(TASK).base.majority < 1
    content = published_samples(results, tmp_path / "eval" / SAMPLES)
    lines = [json.loads(line) for line in content.decode().splitlines()]
    assert len(lines) == 2 * COUNT * K
    assert set(lines[0]) == {
        "policy", "task", "problem", "index", "seed", "tokens", "truncated", "status", "extracted",
    }  # fmt: skip
    assert max(len(line["extracted"] or "") for line in lines) <= 200
    assert any((line["extracted"] or "").startswith(HASHED) for line in lines)
    counted = recount(results, read_published(content, "published"))
    assert (counted.mistakes, counted.results) == ((), results)


@pytest.mark.parametrize("line", [b'{"policy": 5}', b"[" * 100_000, b"\xff"])
def test_a_published_line_that_is_none_is_one_line(folder, line):
    publish(folder)
    with (folder / SAMPLES).open("ab") as file:
        file.write(line + b"\n")
    assert "is not a sample" in said(folder)
    assert len(said(folder).splitlines()) == 1


INTEGRAL = r"\int_0^1 x^2 dx"


def judged(made, gold, **changes):
    """The results counted again, the first problem's gold answer and its samples being others."""
    results, kept = read_results(made), SampleFile(made / SAMPLES)
    problem = results.task(TASK).problems[0].id
    lines = [(key, replace(s, **changes) if s.problem == problem else s) for key, s in kept.lines()]
    return recount(results, KeptSamples(lines), {TASK: {**find_golds(results)[TASK], problem: gold}})


def says_other_verdicts(found):
    return any("verdicts are not those of the texts" in str(one) for one in found.mistakes)


@pytest.mark.parametrize(
    ("there", "now", "stands"),
    [
        ({"status": "timeout"}, "timeout", True),
        ({"status": "timeout"}, "wrong", False),
        ({"status": "right"}, "timeout", False),
        ({"status": "timeout", "extracted": "7"}, "timeout", False),  # the answer is that of the text
    ],
    ids=str,
)
def test_where_the_verifier_does_not_decide_nothing_but_an_undecided_verdict_stands(
    made, monkeypatch, there, now, stands
):
    asked = []

    def as_told(golds, texts, *, timeout_seconds):
        asked.append((len(golds), timeout_seconds))
        of_text = check_all(golds, texts)
        return [v if g != INTEGRAL else Verdict(now, v.extracted) for g, v in zip(golds, of_text, strict=True)]

    monkeypatch.setattr("perl.evaluation.recounting.recount.check_all", as_told)
    found = judged(made, INTEGRAL, **there)
    assert says_other_verdicts(found) is not stands
    undecided = f"8 completions on {TASK} that the verifier could not decide"
    assert (undecided in found.reported) is (now == "timeout")
    # What the file leaves open is asked for a moment only: else it would be undecided after every evaluation.
    open_there = 0 if there["status"] == "right" else K
    assert asked == [(open_there, 1.0), ((COUNT * K) - open_there, 30.0)] * 2


AIME = all_tasks()["aime24"]


def test_no_file_makes_counting_ask_a_network(made, monkeypatch, tmp_path):
    """Not even where the data set is in the cache: the revision may be a commit that a forger proposed."""
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("perl.data.hub.look_up", lambda *given: asked.append(given))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / f"datasets--{AIME.repository.replace('/', '--')}").mkdir()
    monkeypatch.setattr("socket.socket.connect", lambda *given: asked.append(given))
    (task,) = read_results(made).tasks
    data = {"source": AIME.repository, "revision": "b" * 40, "sha256": "a" * 64}
    claimed = replace(read_results(made), tasks=(replace(task, name="aime24", title=AIME.title, data=data),))
    assert find_golds(claimed) == {}
    assert asked == []
