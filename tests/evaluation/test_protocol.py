"""A protocol is resolved in one order, refused where it makes no sense, and hashed by what scores depend on."""

import itertools
from dataclasses import fields, replace

import pytest

from perl.errors import PerlError
from perl.evaluation.scoring.protocol import PRESETS, Protocol, resolve_protocol, short_hash
from tests.oracles.evaluation import digest, seed_by_hand

BASE = {"temperature": 0.3, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "eos_token_id": 2}
TASK = {"task": "aime24", "data": "0" * 64}


def test_a_setting_is_the_users_else_the_presets_else_the_bases_else_neutral():
    neutral, sampling = Protocol(), ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {"temperature": 0.9, "top_p": 0.7, "top_k": 7, "min_p": 0.2, "repetition_penalty": 1.3}
    wrong = []
    for preset, by_user, by_base in itertools.product(PRESETS, (False, True), (False, True)):
        given = values if by_user else {"top_p": None}
        found = resolve_protocol(preset, given, BASE if by_base else None)
        assert found.preset == preset
        for name in sampling:
            sources = [values] * by_user + [PRESETS[preset]] + [BASE] * by_base + [vars(neutral)]
            expected = next(source[name] for source in sources if name in source)
            if getattr(found, name) != expected:
                wrong.append((preset, by_user, by_base, name, getattr(found, name), expected))
    assert wrong == []
    assert resolve_protocol("base", {"k": 2}, BASE) == Protocol("base", 0.3, 0.5, 20, 0.0, 1.1, None, 2, 0, None)


@pytest.mark.parametrize(
    ("preset", "given", "base", "temperature", "k"),
    [
        ("base", {}, {"do_sample": False}, 0.0, 1),  # a base that does not sample
        ("base", {}, {"do_sample": False, "temperature": 0.5}, 0.5, 16),
        ("perl", {"temperature": 0.0, "top_k": 0, "seed": 0}, BASE, 0.0, 1),  # zero is a value
        ("greedy", {"k": 4, "temperature": 0.5}, {}, 0.5, 4),
        ("perl-paper", {}, BASE, 0.7, 32),
    ],
)
def test_greedy_completions_are_all_the_same_hence_one_of_a_problem(preset, given, base, temperature, k):
    protocol = resolve_protocol(preset, given, base)
    assert (protocol.temperature, protocol.k) == (temperature, k)
    if temperature == 0:
        with pytest.raises(PerlError, match="--k: 4 greedy completions of a problem are all the same"):
            resolve_protocol(preset, {**given, "k": 4}, base)


CHANGES = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 5, "k": 1,
    "system_prompt": "",
}  # fmt: skip


def test_the_hash_is_the_sha_256_of_what_scores_depend_on():
    """That is of every setting but the seed, which is another draw, and the name of the preset."""
    assert {*CHANGES, "seed", "preset"} == {field.name for field in fields(Protocol)}
    protocol = resolve_protocol("perl")
    variants = [protocol, *(replace(protocol, **{name: value}) for name, value in CHANGES.items())]
    variants += [replace(protocol, seed=5), replace(protocol, preset="base")]
    hashes = []
    for variant, task in [*((v, TASK) for v in variants), (protocol, {**TASK, "data": "1"}), (protocol, {"task": "x"})]:
        hashes.append(variant.hash(task))
        assert hashes[-1] == digest({**{name: getattr(variant, name) for name in CHANGES}, **task})
    assert len(set(hashes)) == 1 + len(CHANGES) + 2
    assert all(len(found) == 16 and int(found, 16) >= 0 for found in hashes)
    assert short_hash({"a": 1, "b": None}) == short_hash({"b": None, "a": 1}) == digest({"b": None, "a": 1})


def test_every_sample_has_a_seed_of_its_own_that_engines_take():
    protocol = Protocol(seed=3)
    places = [(task, problem, i) for task in ("a", "b") for problem in ("0", "1", "11") for i in range(50)]
    seeds = [protocol.seed_of(*place) for place in places]
    assert seeds == [seed_by_hand(*place, seed=3) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [replace(protocol, k=2, temperature=0.1).seed_of(*place) for place in places]
    assert not set(seeds) & {replace(protocol, seed=4).seed_of(*place) for place in places}
