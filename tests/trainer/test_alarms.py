"""Each alarm is raised by a history that deserves it and by no healthy one; said once, and when it has doubled."""

import json
import logging
import math

import pytest
import torch
from datasets import Dataset
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import AlarmError, RecipeError, RewardError
from perl.methods.registry import METHODS
from perl.rewards import accuracy_reward
from perl.sandbox import BASE_FOLDER, load_problems
from perl.trainer.alarms.of_policy import usual_rate
from perl.trainer.alarms.rule import AlarmSetup, History
from perl.trainer.alarms.table import RULES, change_of
from perl.trainer.callbacks.alarms import Alarm, FlatRewards, HealthAlarms
from tests.conftest import CHECKOUT

WRONG = ("wrong", "no_answer", "unparsable_gold", "timeout", "unjudged", "error")
GAP = "sampling/sampling_logp_difference/mean"


def step_logs(right=0.5, **changed):
    """What a healthy step logs."""
    logs = {
        "loss": 0.1,
        "grad_norm": 0.2,
        "learning_rate": 1e-5,
        "reward": right,
        "reward_std": 0.5,
        "frac_reward_zero_std": 0.25,
        "entropy": 0.3,
        "kl": 0.01,
        "completions/mean_length": 100.0,
        "completions/clipped_ratio": 0.05,
        "rows/masked_fraction": 0.0,
        "clip_ratio/region_mean": 0.01,
        GAP: 0.008,
        **{f"reward/accuracy/{name}_frac": 0.0 for name in WRONG},
        "reward/accuracy/wrong_frac": 1.0 - right,
    }
    return {**logs, **{name.replace("__", "/"): value for name, value in changed.items()}}


def judged(logs, setup=None):
    """At which of the logs, from 1, each rule finds something."""
    history, found = History(), {}
    for step, row in enumerate(logs, start=1):
        history.add(row.pop("step", step), row)
        for rule in RULES.values():
            if rule.judge(history, setup or AlarmSetup(usual_rate=1e-5)) is not None:
                found.setdefault(rule.name, []).append(step)
    return found


def noisy(steps, **changed):
    """Healthy steps that scatter as small batches do, with more and more that is right."""
    chance = torch.Generator().manual_seed(0)

    def scattered(value, share):
        return value * (1 + share * (2 * torch.rand(1, generator=chance).item() - 1))

    for at in range(steps):
        right = min(1.0, scattered(0.4 + 0.5 * at / steps, 0.3))
        row = step_logs(right, entropy=scattered(0.3 - 0.25 * at / steps, 0.5), kl=scattered(0.002 * at, 0.9))
        row |= {"grad_norm": scattered(0.2, 0.8), "completions/mean_length": scattered(100 + 50 * at / steps, 0.2)}
        yield {**row, **{name: value(at) for name, value in changed.items()}}


def test_a_healthy_history_raises_nothing():
    assert judged(noisy(200)) == {}
    held_out = ({"eval_reward": 0.5 + 0.3 * (at % 3) / 10, "step": 10 * (at + 1)} for at in range(20))
    steps = [{**step, "step": at} for at, step in enumerate(noisy(200), start=1)]
    assert judged([row for step in steps for row in ([step] if step["step"] % 10 else [step, next(held_out)])]) == {}


def test_flat_steps_that_are_not_over_are_not_said_to_be_though_their_limit_rises(tmp_path, caplog):
    """Once nearly all answers are right it takes more of them to be an alarm."""
    caplog.set_level(logging.INFO, "perl")
    alarms = begun(tmp_path)
    for step in range(1, 60):
        log(alarms, tmp_path, step, step_logs(0.5 if step < 6 else 1.0, reward_std=0.0, frac_reward_zero_std=1.0))
    assert "differ within groups again" not in caplog.text
    log(alarms, tmp_path, 60, step_logs(0.9))
    assert caplog.text.count("differ within groups again, after 59 steps") == 1


