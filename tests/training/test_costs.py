"""What plans derive, against counts on real passes, sums by hand, and laws."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from step_flops import counter, ideal_flops, model_size
from transformers import AutoConfig, AutoModelForCausalLM

from perl.errors import PerlError
from perl.methods.settings import adaptation
from perl.packing.attention import use_packed_attention
from perl.packing.forward import score
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import LogitSettings, add_scored_forward
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.critic import Critic
from perl.recipe.sections import STRATEGIES, PeftSection
from perl.rollouts.engine import EngineSampling
from perl.rollouts.next_token import write_as_generate
from perl.training.cost_flops import Execution, Group, executed_flops, generation_flops, largest_pass, size_of
from perl.training.decoder import ModelSharing, Types, base_bytes, decoder_of, trained_bytes, weight_bytes
from perl.training.hardware import HARDWARE, hardware_named, sold_as
from perl.training.memory_estimate import GpuWork, estimate_memory

RANK = 4


def config_of(kind: str = "qwen2", *, tied: bool = False, layers: int = 3):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "max_position_embeddings": 256}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied)


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
        prompt[: group.common] = 5
        members.append(list(range(len(rows), len(rows) + len(group.completions))))
        rows += [
            Row(prompt, torch.randint(96, (length,)), torch.ones(length, dtype=torch.bool))
            for length in group.completions
        ]
    return rows, members


@pytest.mark.parametrize(
    ("kind", "method", "shared", "common"),
    [
        ("qwen2", "lora", True, 0),
        ("qwen2", "lora", True, 17),
        ("llama", "lora", False, 17),
        ("qwen3", "dora", True, 0),
        ("qwen2", "dora", False, 0),
    ],
)
def test_flops_of_a_packed_pass_are_those_that_are_counted(kind, method, shared, common):
    config = config_of(kind)
    lengths = ((11, (7, 12, 5)), (6, (9, 9)), (20, (3,)))
    groups = [Group(common + prompt, completions, common=common) for prompt, completions in lengths]
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
    assert found.micro_batches == 2


def test_the_sizes_of_a_config_are_those_of_its_model():
    for kind in ("qwen2", "llama", "qwen3"):
        config = config_of(kind)
        assert size_of(decoder_of(config), RANK) == model_size(AutoModelForCausalLM.from_config(config), RANK)


@pytest.mark.parametrize(
    ("rows", "prompt", "completion", "method", "common"),
    [(3, 10, 8, "lora", 0), (1, 24, 2, "lora", 0), (3, 10, 8, "dora", 0), (3, 30, 8, "lora", 20)],
)
def test_flops_of_rollouts_are_those_that_are_counted(rows, prompt, completion, method, common):
    config = config_of()
    policy = policy_of(config, method).eval()
    ids = torch.randint(2, 96, (rows, prompt))
    length = {"min_new_tokens": completion, "max_new_tokens": completion}
    write = partial(
        policy.generate, input_ids=ids, attention_mask=torch.ones_like(ids), **length, do_sample=False, pad_token_id=0
    )
    if common:
        ids[:, :common] = 5
        ids[:, common] = torch.arange(rows)
        write = partial(write_as_generate, policy, ids.tolist(), 0, EngineSampling(1.0, completion, ()))
    write()  # the first time the library may look at how this machine multiplies
    with counter() as counted, torch.no_grad():
        write()
    size = size_of(decoder_of(config), RANK, dora=method == "dora")
    # Prompts of one length are read with a causal kernel, which leaves out half of the pairs.
    assert generation_flops(size, rows, prompt, completion, padded=False, common=common) == counted.get_total_flops()
    if common:
        return
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
    assert trained_bytes(1000).total == 16_000  # parameter, gradient, two averages


def test_a_base_in_shards_is_a_part_and_the_layers_that_are_gathered():
    model, types = decoder_of(config_of(layers=40)), Types(2, 2)
    whole = weight_bytes(model, types)
    assert base_bytes(model, types, ModelSharing("ddp", 4)) == (whole, 0)
    part, gathered = base_bytes(model, types, ModelSharing("fsdp2", 4))
    layer = 2 * (2 * 32 * (32 + 16) + 3 * 32 * 80)
    assert part == whole / 4
    assert gathered == pytest.approx(3 * layer + 2 * 96 * 32, rel=0.03)  # norms and biases besides


@pytest.mark.parametrize(("layers", "tied"), [(1, True), (2, False), (5, True), (40, False)])
def test_more_processes_never_need_more_memory_but_for_buckets_and_shards_never_more_than_copies(layers, tied):
    model, types = decoder_of(config_of(tied=tied, layers=layers)), Types(2, 2)
    work = GpuWork(200, completions=0)

    def held(strategy: str, processes: int) -> float:
        found = estimate_memory(model, types, RANK, work, sold_as(16), ModelSharing(strategy, processes))
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


def test_hardware_is_found_by_name_or_by_its_memory():
    for name in ("H100", "h100", "NVIDIA H100", "h100-sxm"):
        assert hardware_named(name) == HARDWARE["H100"]
    assert hardware_named("a100") == hardware_named("A100-80GB") == HARDWARE["A100 80GB"]
    assert hardware_named("A100 40GB") == HARDWARE["A100 40GB"]
    for gigabytes, like in ((32, "A100 40GB"), (200, "H200")):
        other = hardware_named(f"{gigabytes}GB")
        assert (other.name, other.memory) == (f"{gigabytes} GB", sold_as(gigabytes))
        assert other.source.startswith(f"memory as given, all else that of {like}")
        assert other.peak == HARDWARE[like].peak
    assert hardware_named("24") == hardware_named("24GB") == HARDWARE["L4"]
    assert hardware_named("rtx4090").name == "RTX 4090"
    assert hardware_named("CPU").on_cpu
    for name, said in (("H1000", r"no hardware 'H1000' \(did you mean H100"), ("0", "no GPU has 0 GB")):
        with pytest.raises(PerlError, match=said):
            hardware_named(name)
