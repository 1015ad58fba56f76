"""Stages of the GPU benchmark that measure a step, its memory and its kernels: run small on a CPU, figures by hand."""

from dataclasses import replace
from pathlib import Path

import compile_and_fuse
import pytest
import torch
from gpu_stages import fuse, memory, profile, step
from gpu_stages.setting import Setting
from gpu_stages.shapes import (
    SHAPES,
    Roof,
    flops_per_token_of_prime_rl,
    measure_masked_attention,
    measure_roof,
    one_row,
    reasoning,
    scale_of,
    stated_peak,
)
from step_cases import draw_rollouts, make_base
from step_flops import Group, ideal_flops, model_size
from step_turns import RANK, adapter_of, make_trainer, take_turn, tokens_of
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from perl.packing import forward as scoring
from perl.policy import guards
from perl.trainer.callbacks import adapter as adapter_callback

CPU = torch.device("cpu")


def taken(stage, folder: Path, *done: str) -> dict[str, dict]:
    """The rows of a stage without some of its cases, by name."""
    rows = list(stage.measure(Setting(CPU, tiny=True, done=frozenset(done), folder=folder, seconds=600.0)))
    assert [row for row in rows if "error" in row] == []
    by_case = {row["case"]: row for row in rows}
    assert len(by_case) == len(rows)
    assert not by_case.keys() & set(done)
    printed = stage.table([row for row in rows if "skipped" not in row])
    assert printed.count("\n") >= len(rows) - 2
    return by_case


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_measured_beside_trl_and_for_rows_of_one_length(tmp_path):
    rows = taken(step, tmp_path, "Qwen3-4B row 16384", "Qwen3-0.6B row 65536", "Qwen3-4B row 65536")
    assert rows.keys() == {
        "roof",
        "Qwen3-0.6B row 16384",
        "Qwen3-0.6B row 16384 kept",
        "Qwen2.5-1.5B reasoning",
        "Qwen2.5-1.5B beside TRL",
    }
    row, kept = rows["Qwen3-0.6B row 16384"], rows["Qwen3-0.6B row 16384 kept"]
    for one, recompute in ((row, True), (kept, False)):
        assert (one["passes"], one["recompute"]) == (2, recompute)
        assert one["tokens_per_second"] == pytest.approx(2 * one["row_tokens"] / one["step_seconds"])
        assert 0 < one["mfu"] < 1
        assert 0 < one["mfu_prime_rl"] < 1
    beside = rows["Qwen2.5-1.5B beside TRL"]
    ours, theirs = beside["trainers"]["perl"], beside["trainers"]["TRL"]
    assert 0 < beside["difference"] < 0.05  # bfloat16
    assert beside["ratio"] == pytest.approx(theirs["step_seconds"] / ours["step_seconds"])
    assert ours["tokens"] == theirs["tokens"]
    assert theirs["recompute"]
    assert beside["trl_seconds_estimated"] > 30
    for one in (row, kept, ours, rows["Qwen2.5-1.5B reasoning"]):
        assert (one["packed"], one["shared"], one["why_not"]) == (True, True, "")
    assert all("attention" in name for one in (row, ours, theirs) for name in one["attention"])
    assert all(one["ok"] for name, one in rows.items() if name != "roof")
    printed = step.table(list(rows.values()))
    assert printed.count("packed, prompts shared; attention _scaled_dot_product") == 4
    assert printed.count("    padded; attention") == 1
    whole = rows["Qwen2.5-1.5B reasoning"]["tokens"]
    assert whole["live"] < whole["real"] < whole["padded"]
    share = whole["padded"] / ours["tokens"]["padded"]
    assert beside["trl_seconds_of_all_at_least"] == pytest.approx(theirs["step_seconds"] * share)


def test_where_trl_runs_out_of_memory_fewer_rows_are_tried_and_then_the_case_is_left_out(tmp_path, monkeypatch):
    asked = []

    def out_of_memory(name, work, _, *, twice=True):
        asked.append((name, work.scale.rows, twice))
        if name == "TRL":
            raise torch.OutOfMemoryError("none left")
        return {}, {}

    monkeypatch.setattr(step, "step_of", out_of_memory)
    setting = Setting(CPU, tiny=True, done=frozenset(), folder=tmp_path, seconds=600.0)
    assert "TRL runs out of memory" in step.beside_trl(setting, Roof(None, 1e12, 1e11))["skipped"]
    # A step of each is compared, the first of its length: ours does not get a second attempt.
    assert asked == [("perl", 8, False), ("TRL", 4, False), ("TRL", 1, False)]


