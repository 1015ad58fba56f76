"""An adapter that a stranger made to harm, or that is broken, is refused in one line before any base is loaded."""

import copy
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from perl.cli.commands import run as run_command
from perl.errors import EXIT_USER_MISTAKE, ModelError, PerlError
from perl.policy.attach import attach_adapter, continue_adapter, shaped_saved_adapter
from perl.policy.model import load_empty_base
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe.sections import ModelSection
from tests.saved_adapters import clean_base, save_adapter

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HUGE = 10**9


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "adapter"
    save_adapter(folder)
    return folder


@pytest.fixture
def adapter(sound) -> Path:
    shutil.copytree(sound, "adapter")
    return Path("adapter")


@pytest.fixture(scope="module")
def base():
    """The base without weights; each trial gets a copy."""
    return load_empty_base(ModelSection())


@pytest.fixture
def spoilt(sound, adapter, base):
    """Tries a table: each row changes a sound adapter in place, and returned is the one line that refuses it."""

    def lines(changes) -> list[str]:
        found = []
        for change in changes:
            for file in sound.iterdir():
                shutil.copy2(file, adapter)
            change(adapter)
            found.append(refusal(base=base))
        return found

    return lines


def without_words(lines, words) -> list[tuple[str, str]]:
    """Pairs of a line and the word that it lacks."""
    return [(line, word) for line, word in zip(lines, words, strict=True) if word not in line]


def with_config(adapter: Path, **changes) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_text(adapter: Path, text: bytes) -> None:
    (adapter / "adapter_config.json").write_bytes(text)


