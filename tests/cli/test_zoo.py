"""`perl zoo`: what its commands print, write and refuse."""

import json

import pytest

from perl.evaluation.scoring.results import read_results
from tests.hub.zoo_entry_runs import trained as trained_run
from tests.zoo.entries import OTHER_PROTOCOL, PROTOCOL, reported, score, seeds, theirs, trained, zoo_of

TASK = "sandbox:addition"


@pytest.fixture
def zoo(tmp_path):
    zoo_of(
        tmp_path / "zoo",
        trained("a-lora", score(0.5), seeds=seeds(0.51, 0.49)),
        trained("b-vera", score(0.7), method="vera"),
        trained("c-hot", score(0.9, protocol_hash=OTHER_PROTOCOL)),
        reported("d-paper", theirs(0.2, "products"), notes=["One seed."]),
    )
    return tmp_path / "zoo"


@pytest.fixture
def perl(perl):
    """Its commands: exit code, what was printed, what was complained of."""
    return lambda *arguments: perl("zoo", *map(str, arguments))


def first_words(text):
    return [line.split()[0] for line in text.splitlines()[1:] if line]


def test_list_filters_sorts_and_chooses_columns_in_every_form(perl, zoo):
    assert first_words(perl("list", "--zoo", zoo)[1]) == ["a-lora", "b-vera", "c-hot", "d-paper"]
    assert first_words(perl("list", "--task", "sums", "--zoo", zoo)[1]) == ["c-hot", "b-vera", "a-lora"]
    filters = ("--method", "lora", "--base", "SANDBOX", "--reverse")
    out = perl("list", *filters, "--columns", "name,sums.gain", "--zoo", zoo)[1]
    assert out.splitlines() == ["name    sums.gain", "c-hot       +50.0", "a-lora      +10.0"]
    chosen = ("--columns", "name,sums", "--sort", "sums", "--zoo", zoo)
    found = {style: perl("list", f"--{style}", *chosen)[1] for style in ("csv", "json", "markdown")}
    assert json.loads(found["json"])[0] == {"name": "c-hot", "sums": 0.9}
    assert found["csv"].splitlines()[1] == "c-hot,0.9"
    assert found["markdown"].splitlines()[2] == "| c-hot | 90.0 ± 1.0 |"


MISTAKES = (
    (("list", "--columns", "nmae"), "error: --columns: no column 'nmae' (did you mean name?)"),
    (("list", "--method", "verra"), "(did you mean vera?)"),
    (("verify", "b-vero"), "error: the zoo has no 'b-vero' (did you mean b-vera?)"),
    (("rank", "smus"), "error: no entry of the zoo has a score on 'smus' (did you mean sums?)"),
    (("html", "-o", "file/zoo.html"), "error: file/zoo.html: cannot be written"),
    (("add", "nowhere"), "is neither a run folder nor a name on the Hub"),
    (("list", "--hub"), "error: HF_HUB_OFFLINE: "),
)