@pytest.mark.filterwarnings("ignore")
def test_a_step_whose_rows_were_padded_is_not_taken_for_one_that_was_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "use_packed_attention", lambda _: "no such layer")
    setting = Setting(CPU, tiny=True, done=frozenset(), folder=tmp_path, seconds=600.0)
    row = {"case": "case", **step.of_rows(setting, Roof(None, 1e12, 1e11), "Qwen3-0.6B", 16_384)}
    assert (row["packed"], row["why_not"], row["ok"]) == (False, "no such layer", False)
    assert "PADDED, prompts not shared: no such layer; attention" in step.table([row])


@pytest.mark.filterwarnings("ignore")
def test_trainers_of_benchmarks_do_not_hash_the_base_and_a_watch_ends_with_a_step_that_fails(tmp_path, monkeypatch):
    for module in (adapter_callback, guards):
        monkeypatch.setattr(module, "base_fingerprint", lambda _: pytest.fail("the base was hashed"))
    monkeypatch.setattr(adapter_callback, "source_fingerprint", lambda _: pytest.fail("the base was hashed"))
    case = one_row(16, tiny=True)
    scale = replace(scale_of("Qwen3-0.6B", tiny=True, device=CPU), rows=case.generations)
    trainer, meter = make_trainer("perl", case, scale, draw_rollouts(case, 2), str(tmp_path))
    start = {name: parameter.detach().clone() for name, parameter in adapter_of(trainer).items()}
    take_turn(trainer, meter, start)
    meter.watch, meter.watched = profile.Traffic(), 1
    monkeypatch.setattr(profile, "kind_of", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_turn(trainer, meter, start)
    assert len(meter.seconds) == 1
    assert _get_current_dispatch_mode_stack() == []


def test_trl_gets_the_seconds_that_its_products_and_its_masked_attention_take(tmp_path):
    setting = Setting(CPU, tiny=True, done=frozenset(), folder=tmp_path, seconds=600.0)
    whole = step.reasoning_work(setting, 2)
    rows = [rollout.lengths for rollout in whole.rollouts]
    longest = max(group.prompt for group in rows) + max(max(group.completions) for group in rows)
    products = 2 * 3 * whole.size.block * 16 * longest  # forward, again, backward to the inputs
    attention = 2 * (2 + 2 + 5) * whole.size.attention * 16 * longest**2
    assert step.trl_seconds(whole, 2, Roof(None, 1e9, 1.0), 1e15) == pytest.approx(products / 0.25e9 + 30)
    assert step.trl_seconds(whole, 2, Roof(None, 1e18, 1.0), 1e9) == pytest.approx(attention / 1e9 + 30)
    assert measure_masked_attention(CPU, tiny=True) > 1e6


@pytest.mark.filterwarnings("ignore")
def test_passes_take_what_is_planned_and_a_step_recovers_from_too_little(tmp_path):
    rows = taken(memory, tmp_path)
    plans = [row for row in rows.values() if row.get("kind") == "plan"]
    assert len(plans) == 4
    for row in plans:
        assert row["ok"]
        assert row["peak_gib"] <= row["room_gib"]
        assert row["tokens"] >= row["row"]
    kept, again = (rows[f"Qwen3-0.6B pass 512 {how}"] for how in ("kept", "recomputed"))
    assert again["peak_gib"] < kept["peak_gib"]
    for row in (kept, again):
        assert 0.7 < row["ratio"] < 1.3
    halved, alone = rows["recovery"], rows["recovery one row"]
    assert halved["tokens_after"] < halved["tokens_before"]
    assert not halved["recompute_after"]
    assert alone["recompute_after"]
    for row in (halved, alone):
        assert row["ok"]
        assert row["difference"] <= 1e-5
    assert "skipped" in rows["fragmentation"]
    assert "skipped" in rows["fragmentation expandable"]


@pytest.mark.parametrize("times", [0.5, 1.0, 1.25])
def test_a_pass_that_fits_but_is_not_what_was_planned_is_found(tmp_path, monkeypatch, times):
    right = memory.peak_of_pass
    monkeypatch.setattr(memory, "peak_of_pass", lambda *given, **options: times * right(*given, **options))
    setting = Setting(CPU, tiny=True, done=frozenset(), folder=tmp_path, seconds=600.0)
    row = memory.of_plan(setting, "Qwen3-0.6B", 24 / 1024, 256)
    policy = memory.policy_of(setting, "Qwen3-0.6B", 256)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    room = 24 * 2**20 - weights - 12 * trained  # of 24 MiB; gradient and both moments of Adam in float32
    assert row["room_gib"] * 2**30 == pytest.approx(room, rel=1e-9)
    assert row["ratio"] == pytest.approx(row["peak_gib"] / row["predicted_gib"])
    assert row["peak_gib"] <= row["room_gib"]
    assert row["ok"] is (times == 1.0)


@pytest.mark.filterwarnings("ignore")
def test_a_profile_says_where_the_time_of_a_step_goes(tmp_path):
    (row,) = taken(profile, tmp_path, "Qwen2.5-1.5B reasoning").values()
    kinds = row["kinds"]
    assert {"matmul", "attention", "copies", "norm, rope, elementwise", "idle"} <= kinds.keys()
    assert sum(kind["seconds"] for name, kind in kinds.items() if name != "idle") >= row["busy_seconds"]
    assert kinds["matmul"]["flops"] > kinds["attention"]["flops"] > 0
    assert kinds["copies"]["bytes"] > 0
    assert row["roof_seconds"] == pytest.approx(sum(kind["roof_seconds"] for kind in kinds.values()))
    assert 0 < row["of_roof"] < 1
    # What is counted of products is what the trainer runs: between the least and thrice it.
    scale = scale_of("Qwen3-0.6B", tiny=True, device=CPU)
    size = model_size(make_base(one_row(48, tiny=True), scale, empty=True), RANK)
    least = ideal_flops(size, [Group(1, (47, 47))], with_reference=False)
    flops = sum(kind["flops"] for kind in kinds.values())
    assert 0.9 * least < flops < 3 * least


@pytest.mark.filterwarnings("ignore")
def test_a_profile_whose_counting_fails_keeps_its_times_and_kernels(tmp_path, monkeypatch):
    def broken():
        raise TypeError("no such formula")

    monkeypatch.setattr(profile, "counter", broken)
    (row,) = taken(profile, tmp_path, "Qwen2.5-1.5B reasoning").values()
    assert row["step_seconds"] > 0
    assert row["kinds"]["matmul"]["seconds"] > 0
    assert row["ok"] is False
    assert row["not_counted"] == "TypeError: no such formula"
    assert "no such formula" in row["log"][-1]
    assert "not counted: TypeError: no such formula" in profile.table([row])


@pytest.mark.filterwarnings("ignore")
def test_each_variant_is_a_row_of_its_own_and_one_that_fails_costs_no_other(tmp_path, monkeypatch):
    right = compile_and_fuse.run_pass

    def out_of_memory(policy, rows, shape):
        if policy.get_base_model() is made[-1]["compile"].get_base_model():
            raise torch.OutOfMemoryError("none left")
        return right(policy, rows, shape)

    made, make = [], compile_and_fuse.make_policies

    def kept(*given):
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(compile_and_fuse, "make_policies", kept)
    monkeypatch.setattr(compile_and_fuse, "run_pass", out_of_memory)
    setting = Setting(CPU, tiny=True, done=frozenset({"tiny float32, off"}), folder=tmp_path, seconds=600.0)
    rows = list(fuse.measure(setting))
    assert [row["case"].split(", ")[1] for row in rows] == ["compile", "fused head", "both"]
    assert "none left" in rows[0]["error"]
    assert all(row["ok"] and row["difference"] < 1e-5 and row["pass_seconds"] > 0 for row in rows[1:])
    assert rows[2]["graphs"] > 0
    assert fuse.table(rows[1:]).count("\n") == 2
    # One set of weights, whatever runs them.
    (policies,) = made
    own = [[parameter.data_ptr() for parameter in policy.parameters()] for policy in policies.values()]
    assert len(own) == 4
    assert all(other == own[0] for other in own)


def test_a_variant_with_another_gradient_is_found(monkeypatch):
    right, calls = compile_and_fuse.run_pass, []

    def wrong(*given):
        calls.append(given)
        seconds, gradient = right(*given)
        return seconds, gradient * (1.0 if len(calls) <= compile_and_fuse.WARM_UP else 1.01)

    monkeypatch.setattr(compile_and_fuse, "run_pass", wrong)
    (shape,) = compile_and_fuse.shapes(CPU, tiny=True)
    policies = compile_and_fuse.make_policies(shape, CPU)
    row = compile_and_fuse.measure_variant("fused head", shape, lambda: policies)
    assert row["difference"] == pytest.approx(0.01, rel=1e-3)
    assert not row["ok"]


@pytest.mark.parametrize(
    ("name", "block", "head", "adapter"),
    [
        # Of a layer: q and o, k and v, gate, up and down.
        ("Qwen2.5-1.5B", 28 * (2 * 1536**2 + 2 * 1536 * 256 + 3 * 1536 * 8960), 1536 * 151_936, 18_464_768),
        ("Qwen3-0.6B", 28 * (2 * 1024 * 2048 + 2 * 1024**2 + 3 * 1024 * 3072), 1024 * 151_936, 10_092_544),
        ("Qwen3-4B", 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728), 2560 * 151_936, 33_030_144),
    ],
)
def test_the_shapes_are_those_of_the_models_of_that_name(name, block, head, adapter):
    scale = scale_of(name, tiny=False, device=CPU)
    base = make_base(one_row(16_384, tiny=False), scale, empty=True)
    size = model_size(base, RANK)
    assert (size.block, size.head, size.adapter) == (block, head, adapter)
    known = {"Qwen2.5-1.5B": 1.54e9, "Qwen3-0.6B": 0.596e9, "Qwen3-4B": 4.02e9}[name]
    assert sum(parameter.numel() for parameter in base.parameters()) == pytest.approx(known, rel=0.005)


