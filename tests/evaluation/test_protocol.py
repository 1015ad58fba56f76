"""A protocol is resolved in one order, refused where it makes no sense, and hashed by what scores depend on."""

import math
from dataclasses import fields, replace

import pytest

from perl.errors import PerlError
from perl.evaluation.protocol import DEFAULT_PRESET, PRESETS, Protocol, resolve_protocol, short_hash

BASE = {"temperature": 0.3, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "eos_token_id": 2}
TASK = {"task": "aime24", "data": "0" * 64}


def test_the_users_word_counts_before_the_presets_before_the_bases_before_neutral():
    protocol = resolve_protocol("perl", {"temperature": 0.9, "top_p": None}, BASE)
    assert protocol.temperature == 0.9  # the user's
    assert protocol.top_p == PRESETS["perl"]["top_p"] == 0.95
    assert protocol.top_k == 20  # the base's
    assert protocol.min_p == 0.0  # neutral


def test_a_preset_that_says_everything_leaves_nothing_to_the_base():
    assert resolve_protocol("perl-paper", {}, BASE) == resolve_protocol("perl-paper")
    assert resolve_protocol("perl-paper").k == 32


def test_the_preset_base_is_what_the_base_says():
    protocol = resolve_protocol("base", {"k": 2}, BASE)
    assert protocol == Protocol("base", 0.3, 0.5, 20, 0.0, 1.1, None, 2, 0, None)
    assert resolve_protocol("base") == Protocol(preset="base")


def test_a_base_that_does_not_sample_is_greedy():
    protocol = resolve_protocol("base", {}, {"do_sample": False})
    assert (protocol.temperature, protocol.k) == (0.0, 1)


def test_a_user_who_asks_for_zero_gets_zero():
    protocol = resolve_protocol("perl", {"temperature": 0.0, "top_k": 0, "seed": 0}, BASE)
    assert (protocol.temperature, protocol.top_k) == (0.0, 0)
    assert protocol.k == 1  # all greedy completions are the same


def test_many_greedy_completions_are_refused_if_asked_for():
    with pytest.raises(PerlError, match="--k: 4 greedy completions of a problem are all the same"):
        resolve_protocol("greedy", {"k": 4})
    assert resolve_protocol("greedy", {"k": 4, "temperature": 0.5}).k == 4


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_protocol(preset):
    protocol = resolve_protocol(preset)
    assert protocol.preset == preset
    assert set(PRESETS[preset]) <= {field.name for field in fields(Protocol)}
    assert protocol.sampling(100, (1, 2)).max_completion_length == 100


def test_an_unknown_preset_is_refused_with_the_nearest_one():
    with pytest.raises(PerlError, match=r"--preset: no preset 'pearl' \(did you mean perl\?\)"):
        resolve_protocol("pearl")
    assert DEFAULT_PRESET in PRESETS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("k", 0),
        ("max_new_tokens", 0),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_refused_by_the_flags_name(name, value):
    with pytest.raises(PerlError, match=f"^--{name.replace('_', '-')}: {value:g} is out of range") as caught:
        resolve_protocol("perl", {name: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "value"), [("top_p", 1), ("min_p", 0), ("min_p", 1), ("k", 1), ("max_new_tokens", 1)])
def test_values_at_the_bounds_are_taken(name, value):
    assert getattr(resolve_protocol("perl", {name: value}), name) == value


def test_the_hash_ignores_the_seed_and_the_presets_name():
    protocol = resolve_protocol("perl")
    assert replace(protocol, seed=5).hash(TASK) == protocol.hash(TASK)
    assert replace(protocol, preset="base").hash(TASK) == protocol.hash(TASK)


def test_the_hash_tells_apart_whatever_a_score_depends_on():
    protocol = resolve_protocol("perl")
    changes = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "k": 1,
        "system_prompt": "",
    }
    assert {*changes, "seed", "preset"} == {field.name for field in fields(Protocol)}
    hashes = {replace(protocol, **{name: value}).hash(TASK) for name, value in changes.items()}
    hashes |= {protocol.hash(TASK), protocol.hash({**TASK, "data": "1" * 64}), protocol.hash({**TASK, "task": "x"})}
    assert len(hashes) == len(changes) + 3
    assert all(len(found) == 16 and int(found, 16) >= 0 for found in hashes)


def test_a_hash_does_not_depend_on_the_order_of_facts():
    assert short_hash({"a": 1, "b": None}) == short_hash({"b": None, "a": 1})


def test_every_sample_has_a_seed_of_its_own_that_engines_take():
    protocol = Protocol(seed=3)
    places = [(task, problem, i) for task in ("a", "b") for problem in ("0", "1", "11") for i in range(50)]
    seeds = [protocol.seed_of(*place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [replace(protocol, k=2, temperature=0.1).seed_of(*place) for place in places]
    assert not set(seeds) & {replace(protocol, seed=4).seed_of(*place) for place in places}


def test_a_protocol_reads_as_one_line():
    assert str(resolve_protocol("perl", {"top_k": 20})) == (
        "temperature 0.6, top_p 0.95, top_k 20, max_new_tokens 32768, k 16, no system prompt"
    )
    greedy = str(resolve_protocol("greedy", {"system_prompt": "Think."}))
    assert greedy == "greedy, max_new_tokens the task's, k 1, a system prompt"