def test_a_mistake_is_one_line_and_exit_code_2(perl, zoo, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for arguments, words in MISTAKES:
        code, out, err = perl(*arguments, "--zoo", zoo)
        assert (code, out) == (2, ""), arguments
        assert words in err
        assert len(err.splitlines()) == 1
    code, _, err = perl("list", "--zoo", tmp_path / "none")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is not a zoo" in err
    monkeypatch.setattr("perl.cli.zoo.zoo_folder", lambda: tmp_path / "site-packages" / "model_cards" / "zoo")
    code, _, err = perl("add", "run")
    assert code == 2
    assert "is the installed package's zoo, which is not written to (--zoo DIR begins one)" in " ".join(err.split())


def test_show_says_scores_seeds_and_notes(perl, zoo):
    lines = perl("show", "a-lora", "--zoo", zoo)[1].splitlines()
    assert lines[0].split() == ["name", "a-lora"]
    row = next(line for line in lines if line.startswith("sums"))
    assert " ".join(row.split()) == f"sums avg@4 500 50.0 ± 1.0 40.0 ± 1.2 +10.0 {PROTOCOL}"
    assert "seed 1: sums 51.0" in lines
    assert not any("licence" in line for line in lines)
    assert "- One seed." in perl("show", "d-paper", "--zoo", zoo)[1]
    entry = (zoo / "entries" / "a-lora.json").read_text()
    assert perl("show", "zoo:a-lora", "--json", "--zoo", zoo)[1] == entry


def test_rank_shows_ranks_and_names_what_is_not_ranked(perl, zoo):
    out = perl("rank", "sums", "--zoo", zoo)[1]
    assert out.splitlines()[0] == f"sums, {PROTOCOL}"
    assert [line.split()[:2] for line in out.splitlines()[3:5]] == [["1", "b-vera"], ["2", "a-lora"]]
    assert f"Not ranked, measured otherwise ({OTHER_PROTOCOL}): c-hot." in out
    found = json.loads(perl("rank", "sums", "--json", "--zoo", zoo)[1])
    assert [(row["rank"], row["name"], row["error"]) for row in found["ranks"]] == [
        ("1", "b-vera", 0.01),
        ("2", "a-lora", pytest.approx(0.01)),
    ]
    assert found["others"] == {OTHER_PROTOCOL: ["c-hot"]}


def test_render_writes_and_checks_and_a_malformed_entry_stops_it_alone(perl, zoo, tmp_path):
    absent = [f"error: {zoo}/MODEL_ZOO.md: is not what the entries say (perl zoo render) [PRL206]"]
    code, _, err = perl("render", "--check", "--zoo", zoo)
    assert (code, err.splitlines()) == (2, absent)
    assert perl("render", "--zoo", zoo)[1].splitlines() == [f"{zoo}/MODEL_ZOO.md"]
    assert perl("render", "--check", "--zoo", zoo) == (0, "", "")
    assert perl("html", "-o", "pages/mine.html", "--zoo", zoo) == (0, "pages/mine.html\n", "")
    assert "b-vera" in (tmp_path / "pages" / "mine.html").read_text()
    (zoo / "entries" / "b-vera.json").write_text("{")
    assert perl("render", "--check", "--zoo", zoo)[0] == 2
    code, out, _ = perl("list", "--zoo", zoo)
    assert (code, first_words(out)) == (0, ["a-lora", "c-hot", "d-paper"])


def test_a_run_is_added_listed_pulled_and_verified_and_another_score_is_exit_code_1(perl, tmp_path):
    run, zoo = trained_run(), tmp_path / "mine"
    code, out, err = perl("add", run, "--name", "tiny", "--ship", "--note", "Two steps only.", "--zoo", zoo)
    assert (code, out) == (0, f"{zoo}/entries/tiny.json\n")
    assert "perl zoo render" in err
    measured = read_results(run / "eval").task(TASK)
    [row] = json.loads(perl("list", "--json", "--columns", f"{TASK},provenance,notes", "--zoo", zoo)[1])
    assert row == {TASK: measured.adapter.accuracy, "provenance": "trained-here", "notes": 1}
    assert perl("pull", "tiny", "here", "--zoo", zoo)[0] == 0
    weights = "adapter_model.safetensors"
    assert (tmp_path / "here" / weights).read_bytes() == (run / "adapter" / weights).read_bytes()
    code, out, _ = perl("verify", "tiny", "--zoo", zoo)
    assert code == 0
    assert out.startswith(f"{TASK}: identical")
    file = zoo / "entries" / "tiny.json"
    facts = json.loads(file.read_text())
    facts["scores"][0].update(adapter=0.3)
    file.write_text(json.dumps(facts))
    code, out, _ = perl("verify", "tiny", "--json", "--zoo", zoo)
    assert code == 1
    assert json.loads(out)["agrees"] is False