EXPLODING = {"kl": lambda at: 0.01 if at < 30 else 0.9, "grad_norm": lambda at: 0.2 if at < 30 else 5.0}
# The steps of a history, 40 of which are healthy but for these, and the first at which it is found.
PLANTED = {
    "samples_masked": ({"rows/masked_fraction": lambda _: 0.6}, 3),
    "completions_truncated": ({"completions/clipped_ratio": lambda _: 0.55}, 5),
    "rewards_flat": (
        {"reward_std": lambda at: 0.0 if at >= 10 else 0.5, "frac_reward_zero_std": lambda at: float(at >= 10)},
        15,
    ),
    "ratios_clipped": ({"clip_ratio/region_mean": lambda _: 0.35}, 3),
    "engine_drift": ({GAP: lambda at: 0.008 + 0.01 * max(0, at - 10)}, 0),
    "kl_explosion": ({"kl": EXPLODING["kl"]}, 32),
    "gradient_explosion": ({"grad_norm": EXPLODING["grad_norm"]}, 33),
    "gradient_zero": ({"grad_norm": lambda at: 0.0 if at >= 10 else 0.2}, 13),
    "learning_rate": ({"learning_rate": lambda _: 1e-4}, 1),
}


@pytest.mark.parametrize(("name", "planted"), PLANTED.items())
def test_each_planted_history_raises_its_alarm_and_no_other(name, planted):
    changed, first = planted
    found = judged(noisy(40, **changed))
    assert set(found) == {name}
    assert not first or found[name][0] == first


LEARNED = [0.1] * 20 + [1e-5] * 25 + [0.01, 0.0, 0.03, 0.025, 0.03, 0.1, 0.2]
SPIKES = {"grad_norm": lambda at: 9.0 if at % 10 in (3, 4) else 0.2, "kl": lambda at: 5.0 if at % 10 == 3 else 0.01}


def norms(*values, **changed):
    return [step_logs(grad_norm=value, **changed) for value in values]


def gaps(first, later):
    return [step_logs(**{GAP: first if at < 10 else later}) for at in range(20)]


def falling(right, agreeing=0.75):
    return [step_logs(right, entropy=0.3 * 0.8**at, frac_reward_zero_std=agreeing) for at in range(30)]


def unjudged(reward):
    known = {"loss": 0.0, "reward_std": 0.1, "frac_reward_zero_std": 0.9}
    return [{**known, "reward": reward(at), "entropy": 0.3 * 0.8**at} for at in range(30)]


def grown(right, length, reward):
    """By so much in a step, of the share that is right, the length and the reward."""
    for at in range(40):
        wiggle = 0.02 * (at % 3 - 1)
        begin = 100.0 if length > 0 else 200.0
        row = step_logs(0.5 + right * at + wiggle, completions__mean_length=begin + length * at)
        yield {**row, "reward": 0.5 + reward * at + wiggle}


# Logs -> the alarms that they raise.
HISTORIES = {
    "a policy that has learned has a gradient in few groups, whose norm comes back": (norms(*LEARNED), ""),
    "and explodes": (norms(*LEARNED, 3.0, 4.0, 5.0), "gradient_explosion"),
    "single batches are no explosion": (noisy(60, **SPIKES), ""),
    "not finite": (norms(*(math.nan if at in (5, 6, 8) else 0.2 for at in range(12))), "gradient_explosion"),
    "not finite now and then": (norms(*(math.inf if at in (5, 9) else 0.2 for at in range(12))), ""),
    "rewards that do not differ explain it": (norms(*[0.0] * 4, reward_std=0.0, frac_reward_zero_std=1.0), ""),
    "masks explain it": (norms(*[0.0] * 4, rows__masked_fraction=1.0), "samples_masked"),
    "zero without rewards": ([{"loss": 1.0, "grad_norm": 0.0}] * 3, "gradient_zero"),
    "a float32 engine that has left": (gaps(1e-5, 0.021), "engine_drift"),
    "a large gap": (gaps(0.11, 0.11), "engine_drift"),
    "a gap that is usual": (gaps(0.008, 0.02), ""),
    "a small gap": (gaps(1e-5, 1e-3), ""),
    "the entropy falls": (falling(0.5), "entropy_collapse"),
    "it is sure of itself, and right": (falling(0.95), ""),
    "sampling still finds other answers": (falling(0.5, agreeing=0.25), ""),
    "without verdicts": (unjudged(lambda _: 0.2), "entropy_collapse"),
    "a reward that has grown may be as high as it gets": (unjudged(lambda at: 0.1 * at), ""),
    "length pays": (grown(0.0, 5, 0.01), "length_gaming"),
    "shortness pays": (grown(-0.01, -4, 0.01), "length_gaming"),
    "reasoning that helps": (grown(0.01, 5, 0.01), ""),
    "length without a reward": (grown(0.0, 5, 0.0), ""),
    "what a length penalty is for": (grown(0.0, -4, 0.01), ""),
    "without metrics": ([{"something": "else"}, {"loss": None}, {"loss": 0.1, "kl": None, "text": "x"}], ""),
}


