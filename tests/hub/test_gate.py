"""One gate: what is not a regular file of ours, of its kind and size, does not leave the machine."""

import json
import os
import socket
import struct
import tracemalloc
import zlib
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.recounting.published_samples import LARGEST, PUBLISHED
from perl.hub.card.candidate import find_candidate
from perl.hub.card.eval_results import eval_result_files
from perl.hub.found_card import _most as most_read
from perl.hub.gate import gate
from perl.hub.gate.gate import gate_mistakes, is_ours, largest
from perl.hub.gate.leaks import Machine
from perl.hub.gate.snapshot import is_simple_name, take
from perl.hub.push.commit import push_package
from perl.hub.push.outbox import queue_checkpoint, queued_checkpoint
from perl.hub.push.package import Package, package_candidate, read_package
from perl.hub.push.publish import pack, pack_checkpoint, push_run, send_checkpoints, wanted_push
from perl.hub.push.script_push import pack_folder
from perl.hub.zoo_entries.from_hub import _READ as READ_BY_THE_ZOO
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from tests.hub.files import png, weights
from tests.hub.push_runs import REPO, add_best, add_checkpoint, files_of, publishable

RESULTS = "eval/results.json"
DIARY = b"my diary: nobody must read this"


def refused(name, content):
    return [str(problem) for problem in gate_mistakes({name: content}, Machine())]


@pytest.fixture
def diary(tmp_path):
    """Somebody's file outside of the run."""
    place = tmp_path / "private"
    place.mkdir()
    (place / "diary.txt").write_bytes(DIARY)
    (place / "picture.png").write_bytes(png())
    return place


def link(path, target):
    if path.is_dir():
        path.rename(path.with_name("moved"))
    path.unlink(missing_ok=True)
    path.symlink_to(target)


