"""Checkpoints that also see, trained on text: names, numbers and files are those of the whole that was published."""

import numpy
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.data import load_problem_set
from perl.errors import DataError
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.export import export
from perl.policy.fingerprint import source_fingerprint
from perl.policy.model import base_identity, load_base, load_empty_base, load_tokenizer
from perl.policy.multimodal import auto_class, dropped_towers, loader_of, towers
from perl.policy.published import check_published
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe.sections import DataSection, ModelSection, PeftSection
from tests.packing.families import MULTIMODAL, make, make_multimodal

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 12, 30, 7, 8], [44, 3, 4, 5, 40, 17]])


@pytest.fixture(scope="module", params=MULTIMODAL)
def published(request, tmp_path_factory):
    """A checkpoint with the sandbox's tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("published") / request.param, load_tokenizer(ModelSection())
    model = make_multimodal(
        request.param, len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def whole(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_base_is_loaded_without_its_towers_and_is_the_one_that_was_published(published):
    section, everything = ModelSection(name=str(published)), whole(published)
    base, empty = load_base(section, CPU), load_empty_base(section)
    assert auto_class(everything.config) is transformers.AutoModelForImageTextToText
    assert loader_of(base) == loader_of(everything) == "AutoModelForImageTextToText"
    assert towers(everything) == dropped_towers(base) == dropped_towers(empty)
    assert towers(base) == towers(empty) == []
    held = {name for name, _ in everything.named_parameters() if not name.startswith(tuple(towers(everything)))}
    assert {name for name, _ in base.named_parameters()} == {name for name, _ in empty.named_parameters()} == held
    with torch.no_grad():
        assert torch.equal(base(input_ids=IDS).logits, everything(input_ids=IDS).logits)
    assert source_fingerprint(base) == source_fingerprint(everything)


@pytest.mark.parametrize("held", [False, True])
def test_an_adapter_is_on_the_language_model_under_published_names_and_plain_peft_loads_it(published, held, tmp_path):
    section = ModelSection(name=str(published))
    base = load_base(section, CPU, with_towers=held)
    assert bool(towers(base)) == held
    policy = attach_adapter(base, adaptation(PeftSection(method="lora", rank=2)))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".language_model." in name for name in trained)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
        expected = policy(input_ids=IDS).logits
    write_adapter(policy, tmp_path / "adapter", *base_identity(policy), source_fingerprint(policy))
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    assert layers <= {name for name, _ in whole(published).named_modules()}
    by_peft = PeftModel.from_pretrained(whole(published), tmp_path / "adapter")
    assert not [name for name, _ in by_peft.named_parameters() if "lora_" in name and ".language_model." not in name]
    again = continue_adapter(load_base(section, CPU), find_adapter(str(tmp_path / "adapter")))
    with torch.no_grad():
        for one in (by_peft, again.eval()):
            torch.testing.assert_close(one(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
    done = export(tmp_path / "adapter", "merged", tmp_path / "merged", base=str(published))
    merged, before = load_file(done.path / "model.safetensors"), load_file(published / "model.safetensors")
    assert merged.keys() == before.keys()
    whole_before, whole_after = (dict(whole(place).named_parameters()) for place in (published, done.path))
    changed = {name for name, p in whole_after.items() if not torch.equal(p, whole_before[name])}
    assert changed == {f"{layer}.weight" for layer in layers}


def few_digits(completions, **_):
    texts = [one if isinstance(one, str) else str(one[0]["content"]) for one in completions]
    return [sum(character.isdigit() for character in text) / 8 for text in texts]


def processor(folder):
    """One that reads images, of Pillow alone."""
    pil = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    special = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=special)
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}"
        "{{ '<begin>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    images = pil.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=4)
    return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def trainer_on(rows, tmp_path, model=None, **given):
    reads = processor(load_tokenizer(ModelSection()).name_or_path)
    model = make_multimodal("Gemma3", len(reads.tokenizer)) if model is None else model(len(reads.tokenizer))
    model.config.image_token_id = model.config.image_token_index = reads.tokenizer.image_token_id
    args = PeftRLConfig(
        str(tmp_path), peft_method="lora", max_steps=1, per_device_train_batch_size=8, num_generations=4, use_cpu=True
    )
    args.max_completion_length, args.learning_rate, args.report_to = 8, 1e-3, []
    data = Dataset.from_list(rows)
    return PeftGRPOTrainer(model, few_digits, args=args, train_dataset=data, processing_class=reads, **given)


@pytest.mark.parametrize("holds", ["text", "images"])
def test_a_script_trains_text_by_our_step_and_images_by_trls_and_says_so(holds, tmp_path, caplog):
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(4)]
    if holds == "images":
        image = numpy.arange(28 * 28 * 3, dtype=numpy.uint8).reshape(28, 28, 3)
        rows = [{**row, "images": [Image.fromarray(image)]} for row in rows]
    with caplog.at_level("WARNING"):
        trainer = trainer_on(rows, tmp_path)
    assert trainer._is_vlm
    assert trainer.step_is_ours == (holds == "text")
    assert ("TRL's own step" in caplog.text) == (holds == "images")
    trainer.train()
    moved = [p for name, p in trainer.policy.named_parameters() if "lora_B" in name and p.abs().max() > 0]
    assert moved
    assert not [n for n, p in trainer.policy.named_parameters() if p.requires_grad and ".language_model." not in n]


def test_an_adapter_that_a_script_put_on_the_tower_is_frozen_there_and_that_is_said(tmp_path, caplog):
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(4)]
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with caplog.at_level("WARNING"):
        trainer = trainer_on(rows, tmp_path, lambda size: get_peft_model(make_multimodal("Gemma3", size), config))
    assert "2 tensors of the adapter are on model.vision_tower" in caplog.text
    trained = [name for name, p in trainer.policy.named_parameters() if p.requires_grad]
    assert trained
    assert all(".language_model." in name for name in trained)


@pytest.mark.parametrize("make", [lambda: make_multimodal("Gemma4"), lambda: make("Qwen3Moe")])
def test_a_quantised_base_whose_parts_transformers_renames_or_joins_is_the_published_one(make, tmp_path):
    pytest.importorskip("torchao")
    make().save_pretrained(tmp_path)
    model = load_base(ModelSection(name=str(tmp_path), dtype="bfloat16", quantization="int8"), CPU)
    assert check_published(model, loaded_here=True) == ""
    whole = load_base(ModelSection(name=str(tmp_path), dtype="bfloat16", quantization="int8"), CPU, with_towers=True)
    plain = load_base(ModelSection(name=str(tmp_path), dtype="bfloat16"), CPU)
    assert source_fingerprint(whole) == source_fingerprint(model) == source_fingerprint(plain)


def test_a_recipe_refuses_images_in_one_line(tmp_path):
    cell, columns = {"bytes": b"x", "path": None}, {"prompt": "prompt", "answer": "solution"}
    Dataset.from_list([{"prompt": "What is it?", "solution": "3", "images": [cell]}]).to_parquet(
        tmp_path / "seen.parquet"
    )
    section = DataSection.model_validate({"train": {"name": str(tmp_path / "seen.parquet"), "columns": columns}})
    with pytest.raises(DataError, match=r"has images \(images\), and a recipe asks with text"):
        load_problem_set(section, chat=False)
    rows = Dataset.from_list([{"prompt": "What is it?", "solution": "3", "images": "a word"}])  # a column of text
    rows.to_parquet(tmp_path / "text.parquet")
    section = DataSection.model_validate({"train": {"name": str(tmp_path / "text.parquet"), "columns": columns}})
    assert len(load_problem_set(section, chat=False).train) == 1
