"""What a reader runs to use an adapter: by PEFT, merged, served by vLLM.

CardFacts -> lines of Python and of a shell

They ask as training asked and draw as the scores were drawn: an adapter that is asked otherwise answers otherwise. A
test runs each of them.
"""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from perl.data.prompts import conversation
from perl.hub.card.card_facts import CardFacts, PromptFormat
from perl.methods.registry import METHODS
from perl.recipe.quantisations import QUANTISATIONS
from perl.sandbox import BASE_NAME, is_sandbox

UNKNOWN_PLACE = "path/to/this/folder"
_NEUTRAL = {"top_k": 0, "min_p": 0.0}
# Left as transformers and vLLM have it, these would come from the base's generation settings.
_ALWAYS = ("temperature", "top_p", "top_k", "repetition_penalty")


class _Unfilled(dict[str, str]):
    """Columns of the data that a template names stand as they are."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def place(facts: CardFacts) -> str:
    """What to write where the adapter is loaded from."""
    return facts.repo_id or UNKNOWN_PLACE


def served_name(facts: CardFacts) -> str:
    """What a server calls it."""
    plain = re.sub(r"[^\w.-]+", "-", (facts.repo_id or facts.name or "adapter").rpartition("/")[2]).strip("-.")
    return plain or "adapter"


def load_with_peft(facts: CardFacts) -> str:
    """Python: base, adapter, and an answer to a question."""
    revision = f", revision={_python(facts.revision)}" if facts.revision else ""
    dtype = _python(_dtype(facts) or "auto")
    sandbox = is_sandbox(facts.base)
    imported, folder = _sandbox_folder(facts.base)
    base = folder if sandbox else _python(facts.base)
    asked = _ask(facts.asking or PromptFormat())
    imports, config, quantised, argument = _quantised(facts)
    lines = [*([] if facts.whole else ["from peft import PeftModel"]), *imports]
    loader = facts.loader or "AutoModelForCausalLM"
    lines += [f"from transformers import {loader}, AutoTokenizer{config}", ""]
    if facts.whole:
        lines += [f"base = {_python(place(facts))}", "tokenizer = AutoTokenizer.from_pretrained(base)"]
        return "\n".join([*lines, f"model = {loader}.from_pretrained(base, dtype={dtype})", *asked])
    if sandbox:
        lines[-1:] = ["", f"from perl.sandbox import {imported}  # {facts.base} comes with perl-rl", ""]
    lines += [
        f"tokenizer = AutoTokenizer.from_pretrained({base}{revision})",
        *quantised,
        f"base = {loader}.from_pretrained({base}{revision}, dtype={dtype}{argument})",
        f"model = PeftModel.from_pretrained(base, {_python(place(facts))})",
        *asked,
    ]
    return "\n".join(lines)


def _sandbox_folder(base: str) -> tuple[str, str]:
    """What a reader imports for the folder of a sandbox model, and how it is written."""
    return ("BASE_FOLDER", "BASE_FOLDER") if base == BASE_NAME else ("model_folder", f"model_folder({_python(base)})")


def _dtype(facts: CardFacts) -> str | None:
    """In which type a reader loads the base: that of its scores, unless plain PEFT cannot compute in it."""
    method = METHODS.get(facts.method or "")
    if facts.quantization == "nf4" and method is not None and method.widens_nf4:
        return "float32"
    dtype = facts.results.engine.get("dtype") if facts.results else None
    return None if dtype is None else str(dtype)


def _quantised(facts: CardFacts) -> tuple[list[str], str, list[str], str]:
    """What a reader writes for a quantised base; nothing for another one.

    Returns:
        Imports on lines of their own, what is imported from transformers besides, the lines that say how the base is
        quantised, and the argument of ``from_pretrained``.
    """
    name = facts.quantization
    if name is None or name not in QUANTISATIONS:
        return [], "", [], ""
    argument, kind = f", quantization_config={name}", QUANTISATIONS[name].weight_only
    if kind:
        # The last argument leaves the reader's compiler, and how exact float32 is, alone.
        how = f"{name} = TorchAoConfig({kind}(set_inductor_config=False))  # the base that it was trained on"
        return [f"from torchao.quantization import {kind}"], ", TorchAoConfig", [how], argument
    lines = [
        "nf4 = BitsAndBytesConfig(  # the base that it was trained on",
        '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,',
        f"    bnb_4bit_compute_dtype={_python(_dtype(facts) or 'bfloat16')},",
        ")",
    ]
    return [], ", BitsAndBytesConfig", lines, argument


def merge_with_peft() -> str:
    """Python, after :func:`load_with_peft`: a model without an adapter."""
    return "\n".join(
        ["merged = model.merge_and_unload()", 'merged.save_pretrained("merged")', 'tokenizer.save_pretrained("merged")']
    )


def export_merged(facts: CardFacts) -> str:
    """Shell: the same, added up in float64 and compared."""
    return f"perl export {shlex.quote(place(facts))} --as merged -o merged"


def serve_with_vllm(facts: CardFacts) -> str:
    """Shell: a server; empty where it is not known how one takes it."""
    imported, folder = _sandbox_folder(facts.base)
    printed = f"\"$(python -c 'from perl.sandbox import {imported}; print({folder})')\""
    base = printed if is_sandbox(facts.base) else shlex.quote(facts.base)
    name, adapter = served_name(facts), shlex.quote(place(facts))
    if facts.whole:
        return f"vllm serve {adapter} --served-model-name {name}"
    if facts.serving is None:
        return ""
    if facts.serving.form == "merged":
        return f"{export_merged(facts)}\nvllm serve merged --served-model-name {name}"
    revision = f" --revision {shlex.quote(facts.revision)}" if facts.revision else ""
    lines = []
    if facts.serving.form == "lora":
        adapter = f"{name}-lora"
        lines.append(f"perl export {shlex.quote(place(facts))} --as lora -o {adapter}")
    options = f"--enable-lora --max-lora-rank {facts.serving.rank} --lora-modules {name}={adapter}"
    known = QUANTISATIONS.get(facts.quantization or "")  # a script's own way is that of bitsandbytes, as it has it
    others = {"--quantization": facts.quantised_by} if facts.quantization else {}
    served_as = known.served_as if known is not None else others
    quantised = "".join(f" {option} {shlex.quote(value)}" for option, value in served_as.items())
    return "\n".join([*lines, f"vllm serve {base}{revision}{quantised} {options}"])


def ask_server(facts: CardFacts) -> str:
    """Shell: the question of :func:`load_with_peft`, put to the server."""
    asking = facts.asking or PromptFormat()
    chat = asking.chat is not False
    body: dict[str, Any] = {"model": served_name(facts)}
    body["messages" if chat else "prompt"] = _prompt(asking)
    sampling = _sampling(asking.sampling)
    body |= {"max_tokens" if name == "max_new_tokens" else name: value for name, value in sampling.items()}
    if chat and asking.template_arguments:
        body["chat_template_kwargs"] = dict(asking.template_arguments)
    path = "chat/completions" if chat else "completions"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl http://localhost:8000/v1/{path} -H 'Content-Type: application/json' -d {data}"


def _ask(asking: PromptFormat) -> list[str]:
    if asking.chat is False:
        rendered = [f"prompt = {_python(_prompt(asking))}", 'inputs = tokenizer(prompt, return_tensors="pt")']
    else:
        further = f", **{dict(asking.template_arguments)!r}" if asking.template_arguments else ""
        rendered = [
            f"messages = {_python(_prompt(asking))}",
            "inputs = tokenizer.apply_chat_template(",
            f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{further}',
            ")",
        ]
    sampling = _sampling(asking.sampling)
    if sampling.get("temperature") == 0:
        sampling = {name: v for name, v in sampling.items() if name in ("repetition_penalty", "max_new_tokens")}
        arguments = ["do_sample=False"]
    else:
        arguments = ["do_sample=True"] if "temperature" in sampling else []
    arguments += [f"{name}={value!r}" for name, value in sampling.items()]
    return [
        "",
        *rendered,
        "output = model.generate(",
        f"    {', '.join(['**inputs.to(model.device)', *arguments])}",
        ")",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _sampling(settings: Mapping[str, float | int]) -> dict[str, float | int]:
    """Settings worth saying: those that a base may have its own values of, and others that do something."""
    return {name: value for name, value in settings.items() if name in _ALWAYS or value != _NEUTRAL.get(name, object())}


def _prompt(asking: PromptFormat) -> Any:  # noqa: ANN401 (a text, or messages)
    template, chat = asking.prompt_template or "{prompt}", asking.chat is not False
    questions = [*(shown.prompt for shown in asking.examples), asking.example]
    asked = [template.format_map(_Unfilled(prompt=question)) for question in questions]
    prompt = conversation(asked, [shown.answer for shown in asking.examples], chat=chat)
    return [{"role": "system", "content": asking.system_prompt}, *prompt] if chat and asking.system_prompt else prompt


def _python(value: object) -> str:
    """Text and lists of messages as Python, which is JSON here."""
    return json.dumps(value, ensure_ascii=False)
