"""Cards of adapters of every method: valid for us and for the Hub, and their snippets do what they say."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel

from perl.hub.card.card_facts import CardFacts, facts_from_files
from perl.hub.card.check import check_card
from perl.hub.card.published import card_mistakes
from perl.hub.card.render import render_card
from perl.hub.cards import find_card, write_card
from perl.policy.attach import without_harmless_warnings
from tests import warm
from tests.hub.card_runs import make_run, policy_of

# PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
IDS = torch.tensor([[7, 78, 8, 86]])
HUB_BASE = "owner/base-7b"
# One of each kind of update: of LoRA's, with magnitudes, of low rank otherwise, of full rank, sparse, of the weights.
METHODS = ("lora", "dora", "vera", "oft", "shira", "ia3")


def blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", card, re.DOTALL)


def on_the_hub(facts: CardFacts) -> CardFacts:
    """The same facts of an adapter whose base and data are on the Hub."""
    subject = {**facts.results.subject, "base": HUB_BASE}
    return replace(facts, base=HUB_BASE, dataset="someone/problems", results=replace(facts.results, subject=subject))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(IDS).logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("hub")
def test_the_card_of_every_method_is_valid_and_its_snippets_load_the_adapter(method, tmp_path, monkeypatch):
    policy = policy_of(method)
    run = make_run(tmp_path / "a-run", method, policy)
    write_card(run)
    found = find_card(str(run.path))
    checked = check_card(found.files, found.weights_sha256, found.counted)
    assert [str(p) for p in checked.mistakes] == []
    facts = facts_from_files(found.files)
    card = run.card.read_text()
    assert render_card(facts) == card
    for text in (card, render_card(on_the_hub(facts))):
        assert [str(p) for p in card_mistakes(text, found.files)] == []
        ModelCard(text).validate(repo_type="model")
        assert ModelCard(text).data.library_name == "peft"
    _run_python(card, run.adapter, policy, monkeypatch)


def _run_python(card: str, adapter: Path, policy: PeftModel, monkeypatch) -> None:
    load, merge = blocks(card, "python")
    names, said = {}, []
    monkeypatch.setattr("builtins.print", lambda *words: said.extend(words))
    with without_harmless_warnings():
        exec(load.replace("path/to/this/folder", str(adapter)), names)  # noqa: S102 (what a reader would do)
    monkeypatch.undo()
    assert len(said) == 1
    expected = logits(policy)
    with policy.disable_adapter():
        assert not torch.allclose(logits(policy), expected, atol=1e-2)
    torch.testing.assert_close(logits(names["model"]), expected, atol=1e-4, rtol=1e-4)
    monkeypatch.chdir(adapter.parent)
    exec(merge, names)  # noqa: S102
    torch.testing.assert_close(logits(names["merged"]), expected, atol=1e-3, rtol=1e-3)
    merged = names["AutoModelForCausalLM"].from_pretrained("merged", dtype="float32")
    torch.testing.assert_close(logits(merged), expected, atol=1e-3, rtol=1e-3)
    assert names["AutoTokenizer"].from_pretrained("merged").chat_template


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["hra", "oft"])
def test_the_commands_that_export_and_that_train_again_are_real(method, tmp_path, perl_command):
    run = make_run(tmp_path / "a-run", method)
    write_card(run)
    lines = "\n".join(blocks(run.card.read_text(), "bash")).splitlines()
    exports = [line for line in lines if line.startswith("perl export")]
    assert len(exports) == 2
    for line in dict.fromkeys(exports):
        arguments = [part.replace("path/to/this/folder", str(run.adapter)) for part in shlex.split(line)[1:]]
        command = [sys.executable, "-m", "perl", *arguments]
        done = warm.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert any(Path(arguments[-1]).glob("*.safetensors"))
        assert f"vllm serve {arguments[-1]} " in "\n".join(lines) or "=a-run-lora" in "\n".join(lines)
    (line,) = [line for line in run.card.read_text().splitlines() if line.startswith("perl train")]
    Path("perl_recipe.yaml").write_text((run.path / "recipe.yaml").read_text())
    done = perl_command(*shlex.split(line)[1:], "--dry-run")
    assert done.returncode == 0, done.stderr