@pytest.mark.parametrize(("model", "tokens"), list(step.PUBLISHED))
def test_mfu_as_prime_rl_counts_it_is_what_it_published_beside_its_speeds(model, tokens):
    published = step.PUBLISHED[model, tokens]
    _, width, shape = SHAPES[model]
    base = make_base(one_row(tokens, tiny=False), scale_of(model, tiny=False, device=CPU), empty=True)
    count = flops_per_token_of_prime_rl(
        model_size(base, RANK), layers=shape["num_hidden_layers"], width=width, tokens=tokens
    )
    found = count * published["tokens_per_second"] / stated_peak("NVIDIA H100 80GB HBM3")
    if published["mfu_prime_rl"] is None:
        assert found == pytest.approx(0.109, abs=0.001)  # by hand: 8.08e9 x 13340 / 989e12
    else:
        assert found == pytest.approx(published["mfu_prime_rl"], abs=0.001)


def test_the_least_that_a_row_needs_is_what_was_worked_out_by_hand():
    base = make_base(one_row(16_384, tiny=False), scale_of("Qwen3-0.6B", tiny=False, device=CPU), empty=True)
    size = model_size(base, RANK)
    block, adapter, head, tokens = 440_401_920, 10_092_544, 155_582_464, 16_384
    first = 1024 * (2048 + 1024 + 1024) + 16 * 3 * 1024  # q, k and v of the first layer, and their A
    pairs = 1 + sum(range(2, tokens + 1))
    expected = (
        (4 * block + 6 * adapter - 2 * first) * tokens
        + 4 * head * (tokens - 1)
        + 3 * 4 * 28 * 2048 * pairs  # queries of 16 heads of 128
    )
    assert ideal_flops(size, [Group(1, (tokens - 1,))], with_reference=False) == expected
    # One H100 at the published speed: 13 340 tokens/s, of which a row takes 1.23 s
    assert expected / (tokens / 13_340) / 989e12 == pytest.approx(0.108, abs=0.01)


