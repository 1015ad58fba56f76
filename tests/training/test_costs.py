"""What plans derive, against counts on real passes, sums by hand, and laws."""

import itertools
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from step_flops import counter, model_size
from transformers import AutoConfig, AutoModelForCausalLM

from perl.errors import PerlError
from perl.methods.settings import adaptation
from perl.packing.attention import use_packed_attention
from perl.packing.divergence import head_divergence
from perl.packing.forward import last_hidden_states, score, score_beside
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import LogitSettings, add_scored_forward
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.critic import Critic
from perl.recipe import load_recipe
from perl.recipe.engines import TRANSFORMERS, VLLM_SERVER
from perl.recipe.sections import STRATEGIES, PeftSection
from perl.training import measured_rates
from perl.training.cost_flops import (
    Execution,
    Group,
    executed_flops,
    generation_flops,
    ideal_flops,
    largest_pass,
    size_of,
)
from perl.training.cost_time import (
    NOTHING,
    Part,
    Range,
    Rates,
    Writing,
    derived_rates,
    rollout_part,
    step_seconds,
    supply,
    sync_part,
    training_part,
)
from perl.training.cost_traffic import Passes, sync_bytes, traffic_of
from perl.training.decoder import Types, decoder_of, weight_bytes
from perl.training.hardware import GIB, HARDWARE, hardware_named, sold_as
from perl.training.memory_estimate import Work, estimate_memory
from perl.training.sharing import ALONE, Sharing, base_bytes, trained_bytes

RANK = 4


def config_of(kind: str = "qwen2", *, tied: bool = False, layers: int = 3):
    return AutoConfig.for_model(
        kind,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )


def policy_of(config, method: str = "lora"):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    policy = attach_adapter(base, adaptation(PeftSection(rank=RANK, method=method))).train()
    fuse_lora(policy)
    add_scored_forward(base, LogitSettings())
    assert use_packed_attention(base) is None
    return policy


def rows_of(groups: list[Group]) -> tuple[list[Row], list[list[int]]]:
    rows, members = [], []
    for group in groups:
        prompt = torch.randint(96, (group.prompt,))
        members.append(list(range(len(rows), len(rows) + len(group.completions))))
        rows += [
            Row(prompt, torch.randint(96, (length,)), torch.ones(length, dtype=torch.bool))
            for length in group.completions
        ]
    return rows, members


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("kind", "method"), [("qwen2", "lora"), ("llama", "lora"), ("qwen3", "lora"), ("qwen2", "dora"), ("qwen3", "dora")]
)
def test_flops_of_a_packed_pass_are_those_that_are_counted(kind, method, shared):
    config = config_of(kind)
    groups = [Group(11, (7, 12, 5)), Group(6, (9, 9)), Group(20, (3,))]
    policy, (rows, members) = policy_of(config, method), rows_of(groups)
    together = members if shared else [[index] for index in range(len(rows))]
    score(policy, rows, together, packed=True, columns=12)  # the first pass asks how the library sums
    with counter() as counted:
        score(policy, rows, together, packed=True, columns=12)[0].sum().backward()
    size = size_of(decoder_of(config), RANK, dora=method == "dora")
    how = Execution(10**6, shared=shared, masked=True, fused_head=True)
    found = executed_flops(size, groups, how)
    assert found.micro_batches == 1
    assert found.training == counted.get_total_flops()
    with counter() as forward, torch.no_grad():
        score(policy, rows, together, packed=True, columns=12)
    old = executed_flops(size, groups, Execution(10**6, shared=shared, masked=True, fused_head=True, old=True))
    assert old.scoring == forward.get_total_flops()


