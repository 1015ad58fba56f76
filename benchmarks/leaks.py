"""Which secrets and paths the gate finds in what is to be published, and how many honest files raise a false alarm.

Run as ``python benchmarks/leaks.py`` (seconds). Every form of a secret, made up by a random generator, and every path
of a machine is put into a card, a log and a recipe. Honest files are those of this repository that are published or are
of their kinds; ``--run FOLDER`` adds the package of a run, ``--problems FOLDER`` problems of competitions (JSON lines)
as logs and cards. Prints what is
found and writes ``results/leaks.json``.
"""

import argparse
import base64
import json
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_lines import as_lines

from perl.errors import Mistake
from perl.hub.gate import MachineFacts, find_leaks, text_of
from perl.run.folder import installed_versions

CHECKOUT = Path(__file__).resolve().parent.parent
HEX, WORD = "0123456789abcdef", string.ascii_letters + string.digits
BASE64 = WORD + "+/"
_RANDOM = random.Random(7)  # noqa: S311 (secrets of nobody)


def some(count: int, letters: str = WORD) -> str:
    """Letters at random; a token of somebody's has a digit, a small and a capital letter, where its form has them."""
    while True:
        text = "".join(_RANDOM.choices(letters, k=count))
        kinds = [set(string.digits), set(string.ascii_lowercase), set(string.ascii_uppercase)]
        if all(kind & set(text) for kind in kinds if kind & set(letters)):
            return text


def web_token() -> str:
    """A JSON web token."""
    parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": "1234567890", "iat": 1516239022})
    packed = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*packed, some(43)])


