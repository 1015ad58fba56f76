"""Attention over packed rows against a masked softmax by hand, and models that use it against themselves."""

import copy
import functools
import inspect
import math

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import perl.packing.attention
from perl.packing.attention import (
    PLAIN,
    KernelCall,
    Machine,
    Scores,
    kernel_call,
    packed_attention,
    register,
    use_packed_attention,
    why_by_segment,
)
from perl.packing.rows import Layout, Row, Segment, pack
from perl.packing.states import use_packed_states
from tests.packing.families import make as make_family

CPU = torch.device("cpu")
# A row alone, a prompt, three completions that see it (one of a single token), a token alone, a prompt and its row.
SHARED = Layout(
    (
        *(Segment(0, 5), Segment(5, 3), Segment(8, 4, prefixes=((5, 3),))),
        *(Segment(12, 1, prefixes=((5, 3),)), Segment(13, 2, prefixes=((5, 3),))),
        *(Segment(15, 1), Segment(16, 1), Segment(17, 6, prefixes=((16, 1),))),
    ),
    CPU,
)
ALONE = Layout((Segment(0, 5), Segment(5, 1), Segment(6, 9), Segment(15, 8)), CPU)
# What all prompts begin with, the rest of a prompt, two of its completions, another prompt with its completion.
BEGUN = Layout(
    (
        *(Segment(0, 4), Segment(4, 3, prefixes=((0, 4),)), Segment(7, 5, prefixes=((0, 4), (4, 3)))),
        *(Segment(12, 2, prefixes=((0, 4), (4, 3))), Segment(14, 9, prefixes=((0, 4),))),
    ),
    CPU,
)
LENGTH = 23
LAYOUTS = {"alone": ALONE, "shared": SHARED, "begun alike": BEGUN}
VOCABULARY = 64
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
COMMON = {**TOKENS, **WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def naive(query, key, value, layout, how):
    """(1, L, H, D), one query at a time."""
    heads, length, width = query.shape[1:]
    key, value = (tensor.repeat_interleave(heads // key.size(1), dim=1)[0] for tensor in (key, value))
    scaling = 1 / math.sqrt(width) if how.scaling is None else how.scaling
    attended = []
    for place in range(length):
        segment = next(s for s in layout.segments if s.start <= place < s.start + s.length)
        seen = [at for start, count in segment.prefixes for at in range(start, start + count)]
        seen = [*seen, *range(segment.start, place + 1)][-(how.window or length) :]
        scores = torch.einsum("hd,hkd->hk", query[0, :, place], key[:, seen]) * scaling
        if how.softcap:
            scores = how.softcap * (scores / how.softcap).tanh()
        sink = 0.0 if how.sinks is None else how.sinks.exp()[:, None]
        weights = scores.exp() / (scores.exp().sum(dim=-1, keepdim=True) + sink)
        attended.append(torch.einsum("hk,hkd->hd", weights, value[:, seen]))
    return torch.stack(attended).unsqueeze(0)


def naive_kernel(  # noqa: PLR0913 (the kernel's signature)
    q, k, v, query_ends, key_ends, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """What the kernel's documentation says, in loops: causal, the last query of a segment with its last key."""
    left, right = window_size
    assert right == 0
    assert enable_gqa == (q.size(1) != k.size(1))
    assert query_ends.dtype == key_ends.dtype == torch.int32
    query_counts, key_counts = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert max_q == max(query_counts)
    assert max_k == max(key_counts)
    assert (query_ends[-1], key_ends[-1]) == (len(q), len(k))
    assert len(k) == len(v)
    k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), dim=1) for tensor in (k, v))
    scale = 1 / math.sqrt(q.size(2)) if scale is None else scale
    rows = []
    for segment, (queries, keys) in enumerate(zip(query_counts, key_counts, strict=True)):
        first = key_ends[segment].item()
        for i in range(queries):
            last = first + keys - queries + i
            seen = slice(first if left < 0 else max(first, last - left), last + 1)
            scores = torch.einsum("hd,khd->kh", q[query_ends[segment] + i], k[seen]) * scale
            rows.append(torch.einsum("kh,khd->hd", torch.softmax(scores, dim=0), v[seen]))
    return torch.stack(rows)


def naive_kernel_of_torch_2_11(  # noqa: PLR0913 (the kernel's signature)
    q, k, v, query_ends, key_ends, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    """Every head of its own: the documentation knows one number of heads."""
    assert q.size(1) == k.size(1) == v.size(1)
    return naive_kernel(q, k, v, query_ends, key_ends, max_q, max_k, scale=scale, window_size=window_size)


def inputs(heads: int, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads + groups)
    return [
        torch.randn(1, count, LENGTH, 6, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, groups, groups)
    ]


def results(attended: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    factors = torch.randn(attended.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [attended.detach(), *torch.autograd.grad((attended * factors).sum(), tensors)]


@pytest.mark.parametrize(
    "kernel",
    [None, naive_kernel, naive_kernel_of_torch_2_11],
    ids=["by segment", "by kernel", "by the kernel of torch 2.11"],
)
@pytest.mark.parametrize(
    ("groups", "scores"),
    [(4, Scores(0.9)), (2, Scores()), (1, Scores(0.9, window=3)), (2, Scores(window=2)), (2, Scores(window=6))],
)
@pytest.mark.parametrize("how", LAYOUTS)
def test_attention_is_a_softmax_over_what_a_token_sees_and_so_is_its_gradient(how, groups, scores, kernel, monkeypatch):
    tensors, layout = inputs(4, groups), LAYOUTS[how]
    if kernel is None:
        attended = packed_attention(*tensors, layout, scores)
    else:
        monkeypatch.setattr(perl.packing.attention, "varlen_attn", kernel)  # the real one needs a GPU
        call = kernel_call(inspect.signature(kernel))
        attended = perl.packing.attention._by_kernel(*tensors, layout, scores, call)
    expected = naive(*tensors, layout, scores)
    assert attended.shape == (1, LENGTH, 4, 6)
    for found, wanted in zip(results(attended, tensors), results(expected, tensors), strict=True):
        assert (found - wanted).norm() <= 1e-12 * wanted.norm()


COMMON_PARAMETERS = "query key value cu_seq_q cu_seq_k max_q max_k"
OPTIONS_OF_2_11 = "return_aux scale window_size"
# Read from torch/nn/attention/varlen.py of each wheel: what stands behind the star of varlen_attn.
OPTIONS = {
    "2.11.0": OPTIONS_OF_2_11,
    **dict.fromkeys(
        ("2.12.0", "2.13.0", "2.14.0", "2.15.0"), f"{OPTIONS_OF_2_11} enable_gqa seqused_k block_table num_splits"
    ),
}


def signature_with(options: str) -> inspect.Signature:
    kind = inspect.Parameter
    places = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in COMMON_PARAMETERS.split()]
    return inspect.Signature([*places, *(kind(name, kind.KEYWORD_ONLY, default=None) for name in options.split())])


@pytest.mark.parametrize("version", OPTIONS)
def test_the_kernel_of_each_torch_is_called_with_names_that_it_has(version):
    """The installed one is among them; one that cannot be called for causal attention is not called."""
    found = inspect.signature(perl.packing.attention.varlen_attn).parameters.values()
    options = " ".join(parameter.name for parameter in found if parameter.kind is inspect.Parameter.KEYWORD_ONLY)
    assert options in OPTIONS.values()
    signature = signature_with(OPTIONS[version])
    call = kernel_call(signature)
    assert call.grouped == (version != "2.11.0")
    for grouped in (False, True):
        bound = signature.bind(*range(7), **call.keywords(0.5, grouped))
        assert bound.arguments["window_size"] == (-1, 0)  # causal
        assert bound.arguments["scale"] == 0.5
        assert bound.arguments.get("enable_gqa", False) == (grouped and version != "2.11.0")
    for options in ("return_aux is_causal scale", "return_aux window_size"):
        assert kernel_call(signature_with(options)) is None


HOPPER = Machine("cuda", (9, 0), flash=True)
T4 = Machine("cuda", (7, 5), flash=True)
CALL = KernelCall(grouped=True)


def gpu(*capability: int, **options: bool) -> Machine:
    return Machine("cuda", capability, **{"flash": True, **options})


RUNS = [
    (gpu(*capability), dtype, (size, size), CALL)
    for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]  # from Ampere on
    for size in [8, 64, 80, 96, 128, 192, 256]
    for dtype in [torch.bfloat16, torch.float16]
]
SEGMENTS = [
    *((Machine(device), torch.bfloat16, (64, 64), CALL, device) for device in ("cpu", "mps", "xpu")),
    (HOPPER, torch.float32, (64, 64), CALL, "float32"),
    (HOPPER, torch.float64, (64, 64), CALL, "float64"),
    (gpu(9, 0, flash=False), torch.bfloat16, (64, 64), CALL, "without FlashAttention"),
    (HOPPER, torch.bfloat16, (64, 64), None, "unknown varlen_attn"),
    (HOPPER, torch.bfloat16, (192, 128), CALL, "heads of 192 with values of 128"),  # DeepSeek
    (HOPPER, torch.bfloat16, (36, 36), CALL, "multiple of 8"),
    (HOPPER, torch.bfloat16, (264, 264), CALL, "above 256"),
    (HOPPER, torch.bfloat16, (512, 512), CALL, "above 256"),
    (gpu(12, 0), torch.bfloat16, (224, 224), CALL, "shared memory"),
]


def test_the_kernel_runs_on_gpus_from_ampere_on_in_half_precision_and_segments_elsewhere_with_the_reason():
    rows = [*((*row, None) for row in RUNS), *SEGMENTS]
    found = [why_by_segment(machine, dtype, *sizes, call) for machine, dtype, sizes, call, _ in rows]
    wrong = [
        (row, why)
        for row, why in zip(rows, found, strict=True)
        if (why is None) != (row[-1] is None) or (row[-1] or "") not in (why or "")
    ]
    assert wrong == []


def refusing_kernel(*_, **__):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize(
    ("machine", "dtype", "size", "value_size", "grouped"),
    [
        *((T4, torch.bfloat16, 8, 8, False), (HOPPER, torch.bfloat16, 12, 8, False)),
        *((HOPPER, torch.bfloat16, 264, 264, False), (HOPPER, torch.float64, 8, 8, False)),
        *((T4, torch.float64, 6, 6, False), (Machine("cpu"), torch.float64, 8, 8, True)),
    ],
)
def test_where_the_kernel_does_not_fit_it_is_not_called_and_on_a_gpu_no_grouped_heads_reach_another(
    machine, dtype, size, value_size, grouped, monkeypatch
):
    """Which would keep all scores. Values and gradients are those of grouped heads."""
    monkeypatch.setattr(perl.packing.attention, "varlen_attn", refusing_kernel)
    monkeypatch.setattr(perl.packing.attention, "machine_of", lambda _: machine)
    real, asked = torch.nn.functional.scaled_dot_product_attention, []

    def recording(q, k, v, **options):
        asked.append((q.size(1) != k.size(1), options["enable_gqa"]))
        return real(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    generator = torch.Generator().manual_seed(0)
    shapes = (4, LENGTH, size), (2, LENGTH, size), (2, LENGTH, value_size)
    own = [torch.randn(1, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in own]
    found, expected = packed_attention(*own, SHARED), naive(*exact, SHARED, PLAIN)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert found.shape == (1, LENGTH, 4, value_size)
    assert set(asked) == {(grouped, grouped)}
    limit = 1e-12 if dtype == torch.float64 else 0.02  # bfloat16 has 8 bits
    for ours, theirs in ((found, expected), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))):
        assert (ours.double() - theirs).norm() <= limit * theirs.norm()


def test_where_the_kernel_fits_it_is_called(monkeypatch):
    monkeypatch.setattr(perl.packing.attention, "varlen_attn", refusing_kernel)
    monkeypatch.setattr(perl.packing.attention, "machine_of", lambda _: HOPPER)
    with pytest.raises(RuntimeError, match="Ampere"):
        packed_attention(*(torch.zeros(1, heads, LENGTH, 8).bfloat16() for heads in (4, 2, 2)), SHARED)


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "Gemma2", "GptOss", "Qwen3_5Text", "GraniteMoeHybrid"])
def test_generation_and_padded_passes_are_what_they_were_bit_for_bit(name):
    model = make_family(name).eval()
    before = copy.deepcopy(model)
    assert use_packed_attention(model) is None
    assert use_packed_attention(model) is None  # once more changes nothing
    use_packed_states(model)
    ids = torch.randint(2, VOCABULARY, (3, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    with torch.no_grad():
        for padding in (mask, mask.flip(1), None):
            assert torch.equal(model(ids, attention_mask=padding).logits, before(ids, attention_mask=padding).logits)
        ours, theirs = model.generate(ids, **options), before.generate(ids, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))


def packed_inputs(prompts: int = 2) -> dict:
    rows = []
    for length in range(3, 3 + prompts):
        prompt = torch.randint(2, VOCABULARY, (length,))
        rows += [Row(prompt, torch.randint(2, VOCABULARY, (c,)), torch.ones(c, dtype=torch.bool)) for c in (4, 6)]
    batch = pack(rows, [[0, 1], *([index] for index in range(2, len(rows)))])
    nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    arguments = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    return {**arguments, "attention_mask": nothing, "packed_layout": batch.layout}


@pytest.mark.parametrize(("name", "reentrant"), [("Qwen3", False), ("GPT2", True)])
def test_gradients_of_packed_passes_are_the_same_with_checkpointing(name, reentrant):
    model = make_family(name).train()
    assert use_packed_attention(model) is None
    batches = [packed_inputs(), packed_inputs(prompts=3)]
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        # Both passes before either backward pass: the layout is the pass's own, not the last one's.
        losses = [model(**batch).logits.sin().sum() for batch in batches]
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-6)