def test_flops_of_a_critic_are_those_that_are_counted():
    config, rank = config_of(), 3
    groups = [Group(11, (7, 12, 5)), Group(6, (9, 9))]
    policy, (rows, members) = policy_of(config), rows_of(groups)
    critic = Critic(policy, rank=rank, seed=0)
    for tensor in critic.parameters:  # at 0 B has a gradient and A has none
        tensor.data += 0.1
    run = partial(score, policy, rows, members, packed=True, columns=12, entropy="none", read=critic.values)
    with critic.in_place_of(policy):
        run()
        with counter() as counted:
            run()[0].sum().backward()
        with counter() as forward, torch.no_grad():
            run()
    decoder = decoder_of(config)
    size = size_of(decoder, RANK)
    plain = Execution(10**6, masked=True, fused_head=True)
    without = executed_flops(size, groups, plain)
    found = executed_flops(size, groups, replace(plain, critic=replace(size_of(decoder, rank), head=0)))
    head = 2 * decoder.hidden * sum(sum(group.completions) for group in groups)  # the value head is not counted
    assert found.scoring - without.scoring == forward.get_total_flops() - head
    assert found.training - without.training == counted.get_total_flops() - 3 * head
    assert (found.micro_batches, found.scoring_passes) == (2, 1)


def test_flops_of_a_teacher_are_those_that_are_counted():
    config = config_of()
    groups = [Group(11, (7, 12, 5)), Group(6, (9, 9))]
    policy, (rows, members) = policy_of(config), rows_of(groups)
    size = size_of(decoder_of(config), RANK)
    plain = Execution(10**6, masked=True, fused_head=True)

    run = partial(score_beside, policy, rows, members, packed=True, columns=12, entropy="value")
    teacher_SD = torch.randn(sum(row.completion.numel() for row in rows), 32)
    run(beside=None)  # the first pass asks how the library sums
    with counter() as layers:
        last_hidden_states(policy, rows, members, packed=True)
    with counter() as alone:
        run(beside=None)[0].sum().backward()
    with counter() as both:
        log_probs_NT, _, (kl_NT, _) = run(beside=lambda _, states: head_divergence(states, teacher_SD))
        (log_probs_NT + kl_NT).sum().backward()
    found = executed_flops(size, groups, replace(plain, teacher=size))
    expected = both.get_total_flops() - alone.get_total_flops() + layers.get_total_flops()
    assert found.training - executed_flops(size, groups, plain).training == expected


def test_the_sizes_of_a_config_are_those_of_its_model():
    for kind in ("qwen2", "llama", "qwen3"):
        config = config_of(kind)
        assert size_of(decoder_of(config), RANK) == model_size(AutoModelForCausalLM.from_config(config), RANK)


