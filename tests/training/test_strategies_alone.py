"""One process holds everything, whatever strategy a recipe names: what several cannot share is not refused there."""

import pytest

from perl.errors import PerlError
from perl.training.forecast_text import plan_lines
from perl.training.stages import prepare, read_recipe

BEYOND = {
    "a critic": ["algorithm=ppo"],
    "a teacher": ["teacher.hint=x"],
    "the base itself": ["peft.method=full", "peft.rank=null", "peft.alpha=null"],
    "4 bits": ["model.quantization=nf4"],
}


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
@pytest.mark.parametrize("asked", BEYOND)
def test_a_strategy_takes_nothing_from_one_process(asked, strategy):
    overrides = [*BEYOND[asked], f"engine.strategy={strategy}"]
    plan = prepare(read_recipe("quickstart", overrides))
    assert plan.arguments.strategy == "ddp"
    assert list(plan_lines(plan)) == list(plan_lines(prepare(read_recipe("quickstart", BEYOND[asked]))))


@pytest.mark.parametrize("asked", ["a teacher", "the base itself", "4 bits"])
def test_of_several_processes_a_plan_is_refused_as_the_processes_would_be(asked):
    with pytest.raises(PerlError, match="fsdp2"):
        prepare(read_recipe("quickstart", [*BEYOND[asked], "engine.strategy=fsdp2", "engine.processes=2"]))