LINKED_FILES = (
    *("plots/x.png", "eval/problems.png", "metrics.jsonl", "recipe.yaml", "eval/results.json"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
)


def make_irregular(place, kind):
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("plots.sock")
        os.rename("plots.sock", place)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mknod(place, 0o20666, os.makedev(1, 5))  # /dev/zero, without an end


def test_a_link_or_what_is_no_regular_file_is_not_published_and_nobody_waits_for_it(hub, diary, tmp_path):
    before = hub.requests
    for number, name in enumerate((*LINKED_FILES, "plots", "eval", "adapter")):
        run = publishable(f"run-{number}")
        target, place = run.path / name, diary / f"{number}"
        place.mkdir()
        if name in LINKED_FILES:
            (place / "same").write_bytes(target.read_bytes() if target.exists() else png())
            link(target, place / "same")
        else:
            for file in target.iterdir():
                (place / file.name).write_bytes(file.read_bytes())
            link(target, place)
        said = f"{name}: is a link" + (", and links are not published" if name in LINKED_FILES else "")
        with pytest.raises(PerlError, match=said):
            push_run(run, wanted_push(run, REPO), sleep=pytest.fail)
        assert hub.requests == before, name
    run = publishable()  # a run that is itself reached by a link is published
    (tmp_path / "elsewhere").symlink_to(run.path.resolve())
    there = type(run).read(tmp_path / "elsewhere")
    assert package_candidate(find_candidate(there), REPO).files.keys() == pack(find_candidate(run), REPO).files.keys()
    for kind in ("pipe", "socket", "folder", *(("device",) if os.getuid() == 0 else ())):  # devices are for root only
        run = publishable(kind)
        make_irregular(run.path / "plots" / "x.png", kind)
        with pytest.raises(PerlError, match=r"plots/x.png: is not a regular file$"):
            package_candidate(find_candidate(run), REPO)


def test_only_our_names_and_sizes_pass_and_no_name_leads_out_of_a_folder(tmp_path):
    (tmp_path / "x").write_bytes(DIARY)
    (tmp_path / "run").mkdir()
    for name in ("../x", "a/../../x", "/etc/passwd", ".", "..", "a//b", "a/./b", "", "a\\..\\b", "a\0b"):
        assert not is_simple_name(name), name
        with pytest.raises(PerlError):
            take(tmp_path / "run", name)
        with pytest.raises(PerlError, match="is not the name of a file in it"):
            Package({name: b"x"}).write(tmp_path / "run")
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["run", "x"], name
        assert refused(name, b"{}"), name
    found = find_candidate(publishable("another")).results
    (task,) = found.tasks
    data = {"source": "MathArena/aime_2026", "revision": None, "sha256": "a" * 64}
    for name in ("../../TRAVERSED", "a/b", "..", "x\n"):  # nor does a task
        wrong = replace(task, name=name, data=data, adapter=replace(task.adapter, n=30))
        with pytest.raises(PerlError, match="is not a valid name of a task"):
            eval_result_files(replace(found, tasks=(wrong,)))
    for name in (
        *("LICENSE", "adapter/x.json", "plots/a b.png", "plots/x.PNG", "plots/.x.png"),
        *("plots/\u202egnp.png", "x.html"),
    ):
        assert refused(name, b"")[0].endswith("is not a file that perl publishes (leave it out)"), name
        assert not is_ours(name)
    ours = ["README.md", "eval/x.png", "plots/x.png", ".eval_results/gsm8k.yaml", "metrics.jsonl", "plots/curves.png"]
    others = ["LICENSE", "eval/x.txt", "plots/a/x.png", ".eval_results/hle.yaml", "x/README.md", "model.safetensors"]
    assert [name for name in (*ours, *others) if is_ours(name)] == ours
    for name in (RESULTS, "perl_recipe.yaml", CONFIG, "README.md", "perl_run.json", "metrics.jsonl", PUBLISHED):
        assert most_read(name) == largest(name)  # who reads a repository takes files of the sizes that are published
        assert name == "perl_run.json" or name in READ_BY_THE_ZOO
    assert most_read(".eval_results/a b.yaml") == largest(".eval_results/gsm8k.yaml")
    assert largest("adapter_model.safetensors") > 10**10
    assert largest(PUBLISHED) == LARGEST  # as many samples may leave as are made and read
    assert refused("perl_recipe.yaml", b"#" * 200_001) == [
        "perl_recipe.yaml: has 200,001 bytes, at most 200,000 are published"
    ]
    (tmp_path / "five").write_bytes(b"12345")
    with pytest.raises(PerlError, match="has 5 bytes, at most 4 are published"):
        take(tmp_path, "five", 4)


HEADER = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()


TOKEN = b"hf" + b"_" + b"aB3" * 11
NOT_ITS_KIND = [
    ("plots/x.png", DIARY, "is not a valid PNG"),
    ("plots/x.png", b"\x89PNG\r\n\x1a\n", "pixels"),
    ("plots/x.png", b"\x89PNG\r\n\x1a\n" + DIARY, "a chunk is not whole"),
    ("plots/x.png", png() + DIARY, "something follows its end"),
    ("plots/x.png", png()[:-20], "a chunk is not whole"),
    ("plots/x.png", png((b"eXIf", DIARY)), "holds 'eXIf'"),
    ("plots/x.png", png((b"prVt", DIARY)), "holds 'prVt'"),
    ("plots/x.png", png(pixels=b"\0\0" + DIARY), "pixels"),
    ("plots/x.png", png(pixels=b"\0"), "pixels"),
    ("plots/x.png", png((b"zTXt", b"Comment\0\0" + zlib.compress(b"a" * 10_000_000))), "long remark"),
    (WEIGHTS, DIARY, "is not a valid safetensors file"),
    (WEIGHTS, weights(b"12") + DIARY, "bytes that are of no tensor"),
    (WEIGHTS, len(HEADER).to_bytes(8, "little") + HEADER + b"1", "bytes that are of no tensor"),
    (WEIGHTS, weights(b"12")[:4], "no whole header"),
    (CONFIG, b"{", "is not valid JSON"),
    (CONFIG, b"\xff{}", "is not UTF-8"),
    (CONFIG, b"[" * 100_000, "is not valid JSON"),
    (
        "metrics.jsonl",
        b'{"a": 1}\n' + DIARY,
        "is not valid JSON: Expecting value: line 1 column 1 (char 0) in line 2",
    ),
    ("perl_recipe.yaml", b"a: [", "is not valid YAML"),
    ("perl_recipe.yaml", b"a: &x [1]\nb: *x\n", "is not valid YAML"),
    ("README.md", b"a\xff", "is not UTF-8"),
    ("README.md", "a\nb\u202egnp".encode(), "holds the control character U+202E in line 2"),
    ("README.md", b"a\x1b[2J", "holds the control character U+001B in line 1"),
    # Remarks of pictures are read.
    ("plots/x.png", png((b"tEXt", b"Comment\0" + TOKEN)), ""),
    ("plots/x.png", png((b"zTXt", b"Comment\0\0" + zlib.compress(TOKEN))), ""),
    ("plots/x.png", png((b"iTXt", b"Comment\0\0\0de\0Bemerkung\0" + TOKEN)), ""),
    ("plots/x.png", png((b"iTXt", b"Comment\0\1\0de\0Bemerkung\0" + zlib.compress(TOKEN))), ""),
    ("plots/x.png", png((b"tEXt", b"File\0/home/alice/x")), ""),
]


def test_a_file_is_what_its_ending_says_and_pixels_are_unpacked_up_to_the_pictures_size_however_cut():
    for name, content, said in NOT_ITS_KIND:
        lines = refused(name, content)
        assert any(said in line for line in lines), (name, content[:80], said, lines)
    huge = bytearray(png())  # a picture that would fill the memory is refused unopened
    huge[16:24] = struct.pack(">II", 100_000, 100_000)
    huge[29:33] = struct.pack(">I", zlib.crc32(bytes(huge[12:29])))
    assert any("that perl would draw" in line for line in refused("plots/x.png", bytes(huge)))
    honest = {
        "plots/x.png": png((b"tEXt", b"Software\0Matplotlib"), (b"pHYs", b"\0" * 9)),
        WEIGHTS: weights(b"1234", format="pt"),
        CONFIG: b"{}",
        "README.md": "# Über\n\n\tπ ≤ θ\n".encode(),
    }
    assert gate_mistakes(honest, Machine()) == []
    # A first piece that ends one byte too late, then one of many megabytes.
    packer = zlib.compressobj(9)
    first = packer.compress(b"\0" * 3) + packer.flush(zlib.Z_FULL_FLUSH)
    bomb = packer.compress(b"\0" * 100_000_000) + packer.flush()
    small = png()
    end = small.index(b"IDAT") - 4
    pieces = [
        struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))
        for data in (first, bomb)
    ]
    content = small[:end] + b"".join(pieces) + small[small.index(b"IEND") - 4 :]
    tracemalloc.start()
    (line,) = refused("plots/x.png", content)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert line == "plots/x.png: is not a valid PNG: its pixels are not those of its size"
    assert most < 20_000_000


