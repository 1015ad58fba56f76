"""Our own files, cut, edited, of another version or of any other type: one line says it, or it does not matter.

Every mutation is drawn from a seed.
"""

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perl.cli.train import _summary
from perl.errors import PerlError
from perl.evaluation.comparing import evaluations, text
from perl.evaluation.drawing.drawn_samples import stored_samples
from perl.evaluation.drawing.subject import find_subject
from perl.evaluation.scoring import table
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import Results, read_results
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.scoring.task import all_tasks
from perl.evaluation.tasks.draw import RenderedProblem, TaskRequest
from perl.hub.card.candidate import checkpoint_steps, find_candidate
from perl.hub.card.check import check_card
from perl.hub.cards import find_card, run_card, write_card
from perl.hub.push.outbox import Push, read_push, write_push
from perl.hub.push.package import package_candidate, package_mistakes
from perl.hub.zoo_entries.material import of_run
from perl.policy.checkpoint import latest_checkpoint
from perl.policy.probe import read_probe
from perl.run.folder import Run
from perl.zoo.catalogue import open_zoo
from perl.zoo.entry import read_entry
from tests.hub.push_runs import add_best, add_checkpoint, publishable

FEW, MANY = 1, 14  # of each kind of mutation; the many begin with the few
STEP = 10
PROTOCOL = Protocol(k=1)
DEEP = "[" * 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, "text", "", 5, -1, 0, 1.5, [], {}, ["x"], {"x": 1}, [[1]], math.nan, math.inf, 10**30, 2**63),
    *("../../x", "\x00", "\u202e", "\ud800", "x" * 100_000, ["x"] * 10_000, {str(i): i for i in range(10_000)}),
)  # fmt: skip


def whole_run() -> Path:
    """A run that has every file that a run may have."""
    run = publishable()
    add_best(run)
    add_checkpoint(run, STEP)
    (run.path / "best" / "best.json").write_text(
        json.dumps({"step": 3, "metric": "sums/avg@4", "value": 0.5, "metrics": {"eval/sums/avg@4": 0.5}})
    )
    write_push(run, Push("done", "user/adapter", sha256="a" * 64, steps=(STEP,), url="https://host/user/adapter"))
    samples = SampleFile(run.path / "eval" / "samples.jsonl")
    seeds = [PROTOCOL.seed_of("sums", str(i), 0) for i in range(4)]
    samples.append(
        "key", [Sample("sums", str(i), 0, seeds[i], "so \\boxed{3}", 5, False, "right", "3") for i in range(4)]
    )
    _rehashed(read_results(run.path)).write(run.path / "eval")
    write_card(run)
    entries = run.path / "zoo" / "entries"
    entries.mkdir(parents=True)
    shipped = open_zoo().entries["sandbox-lora"]
    (entries / "sandbox-lora.json").write_text(shipped.to_json())
    return run.path


def _rehashed(found: Results) -> Results:
    """With the hash that a zoo asks for."""
    (task,) = found.tasks
    ours = all_tasks()[task.name]
    facts = {"task": task.name, "task_version": ours.version, "prompt": ours.prompt, "data": task.data["sha256"]}
    digest = found.protocol.hash({**facts, "max_new_tokens": task.max_new_tokens})
    return replace(found, tasks=(replace(task, protocol_hash=digest),))


def of_a_run(folder: Path) -> None:
    """What every command reads first."""
    find_subject(str(folder)).policy("b" * 64)
    run = Run.read(folder)
    checkpoint_steps(run)
    latest_checkpoint(run.checkpoints)


def summed_up(folder: Path) -> None:
    _summary(Run.read(folder))


def carded(folder: Path) -> None:
    run_card(Run.read(folder))


def checked(folder: Path) -> None:
    found = find_card(str(folder))
    check_card(found.files, found.weights_sha256, found.counted)


def packaged(folder: Path, which: Any = "final") -> None:
    package_mistakes(package_candidate(find_candidate(Run.read(folder), which), "user/adapter"), folder)


def best_packaged(folder: Path) -> None:
    packaged(folder, "best")


def checkpoint_packaged(folder: Path) -> None:
    packaged(folder, STEP)


def added_to_a_zoo(folder: Path) -> None:
    of_run(folder)


