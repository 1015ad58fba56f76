"""The page is one file that requests nothing; what a run says is data in it; mistakes are one line each."""

import json
import re

import pytest

import perl
from perl.cli import commands
from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE
from perl.reports.page import page_of
from perl.reports.page_data import page_data
from perl.reports.run_log import read_run
from tests.html_tags import Tags
from tests.reports.written import alarm, samples_of, write_rows, write_run

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u2028<!--<script>"
)


def hostile_run(folder):
    """Everything that a run can say is an attack."""
    write_run(folder, alarms=(alarm(3, HOSTILE, line=HOSTILE, name=HOSTILE),), settings={HOSTILE: HOSTILE})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {f"rewards/{HOSTILE}/mean": 0.5, f"eval/{HOSTILE}/avg@4": 0.5, HOSTILE: 1.0}
    write_rows(folder / "metrics.jsonl", rows)
    for_verdicts = {f"{HOSTILE}_verdict": HOSTILE, f"{HOSTILE}_answer": HOSTILE, HOSTILE: HOSTILE}
    texts = {"prompt": HOSTILE, "completion": HOSTILE, "rewards": {HOSTILE: 1.0}, "tokens": [HOSTILE], "gaps": [0.1]}
    write_rows(folder / "samples.jsonl", samples_of(1, **texts, **for_verdicts))
    (folder / "recipe.yaml").write_text(f"model: {json.dumps(HOSTILE)}\n")
    facts = json.loads((folder / "run.json").read_text())
    of_run = {"base": HOSTILE, "method": HOSTILE, "error": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    (folder / "run.json").write_text(json.dumps({**facts, **of_run, "rewards": {HOSTILE: 1.0}, "forecast": [HOSTILE]}))
    return folder


def test_the_page_requests_nothing_and_runs_its_own_two_scripts(tmp_path):
    made = perl.report(write_run(tmp_path / "run"), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page == made.html
    tags = Tags(page)
    for tag, attributes in tags.found:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert not attributes.keys() & {"src", "href", "action"}
        assert not any(name.startswith("on") for name in attributes)
    assert [attributes.get("type") for tag, attributes in tags.found if tag == "script"] == [
        "application/json",
        None,
        None,
    ]
    (policy,) = [a["content"] for t, a in tags.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert re.search(r"script-src 'sha256-[\w+/=]+' 'sha256-[\w+/=]+';", policy)
    assert "unsafe-eval" not in policy
    assert "https:" not in policy


def test_what_a_run_says_is_data_and_never_markup(tmp_path):
    page = perl.report(hostile_run(tmp_path / "a <img src=x onerror=alert(1)>")).html
    tags = Tags(page)
    assert [tag for tag, _ in tags.found if tag in ("script", "img")] == ["script"] * 3
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert not set("<>&\u2028\u2029") & set(data)
    found = json.loads(data)
    (run,) = found["runs"]
    completion = run["completions"][0]["prompts"][0]["completions"][0]
    assert completion["text"] == HOSTILE
    assert completion["tokens"] == [HOSTILE]
    assert run["plan"]["lines"] == [HOSTILE]
    assert "<title>a &lt;img src=x" in page


def test_a_notebook_shows_the_page_in_a_frame_that_reaches_nothing(tmp_path):
    made = perl.report([perl.Run.read(write_run(tmp_path / "run"))])
    assert made.path is None
    shown = made._repr_html_()
    ((tag, attributes),) = Tags(shown).found
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == made.html
    assert "done, step 12 of 12; reward" in str(made)
    assert len(repr(made)) < 100
    assert made.save(tmp_path / "page.html").read_text() == made.html


def said(capsys, *arguments):
    code = commands.run([str(argument) for argument in arguments], "perl")
    found = capsys.readouterr()
    assert "Traceback" not in found.out + found.err
    return code, found.out, found.err


def test_the_command_writes_a_page_or_prints_what_it_shows(tmp_path, capsys, monkeypatch):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", status="running", steps=3)
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "report", one, two)
    assert code == EXIT_DONE
    assert out.splitlines()[1].startswith("two: running, step 3 of 12; reward ")
    assert re.fullmatch(r"report   report.html \(\d\.\d MB\)", out.splitlines()[-1])
    before = (tmp_path / "report.html").read_text()
    with (two / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "reward": 0.77}\n')
    assert said(capsys, "report", one, two)[1].splitlines()[1].startswith("two: running, step 4 of 12")
    assert (tmp_path / "report.html").read_text() != before
    (tmp_path / "report.html").unlink()
    code, out, _ = said(capsys, "report", one, "--json")
    assert [run["name"] for run in json.loads(out)["runs"]] == ["one"]
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said_of_it"),
    [
        (("nowhere",), "nowhere: no such folder"),
        (("run", "-o", "nowhere/page.html"), "nowhere: no such folder (make it, or name another file with --output)"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, monkeypatch, arguments, said_of_it):
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, "report", *arguments)
    assert (code, out) == (EXIT_USER_MISTAKE, "")
    assert said_of_it in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_size_of_a_page_is_bounded(tmp_path):
    """Of 12,000 steps with long completions; without the script that draws charts."""
    folder = write_run(tmp_path / "run", steps=2)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_rows(folder / "metrics.jsonl", [{**rows[0], "step": step} for step in range(1, 12_001)])
    write_rows(
        folder / "samples.jsonl", [row for s in range(1, 3_001) for row in samples_of(s, completion="x" * 5_000)]
    )
    data = page_data([read_run(folder)])
    (run,) = data["runs"]
    assert data["thinned"]
    assert max(len(curve["x"]) for curve in run["curves"].values()) <= data["points"] <= 2_000
    assert len(run["completions"]) < run["completion_steps"] == 3_000
    assert len(page_of(data, "").encode()) < 10_000_000
