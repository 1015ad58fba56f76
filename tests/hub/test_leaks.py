"""Nothing of this machine is published: paths, names, tokens, pickles."""

import io
import json
import pickle
import zipfile

from perl.hub.gate.leaks import Machine, find_leaks, this_machine

NOBODY = Machine()
SOMEBODY = Machine(
    folders=("/srv2/runs/mine",), users=("alice",), hosts=("gpu-17",), secrets={"secret-of-mine": "your token"}
)
HEX = "0123456789abcdef0123456789abcdef01234567"


def leaks(text, machine=NOBODY, name="README.md"):
    content = text if isinstance(text, bytes) else text.encode()
    return [str(problem) for problem in find_leaks({name: content}, machine)]


PATHS = (
    "/home/alice/runs",
    "/tmp/run-1/adapter",  # noqa: S108 (no file)
    "/" + "root/.cache/x",
    "/Users/alice/x",
    "/mnt/data/models",
    "file:///srv/x",
    "C:\\Users\\alice\\x",
    "D:\\data\\x",
)


TOKENS = (
    "hf_" + "aB3" * 11,
    "sk-proj-" + "aB3_" * 10,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3" * 12,
    "AKIA" + "ABCD" * 4,
    f"api_key: {HEX}",
    f'"api_key": "{HEX}"',
    f"WANDB_API_KEY={HEX}",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "secret-of-mine",
)


def test_paths_and_tokens_are_found_wherever_they_stand_and_tokens_not_repeated():
    for path in PATHS:
        for around in ("{}", 'base: "{}"', "see {} for more", "data={}", "[a]({})", "a.py:{}"):
            (line,) = leaks(f"fine\n{around.format(path)}\nfine")
            assert line.startswith("README.md:2: names a path of this machine: "), (path, around)
        assert leaks(json.dumps({"base": path}), name="x.json"), path
    found = find_leaks({"a": b"/tmp/x/y\n/home/alice/c and hf_" + b"aB3" * 11, "b/tmp": b"/" + b"root/z"}, NOBODY)
    assert [problem.where for problem in found] == ["a:1", "a:2", "a:2", "b/tmp:1"]  # every file and line at once
    for number, token in enumerate(TOKENS):
        (line,) = leaks(f"x\n{token}", SOMEBODY)
        assert line.startswith("README.md:2: "), number
        assert "token" in line, number
        assert token[4:] not in line, number
        assert HEX not in line, number
        assert leaks(f"https://example.org/?t={token}", SOMEBODY), number


def test_this_machine_and_its_users_are_found_and_what_is_public_or_everybodys_name_is_not(tmp_path, monkeypatch):
    public = (
        "https://example.org/home/alice/x",
        "user/name and a/tmp/b",
        "http://localhost:8000/v1/completions",
        "and/or, 3/4, /no_think, ~, ./x, s/home/g",
        "perl eval --adapter user/name --tasks aime24",
        "hf_hub_download, sk-learn, ghp_, task-1, AKIA",
        "alice and gpu-1, alice/adapter",
        "https://huggingface.co/alice/adapter",
        "adapter sha256 " + HEX,
    )
    assert {text: found for text in public if (found := leaks(text, SOMEBODY))} == {}
    for text, said in (
        ("runs/alice/x", "names a user of this machine: alice"),
        ("mail alice@gpu", "names a user of this machine: alice"),
        ("on gpu-17.", "names this machine: gpu-17"),
        ("http://gpu-17:8000", "names this machine: gpu-17"),
        ("at /srv2/runs/mine/x", "names a path of this machine: /srv2/runs/mine"),
    ):
        assert leaks(text, SOMEBODY) == [f"README.md:1: {said}"]
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    machine = this_machine(tmp_path / "run")
    assert str(tmp_path / "run") in machine.folders
    assert machine.users == ("alice",)
    assert machine.hosts == ()


def test_pickles_are_found_and_of_weights_the_header_is_read_and_not_the_numbers():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"x")
    for protocol in (2, 4, 5):
        assert "is a pickle" in leaks(pickle.dumps({"a": 1}, protocol), name="innocent.json")[0]
    assert "is a pickle" in leaks(archive.getvalue(), name="innocent.json")[0]
    assert "is a pickle" in leaks(b"plain", name="training_args.bin")[0]
    assert leaks(b"plain", name="table.md") == []
    header = json.dumps({"__metadata__": {"made": "/home/alice/x"}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"/tmp/abc/def"
    (line,) = leaks(weights, name="adapter_model.safetensors")
    assert "/home/alice/x" in line
    clean = b'{"a":1}'
    assert leaks(len(clean).to_bytes(8, "little") + clean + b"/tmp/abc/d", name="adapter_model.safetensors") == []