def shown(folder: Path) -> None:
    found = read_results(folder)
    table.markdown(found)
    table.plain(found)
    text.as_plain(evaluations.compare([found, found], force=True))
    found.as_dict()


def resumed(folder: Path) -> None:
    file = SampleFile(folder / "eval" / "samples.jsonl")
    file.unreadable()
    request = TaskRequest("sums", tuple(RenderedProblem(str(i), (1,), "3") for i in range(4)), 8, (0,))
    stored = stored_samples(file.read("key"), request, PROTOCOL)
    file.correct("key", stored.samples, stored.dropped)


def pushed(folder: Path) -> None:
    read_push(Run.read(folder))


def probed(folder: Path) -> None:
    read_probe(folder)


def listed(folder: Path) -> None:
    read_entry(folder / "zoo" / "entries" / "sandbox-lora.json")


FILES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "run.json": (of_a_run, summed_up, carded, packaged, added_to_a_zoo),
    "recipe.yaml": (of_a_run, carded),
    "eval/results.json": (shown, carded, checked, added_to_a_zoo, summed_up),
    "eval/samples.jsonl": (resumed,),
    "best/best.json": (best_packaged, summed_up),
    "push.json": (pushed, summed_up),
    "probe.json": (probed,),
    "metrics.jsonl": (packaged,),  # the card's curves are packaged with it
    "samples.jsonl": (carded,),
    "adapter/adapter_config.json": (of_a_run, carded, added_to_a_zoo),
    "adapter/adapter_model.safetensors": (of_a_run, carded),
    f"checkpoints/checkpoint-{STEP}/complete.json": (of_a_run, checkpoint_packaged),
    "zoo/entries/sandbox-lora.json": (listed,),
}


def mutations(content: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """What may become of a file, and how each is called."""
    yield "empty", b""
    yield "deep", DEEP.encode()
    yield "null", b"null"
    for _ in range(count):
        at = draw.randrange(len(content) + 1)
        yield f"cut at {at}", content[:at]
        byte = draw.choice([b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"{", b"\n"])
        yield f"{byte!r} at {at}", content[:at] + byte + content[at:]
        try:
            lines = [json.loads(line) for line in content.splitlines()]
            one = len(lines) > 1
        except ValueError:
            try:
                lines, one = [json.loads(content)], False
            except ValueError:  # no JSON
                continue
        line = draw.randrange(len(lines))
        places = list(_places(lines[line]))
        place = draw.choice(places)
        value = draw.choice([..., ..., *VALUES])
        _put(lines[line], place, value)
        text = ("\n" if one else "").join(json.dumps(each) for each in lines)
        yield f"{place}: {'dropped' if value is ... else repr(value)[:40]}", text.encode()
        if "Infinity" in text:
            yield f"{place}: 1e999", text.replace("Infinity", "1e999").encode()


def _places(value: Any, above: tuple = ()) -> Iterator[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*above, key)
        yield from _places(one, (*above, key))


def _put(document: Any, place: tuple, value: Any) -> None:
    *above, last = place
    for key in above:
        document = document[key]
    if value is ...:
        del document[last]
    else:
        document[last] = value


def failures(folder: Path, name: str, count: int) -> tuple[int, list[str]]:
    """How many mutations were tried, and those after which something else than one line was said."""
    file, draw, tried, found = folder / name, random.Random(f"{name} 1"), 0, []
    content = file.read_bytes()
    for what, changed in mutations(content, draw, count):
        file.write_bytes(changed)
        for read in FILES[name]:
            tried += 1
            try:
                read(folder)
            except PerlError as error:
                if any("\n" in line for line in map(str, error.mistakes)):
                    found.append(f"{name} {what} {read.__name__}: many lines")
            except Exception as error:  # noqa: BLE001 (what is looked for)
                found.append(f"{name} {what} {read.__name__}: {type(error).__name__}: {str(error)[:200]}")
            if not file.exists() or name == "eval/samples.jsonl":
                file.write_bytes(changed)
    file.write_bytes(content)
    return tried, found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return whole_run().resolve()


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_of_ours_is_said_in_one_line(name, count, made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    for read in FILES[name]:
        read(folder)  # as it is it can be read
    _, found = failures(folder, name, count)
    assert found == []