@pytest.mark.parametrize(
    ("rows", "prompt", "completion", "method"), [(3, 10, 8, "lora"), (1, 24, 2, "lora"), (3, 10, 8, "dora")]
)
def test_flops_of_rollouts_are_those_that_are_counted(rows, prompt, completion, method):
    config = config_of()
    policy = policy_of(config, method).eval()
    ids = torch.randint(2, 96, (rows, prompt))
    length = {"min_new_tokens": completion, "max_new_tokens": completion}
    write = partial(
        policy.generate,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **length,
        do_sample=False,
        pad_token_id=0,
    )
    write()  # the first time the library may look at how this machine multiplies
    with counter() as counted, torch.no_grad():
        write()
    size = size_of(decoder_of(config), RANK, dora=method == "dora")
    # Prompts of one length are read with a causal kernel, which leaves out half of the pairs.
    assert generation_flops(size, rows, prompt, completion, padded=False) == counted.get_total_flops()
    left_out = rows * 4 * size.attention * (prompt**2 - prompt * (prompt + 1) // 2)
    assert generation_flops(size, rows, prompt, completion) == counted.get_total_flops() + left_out


def test_what_is_executed_is_never_less_than_what_is_needed_but_for_last_tokens():
    size = size_of(decoder_of(config_of()), RANK)
    groups = [Group(30, (40,) * 8)] * 4
    one_longer = [Group(30, (39,) * 8)] * 4  # the last token predicts nothing, and is not run
    for budget, shared, recompute in itertools.product((10**6, 128), (True, False), (True, False)):
        how = Execution(budget, shared=shared, recompute=recompute)
        assert executed_flops(size, groups, how).training > ideal_flops(size, one_longer, with_reference=False)
    plain = executed_flops(size, groups, Execution(10**6))
    assert executed_flops(size, groups, Execution(10**6, recompute=True)).training > plain.training
    assert executed_flops(size, groups, Execution(64)).micro_batches > plain.micro_batches == 1
    assert largest_pass(groups, Execution(10**6)) == plain.tokens == 4 * (30 + 8 * 39)
    assert largest_pass(groups, Execution(600)) == 30 + 8 * 39
    dead = [Group(30, (40,) * 8, live=False)]
    assert executed_flops(size, dead, Execution(10**6)).training == 0
    assert executed_flops(size, dead, Execution(10**6, reference=True)).scoring > 0


def test_memory_of_the_adapter_is_added_up_by_hand():
    assert trained_bytes(1000, ALONE).total == 16_000  # parameter, gradient, two averages
    assert trained_bytes(1000, Sharing("fsdp2", 8)) == trained_bytes(1000, ALONE)
    assert trained_bytes(1000, Sharing("ddp", 8)).gradients == 8000  # the gradient, and DDP's buckets
    assert trained_bytes(1000, Sharing("ddp", 8)).total == 20_000
    held = trained_bytes(1000, Sharing("zero2", 4))
    # The share: a copy of its parameters, its gradient during the step, two averages.
    assert (held.parameters, held.gradients, held.optimizer) == (4000, 4000, 16_000 / 4)
    for strategy in STRATEGIES:
        assert trained_bytes(1000, Sharing(strategy, 1)) == trained_bytes(1000, ALONE)


def test_a_base_in_shards_is_a_part_and_the_layers_that_are_gathered():
    model, types = decoder_of(config_of(layers=40)), Types(2, 2)
    whole = weight_bytes(model, types)
    assert base_bytes(model, types, Sharing("ddp", 4)) == (whole, 0)
    part, gathered = base_bytes(model, types, Sharing("fsdp2", 4))
    layer = 2 * (2 * 32 * (32 + 16) + 3 * 32 * 80)
    assert part == whole / 4
    assert gathered == pytest.approx(3 * layer + 2 * 96 * 32, rel=0.03)  # norms and biases besides


@pytest.mark.parametrize("layers", [1, 2, 5, 40])
@pytest.mark.parametrize("tied", [True, False])
def test_more_processes_never_need_more_memory_but_for_buckets_and_shards_never_more_than_copies(layers, tied):
    model, types = decoder_of(config_of(tied=tied, layers=layers)), Types(2, 2)
    work = Work(200, completions=0)

    def held(strategy: str, processes: int) -> float:
        found = estimate_memory(model, types, RANK, "16 GB", work, Sharing(strategy, processes))
        assert not found.plan.recompute
        return found.least

    buckets = 4 * model.lora_parameters(RANK)
    for strategy in STRATEGIES:
        alone, *several = (held(strategy, count) for count in (1, 2, 3, 4, 8, 64))
        assert several == sorted(several, reverse=True), strategy
        assert several[0] <= alone + (buckets if strategy == "ddp" else 0)
    for count in (1, 2, 8, 64):
        assert held("fsdp2", count) <= held("ddp", count)
    if layers > 4:  # of fewer all may be whole at a time
        assert held("fsdp2", 64) < held("ddp", 64)


def test_parts_of_memory_are_all_that_is_held():
    model, types = decoder_of(config_of()), Types(2, 2)
    found = estimate_memory(model, types, RANK, "24 GB", Work(100, completions=8), Sharing("fsdp2", 2))
    passes = found.activations(recompute=False) + found.head
    assert found.least == found.context + found.weights + found.gathered + found.adapter + max(passes, found.cache)
    assert found.available == sold_as(24) == 22.0 * GIB
    assert estimate_memory(model, types, RANK, "24 GB", Work(100), trained=10**9).adapter == 16 * 10**9


def test_bytes_between_processes_are_added_up_by_hand():
    model, types = decoder_of(config_of()), Types(2, 2)
    whole, head = weight_bytes(model, types), 2 * 96 * 32
    found = traffic_of(model, types, Sharing("fsdp2", 4), Passes(3, 2, 50), trained=1000, synced=7.0)
    # Both ways but for the head, which is kept, and the embedding, which has no way back.
    assert found.gathered == pytest.approx(3 / 4 * (3 * (2 * whole - 2 * head) + 2 * whole))
    assert found.gathered_for_rollouts == 3 / 4 * 50 * whole
    assert found.averaged == 2 * 3 / 4 * 4 * 1000
    assert found.synced == 7.0
    copies = traffic_of(model, types, Sharing("ddp", 4), Passes(3, 2, 50), trained=1000, synced=0.0)
    assert (copies.gathered, copies.gathered_for_rollouts) == (0, 0)
    assert copies.averaged == 2 * 3 / 4 * 4 * 1000
    shares = traffic_of(model, types, Sharing("zero2", 4), Passes(3, 2, 50), trained=1000, synced=0.0)
    assert shares.averaged == 2 * 3 / 4 * 4 * 1000 + 3 / 4 * 4 * 1000  # the mean, then updated parameters
    assert sync_bytes(model, types, RANK) == 2 * model.lora_parameters(RANK)
    assert sync_bytes(model, types, None) == 2 * model.linear_parameters


RATES = Rates(
    products=Range(1e12, 2e12),
    writing=Range(1e12, 2e12),
    bandwidth=Range(1e9, 2e9),
    link=Range(1e9, 4e9),
    token=Range(0.001, 0.002),
)


def test_seconds_go_from_all_at_once_to_one_after_the_other():
    training = training_part(4e12, 8e9, 0.0, RATES)
    assert training.seconds == Range(max(2.0, 2.0), 4.0 + 8.0)
    assert training.bound == "gathering the base"
    assert training_part(4e12, 0.0, 0.0, RATES).bound == "products"
    # 10 completions of 80 tokens, up to 100, 5 at a time: 200 tokens in turn; the base is read at each of them, a cache
    # at its own.
    work = Writing(10, 5, 100, 80, 1e12, 0.0, weights=1e7, cache=1e5)
    rollouts = rollout_part(work, RATES)
    reading = 200 * 1e7 + 10 * 80 * 1e5
    assert rollouts.seconds.low == pytest.approx(max(0.2, reading / 2e9, 0.5))
    assert rollouts.seconds.high == pytest.approx(0.4 + reading / 1e9 + 1.0)
    assert rollout_part(Writing(0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0), RATES).seconds == NOTHING
    measured = rollout_part(work, RATES.with_measured({"token": 0.01}))
    assert measured.measured
    assert measured.seconds == Range(pytest.approx(200 * 0.0075), pytest.approx(200 * 0.0135))


def test_a_step_is_its_parts_one_after_the_other_or_rollouts_beside_the_rest():
    seconds = {"rollouts": Range(10, 20), "training": Range(3, 6), "sync": Range(1, 2)}
    parts = {name: Part(name, value, "") for name, value in seconds.items()}
    assert step_seconds(parts, overlapped=False) == Range(14, 28)
    assert step_seconds(parts, overlapped=True) == Range(10, 20)
    assert sync_part(0.0, 4).seconds == NOTHING
    assert sync_part(1e9, 4).seconds.high > sync_part(1e9, 1).seconds.high


def test_more_servers_need_fewer_completions_each_and_too_few_are_said_to_be_so():
    work = Writing(128, 128, 1000, 1000, 128 * 1000 * 1e6, 0.0, weights=1e6, cache=10.0)
    one, four = (supply(20_000, work, RATES, servers=count, trainers=2) for count in (1, 4))
    assert one.samples > four.samples >= 1
    # 20,000 tokens/s at 1 / sqrt(0.001 * 0.002) of them a second for each completion
    assert one.samples == -(-20_000 * (0.001 * 0.002) ** 0.5 // 1)
    assert supply(10**9, work, RATES, servers=1, trainers=2).samples is None
    assert one.servers_per_trainer == pytest.approx(20_000 / (128 / (0.001 * 0.002) ** 0.5) / 2)


def test_a_server_writes_no_more_at_a_time_than_it_has_memory_for_and_no_more_than_a_step_has():
    # A token of a completion takes 1e12 FLOP, so a server with 1e12 to 2e12 FLOP/s writes sqrt(2) of them a second.
    work = Writing(8, 128, 1000, 500, 8 * 500 * 1e12, 0.0, weights=1.0, cache=0.0)
    bound = supply(1.0, work, RATES, servers=1, trainers=1)
    assert (bound.samples, bound.at_once) == (1, 8)
    assert bound.servers_per_trainer == pytest.approx(2**-0.5)
    # Without products a completion is written at 1 / sqrt(0.001 * 0.002) tokens/s.
    free, alone = replace(work, flops=0.0), (0.001 * 0.002) ** -0.5
    assert supply(8.5 * alone, free, RATES, servers=1, trainers=1).samples is None
    ahead = supply(8.5 * alone, free, RATES, servers=1, trainers=1, ahead=1)
    assert (ahead.samples, ahead.at_once) == (9, 16)
    assert supply(1.0, replace(free, at_once=5), RATES, servers=1, trainers=1, ahead=1).at_once == 5


def test_rates_follow_the_device_and_measured_ones_say_so():
    how = {"peak": HARDWARE["H100"].peak, "on_a_node": 1, "nodes": 1}
    fast = derived_rates(HARDWARE["H100"], TRANSFORMERS, 28, **how)
    slow = derived_rates(HARDWARE["L4"], TRANSFORMERS, 28, **{**how, "peak": HARDWARE["L4"].peak})
    assert slow.products.high < fast.products.low
    assert slow.token == fast.token
    served = derived_rates(HARDWARE["H100"], VLLM_SERVER, 28, **how)
    assert served.token.high < fast.token.high
    far, farther = (
        derived_rates(HARDWARE["H100"], VLLM_SERVER, 28, **{**how, "nodes": 2, "on_a_node": count}) for count in (2, 8)
    )
    assert far.link.high == 4 * farther.link.high  # processes of a node share its link to the others
    assert far.bandwidth == farther.bandwidth
    on_cpu = [derived_rates(hardware_named("cpu"), TRANSFORMERS, 28, **{**how, "on_a_node": n}) for n in (1, 4)]
    assert on_cpu[0].products.high == 4 * on_cpu[1].products.high
    assert far.link.high < served.link.low
    measured = fast.with_measured({"products": 1e12})
    assert measured.products.low < 1e12 < measured.products.high
    assert measured.measured == {"products"}
    assert measured.bandwidth == fast.bandwidth


def test_products_in_float32_are_slower_than_in_half_precision():
    for row in HARDWARE.values():
        assert row.peak_of(4) <= row.peak_of(4, tf32=True) < row.peak_of(2) == row.peak_of(2, tf32=True) == row.peak
    assert HARDWARE["A100 80GB"].peak_of(4) == 19.5e12
    assert hardware_named("cpu").peak_of(4) == hardware_named("cpu").peak_of(2)


@pytest.mark.parametrize(
    ("train", "device", "type_"),
    [
        ({}, "cpu", None),
        ({"bf16": True}, "cpu", torch.bfloat16),
        ({}, "cuda", torch.bfloat16),
        ({"bf16": False}, "cuda", None),
        ({"fp16": True}, "cuda", torch.float16),
    ],
)
def test_rates_are_measured_in_the_type_of_the_run(train, device, type_):
    recipe = load_recipe("quickstart", [f"train.{name}={value}" for name, value in train.items()])
    found = SimpleNamespace(enabled=None)

    def autocast(kind, dtype, *, enabled):
        found.kind, found.dtype, found.enabled = kind, dtype, enabled

    with pytest.MonkeyPatch.context() as patch:  # there may be no GPU here
        patch.setattr(measured_rates.torch, "autocast", autocast)
        measured_rates.autocast_of(recipe, torch.device(device))
    assert (found.kind, found.enabled) == (device, type_ is not None)
    assert type_ in (None, found.dtype)


def test_hardware_is_found_by_name_or_by_its_memory():
    for name in ("H100", "h100", "NVIDIA H100", "h100-sxm"):
        assert hardware_named(name) == HARDWARE["H100"]
    assert hardware_named("a100") == hardware_named("A100-80GB") == HARDWARE["A100 80GB"]
    assert hardware_named("A100", 40.0).memory == HARDWARE["A100 40GB"].memory
    assert hardware_named("A100", 40.0) == HARDWARE["A100 40GB"]
    assert hardware_named("H100", 80.0) == HARDWARE["H100"]
    for name in ("H100", None):
        other = hardware_named(name, 200.0)
        assert other.name == "200 GB"
        assert other.source.startswith("memory as given")
        assert other.memory == sold_as(200.0)
    assert hardware_named("H100", 200.0).peak == HARDWARE["H100"].peak
    assert hardware_named("rtx4090").name == "RTX 4090"
    assert hardware_named("cpu", 64.0).memory == 64 * GIB
    assert hardware_named("CPU").on_cpu
    with pytest.raises(PerlError, match=r"no hardware 'H1000' \(did you mean H100"):
        hardware_named("H1000")


def test_lengths_of_an_earlier_run_are_those_of_its_last_steps(tmp_path):
    from perl.training.lengths import _measured

    rows = [{"completions/mean_length": 10.0 * (step > 5), "completions/max_length": 20} for step in range(56)]
    rows = [{**row, "rows/trained_fraction": 0.5, "step_time": 2.0} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"epoch": 1}])))
    found = _measured(tmp_path, 7, None)
    assert (found.prompt, found.completion, found.longest, found.live, found.seconds) == (7, 10, 20, 0.5, 2.0)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}')
    with pytest.raises(PerlError, match="no step of this run"):
        _measured(tmp_path, 7, None)


def test_an_engine_in_the_process_must_have_room_for_its_copy_of_the_base():
    model, types = decoder_of(AutoConfig.for_model("qwen2", num_key_value_heads=32)), Types(2, 2)  # 7.7 B
    whole = weight_bytes(model, types) + 2 * model.layers * model.keys * 2 * 500
    for share, fits in ((0.9 * whole, False), (1.1 * whole, True)):
        work = Work(500, engine_share=share / sold_as(80))
        found = estimate_memory(model, types, RANK, "80 GB", work)
        assert found.least < found.available
        assert found.fits == fits


@pytest.mark.parametrize(("few", "more", "token"), [(2.0, 10.0, 1.0), (6.0, 5.0, 0.5)])
def test_a_token_has_a_measured_time_even_if_more_tokens_were_written_faster_than_few(monkeypatch, few, more, token):
    """As happens beside other work."""
    taken = iter((few, more))
    monkeypatch.setattr(measured_rates, "_seconds", lambda *_: next(taken))
    policy = SimpleNamespace(config=SimpleNamespace(vocab_size=8), eval=lambda: None)
    assert measured_rates._writing_seconds(policy, 1, 1, torch.device("cpu")) == token
