"""What a recipe cannot have on a base in shards: said with its line, before anything is imported."""

import pytest

from perl.errors import RecipeError
from perl.methods.base_checks import strategy_mistakes
from perl.methods.registry import METHODS
from perl.recipe import load_recipe


def read(strategy: str, processes: int | None = 2, **sections):
    engine = {"strategy": strategy, "processes": processes}
    return load_recipe({"engine": engine, **sections}, checks=(strategy_mistakes,))


SHARDED = [
    ("peft.method", {"peft": {"method": "full"}}),
    ("peft.method", {"peft": {"method": "ln_tuning"}}),
    ("peft.type", {"peft": {"type": "LN_TUNING"}}),
    ("peft.kwargs.modules_to_save", {"peft": {"kwargs": {"modules_to_save": ["lm_head"]}}}),
    ("peft.kwargs.trainable_token_indices", {"peft": {"kwargs": {"trainable_token_indices": [1]}}}),
    ("model.quantization", {"model": {"quantization": "nf4"}}),
    ("train.fsdp", {"train": {"fsdp": "full_shard"}}),
]


@pytest.mark.parametrize(("key", "sections"), SHARDED)
def test_what_trains_the_base_or_divides_it_otherwise_is_refused_by_its_key(key, sections):
    with pytest.raises(RecipeError) as caught:
        read("fsdp2", **sections)
    assert [mistake.where.rpartition(" ")[2] for mistake in caught.value.mistakes] == [key]
    read("ddp", **sections)


@pytest.mark.parametrize(("key", "sections"), [case for case in SHARDED if case[0] != "train.fsdp"])
def test_one_process_holds_the_whole_base_and_nothing_is_refused(monkeypatch, key, sections):
    for processes in (None, 1):
        read("fsdp2", processes, **sections)
    monkeypatch.setenv("WORLD_SIZE", "2")  # what a launcher has started counts
    with pytest.raises(RecipeError, match=key):
        read("fsdp2", None, **sections)


def test_every_other_method_may_be_asked_for():
    refused = []
    for name, method in METHODS.items():
        try:
            read("fsdp2", peft={"method": name})
        except RecipeError:
            refused.append(name)
        assert (name in refused) == method.trains_the_bases
    assert refused == ["ln_tuning", "full"]
