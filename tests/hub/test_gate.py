"""One gate: what is not a regular file of ours, of its kind and size, does not leave the machine."""

import json
import os
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.recounting.files import LARGEST, PUBLISHED
from perl.hub import gate
from perl.hub.card.candidate import find_candidate
from perl.hub.card.eval_results import eval_result_files
from perl.hub.cards import write_card
from perl.hub.gate import MachineFacts, gate_mistakes, is_ours, is_simple_name, largest, take
from perl.hub.push.commit import push_package
from perl.hub.push.package import PushPackage, package_candidate, read_package
from perl.hub.push.publish import pack, pack_checkpoint, push_run, send_checkpoints, wanted_push
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from tests.hub.files import weights
from tests.hub.push_runs import REPO, add_best, add_checkpoint, files_of, publishable

DIARY = b"my diary: nobody must read this"
TOKEN = b"hf" + b"_" + b"aB3" * 11


def refused(name, content):
    return [str(problem) for problem in gate_mistakes({name: content}, MachineFacts())]


def link(path, elsewhere):
    """Moves something away and leaves a link to it."""
    elsewhere.mkdir(exist_ok=True)
    path.symlink_to(path.rename(elsewhere / path.name))


LINKED = ("recipe.yaml", "eval/results.json", "adapter/adapter_model.safetensors", "metrics.jsonl", "eval")


def test_a_link_or_what_is_no_regular_file_is_not_published_and_nobody_waits_for_it(hub, tmp_path):
    for number, name in enumerate(LINKED):
        run = publishable(f"run-{number}")
        link(run.path / name, tmp_path / f"private-{number}")
        with pytest.raises(PerlError, match=f"{name}: is a link, and links are not published"):
            push_run(run, wanted_push(run, REPO), sleep=pytest.fail)
    assert hub.requests == 0
    run = publishable()  # a run that is itself reached by a link is published
    (tmp_path / "elsewhere").symlink_to(run.path.resolve())
    there = type(run).read(tmp_path / "elsewhere")
    assert package_candidate(find_candidate(there), REPO).files.keys() == pack(find_candidate(run), REPO).files.keys()
    for make in (os.mkfifo, os.mkdir):
        run = publishable(make.__name__)
        (run.path / "eval" / "samples.jsonl").unlink()
        make(run.path / "eval" / "samples.jsonl")
        with pytest.raises(PerlError, match=r"samples.jsonl: (is not a regular file|cannot be read)"):
            package_candidate(find_candidate(run), REPO)


def test_only_our_names_and_sizes_pass_and_no_name_leads_out_of_a_folder(tmp_path):
    (tmp_path / "x").write_bytes(DIARY)
    (tmp_path / "run").mkdir()
    for name in ("../x", "a/../../x", "/etc/passwd", ".", "a//b", "", "a\\..\\b", "a\0b"):
        assert not is_simple_name(name), name
        with pytest.raises(PerlError):
            take(tmp_path / "run", name)
        with pytest.raises(PerlError, match="is not the name of a file in it"):
            PushPackage({name: b"x"}).write(tmp_path / "run")
        assert refused(name, b"{}"), name
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["run", "x"]
    found = find_candidate(publishable("another")).results
    (task,) = found.tasks
    data = {"source": "MathArena/aime_2026", "revision": None, "sha256": "a" * 64}
    wrong = replace(task, name="../../TRAVERSED", data=data, adapter=replace(task.adapter, n=30))
    with pytest.raises(PerlError, match="is not a valid name of a task"):
        eval_result_files(replace(found, tasks=(wrong,)))
    strange = [".eval_results/a b.yaml", ".eval_results/\u202elmay.yaml"]
    for name in ("LICENSE", "adapter/x.json", "plots/x.png", "eval/x.png", "x.html", *strange):
        assert refused(name, b"")[0].endswith("is not a file that perl publishes (leave it out)"), name
        assert not is_ours(name)
    ours = ["README.md", ".eval_results/gsm8k.yaml", "metrics.jsonl"]
    others = ["LICENSE", "eval/x.txt", "plots/x.png", ".eval_results/hle.yaml", "x/README.md", "model.safetensors"]
    assert [name for name in (*ours, *others) if is_ours(name)] == ours
    assert largest(PUBLISHED) == LARGEST  # as many samples may leave as are made and read
    assert refused("perl_recipe.yaml", b"#" * 200_001) == [
        "perl_recipe.yaml: has 200,001 bytes, at most 200,000 are published"
    ]
    with pytest.raises(PerlError, match="has 31 bytes, at most 4 are published"):
        take(tmp_path, "x", 4)