# No secret stands here in one piece, so that this file itself is no finding of anybody's scanner.
SECRETS = {
    "Hub": "hf" + "_" + some(34),
    "Hub, OAuth": "hf" + "_oauth_" + some(40),
    "Hub, JWT": "hf" + "_jwt_" + some(40),
    "Hub, organisation": "api" + "_org_" + some(34),
    "OpenAI, project": "sk" + "-proj-" + some(60),
    "OpenAI, old": "sk" + "-" + some(20) + "T3Blbk" + "FJ" + some(20),
    "Anthropic": "sk" + "-ant-api03-" + some(80),
    "OpenRouter": "sk" + "-or-v1-" + some(64, HEX),
    "Groq": "gs" + "k_" + some(52),
    "xAI": "xa" + "i-" + some(80),
    "NVIDIA": "nv" + "api-" + some(64),
    "Replicate": "r8" + "_" + some(37),
    "Perplexity": "pp" + "lx-" + some(48),
    "Fireworks": "fw" + "_" + some(24),
    "Together": "tg" + "p_v1_" + some(43),
    "RunPod": "rp" + "a_" + some(42, string.ascii_uppercase + string.digits),
    "GitHub": "gh" + "p_" + some(36),
    "GitHub, fine-grained": "github" + "_pat_" + some(22) + "_" + some(59),
    "GitLab": "gl" + "pat-" + some(20),
    "GitLab, CI": "gl" + "cbt-" + some(24),
    "AWS, id": "AK" + "IA" + some(16, string.ascii_uppercase + string.digits),
    "AWS, temporary id": "AS" + "IA" + some(16, string.ascii_uppercase + string.digits),
    "AWS, secret by name": "aws_secret" + "_access_key = " + some(40, BASE64),
    "AWS, secret alone": some(40, BASE64),
    "Google": "AI" + "za" + some(35),
    "Google, OAuth": "ya" + "29." + some(60),
    "Google, client": "GOC" + "SPX-" + some(28),
    "Azure, storage": "Account" + "Key=" + some(86, BASE64) + "==",
    "Weights & Biases, alone": some(40, HEX),
    "Weights & Biases, by name": '"wandb' + '_key": "' + some(40, HEX) + '"',
    "Weights & Biases, variable": "WANDB_API" + "_KEY=" + some(40, HEX),
    "Weights & Biases, new": "wandb" + "_v1_" + some(60),
    "Slack, bot": "xo" + "xb-" + some(12, string.digits) + "-" + some(13, string.digits) + "-" + some(24),
    "Slack, app": "xa" + "pp-1-A" + some(10) + "-" + some(13, string.digits) + "-" + some(64, HEX),
    "Slack, hook": "https://hooks.slack" + ".com/services/T" + some(8) + "/B" + some(8) + "/" + some(24),
    "Discord, bot": "M" + some(25) + "." + some(6) + "." + some(38),
    "Discord, hook": "https://discord" + ".com/api/webhooks/" + some(18, string.digits) + "/" + some(68),
    "Telegram": some(10, "123456789") + ":" + "AA" + some(33),
    "Stripe": "sk" + "_live_" + some(24),
    "npm": "np" + "m_" + some(36),
    "Python package index": "py" + "pi-AgEIcHlwaS5vcmc" + some(120),
    "Docker": "dck" + "r_pat_" + some(27),
    "DigitalOcean": "do" + "p_v1_" + some(64, HEX),
    "Databricks": "da" + "pi" + some(32, HEX),
    "LangSmith": "lsv2" + "_pt_" + some(32, HEX) + "_" + some(10, HEX),
    "Kaggle": '{"username": "somebody", "k' + 'ey": "' + some(32, HEX) + '"}',
    "SendGrid": "S" + "G." + some(22) + "." + some(43),
    "Twilio": "S" + "K" + some(32, HEX),
    "Mailgun": "ke" + "y-" + some(32, HEX),
    "Vault": "hv" + "s." + some(24),
    "Grafana": "gl" + "sa_" + some(32) + "_" + some(8, HEX),
    "Notion": "nt" + "n_" + some(46),
    "Linear": "lin" + "_api_" + some(40),
    "private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "age": "AGE-SECRET" + "-KEY-1" + some(58, string.ascii_uppercase + string.digits),
    "JSON web token": web_token(),
    "bearer": "Authorization: " + "Bearer " + some(40),
    "address with a password": "https://somebody:" + some(12) + "@proxy.example.org:8080/x",
    "data base": "postgresql://somebody:" + some(12) + "@db.example.org/x",
    "netrc": "machine api.example.org login user " + "password " + some(20),
    "password by name": "pass" + "word: " + some(14),
    "secret by name": '"client_' + 'secret": "' + some(32) + '"',
    "password with signs": "pass" + 'word: "' + some(8) + "&r-" + some(4) + '!zz7"',
    "access token by name": "access" + 'Token = "' + some(24) + '"',
    "basic": "Authorization: " + "Basic " + some(24),
    "server key, short": "sk" + "-" + some(16),
}
PATHS = (
    *("/home/alice/run", "/Users/alice/run", "/users/alice/run", "/home2/alice/run", "/data1/run/x", "/raid/alice/x"),
    *("/cluster/work/alice", "/scratch1/alice/x", "/shared/models/x", "/ceph/alice/x", "/mnt/nfs2/x", "/lustre/fs1/x"),
    *("/gpfs/u/x", "/work/alice/x", "/workspace/x", "/opt/models/x", "/projects/p1/x", "/storage/x/y", "~/models/x"),
    *("~alice/models/x", "D:\\models\\x", "d:\\x", "C:\\Users\\alice\\x", "\\\\server\\share\\x", "E:/models/alice/x"),
    *("file:///srv/x", "/zdisk/alice/runs/x", "/fast-pool/models/base/x", "/content/drive/x", "/autofs/x/y"),
)


def carriers(text: str) -> dict[str, dict[str, bytes]]:
    """A text in each kind of file, as a careless program would put it there."""
    return {
        "card": {"README.md": f"# A card\n\nIt was made with {text} on a machine.\n".encode()},
        "log": {"metrics.jsonl": (json.dumps({"step": 1}) + "\n" + json.dumps({"note": text}) + "\n").encode()},
        "recipe": {"perl_recipe.yaml": f"train:\n  seed: 1\nnote: |\n  {text}\n".encode()},
    }


