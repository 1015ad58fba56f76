"""Run by torchrun: a failure of rank 1 within several blocks that fail together; a file seen late; files carried.

``distributed_failures.py FOLDER`` writes ``FOLDER/RANK.json``.
"""

import json
import sys
from pathlib import Path

import perl.launch.together
from perl.errors import PerlError, RunFolderError
from perl.launch.together import see_files
from perl.run.joint_work import Processes, gather_files, joined, joining, spread_files


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    with joining(on_cpu=True) as processes:
        found["one"] = joined() is processes
        found["told"] = failed_within_two(processes)
        processes.meet()
        found["again"] = failed_within_two(joined())
        found["carried"] = carried(folder / f"own-{processes.rank}", processes)
        found["seen"] = late(folder / "adapter", processes)
    (folder / f"{processes.rank}.json").write_text(json.dumps(found))


def failed_within_two(outer: Processes) -> list[str]:
    """How often this process tells the others, and what each has raised."""
    told: list[bytes] = []
    exchanged = Processes._exchanged
    Processes._exchanged = lambda self, message, *a: told.append(message) or exchanged(self, message, *a)
    try:
        with outer.failing_together(), joined().failing_together():
            if outer.rank == 1:
                raise PerlError("too little of everything")
            outer.meet()
    except PerlError as error:
        return [str(len(told)), str(error)]
    finally:
        Processes._exchanged = exchanged
    return []


def carried(own: Path, processes: Processes) -> list[str]:
    """What each process has after files went both ways, and how a file fails that has no room."""
    (own / "deep").mkdir(parents=True)
    (own / "both").write_bytes(b"of %d" % processes.rank)
    (own / f"deep/{processes.rank}").write_bytes(bytes(range(processes.rank, 10 + 3 * processes.rank)))
    (own / f"empty-{processes.rank}").touch()
    gather_files(own, processes)
    spread_files(own, processes)
    has = [f"{path.relative_to(own)} {path.read_bytes().hex()}" for path in sorted(own.rglob("*")) if path.is_file()]
    (own / "taken").mkdir() if processes.main else (own / "taken").write_bytes(b"123456")
    try:
        gather_files(own, processes)
    except (OSError, PerlError) as error:
        has.append(type(error).__name__)
    processes.meet()
    return [*has, str(len(list(own.rglob(".*"))))]


def late(adapter: Path, processes: Processes) -> list[str]:
    """A folder as rank 1 sees it: first too short a file, then none of its last file."""
    sizes, looks = perl.launch.together._sizes, []
    if processes.main:
        adapter.mkdir()
        (adapter / "a").write_bytes(b"1234")

    def stale(folder: Path) -> dict[str, int]:
        looks.append(1)
        return {"a": 1} if len(looks) < 4 else sizes(folder)

    if processes.rank == 1:
        perl.launch.together._sizes = stale
    see_files(adapter, processes)
    found = [str(len(looks))]
    perl.launch.together.FOLDER_SECONDS = 0.3
    if processes.rank == 1:
        perl.launch.together._sizes = lambda _: {"a": 1}
    try:
        see_files(adapter, processes)
    except RunFolderError as error:
        found.append(str(error))
    perl.launch.together._sizes = sizes
    return found


if __name__ == "__main__":
    main()