NOT_ITS_KIND = [
    (WEIGHTS, DIARY, "is not a valid safetensors file"),
    (CONFIG, b"{", "is not valid json"),
    (CONFIG, b"\xff{}", "is not UTF-8"),
    (CONFIG, b"[" * 100_000, "is not valid json"),
    ("metrics.jsonl", b'{"a": 1}\n' + DIARY, "is not valid json"),
    ("perl_recipe.yaml", b"a: [", "is not valid yaml"),
    ("perl_recipe.yaml", b"a: &x [1]\nb: *x\n", "is not valid yaml"),
    ("README.md", "a\nb\u202egnp".encode(), "holds the control character U+202E in line 2"),
]


def test_a_file_is_what_its_ending_says():
    for name, content, said in NOT_ITS_KIND:
        assert any(said in line for line in refused(name, content)), (name, content[:80], said)
    honest = {WEIGHTS: weights(b"1234", format="pt"), CONFIG: b"{}", "README.md": "# Über\n\n\tπ ≤ θ\n".encode()}
    assert gate_mistakes(honest, MachineFacts()) == []


def test_what_was_looked_at_is_what_is_sent(hub, monkeypatch):
    """Every file is exchanged right after the gate looked at it."""
    run = publishable()
    before = pack(find_candidate(run), REPO).files
    looked = gate.text_of

    def exchanged(name, content):
        for path in (*(run.path / "eval").glob("*"), run.adapter / CONFIG, run.metrics):
            path.unlink(missing_ok=True)
            path.write_bytes(DIARY)
        return looked(name, content)

    monkeypatch.setattr(gate, "text_of", exchanged)
    push_run(run, wanted_push(run, REPO))
    assert run.metrics.read_bytes() == DIARY
    assert files_of(hub) == before


def test_what_waits_in_the_outbox_is_looked_at_again_and_the_sender_looks_itself(hub, tmp_path):
    for what in ("stranger", "token"):
        run = publishable(tmp_path / what)
        add_checkpoint(run, 10)
        pack_checkpoint(run, 10, REPO)
        folder = run.path / "outbox" / REPO.replace("/", "--") / "step-10"
        if what == "stranger":
            (folder / "diary.txt").write_bytes(DIARY)
        else:
            (folder / "metrics.jsonl").write_text(json.dumps({"x": TOKEN.decode()}))
        with pytest.raises(PerlError):
            send_checkpoints(run, wanted_push(run, REPO))
    for number, part in enumerate(("outbox", "outbox/user--adapter", "outbox/user--adapter/step-10")):
        run = publishable(tmp_path / f"linked-{number}")
        add_checkpoint(run, 10)
        pack_checkpoint(run, 10, REPO)
        link(run.path / part, tmp_path / f"elsewhere-{number}")
        with pytest.raises(PerlError, match=f"{part}: is a link"):
            pack_checkpoint(run, 10, REPO)
        with pytest.raises(PerlError, match=f"{part}: is a link"):
            send_checkpoints(run, wanted_push(run, REPO))
    # Whoever packs, nothing goes round the gate; of a script too only our files are sent.
    for name, content in (("diary.txt", DIARY), ("plots/x.png", DIARY), ("README.md", TOKEN)):
        with pytest.raises(PerlError, match=name.replace("/", ".")):
            push_package(PushPackage({WEIGHTS: weights(b"x"), CONFIG: b"{}", name: content}), REPO, sleep=pytest.fail)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "training_args.bin").write_bytes(b"\x80\x04")
    with pytest.raises(PerlError, match=r"training_args.bin: is not a file that perl publishes"):
        read_package(tmp_path / "adapter")
    assert hub.requests == 0


def test_samples_that_are_too_many_and_weights_that_are_exchanged_are_refused(monkeypatch):
    run = publishable()
    add_best(run)
    assert WEIGHTS in pack(find_candidate(run, "best"), REPO).files
    monkeypatch.setattr("perl.evaluation.recounting.files.LARGEST", 10)
    with pytest.raises(PerlError, match=r"there is no samples\.jsonl \(perl push sends them, at most"):
        pack(find_candidate(run), REPO)
    write_card(run)  # which a training's end does, and fails for no such reason
    monkeypatch.undo()
    candidate = find_candidate(run)
    (run.adapter / WEIGHTS).write_bytes(weights(b"other"))
    with pytest.raises(PerlError, match="was exchanged while it was read"):
        package_candidate(candidate, REPO)