def test_peaks_are_known_by_the_names_of_drivers():
    assert stated_peak("NVIDIA H100 80GB HBM3") == stated_peak("NVIDIA H200") == 989e12
    assert stated_peak("NVIDIA H100 PCIe") == 756e12
    assert stated_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert stated_peak("NVIDIA L4") == 121e12
    assert stated_peak("NVIDIA L40S") == 362e12
    assert stated_peak("NVIDIA L40") == 181e12
    assert stated_peak("NVIDIA H200 NVL") == stated_peak("NVIDIA H100 NVL") == 835e12
    assert stated_peak("NVIDIA GH200 480GB") is None
    assert stated_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None  # a seventh of it
    assert stated_peak("Tesla T4") == 65e12
    assert stated_peak("NVIDIA GeForce RTX 4090") is None
    assert Roof(None, 5e13, 1e12).peak == 5e13
    assert Roof(989e12, 8e14, 3e12).peak == 989e12
    assert measure_roof(CPU, tiny=True).flops > 1e7


def test_the_batches_of_a_gpu_are_as_long_as_is_said():
    rollouts = draw_rollouts(reasoning(tiny=False), 16)
    lengths = torch.tensor([len(completion) for rollout in rollouts for completion in rollout.completions]).float()
    assert len(lengths) == 128
    assert lengths.mean().item() == pytest.approx(3000, rel=0.2)
    assert lengths.max() <= 16_384
    assert sum(not rollout.lengths.live for rollout in rollouts) == 6  # 40 % of 16
    tokens = tokens_of([rollout.lengths for rollout in rollouts], 16, with_reference=False)
    assert tokens["padded"] > 3 * tokens["real"]
    # Those of compiled layers and fused heads fit a GPU with all activations kept.
    (shape,) = compile_and_fuse.shapes(torch.device("cuda"), tiny=False)
    seeds = range(compile_and_fuse.WARM_UP + shape.batches)
    longest = max(sum(row.tokens for row in compile_and_fuse.draw_rows(shape, CPU, seed)) for seed in seeds)
    assert 8000 < longest < 16_000


