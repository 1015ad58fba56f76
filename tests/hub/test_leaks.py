"""Forms of secrets and of paths are found in every kind of file, and nothing in what we honestly publish."""

import json

import pytest
from leaks import PATHS, SECRETS, carriers, in_repository, now

from perl.hub.gate import MachineFacts, find_leaks, gate_mistakes, own_secrets, this_machine, without_secrets

SOMEBODY = MachineFacts(
    folders=("/srv2/runs/mine",), users=("alice",), hosts=("gpu-17",), secrets={"secret-of-mine": "your token"}
)
# What the rules let pass on purpose: they have no form of their own, or one that hashes have too.
NO_FORM = {
    *("AWS, secret alone", "Weights & Biases, alone", "Discord, hook", "Kaggle", "Mailgun", "netrc"),
    *("D:\\models\\x", "d:\\x", "\\\\server\\share\\x"),
}


def leaks(text, machine=SOMEBODY):
    return [str(problem) for problem in find_leaks("README.md", text, machine)]


def test_secrets_and_paths_of_every_form_are_found_in_every_kind_of_file_and_secrets_not_shown():
    missed, shown = set(), []
    for name, text in SECRETS.items():
        for files in carriers(text).values():
            said = [str(problem) for problem in now(files)]
            missed |= set() if any("token of" in line for line in said) else {name}
            shown += [name for line in said if max(text.split(), key=len) in line]
    for path in PATHS:
        for files in carriers(path).values():
            missed |= set() if any("names a path" in str(problem) for problem in now(files)) else {path}
    assert (missed, shown) == (NO_FORM, [])
    text = f"/mnt/x/y\n/home/alice/c and {SECRETS['Hub']}"
    found = [problem.where for problem in find_leaks("a", text, MachineFacts())]
    assert found == ["a:1", "a:2", "a:2"]  # every line at once


HONEST = (
    r"$f:\mathbb{R}\to\mathbb R$, $T:\alpha\beta$ and $\\frac{a}{b}/c/d$, $x\\y\z$, \[P:\left(a\right)\]",
    r"\begin{aligned} a &= 1\\2\pi &= b \\\text{so} \end{aligned} 1/2/3, a/b/c, km/h/s, $/tmp$, ~5",
    "</b></i>, <br/>, /think, /no_think, and/or/not, s/a/b/g, 24/7/365, 2026-01-31, 12:30:45, x=/=y",
    "model.layers.0.self_attn.q_proj.lora_A.weight, .*\\.(q_proj|v_proj), mean±std, sk-learn-contrib-tools",
    "pad_token: <|endoftext|>, eos_token: im_end_2, tokens: 12345678, secret: unknown, password: see below",
    'revision: "0123456789abcdef0123456789abcdef01234567", @0123456789abcdef0123456789abcdef01234567',
    "sha256 " + "0123456789abcdef" * 4 + ", base64: AAAAAAAA, key: value, api_key: ${HF_TOKEN}, token=os.environ",
    "https://huggingface.co/alice/name/resolve/main/data/train.jsonl and hf://datasets/a/b/c",
    "openai/gsm8k, HuggingFaceH4/aime_2024, alice/adapter@step-10, alice and gpu-1, hf_hub_download, ghp_, AKIA",
    "http://localhost:8000/v1/completions, ~, ./x, s/home/g, a/tmp/b",
)


def test_honest_files_raise_no_alarm():
    honest = in_repository()
    assert len(honest) > 120
    assert {name: found for name, content in honest.items() if (found := now({name: content}))} == {}
    for text in HONEST:  # maths, names and hashes are neither secrets nor paths
        assert leaks(text) == []
        assert leaks(json.dumps({"x": text})) == []


def test_this_machine_and_its_users_are_found(tmp_path, monkeypatch):
    for text, said in (
        ("runs/alice/x", "names a user of this machine: alice"),
        ("mail alice@gpu", "names a user of this machine: alice"),
        ("on gpu-17.", "names this machine: gpu-17"),
        ("http://gpu-17:8000", "names this machine: gpu-17"),
        ("at /srv2/runs/mine/x", "names a path of this machine: /srv2/runs/mine"),
        ("https://example.org/?t=secret-of-mine", "holds your token"),
    ):
        assert leaks(text) == [f"README.md:1: {said}"]
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    machine = this_machine(tmp_path / "run")
    assert str(tmp_path / "run") in machine.folders
    assert (machine.users, machine.hosts) == (("alice",), ())


@pytest.mark.parametrize("value", ["aB3-" * 200, "/" * 5 + "x9" * 200, "aB3\udcff" * 5], ids=["long", "path", "bytes"])
def test_the_secrets_of_this_process_are_compared_and_not_shown_whatever_their_form(value, monkeypatch):
    names = ("MYSQL_PWD", "SMTP_PASS", "GH_PAT")
    secrets = {"COMET_API_KEY": "plain-words-only-here", "MY_SECRET": "x7!k9#qq", "PGPASSWORD": 'with-a-"quote"'}
    secrets |= {"TOKENS": value, **{name: f"letters/of-{name}" for name in names}}
    no_secrets = {
        "DB_PASSWORD": "two parts",
        "TOKENIZERS_PARALLELISM": "a-value-of-no-secret",
        "COMPAT": "compatible-1",
    }
    for name, held in {**secrets, **no_secrets, "OLDPWD": "/home/alice/x", "PWD": "/"}.items():
        monkeypatch.setenv(name, held)
    found = own_secrets()
    assert [found.get(held) for held in secrets.values()] == [f"the value of ${name}" for name in secrets]
    assert not set(no_secrets.values()) & set(found)
    machine = this_machine()
    for written in (secrets["PGPASSWORD"], json.dumps(secrets["PGPASSWORD"]), "with-a-%22quote%22"):
        assert leaks(f"see {written}", machine) == ["README.md:1: holds the value of $PGPASSWORD"]
    if value.isascii():
        (line, *_) = leaks(value, machine)
        assert "$TOKENS" in line
        assert value not in line
    assert without_secrets({"a": "plain-words-only-here", "b": ["fine", 1]}) == {"a": "***", "b": ["fine", 1]}


def test_of_weights_the_header_is_read():
    header = json.dumps({"__metadata__": {"made": "/home/alice/x"}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"/tmp/abc/def"
    (line,) = map(str, gate_mistakes({"adapter_model.safetensors": weights}, MachineFacts()))
    assert "/home/alice/x" in line
    assert gate_mistakes({"adapter_model.safetensors": b"\x02" + bytes(7) + b"{}/tmp/abc/d"}, MachineFacts()) == []
