"""A push under every fault that we could think of: the repository holds the run or is untouched, never half."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from perl.hub.push.commit import push_package
from perl.hub.push.package import Package
from perl.hub.push.retries import HubOutageError
from tests.hub.files import weights
from tests.local_hub import LocalHub

CARD = b"---\nlibrary_name: peft\ntags: [perl-rl]\n---\n# An adapter\n"
OLD = {"adapter_model.safetensors": b"old weights", "README.md": CARD, "plots/old.png": b"old", "NOTES.md": b"mine"}
NEW = {"adapter_config.json": b"{}", "README.md": CARD + b"New.\n", "eval/results.json": b'{"perl": {}}'}


@dataclass(frozen=True)
class Outcome:
    """What became of one push under one fault.

    Attributes:
        fault: As ``cut at request 3``.
        first: ``done``, ``outage`` or ``refused``.
        untouched: Whether the repository was as before after it.
        whole: Whether it held the package after it.
        second: Whether it held the package after the same push again, without faults.
        commits: That it took.
        waited: Seconds that the push asked to wait.
    """

    fault: str
    first: str
    untouched: bool
    whole: bool
    second: bool
    commits: int
    waited: float


PARTS = 3
Fault = Callable[[LocalHub], None]


def faults(requests: int) -> Iterator[tuple[str, Fault]]:
    """Every fault at every request of a push."""
    for n in range(1, requests + 1):
        yield f"cut before request {n}", lambda hub, n=n: hub.faults.cut(n)
        yield f"cut after request {n}", lambda hub, n=n: hub.faults.cut_after(n)
        yield f"500 at request {n}", lambda hub, n=n: hub.faults.fail(n, 500)
        yield f"everything cut from request {n}", lambda hub, n=n: hub.faults.cut(n, times=10**6)
        yield f"everything 503 from request {n}", lambda hub, n=n: hub.faults.fail(n, 503, times=10**6)
    yield "another commit between (412)", lambda hub: hub.faults.stale()
    yield "429 with Retry-After", lambda hub: hub.faults.fail(2, 429, retry_after=7)
    yield "slow", lambda hub: hub.faults.slow(0.05)


def prepared(hub: LocalHub, number: int) -> tuple[str, dict[str, bytes]]:
    """A repository with an older version and somebody's own file, and files to push that no Hub has seen."""
    repo_id = f"user/adapter-{number}"
    hub.create(repo_id, OLD)
    return repo_id, NEW | {"adapter_model.safetensors": weights(b"new weights %d " % number * 100)}


def count_requests(hub: LocalHub) -> int:
    """Requests of a push without faults."""
    repo_id, files = prepared(hub, 0)
    before = hub.requests
    push_package(Package(files), repo_id, may_replace=None)
    return hub.requests - before


def suffer(hub: LocalHub, number: int, name: str, fault: Fault) -> Outcome:
    """Pushes under a fault, then again without."""
    repo_id, files = prepared(hub, number)
    wanted, sleeps = files | {"NOTES.md": OLD["NOTES.md"]}, []
    start = len(hub.repo(repo_id).commits) + ("412" in name)  # the one that is slipped in
    fault(hub)
    try:
        push_package(Package(files), repo_id, may_replace=None, sleep=sleeps.append)
        first = "done"
    except HubOutageError:
        first = "outage"
    hub.faults.clear()
    there = ours_and_known(hub, repo_id)
    push_package(Package(files), repo_id, may_replace=None)
    commits = len(hub.repo(repo_id).commits) - start
    second = ours_and_known(hub, repo_id) == wanted
    return Outcome(name, first, there == OLD, there == wanted, second, commits, sum(sleeps))


def ours_and_known(hub: LocalHub, repo_id: str) -> dict[str, bytes]:
    """The repository without what the Hub itself, and whoever slipped in a commit, put there."""
    known = OLD.keys() | NEW.keys()
    return {name: data for name, data in hub.repo(repo_id).files().items() if name in known}


def run_faults(hub: LocalHub) -> str:
    """Every fault, as a table."""
    outcomes = [suffer(hub, i, *fault) for i, fault in enumerate(faults(count_requests(hub)), 1)]
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(re.sub(r" (at|from)? ?request \d+", "", outcome.fault), []).append(outcome)
    rows = ["| fault | pushes | done | kept for later | whole | untouched | half | whole after the second push |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for kind, found in kinds.items():
        counts = [
            len(found),
            sum(o.first == "done" for o in found),
            sum(o.first == "outage" for o in found),
            sum(o.whole for o in found),
            sum(o.untouched for o in found),
            sum(not o.whole and not o.untouched for o in found),
            sum(o.second and o.commits == 1 for o in found),
        ]
        rows.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


@pytest.fixture(autouse=True)
def _no_waiting_in_the_client(monkeypatch):
    """The client itself waits between its own repetitions of an upload."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))


def test_a_push_is_one_commit_of_exactly_the_package_others_files_stay_and_older_ones_of_ours_go(hub):
    repo_id, files = prepared(hub, 0)
    before = len(hub.repo(repo_id).commits)
    pushed = push_package(Package(files), repo_id, may_replace=None)
    assert ours_and_known(hub, repo_id) == files | {"NOTES.md": b"mine"}
    assert len(hub.repo(repo_id).commits) == before + 1
    assert hub.repo(repo_id).commits[-1].oid == pushed.commit
    assert pushed.changed
    assert pushed.deleted == ("plots/old.png",)
    assert pushed.foreign == ("NOTES.md",)
    score = b"- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 41.2\n"
    held = {"LICENSE": b"mine", "eval/old.png": b"old", ".eval_results/gsm8k.yaml": score, "x/y.txt": b""}
    hub.create("user/others", held)
    pushed = push_package(Package(files), "user/others")
    assert hub.repo("user/others").files().keys() == files.keys() | {"LICENSE", "x/y.txt", ".gitattributes"}
    assert pushed.deleted == (".eval_results/gsm8k.yaml", "eval/old.png")
    assert pushed.foreign == ("LICENSE", "x/y.txt")


@pytest.mark.parametrize("part", range(PARTS))
def test_under_every_fault_the_repository_is_untouched_or_whole_and_waits_double(hub, part, monkeypatch):
    """Six tries have five waits between them, of 1, 2, 4, 8 and 16 seconds; chance only shortens them."""
    monkeypatch.setattr("perl.hub.push.retries.random.uniform", lambda _, longest: longest)
    requests = count_requests(hub)
    assert requests >= 6
    for number, (name, fault) in enumerate(faults(requests), 1):
        if number % PARTS != part:
            continue
        before = hub.requests
        outcome = suffer(hub, number, name, fault)
        assert outcome.untouched or outcome.whole, outcome
        assert outcome.second, outcome
        assert outcome.commits == 1, outcome
        assert (outcome.first == "outage") == name.startswith("everything"), outcome
        assert outcome.waited >= 7 or "429" not in name
        if outcome.first == "outage":
            assert outcome.waited == sum(2.0**attempt for attempt in range(5)), outcome
        if "412" in name:  # nothing is written over a commit that was not looked at
            statuses = [request.status for request in hub.log[before:] if "/commit/" in request.path]
            assert statuses[:2] == [412, 200]