def test_an_attention_that_transformers_does_not_know_is_refused_and_stays():
    model = make_family("Qwen3")
    model.config._attn_implementation_internal = "of their own"
    assert "sdpa" in use_packed_attention(model)
    assert model.config._attn_implementation == "of their own"


def test_sdpa_takes_the_place_of_a_flash_attention_in_passes_that_are_not_packed():
    """transformers looks for a kernel of the name that a model is given, whenever there is "flash" in it."""
    model, ids = make_family("Qwen3"), torch.arange(6).unsqueeze(0)
    expected = model(input_ids=ids).logits
    model.config._attn_implementation_internal = "flash_attention_2"  # as a model that was loaded with it has it
    assert use_packed_attention(model) is None
    assert model.config._attn_implementation == "perl_packed_sdpa"
    assert torch.equal(model(input_ids=ids).logits, expected)
    capped = make_family("Gemma2")  # SDPA would leave its soft caps out
    expected = capped(input_ids=ids).logits
    capped.config._attn_implementation_internal = "flash_attention_2"
    assert use_packed_attention(capped) is None
    assert torch.equal(capped(input_ids=ids).logits, expected)


def test_what_packed_rows_do_not_have_is_refused_by_name():
    register("sdpa")
    attend = functools.partial(ALL_ATTENTION_FUNCTIONS["perl_packed_sdpa"], torch.nn.Module())
    tensors = [tensor.detach() for tensor in inputs(4, 2)]
    for name, value in {"position_bias": torch.zeros(1), "dropout": 0.1}.items():
        with pytest.raises(NotImplementedError, match=name):
            attend(*tensors, None, packed_layout=SHARED, **{name: value})
    plain = {"scaling": None, "softcap": None, "position_bias": None, "dropout": 0.0, "sliding_window": None}
    assert torch.equal(attend(*tensors, None, packed_layout=SHARED, **plain)[0], packed_attention(*tensors, SHARED))


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("how", LAYOUTS)
def test_soft_caps_and_sinks_are_those_of_a_softmax_by_hand_and_so_are_their_gradients(how, groups):
    tensors, layout = inputs(4, groups), LAYOUTS[how]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    for scores in (Scores(0.9, softcap=0.7), Scores(sinks=sinks), Scores(window=3, softcap=2.0, sinks=sinks)):
        trained = tensors if scores.sinks is None else [*tensors, sinks]
        found, expected = packed_attention(*tensors, layout, scores), naive(*tensors, layout, scores)
        for ours, by_hand in zip(results(found, trained), results(expected, trained), strict=True):
            torch.testing.assert_close(ours, by_hand, rtol=1e-11, atol=1e-12)
