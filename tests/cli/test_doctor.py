"""``perl doctor`` names what is missing or slow with what to do, and ``perl explain`` what each code means."""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perl.doctor import machine, software
from perl.doctor.codes import Finding, codes
from perl.errors import EXIT_DONE, EXIT_FAILED
from tests.ports import free_port

GIB = 2**30


@pytest.fixture
def quiet_machine(monkeypatch):
    """Cores, memory and a disk that nobody else wants."""
    monkeypatch.setattr(machine, "times_slower", lambda _: 0.6)
    monkeypatch.setattr(machine, "_LEAST_ROOM", 0)
    monkeypatch.setattr(machine, "_LEAST_MEMORY", 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def lines_of(findings, code):
    return [finding for finding in findings if finding.code == code]


@pytest.mark.usefixtures("quiet_machine")
def test_a_sound_machine_and_recipe_have_a_line_for_each_thing_and_no_problem(perl, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = perl("doctor", "quickstart", "--json")
    found = [Finding(**row) for row in json.loads(out)]
    assert [finding for finding in found if finding.level == "problem"] == []
    assert code == EXIT_DONE
    machines = {"PRL101", "PRL102", "PRL103", "PRL104", "PRL105", "PRL106", "PRL107", "PRL108", "PRL109"}
    assert {finding.code for finding in found} == machines | {"PRL120", "PRL122"}
    assert all((finding.level == "ok") or finding.fix or finding.code == "PRL102" for finding in found)
    (plan,) = lines_of(found, "PRL122")
    assert plan.message.startswith("needs ")
    assert " s a step, " in plan.message
    assert not (tmp_path / "runs").exists()
    code, out, _ = perl("doctor")
    *lines, last = out.splitlines()
    assert code == EXIT_DONE
    assert "perl explain CODE" in last
    assert all(line.split()[1] in codes() for line in lines)
    assert not any("PRL12" in line for line in lines)


def test_packages_are_held_against_their_tested_ranges(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return {"trl": "1.17.0"}.get(name) or real(name)

    monkeypatch.setattr(software.metadata, "version", version)
    found = list(software.look_at_versions())
    problems = {finding.message: finding.fix for finding in found if finding.level == "problem"}
    assert set(problems) == {"trl 1.17.0 is installed, tested is <1.17,>=1.16", "peft is not installed"}
    assert problems["peft is not installed"].startswith("pip install 'peft<0.22,>=0.21")
    (right,) = [finding for finding in found if finding.level == "ok"]
    assert "transformers " in right.message
    assert "trl" not in right.message


@pytest.mark.parametrize(
    ("version", "level"), [(None, "note"), ("0.27.1", "problem"), ("0.32.1", "ok"), ("0.33.0", "note")]
)
def test_vllm_is_absent_too_old_tested_or_newer(monkeypatch, version, level):
    monkeypatch.setattr(software, "_installed", lambda name: version if name == "vllm" else None)
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda _: version)
    (finding,) = software.look_at_vllm()
    assert finding.level == level
    assert ("0.28" in finding.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("cores", "slower", "level", "words"),
    [
        (4, 0.7, "ok", ("3 threads on 4 cores",)),
        (2, 9.1, "problem", ("3 threads on 2 cores", "9.1 times slower", "OMP_NUM_THREADS=2")),
        (0.5, 1.1, "note", ("3 threads on 0.5 core", "OMP_NUM_THREADS=1")),
        (4, 3.0, "note", ("3.0 times slower", "other processes are done")),
    ],
)
def test_threads_are_held_against_cores_and_what_they_cost(monkeypatch, cores, slower, level, words):
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "times_slower", lambda _: slower)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    (finding,) = machine.look_at_cores()
    assert finding.level == level
    assert all(word in str(finding) for word in words)


def test_folders_that_are_full_or_not_ones_own_and_little_memory_are_problems(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB // 2))
    found = list(machine.look_at_folders(tmp_path / "deep" / "runs"))
    assert [finding.level for finding in found] == ["problem", "problem"]
    assert all("0.5 GiB are left" in finding.message for finding in found)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert all("cannot be written" in finding.message for finding in machine.look_at_folders(tmp_path))
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 * 2**20} kB\nMemAvailable: {2**19} kB\n")
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "meminfo")
    (finding,) = machine.look_at_memory()
    assert (finding.level, finding.message) == ("problem", "0.5 of 8.0 GiB are free")


@pytest.mark.usefixtures("quiet_machine")
def test_a_recipe_that_cannot_start_has_a_line_for_each_mistake(perl, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: quickstart\npeft: {rnak: 3}\ntrain: {max_steps: 0}\n")
    code, out, _ = perl("doctor", "mine.yaml", "--json")
    found = lines_of([Finding(**row) for row in json.loads(out)], "PRL120")
    assert code == EXIT_FAILED
    assert [finding.level for finding in found] == ["problem", "problem"]
    assert found[0].message.startswith("mine.yaml:2: peft.rnak: unknown key (did you mean rank?)")
    code, out, _ = perl("doctor", "absent.yaml", "--json")
    assert code == EXIT_FAILED
    assert "no such file" in lines_of([Finding(**row) for row in json.loads(out)], "PRL120")[0].message


@pytest.mark.usefixtures("quiet_machine")
def test_servers_that_do_not_answer_are_a_problem(perl, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    server = f"http://localhost:{free_port()}"
    asked = ["rollout.backend=vllm-server", f"rollout.servers=[{server}]", "rollout.server_timeout=1"]
    code, out, _ = perl("doctor", "quickstart", *asked, "--json")
    (finding,) = lines_of([Finding(**row) for row in json.loads(out)], "PRL121")
    assert (code, finding.level) == (EXIT_FAILED, "problem")
    assert server in finding.message