def with_tensors(adapter: Path, **changes) -> None:
    """Other tensors in the file; None: left out. ``A`` stands for the first layer's lora_A."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file) | {A if name == "A" else name: tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def with_header(adapter: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    size = len(header) if length is None else length
    (adapter / "adapter_model.safetensors").write_bytes(size.to_bytes(8, "little") + header + data)


def accept(base=None) -> None:
    shaped_saved_adapter(copy.deepcopy(base or load_empty_base(ModelSection())), find_adapter("adapter"))


def refusal(base=None) -> str:
    """The one line with which it is refused while there are no weights of a base."""
    with pytest.raises(PerlError) as caught:
        accept(base)
    (line,) = str(caught.value).splitlines()
    assert line.isprintable()
    assert len(line) < 500
    return line


NAMES = [f"m{i}" for i in range(50_000)]
LISTS = {
    name: dict.fromkeys(NAMES, 1) if name == "rank_pattern" else NAMES
    for name in ("target_modules", "modules_to_save", "trainable_token_indices", "rank_pattern")
}
DEEP = (b"[" * 300_000, b'{"a":' * 100_000, b'{"peft_type": "LORA", "x":' + b"[" * 300_000)
MALFORMED = (
    (b"[1]", "is not a mapping"),
    (b"\xff\xfe\x00", "can't decode byte"),
    (b'{"peft_type": "EVIL"}', "PEFT has no type 'EVIL'"),
    (b'{"peft_type": ["LORA"]}', "PEFT has no type"),
    (b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}", "integer string conversion"),
    (b'{"peft_type": "LORA", "lora_alpha": 1e999}', "lora_alpha is inf, which is no number"),
    (b'{"peft_type": "LORA", "target_modules": ["\\u001b[2J"]}', "holds control characters"),
    (b'{"peft_type": "LORA", "\\nerror: none": 1}', "holds control characters"),
    (b'{"peft_type": "LORA", "base_model_name_or_path": 5}', "base_model_name_or_path is no name"),
)


CODE = (
    ({"auto_mapping": {"base_model_class": "X", "parent_library": "evil.code"}}, "auto_mapping names 'evil.code'"),
    ({"auto_mapping": {"parent_library": "transformers_evil"}}, "auto_mapping names 'transformers_evil'"),
    ({"trust_remote_code": True}, "trust_remote_code would run code"),
    ({"tokenizer_kwargs": {"trust_remote_code": 1}}, "tokenizer_kwargs.trust_remote_code would run code"),
    ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map would run code"),
    ({"loftq_config": {"_target_": "os.system"}}, "loftq_config._target_ would run code"),
    ({"megatron_core": "evil"}, "megatron_core would import a module"),
    ({"layer_replication": [[0, 4], [0, 4]]}, "layer_replication makes another base"),
)
HARMLESS = (
    {},
    {"auto_mapping": {"base_model_class": "X", "parent_library": "transformers.models.qwen3.modeling_qwen3"}},
    {"trust_remote_code": False},
    {"megatron_core": "megatron.core"},
    {"a_setting_of_a_later_peft": None},
)


def test_a_config_that_is_malformed_or_too_large_or_names_code_or_another_model_is_refused(spoilt):
    patterns = ("(", "a{99999999999}")
    unread = "peft.adapter: adapter cannot be read: "
    rows = [
        *((partial(with_text, text=text), unread, words) for text, words in MALFORMED),
        *((partial(with_config, target_modules=pattern), "peft.adapter: ", "in its config is no pattern: ")
          for pattern in patterns),
        *((partial(with_config, **changes), "", words) for changes, words in CODE),
        (partial(with_config, target_modules=["q_proj"] * 1_000_000), "", " bytes, at most 1,000,000 are read"),
        *((partial(with_config, **{name: value}), "", f"{name} has 50,000 entries, at most 4,000 are read")
          for name, value in LISTS.items()),
        *((partial(with_text, text=text), "", "adapter_config.json is nested too deeply") for text in DEEP),
    ]  # fmt: skip
    lines = spoilt(change for change, _, _ in rows)
    assert [line for line, (_, start, _) in zip(lines, rows, strict=True) if not line.startswith(start)] == []
    assert without_words(lines, [words for _, _, words in rows]) == []


def test_what_sound_and_published_adapters_hold_is_accepted(adapter, base, caplog):
    config, weights = (adapter / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    text, tensors = config.read_text(), weights.read_bytes()
    for changes in HARMLESS:
        with_config(adapter, **changes)
        accept(base)
        config.write_text(text)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with_tensors(adapter, A=torch.zeros(4, 128, dtype=dtype))
        accept(base)
        weights.write_bytes(tensors)
    caplog.clear()
    with_config(adapter, twice_as_good=True)  # a setting that this PEFT does not know is named
    find_adapter("adapter")
    said = "adapter_config.json: this version of PEFT does not know twice_as_good and ignores it [PRL330]"
    assert caplog.messages == [said]
    shutil.rmtree(adapter)
    as_people_write = r".*\.(?:self_attn|mlp)\.(?:q_proj|v_proj|down_proj)"
    config = LoraConfig(r=2, target_modules=as_people_write, rank_pattern={"q.*": 3})
    write_adapter(attach_adapter(clean_base(), config), adapter, "sandbox:base", None, None)
    accept()


def test_an_absurd_rank_is_refused_before_anything_is_built(sound):
    absurd = ({"r": -1}, {"rank_pattern": {"q_proj": HUGE}}, {"peft_type": "VBLORA", "num_vectors": HUGE})
    largest = max(max(tensor.shape) for tensor in load_file(sound / "adapter_model.safetensors").values())
    for i, changes in enumerate(absurd):
        shutil.copytree(sound, f"adapter{i}")
        with_config(Path(f"adapter{i}"), **changes)
        with pytest.raises(ModelError) as refused:
            find_adapter(f"adapter{i}")
        asked, side = re.search(
            r"asks for \S+ (\S+), the largest side of a tensor is (\d+)", str(refused.value)
        ).groups()
        assert int(asked.replace(",", "")) in (HUGE, -1)
        assert int(side) == largest


HEADERS = (
    (b"{}", b"", 2**63),
    (b"{}", b"", 40_000_000),
    (b"[" * 100_000, b"", None),
    (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
     b"\0" * 12, None),
    (b'{"a":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,8]}}', b"\0" * 8, None),
    (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8000000000]}}', b"\0" * 8, None),
    (b'{"a":{"dtype":"EVIL","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, None),
    (b'{"a\\u001b[2J":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, None),
)  # fmt: skip


def test_weights_with_a_malformed_header_or_of_a_type_that_weights_do_not_have_are_refused(spoilt):
    lines = spoilt(partial(with_header, header=header, data=data, length=size) for header, data, size in HEADERS)
    assert [line for line in lines if not line.startswith("peft.adapter: adapter cannot be read: ")] == []
    assert "the header of adapter_model.safetensors has 40,000,000 bytes, at most 32,000,000 are read" in lines[1]
    dtypes = (torch.int8, torch.float8_e4m3fn)
    lines = spoilt(partial(with_tensors, A=torch.zeros(4, 128).to(dtype)) for dtype in dtypes)
    assert without_words(lines, [f"{A} holds numbers of type"] * len(dtypes)) == []
    assert [line for line in lines if not line.endswith("an adapter's are F64, F32, F16, BF16")] == []


def test_weights_that_are_not_finite_are_counted_and_refused_before_a_base_is_loaded(adapter, base):
    sound = load_file(adapter / "adapter_model.safetensors")[A]
    for value, places in ((math.nan, [(1, 5)]), (-math.inf, [(2, 2), (2, 3), (1, 0)])):
        poisoned = sound.clone()
        for place in places:
            poisoned[place] = value
        with_tensors(adapter, A=poisoned)
        line = refusal(base)
        count, among = map(int, re.search(r"has weights that are not finite: (\d+) of (\d+) in", line).groups())
        assert count == poisoned.numel() - torch.isfinite(poisoned).sum()
        assert among == poisoned.shape[0] * poisoned.shape[1]
        assert line == f"peft.adapter: adapter has weights that are not finite: {len(places)} of 512 in {A}"
        with pytest.raises(ModelError, match="are not finite"):
            continue_adapter(clean_base(), find_adapter("adapter"))


def test_a_command_exits_with_2_and_one_line(adapter, sound, capsys):
    Path("recipe.yaml").write_text("peft: {adapter: adapter}\ndata: {train: sandbox:addition}\n")
    evaluated = ["eval", "--adapter", "adapter", "--tasks", "sandbox:addition", "--output", "out"]
    nan, code = partial(with_tensors, A=torch.full((4, 128), math.nan)), {"parent_library": "evil"}
    unread = "adapter cannot be read: adapter_config.json"
    for arguments, spoil, start in (
        (evaluated, nan, "--adapter: adapter has weights that are not finite: 512 of 512 in "),
        (evaluated, partial(with_config, auto_mapping=code), f"--adapter: {unread}: auto_mapping names 'evil'"),
        (["train", "recipe.yaml", "--output", "out"], partial(with_text, text=b"[" * 300_000),
         f"recipe.yaml:1: peft.adapter: {unread} is nested"),
    ):  # fmt: skip
        shutil.copytree(sound, adapter, dirs_exist_ok=True)
        spoil(adapter)
        assert run_command(arguments, "perl") == EXIT_USER_MISTAKE
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert (printed.out, line[: len(start) + 7]) == ("", f"error: {start}")
