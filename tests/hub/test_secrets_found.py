"""Forms of secrets and of paths are found in every kind of file, and nothing in what we honestly publish."""

import base64
import json

import pytest
from leaks import PATHS, SECRETS, carriers, in_repository, now

from perl.hub.gate.leaks import Machine, find_leaks, this_machine
from perl.hub.gate.tokens import own_secrets


def test_secrets_and_paths_of_every_form_are_found_and_not_shown():
    assert len(SECRETS) >= 60
    assert len(set(SECRETS.values())) == len(SECRETS)
    wrong = []
    for name, text in SECRETS.items():
        for kind, files in carriers(text).items():
            said = [str(problem) for problem in now(files)]
            secret = max(text.split(), key=len)
            if not any("token of" in line for line in said) or any(secret in line for line in said):
                wrong.append((name, kind))
    for path in PATHS:
        for kind, files in carriers(path).items():
            if not any("names a path" in str(problem) for problem in now(files)):
                wrong.append((path, kind))
    assert wrong == []


HONEST = (
    r"$f:\mathbb{R}\to\mathbb R$, $T:\alpha\beta$ and $\\frac{a}{b}/c/d$, $x\\y\z$, \[P:\left(a\right)\]",
    r"\begin{aligned} a &= 1\\2\pi &= b \\\text{so} \end{aligned} 1/2/3, a/b/c, km/h/s, $/tmp$, ~5",
    "</b></i>, <br/>, /think, /no_think, and/or/not, s/a/b/g, 24/7/365, 2026-01-31, 12:30:45, x=/=y",
    "model.layers.0.self_attn.q_proj.lora_A.weight, .*\\.(q_proj|v_proj), mean±std, sk-learn-contrib-tools",
    "pad_token: <|endoftext|>, eos_token: im_end_2, tokens: 12345678, secret: unknown, password: see below",
    'revision: "0123456789abcdef0123456789abcdef01234567", @0123456789abcdef0123456789abcdef01234567',
    "sha256 " + "0123456789abcdef" * 4 + ", base64: AAAAAAAA, key: value, api_key: ${HF_TOKEN}, token=os.environ",
    "https://huggingface.co/datasets/user/name/resolve/main/data/train.jsonl and hf://datasets/a/b/c",
    "openai/gsm8k, HuggingFaceH4/aime_2024, Qwen/Qwen2.5-1.5B, user/adapter@step-10",
)


def test_honest_files_raise_no_alarm():
    honest = in_repository()
    assert len(honest) > 120
    assert {name: found for name, content in honest.items() if (found := now({name: content}))} == {}
    for text in HONEST:  # maths, names and hashes are neither secrets nor paths
        assert now({"README.md": text.encode()}) == []
        assert now({"metrics.jsonl": json.dumps({"x": text}).encode()}) == []


@pytest.mark.parametrize("value", ["aB3-" * 200, "/" * 5 + "x9" * 200, "aB3\udcff" * 5], ids=["long", "path", "bytes"])
def test_the_secrets_of_this_process_are_compared_and_not_shown_whatever_their_form(value, tmp_path, monkeypatch):
    known = {"COMET_API_KEY": "plain-words-only-here", "MY_SECRET": "x7!k9#qq", "DB_PASSWORD": "two parts"}
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.example.org login user password " + "of-the-netrc-file\n")
    netrc.chmod(0o600)
    for name, value in {**known, "NETRC": str(netrc), "TOKENIZERS_PARALLELISM": "a-value-of-no-secret"}.items():
        monkeypatch.setenv(name, value)
    found = own_secrets()
    assert found["plain-words-only-here"] == "the value of $COMET_API_KEY"
    assert found["x7!k9#qq"] == "the value of $MY_SECRET"
    assert found["of-the-netrc-file"] == "the password of api.example.org in netrc"
    assert "two parts" not in found
    assert "a-value-of-no-secret" not in found
    for written in ("plain-words-only-here", base64.b64encode(b"plain-words-only-here").decode()):
        (problem,) = find_leaks({"README.md": f"see {written}".encode()}, this_machine(tmp_path))
        assert str(problem) == "README.md:1: holds the value of $COMET_API_KEY"
    monkeypatch.setenv("DEPLOY_TOKEN", value)
    assert own_secrets()[value] == "the value of $DEPLOY_TOKEN"
    said = [str(problem) for problem in find_leaks({"README.md": b"x"}, this_machine())]
    assert said == []
    if value.isascii():
        (line, *_) = [str(problem) for problem in find_leaks({"README.md": value.encode()}, this_machine())]
        assert "$DEPLOY_TOKEN" in line
        assert value not in line


def test_no_escape_and_no_second_key_hides_a_word():
    token = SECRETS["Hub"]
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in token)
    for text in (f'{{"a": "{escaped}"}}', f'{{"a": "{token}", "a": 1}}', f'{{"{token}": 1}}', f'[[["{token}"]]]'):
        assert find_leaks({"adapter_config.json": text.encode()}, Machine()), text
    quoted = "".join(f"\\x{ord(letter):02x}" for letter in token)
    assert find_leaks({"perl_recipe.yaml": f'a: "{quoted}"'.encode()}, Machine())
    assert find_leaks({"perl_recipe.yaml": f"a: 1 # {token}".encode()}, Machine())