KERNELS = {
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matmul",
    "aten::addmm": "matmul",
    "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>": "attention",
    "fmha_cutlassB_bf16_aligned_128x64_k128_seqaligned_sm80": "attention",
    "torch_attn::_varlen_attn": "attention",
    "_forward_kernel": "head",
    "_backward_kernel": "head",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copies",
    "void at::native::vectorized_elementwise_kernel<4, MulFunctor>": "norm, rope, elementwise",
    "void at::native::reduce_kernel<512, 1, MeanOps>": "norm, rope, elementwise",
    "aten::silu": "norm, rope, elementwise",
    "somebodys_kernel": "other",
}


def test_kernels_are_put_where_they_belong():
    assert {name: profile.kind_of(name) for name in KERNELS} == KERNELS


def test_a_profile_of_known_kernels_is_what_was_worked_out_by_hand():
    kernels = [("gemm", 0.0, 2.0), ("gemm", 1.0, 3.0), ("flash", 4.0, 5.0), ("memcpy", 9.0, 9.5)]
    assert profile.busy((begin, end) for _, begin, end in kernels) == 3 + 1 + 0.5
    row = profile.summary(
        10.0, kernels, {"matmul": 300, "attention": 10}, {"matmul": 50, "copies": 20}, Roof(None, 100.0, 40.0)
    )
    seconds = {name: kind["seconds"] for name, kind in row["kinds"].items()}
    assert seconds == {"idle": 5.5, "matmul": 4.0, "attention": 1.0, "copies": 0.5}
    assert row["kinds"]["idle"]["share"] == 0.55
    # 300 / 100 and 50 / 40: the larger; 10 / 100; 20 / 40
    assert row["roof_seconds"] == pytest.approx(3.0 + 0.1 + 0.5)
    assert row["of_roof"] == pytest.approx(0.36)
    assert row["kernels"][0] == {"name": "gemm", "seconds": 4.0, "count": 2}


def test_traffic_is_what_operations_read_and_write():
    left, right = torch.ones(10, 20), torch.ones(20, 30)
    with profile.Traffic() as traffic:
        product = left @ right
        product.view(-1)
        product.transpose(0, 1)
        product * 2
        torch.mm(left, right, out=product)  # is written once
    assert traffic.bytes == {
        "matmul": 2 * 4 * (200 + 600 + 300),
        "norm, rope, elementwise": 4 * (300 + 300),
    }