@pytest.mark.parametrize(("logs", "alarm"), HISTORIES.values(), ids=HISTORIES)
def test_a_history_raises_what_it_deserves(logs, alarm):
    assert list(judged([dict(row) for row in logs])) == ([alarm] if alarm else [])


def test_another_trainers_logs_are_silent():
    row = {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 2e-4, "mean_token_accuracy": 0.5}
    assert judged([row] * 20, AlarmSetup()) == {}


def test_what_is_set_explains_gradients_of_zero_and_ratios_of_whole_completions():
    assert judged(norms(*[0.0] * 6), AlarmSetup(waits=6)) == {}  # only the critic moves
    clipped = [step_logs(clip_ratio__region_mean=0.9) for _ in range(9)]
    assert set(judged(clipped)) == {"ratios_clipped"}
    assert judged(clipped, AlarmSetup(by_sequence=True)) == {}


def test_held_out_scores_fall_while_the_reward_rises():
    def scored(scores, gain, name="eval_reward"):
        for at in range(60):
            yield step_logs(0.4 + gain * at / 60, step=at + 1)
            if at % 15 == 14:
                yield {name: scores[at // 15], "step": at + 1}

    falling, once = (0.5, 0.6, 0.2, 0.15), (0.5, 0.6, 0.1, 0.58)
    for name in ("eval_reward", "eval_hard_ones_reward", "eval/aime24/avg@8"):
        assert set(judged(scored(falling, 0.4, name))) == {"heldout_falling"}
    assert judged(scored(once, 0.4)) == {}
    assert judged(scored(falling, -0.3)) == {}  # all falls: other alarms say why
    assert judged(scored((0.5, 0.6, 0.55, 0.5), 0.4)) == {}
    # A smaller fall is one only if it is larger than the error of so many completions.
    less = list(scored((0.5, 0.6, 0.4, 0.35), 0.4))
    for problems, found in ((10, set()), (500, {"heldout_falling"})):
        counted = {"eval_runtime": 10.0, "eval_samples_per_second": problems / 10}
        rows = [{**row, **counted} if "eval_reward" in row else dict(row) for row in less]
        assert set(judged(rows, AlarmSetup(values={"num_generations": 4}))) == found
    # Scores may be in the log of a step, too, as a recipe has them.
    rows = [step_logs(0.4 + at / 100) for at in range(45)]
    for at, score in zip((9, 19, 29, 39), falling, strict=True):
        rows[at]["eval/math/avg@4"] = score
    assert set(judged(rows)) == {"heldout_falling"}


def test_the_usual_rate_goes_with_the_width_of_narrow_models():
    lora = METHODS["lora"].learning_rate
    assert usual_rate(lora, 4096) == usual_rate(lora, 2048) == lora
    assert usual_rate(lora, 128) == pytest.approx(16 * lora)
    assert usual_rate(lora, None) is None
    for method in METHODS.values():  # what the benchmarks of methods train the sandbox with
        assert 1e-3 * method.rate < 10 * usual_rate(method.learning_rate, 128)


# The callback.


@pytest.fixture
def said(caplog):
    """The warnings of the logger "perl", and takes them away."""
    caplog.set_level(logging.INFO, "perl")

    def take():
        lines = [r.getMessage() for r in caplog.records if r.name == "perl" and r.levelname == "WARNING"]
        caplog.clear()
        return lines

    return take


def state_of(step, history=(), main=True):
    return TrainerState(global_step=step, log_history=list(history), is_world_process_zero=main)


def begun(tmp_path, history=(), step=0, stop=(), **given):
    alarms = HealthAlarms(stop, **given)
    alarms.on_train_begin(TrainingArguments(str(tmp_path), use_cpu=True), state_of(step, history), TrainerControl())
    return alarms


def log(alarms, tmp_path, step, logs, main=True):
    control = TrainerControl()
    arguments, state = TrainingArguments(str(tmp_path), use_cpu=True), state_of(step, main=main)
    alarms.on_log(arguments, state, control, logs=logs and dict(logs))
    return control


MASKED = step_logs(rows__masked_fraction=0.9)


def test_an_alarm_is_said_once_and_again_each_time_its_steps_have_doubled(tmp_path, said):
    alarms = begun(tmp_path)
    for step in range(1, 30):
        log(alarms, tmp_path, step, MASKED)
    assert [alarm.step for alarm in alarms.raised] == [3, 6, 12, 24]
    lines = said()
    assert lines == [alarm.line for alarm in alarms.raised]
    assert lines[0].startswith("90 % of the completions of the newest 3 steps are masked out: ")
    assert lines[0].endswith(" [PRL401]")
    rows = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [Alarm(**row) for row in rows] == alarms.raised
    first = {"step": 3, "code": "PRL401", "name": "samples_masked", "limit": 0.5, "stopped": False}
    assert {key: rows[0][key] for key in first} == first
    assert rows[0]["value"] == pytest.approx(0.9)
    other = begun(tmp_path / "other")
    for step in range(1, 9):
        log(other, tmp_path / "other", step, MASKED, main=False)
    assert other.raised == said() == []  # the main process judges for all
    assert not (tmp_path / "other" / "alarms.jsonl").exists()


def test_steps_that_are_logged_together_count_as_many_and_an_alarm_that_comes_and_goes_is_one(tmp_path, said):
    alarms = begun(tmp_path)
    flat = step_logs(0.0, reward_std=0.0, frac_reward_zero_std=1.0)
    for step in range(10, 81, 10):
        log(alarms, tmp_path, step, flat)
    assert [(alarm.step, alarm.value) for alarm in alarms.raised] == [(10, 10.0), (20, 20.0), (40, 40.0), (80, 80.0)]
    said()
    alarms = begun(tmp_path)
    for step in range(1, 40):
        log(alarms, tmp_path, step, MASKED if step % 4 else step_logs(rows__masked_fraction=0.2))
    assert len(said()) <= 5


def test_what_was_said_before_a_resume_is_not_said_again(tmp_path, said):
    whole, history = begun(tmp_path), []
    for step in range(1, 30):
        log(whole, tmp_path, step, MASKED)
        history.append({**MASKED, "step": step})
    uninterrupted = (tmp_path / "alarms.jsonl").read_text()
    said()
    for at in (2, 3, 8, 13, 28):
        resumed = begun(tmp_path, history[: at + 1], step=at)  # the last of which is of a step that is made again
        assert said() == []
        for step in range(at + 1, 30):
            log(resumed, tmp_path, step, MASKED)
        assert resumed.raised == whole.raised
        assert said() == [alarm.line for alarm in whole.raised if alarm.step > at]
        assert (tmp_path / "alarms.jsonl").read_text() == uninterrupted


def test_stop_asks_for_a_checkpoint_and_the_end(tmp_path):
    alarms = begun(tmp_path, stop=["samples_masked"])
    history = []
    for step in range(1, 4):
        control = log(alarms, tmp_path, step, MASKED)
        history.append({**MASKED, "step": step})
        assert control.should_training_stop == control.should_save == (step == 3)
    assert alarms.stopped == alarms.raised[0]
    assert alarms.stopped.stopped
    # Resumed with the same it would only go on as it was; without the name it may.
    with pytest.raises(AlarmError, match="the alarm samples_masked has ended the training after step 3") as caught:
        begun(tmp_path, history, step=3, stop="samples_masked")
    assert "HealthAlarms(stop=...)" in str(caught.value)
    assert "\n" not in str(caught.value)
    begun(tmp_path, history, step=3, stop=["kl_explosion"])
    begun(tmp_path, [*history, {**MASKED, "step": 4}], step=4, stop=["samples_masked"])  # it went on without it
    assert not any(log(begun(tmp_path), tmp_path, step, MASKED).should_save for step in range(1, 9))


def test_an_unknown_alarm_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no alarm 'kl_explosoin' \(did you mean kl_explosion\?\)"):
        HealthAlarms(["rewards_flat", "kl_explosoin"])


# With trainers.


def data(count=16):
    problems = load_problems("sandbox:addition", "train")[:count]
    return Dataset.from_list([{"prompt": p.question, "solution": p.answer} for p in problems])


def settings(tmp_path, steps, **changed):
    common = {"max_steps": steps, "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    return {"output_dir": str(tmp_path / "run"), "max_completion_length": 6, **common, **changed}


def trained(tmp_path, steps, reward=accuracy_reward, callbacks=None, added=(), resume=None, **changed):
    """With our trainer."""
    changed = {"prompts_per_step": 2, "num_generations": 2, **changed}
    trainer = PeftGRPOTrainer(
        model="sandbox:base",
        reward_funcs=reward,
        args=PeftRLConfig(**settings(tmp_path, steps, **changed)),
        train_dataset=data(),
        callbacks=callbacks,
    )
    for callback in added:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def differing(completions, **_):
    return [float(at) for at in range(len(completions))]


def test_our_trainer_has_alarms_of_its_own_unless_it_is_given_some(tmp_path, said):
    trained(tmp_path, 3, flat_reward_steps=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert [(row["name"], row["step"]) for row in rows] == [("rewards_flat", 2)]
    assert sum("[PRL403]" in line for line in said()) == 1
    own = HealthAlarms(folder=tmp_path / "own")
    trained(tmp_path / "added", 3, flat_reward_steps=2, added=[own])
    assert [alarm.name for alarm in own.raised] == ["rewards_flat"]
    assert "a typical completion ends" in own.raised[0].line
    assert (tmp_path / "own" / "alarms.jsonl").is_file()
    assert not (tmp_path / "added" / "run" / "alarms.jsonl").exists()
    lines = said()
    assert sum("[PRL403]" in line for line in lines) == 1
    assert any("100 % of the completions of the first step are truncated" in line for line in lines)
    trained(tmp_path / "flat", 3, callbacks=[FlatRewards(after_steps=2)])
    assert sum("[PRL403]" in line for line in said()) == 1
    with pytest.raises(RecipeError, match="there are two HealthAlarms"):
        trained(tmp_path / "two", 1, callbacks=[HealthAlarms(), HealthAlarms()])


def test_a_script_is_stopped_with_a_checkpoint_and_refused_until_the_alarm_is_left_out(tmp_path, said):
    alarms = HealthAlarms(stop=["learning_rate"])
    changed = {"learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    trainer = trained(tmp_path, 4, differing, [alarms], **changed)
    assert trainer.state.global_step == 1
    assert alarms.stopped.name == "learning_rate"
    assert "the learning rate is 0.005, 31.2 times the usual 0.00016: " in alarms.stopped.line
    assert "lower learning_rate (now 0.005) [PRL410]" in alarms.stopped.line
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(AlarmError):
        trained(tmp_path, 4, differing, [HealthAlarms(stop=["learning_rate"])], resume=checkpoint, **changed)
    said()
    rest = HealthAlarms()
    assert trained(tmp_path, 4, differing, [rest], resume=checkpoint, **changed).state.global_step == 4
    assert [alarm.step for alarm in rest.raised] == [1]  # and again after ten more
    assert not any("PRL410" in line for line in said())


def test_trls_own_trainer_is_judged_too(tmp_path, said):
    alarms = HealthAlarms(stop=["completions_truncated"])
    of_trl = {"per_device_train_batch_size": 4, "num_generations": 2, "bf16": False, "learning_rate": 1e-6}
    of_trl |= {"activation_checkpointing": False, "dataloader_pin_memory": False}
    grpo = GRPOTrainer(
        model=str(BASE_FOLDER),
        reward_funcs=[differing],
        args=GRPOConfig(**settings(tmp_path, 7, **of_trl)),
        train_dataset=data(),
        callbacks=[alarms, FlatRewards(after_steps=2)],
    )
    grpo.train()
    assert grpo.state.global_step == 5
    assert [alarm.name for alarm in alarms.raised] == ["completions_truncated"]
    assert "raise max_completion_length (now 6)" in alarms.stopped.line
    assert (tmp_path / "run" / "checkpoint-5").is_dir()
    assert not any("PRL403" in line for line in said())


def test_an_infinite_reward_ends_a_script_before_it_trains_on_it(tmp_path):
    def infinite(completions, **_):
        return [float("inf"), *[0.0] * (len(completions) - 1)]

    for options in ({}, {"algorithm": "dr_grpo"}, {"algorithm": "rloo"}, {"algorithm": "gdpo"}):
        with pytest.raises(RewardError, match=r"^reward infinite: returned inf, which is not finite [^\n]*$"):
            trained(tmp_path, 1, infinite, **options)


def test_a_run_that_masks_its_truncated_completions_is_told_to_raise_their_length(tmp_path, said):
    settings = {"max_completion_length": 4, "flat_reward_steps": 1}
    for masks, lines in ((True, 2), (False, 0)):
        trainer = trained(tmp_path, 3, differing, mask_truncated_completions=masks, **settings)
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["rows/masked_fraction"] for entry in steps] == [float(masks)] * 3
        found = [line for line in said() if "PRL401" in line or "PRL323" in line]
        assert len(found) == lines
        if masks:
            assert found[0].startswith("100 % of the completions of the newest 3 steps are masked out")
            assert ": mask_truncated_completions leaves truncated ones out of the loss; " in found[0]
            assert "raise max_completion_length (now 4)" in found[0]
            assert found[0].endswith(" [PRL401]")


def test_the_page_has_the_table_of_rules():
    page = (CHECKOUT / "docs" / "alarms.md").read_text(encoding="utf-8")
    head = "| code | name | watches | fires when | why there | change |\n|---|---|---|---|---|---|\n"
    cells = [(r.code, f"`{r.name}`", r.watches, r.fires, r.why, change_of(r)) for r in RULES.values()]
    assert page.endswith(head + "".join(f"| {' | '.join(row)} |\n" for row in cells))


def test_each_alarm_has_found_a_planted_failure_and_no_healthy_run_was_disturbed():
    """What ``benchmarks/alarms.py`` has measured; a new rule needs a planted failure there."""
    results = json.loads((CHECKOUT / "benchmarks" / "results" / "alarms.json").read_text(encoding="utf-8"))
    assert {row["planted"] for row in results["planted"] if row["caught"]} == set(RULES)
    assert results["limits"] == {name: row.limit for name, row in RULES.items()}
    held_out = [results["heldout"], results["heldout2"]]
    assert [row for part in held_out for row in part["false"]] == []
    assert sum(part["runs"] for part in held_out) >= 150
    # Of what was to be healthy and was not trained in most steps: an alarm that says so.
    assert all(row["alarms"] for part in held_out for row in part["idle"])