def in_repository() -> dict[str, bytes]:
    """Files of this repository that are published, or are of the same kinds."""
    patterns = ("model_cards/zoo/entries/*.json", "model_cards/zoo/adapters/*/*", "*.md")
    patterns += ("docs/*.md", "eval/*.md", "benchmarks/results/*.json", "recipes/**/*.yaml")
    found = [path for pattern in patterns for path in sorted(CHECKOUT.glob(pattern)) if path.is_file()]
    files = {path.relative_to(CHECKOUT).as_posix(): path.read_bytes() for path in found}
    # Lists of paths on purpose: what such a document says is what must be found elsewhere.
    own = ("benchmarks/results/leaks.json", "benchmarks/README.md", "docs/methods.md", "docs/publishing.md")
    return {name: content for name, content in files.items() if name not in own}


def of_run(folder: Path) -> dict[str, bytes]:
    """What would be published of a run, and of each of its checkpoints."""
    from perl.hub.card.candidate import checkpoint_steps, find_candidate
    from perl.hub.push.package import package_candidate
    from perl.run.folder import Run

    run = Run.read(folder)
    found: dict[str, bytes] = {}
    for which in ("final", *checkpoint_steps(run)):
        package = package_candidate(find_candidate(run, which), "user/name")  # type: ignore[arg-type]
        found |= {f"{which}/{name}": content for name, content in package.files.items()}
    return found


def of_problems(folder: Path, in_one: int = 100) -> Iterator[tuple[str, bytes]]:
    """Problems of competitions, so many in a file, as a log and as a card."""
    for path in sorted(folder.glob("*.jsonl")):
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
        for start in range(0, len(lines), in_one):
            part = lines[start : start + in_one]
            yield f"{path.stem}-{start}.jsonl", "\n".join(part).encode()
            texts = [value for line in part for value in json.loads(line).values() if isinstance(value, str)]
            yield f"{path.stem}-{start}.md", "\n\n".join(texts).encode()


def now(files: dict[str, bytes]) -> list[Mistake]:
    """Today's search, without what is this machine's own."""
    return [
        line for name, content in files.items() for line in find_leaks(name, text_of(name, content), MachineFacts())
    ]


def missed(texts: dict[str, str]) -> dict[str, list[str]]:
    """Of each text the kinds of files in which it was not found."""
    found = {name: [kind for kind, files in carriers(text).items() if not now(files)] for name, text in texts.items()}
    return {name: kinds for name, kinds in found.items() if kinds}


def measured(honest: dict[str, bytes]) -> dict[str, Any]:
    """What a search finds, and where it finds what is none."""
    paths = {path: path for path in PATHS}
    started = time.process_time()
    alarms = {name: [str(problem) for problem in now({name: content})] for name, content in honest.items()}
    seconds = time.process_time() - started
    alarms = {name: lines[:5] for name, lines in alarms.items() if lines}
    missed_secrets, missed_paths = missed(SECRETS), missed(paths)
    return {
        "secrets": len(SECRETS), "secrets_found": len(SECRETS) - len(missed_secrets), "secrets_missed": missed_secrets,
        "paths": len(PATHS), "paths_found": len(PATHS) - len(missed_paths), "paths_missed": list(missed_paths),
        "honest_files": len(honest), "honest_bytes": sum(map(len, honest.values())),
        "false_alarms": len(alarms), "alarms": alarms, "seconds_on_honest_files": round(seconds, 2),
    }  # fmt: skip


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, action="append", default=[])
    parser.add_argument("--problems", type=Path)
    options = parser.parse_args()
    honest = in_repository()
    for run in options.run:
        honest |= {f"{run.name}/{name}": content for name, content in of_run(run).items()}
    if options.problems:
        honest |= dict(of_problems(options.problems))
    found = measured(honest)
    for what, number, of in (("secrets", "secrets_found", "secrets"), ("paths", "paths_found", "paths")):
        print(f"{what} found in all of card, log, recipe: {found[number]} of {found[of]}")
    print(f"false alarms: {found['false_alarms']} of {found['honest_files']} files")
    for key in ("secrets_missed", "paths_missed", "alarms"):
        print(f"{key}: {json.dumps(found[key], indent=1)}")
    target = CHECKOUT / "benchmarks" / "results" / "leaks.json"
    versions = installed_versions(["detect-secrets"])
    target.write_text(as_lines({"versions": versions, **found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