def test_what_was_looked_at_is_what_is_sent(hub, monkeypatch):
    """Every file is exchanged right after the gate looked at it."""
    run = publishable()
    before = pack(find_candidate(run), REPO).files
    looked = gate.find_leaks

    def exchanged(files, machine=None):
        for path in (*run.plots.glob("*"), *(run.path / "eval").glob("*"), run.adapter / CONFIG, run.metrics):
            path.unlink(missing_ok=True)
            path.write_bytes(DIARY)
        return looked(files, machine)

    monkeypatch.setattr(gate, "find_leaks", exchanged)
    push_run(run, wanted_push(run, REPO))
    assert run.metrics.read_bytes() == DIARY
    assert files_of(hub) == before


def test_what_waits_in_the_outbox_is_looked_at_again_and_the_sender_looks_itself(hub, diary, tmp_path):
    before = hub.requests
    for what in ("link", "stranger", "token", "exchanged", "linked folder"):
        run = publishable(tmp_path / what)
        add_checkpoint(run, 10)
        pack_checkpoint(run, 10, REPO)
        folder = run.path / "outbox" / REPO.replace("/", "--") / "step-10"
        if what == "link":
            link(folder / "metrics.jsonl", diary / "diary.txt")
        elif what == "stranger":
            (folder / "diary.txt").write_bytes(DIARY)
        elif what == "token":
            (folder / "metrics.jsonl").write_text(json.dumps({"x": TOKEN.decode()}))
        elif what == "exchanged":
            (folder / WEIGHTS).write_bytes(DIARY)
        else:
            place = tmp_path / "elsewhere"
            place.mkdir()
            for file in folder.iterdir():
                file.rename(place / file.name)
            folder.rmdir()
            folder.symlink_to(place)
        with pytest.raises(PerlError):
            send_checkpoints(run, wanted_push(run, REPO))
        assert hub.requests == before, what
    run = publishable(tmp_path / "linked")
    folder = queue_checkpoint(run, REPO, 10, Package({"README.md": b"b"}))
    assert dict(queued_checkpoint(run, REPO, 10).files) == {"README.md": b"b"}
    elsewhere = folder.rename(tmp_path / "moved away")
    folder.symlink_to(elsewhere)
    for refused in (
        lambda: queued_checkpoint(run, REPO, 10),
        lambda: queue_checkpoint(run, REPO, 10, Package({"README.md": b"c"})),
    ):
        with pytest.raises(PerlError, match=r"step-10: is a link, and links are not published \(delete it\)"):
            refused()
    assert (elsewhere / "README.md").read_bytes() == b"b"
    # Whoever packs, nothing goes round the gate; of a script too only our files are sent.
    hub.create(REPO, {})
    good = {WEIGHTS: weights(b"x"), CONFIG: b"{}"}
    for name, content in (("diary.txt", DIARY), ("plots/x.png", DIARY), ("README.md", TOKEN)):
        before = hub.requests
        with pytest.raises(PerlError, match=name.replace("/", ".")):
            push_package(Package(good | {name: content}), REPO, sleep=pytest.fail)
        assert hub.requests == before
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "training_args.bin").write_bytes(b"\x80\x04")
    with pytest.raises(PerlError, match=r"training_args.bin: is not a file that perl publishes"):
        pack_folder(folder)
    (folder / "training_args.bin").unlink()
    (folder / "README.md").symlink_to(diary / "diary.txt")
    with pytest.raises(PerlError, match=r"README.md: is a link"):
        read_package(folder)


def test_the_best_adapter_and_checkpoints_pass_and_what_does_not_is_reported(monkeypatch, caplog):
    run = publishable()
    add_best(run)
    add_checkpoint(run, 10)
    pack_checkpoint(run, 10, REPO)
    assert WEIGHTS in pack(find_candidate(run, "best"), REPO).files
    assert WEIGHTS in queued_checkpoint(run, REPO, 10).files
    monkeypatch.setattr("perl.evaluation.recounting.published_samples.LARGEST", 10)
    caplog.clear()
    assert "eval/samples.jsonl" not in pack(find_candidate(run), REPO).files
    (line,) = [record.getMessage() for record in caplog.records if "samples" in record.getMessage()]
    assert "the samples of its scores are not sent" in line
    candidate = find_candidate(run)
    (run.adapter / WEIGHTS).write_bytes(weights(b"other"))
    with pytest.raises(PerlError, match="was exchanged while it was read"):
        package_candidate(candidate, REPO)
