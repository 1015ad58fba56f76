"""A package holds exactly what is said of an adapter, and nothing of another or of this machine."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest

from perl.errors import PerlError
from perl.evaluation.scoring.results import read_results
from perl.hub.card.candidate import find_candidate
from perl.hub.card.published import PUBLIC_RECIPE, SCORES
from perl.hub.cards import write_card
from perl.hub.push.package import MOST_ROWS, PushPackage, package_candidate, package_mistakes, read_package, thinned
from perl.policy.name import policy_name
from perl.run.folder import Run
from perl.run.logs import log_rows
from tests.documents.pages import links
from tests.hub.push_runs import FILES, add_best, add_checkpoint, publishable
from tests.hub_fixtures import TOKEN


def rows(content):
    return [json.loads(line) for line in content.splitlines()]


def test_it_holds_these_files_and_no_others():
    run = publishable()
    for stranger in ("adapter/training_args.bin", "eval/table.md", "adapter/.DS_Store"):
        (run.path / stranger).write_bytes(b"\x80\x04")
    assert list(package_candidate(find_candidate(run), "user/a").files) == FILES
    add_best(run)  # results of another adapter are not in it
    files = package_candidate(find_candidate(run, "best"), "user/a").files
    assert not [name for name in files if name.startswith("eval/")]
    add_checkpoint(run, 10)  # which ends where it was saved
    package = package_candidate(find_candidate(run, 10), "user/a")
    assert rows(package.files["metrics.jsonl"])[-1]["step"] == 10


def test_a_long_log_is_thinned_evenly_and_keeps_its_ends():
    for length in (1001, 1500, 5000):
        log = [{"step": step} for step in range(1, length + 1)]
        steps = [row["step"] for row in rows(thinned(log))]
        assert len(steps) == MOST_ROWS == 1000
        assert (steps[0], steps[-1]) == (1, length)
        spacing = (length - 1) / (MOST_ROWS - 1)
        expected = [1 + number * spacing for number in range(MOST_ROWS)]
        assert max(abs(step - place) for step, place in zip(steps, expected, strict=True)) <= 1
        assert steps == sorted(set(steps))
        assert max(b - a for a, b in pairwise(steps)) <= spacing + 1
    assert thinned(log[:1000]).splitlines() == [json.dumps(row).encode() for row in log[:1000]]
    assert log_rows('{"step": 1}\n[]\n{"step": 2, "rew') == [{"step": 1}]  # a line that a kill cut short is left out


def inner_links(card):
    return {target for target in links(card) if not target.startswith("https://")}


def test_the_links_of_a_local_card_lead_to_the_files_of_its_run_as_long_as_they_are_published():
    run = publishable()
    write_card(run)
    assert inner_links(run.card) == {SCORES}
    assert all((run.adapter / name).is_file() for name in (SCORES, PUBLIC_RECIPE))
    shutil.rmtree(run.path / "eval")
    write_card(run)
    assert inner_links(run.card) == set()
    assert not (run.adapter / SCORES).exists()


def test_places_are_published_by_their_last_part():
    run = publishable()
    file = run.path / "eval" / "results.json"
    facts = json.loads(file.read_text())
    facts["perl"]["subject"]["name"] = facts["config_general"]["model_name"] = "/home/alice/runs/mine"
    file.write_text(json.dumps(facts))
    there = json.loads(package_candidate(find_candidate(run), "user/a").files["eval/results.json"])
    assert there["perl"]["subject"]["name"] == "mine"
    assert there["perl"]["tasks"] == facts["perl"]["tasks"]
    assert there["results"] == facts["results"]
    config = run.adapter / "adapter_config.json"
    for base in ("/home/alice/models/base", "../models/base", "C:\\Users\\alice\\base"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
        package = package_candidate(find_candidate(run), "user/a")
        assert json.loads(package.files["adapter_config.json"])["base_model_name_or_path"] == "base", base
    for key in ("base_model_name_or_path", "revision"):
        for value in (5, ["a"], {"a": "b"}):
            config.write_text(
                json.dumps(
                    {**json.loads(config.read_text()), "base_model_name_or_path": "a/b", "revision": None, key: value}
                )
            )
            with pytest.raises(PerlError, match=f"^adapter_config.json: .* {key} is no name$"):
                package_candidate(find_candidate(run), "user/a")


def test_a_sound_package_has_no_problems_and_a_leak_is_one(tmp_path, monkeypatch):
    run = publishable()
    package = package_candidate(find_candidate(run), "user/a")
    assert package_mistakes(package, run.path) == []
    for name, leak in (("metrics.jsonl", b'{"x": "/home/alice/x"}'), ("perl_recipe.yaml", TOKEN.encode())):
        changed = PushPackage({**package.files, name: leak})
        # The card, which comes from these files, is found to say something else too.
        assert f"{name}:1" in {problem.where for problem in package_mistakes(changed, run.path)}
    assert json.loads(package.files["eval/results.json"])["perl"]["tasks"]
    wrong = package.files["README.md"].replace(b"value: ", b"value: 9")
    assert package_mistakes(PushPackage({**package.files, "README.md": wrong}), run.path)
    package.write(tmp_path / "staged")  # it is the same when it was written
    assert read_package(tmp_path / "staged").files == package.files
    assert package.size == sum(path.stat().st_size for path in (tmp_path / "staged").rglob("*") if path.is_file())
    (tmp_path / "elsewhere").mkdir()
    absolute = run.path.resolve()
    monkeypatch.chdir(tmp_path / "elsewhere")  # it is packed from the folder alone
    assert package_candidate(find_candidate(Run.read(absolute)), "user/a").files == package.files


def test_results_are_not_shown_beside_an_edited_config_or_on_another_base(caplog):
    run = publishable()
    config = run.adapter / "adapter_config.json"
    text = config.read_text()
    assert find_candidate(run).results is not None
    for change in ({"lora_alpha": 99}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 1}}):
        config.write_text(json.dumps({**json.loads(text), **change}))
        caplog.clear()
        assert find_candidate(run).results is None, change
        assert "adapter_config.json" in caplog.text
        files = package_candidate(find_candidate(run), "user/a").files
        assert not [name for name in files if name.startswith("eval/")], change
    config.write_text(text)
    found = read_results(run.path)
    subject = {**found.subject, "base_sha256": "e" * 64}
    named = [subject[name] for name in ("base_sha256", "adapter_sha256", "adapter_config_sha256")]
    replace(found, subject={**subject, "policy": policy_name(*named)}).write(run.path / "eval")
    assert find_candidate(run).results is None


def test_a_card_or_a_sample_that_is_not_utf8_is_one_line_or_unknown():
    run = publishable()
    run.samples.write_bytes(b'{"prompt": "\xff"}\n')
    run.card.write_bytes(b"# x\n\n## Said by the author, not checked\n\n\xff\n")
    with pytest.raises(PerlError, match=r"README.md: is not UTF-8"):
        package_candidate(find_candidate(run), "user/a")
    run.card.unlink()
    package = package_candidate(find_candidate(run), "user/a")
    assert json.loads(package.files["perl_run.json"])["chat"] is None
