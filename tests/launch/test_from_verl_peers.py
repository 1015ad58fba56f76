"""Adapters of trainers that write PEFT's form by themselves go on here by ``peft.adapter``, from the very same numbers.

What each folder holds is assumed from the trainers' public sources, as they were read in November 2026:

* prime-rl (``PrimeIntellect-ai/prime-rl``: ``trainer/rl/broadcast/filesystem.py``, ``trainer/lora.py``
  ``save_lora_config``, ``trainer/weights.py``): ``broadcasts/step_N/{adapter_model.safetensors, adapter_config.json,
  STABLE}``. The config has nine keys, its base is ``config._name_or_path``, which may be empty or null; tensors are
  named ``base_model.model.<module>.lora_A.weight``. Weight checkpoints (``weights/step_N/lora_adapters``) hold pickles.
* AReaL (``inclusionAI/AReaL``: ``utils/saver.py``, ``engine/fsdp_engine.py`` ``_save_model_to_hf``):
  ``checkpoints/USER/EXPERIMENT/TRIAL/default/epochEepochstepSglobalstepG/``, written by ``PeftModel.save_pretrained``
  with the base's config and tokenizer beside; numbers in the base's type, bfloat16, and a path as the base's name.
  Its Megatron engine (``megatron_utils/megatron_lora.py`` ``save_hf_adapter``) writes float32, and a config of its own.
"""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from perl.errors import ModelError
from perl.policy.attach import adapter_tensors, continue_adapter
from perl.policy.model import load_base, load_tokenizer
from perl.policy.saved.adapter import CONFIG, WEIGHTS, find_adapter
from perl.recipe.sections import ModelSection

IDS = torch.randint(5, 60, (4, 24), generator=torch.Generator().manual_seed(3))
SECTION = ModelSection(name="sandbox:base")
ELSEWHERE = "/storage/models/Base"
RANK, ALPHA, TARGETS = 4, 8.0, ["gate_proj", "o_proj", "q_proj"]


def base():
    return load_base(SECTION, torch.device("cpu"))


def trained(dtype=torch.float32):
    """A LoRA with moved factors, of PEFT alone."""
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    policy = get_peft_model(base().to(dtype), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return policy


def by_prime_rl(root: Path, name: str | None) -> Path:
    folder = root / "run_default" / "broadcasts" / "step_20"
    folder.mkdir(parents=True)
    tensors = get_peft_model_state_dict(trained())
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": TARGETS,
        "modules_to_save": None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    (folder / "STABLE").touch()
    return folder


def by_areal(root: Path) -> Path:
    folder = root / "checkpoints" / "alice" / "math" / "trial0" / "default" / "epoch0epochstep19globalstep19"
    policy = trained(torch.bfloat16)
    policy.save_pretrained(folder, state_dict={name: t.detach().clone() for name, t in policy.state_dict().items()})
    config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": ELSEWHERE}
    (folder / CONFIG).write_text(json.dumps(config))
    policy.get_base_model().config.save_pretrained(folder)
    load_tokenizer(SECTION).save_pretrained(folder)
    return folder


def by_areal_on_megatron(root: Path) -> Path:
    folder = by_prime_rl(root, ELSEWHERE)
    config = json.loads((folder / CONFIG).read_text()) | {
        "inference_mode": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


WRITERS = {
    "prime-rl": lambda root: by_prime_rl(root, "sandbox:base"),
    "prime-rl without a base's name": lambda root: by_prime_rl(root, None),
    "prime-rl with an empty name": lambda root: by_prime_rl(root, ""),
    "AReaL, FSDP": by_areal,
    "AReaL, Megatron": by_areal_on_megatron,
}


def first_step(policy):
    """Logits of a batch, its loss, and the gradient of each factor."""
    logits = policy.eval()(IDS).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.item(), {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_the_first_step_here_begins_where_peft_has_it(tmp_path, write):
    folder = write(tmp_path)
    logits, loss, gradients = first_step(continue_adapter(base(), find_adapter(str(folder), "sandbox:base")))
    theirs = first_step(PeftModel.from_pretrained(base(), str(folder), is_trainable=True))
    torch.testing.assert_close(logits, theirs[0], rtol=0, atol=0)
    assert loss == pytest.approx(theirs[1], rel=1e-6)
    assert gradients.keys() == theirs[2].keys()
    assert len(gradients) == 2 * 4 * len(TARGETS)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[2][name], rtol=0, atol=0)
    with torch.no_grad():
        moved = (logits - base()(IDS).logits).abs().max().item()
    assert moved > 0.1  # the adapter does something


def test_a_pickle_is_refused_with_the_way_out(tmp_path):
    folder = by_prime_rl(tmp_path, None)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="its weights are pickles; save it again with PEFT"):
        find_adapter(str(folder))
