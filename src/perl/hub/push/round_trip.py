"""Whether the files that will be published are the adapter that was trained, loaded as others load it.

staged folder, a base loaded anew -> largest difference of a log-probability, or an error
"""

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from perl.errors import BrokenPromiseError, ModelError, PerlError
from perl.hub.card.candidate import RunAdapter, source_of_run
from perl.policy.attach import without_harmless_warnings
from perl.policy.fingerprint import is_the_base
from perl.policy.guards import RELOAD_TOLERANCE
from perl.policy.model import load_base
from perl.policy.precision import in_float32
from perl.policy.probe import read_probe
from perl.policy.reference import token_log_probs
from perl.policy.saved.adapter import BASE_DTYPE, WEIGHTS
from perl.recipe.sections import ModelSection
from perl.sandbox import is_sandbox

# Types in which a base may be loaded to compare with the run's.
_LOADED_AS = ("float32", "bfloat16", "float16")
# Tokens of a random text, for an adapter whose policy left no probe.
_TEXT = (2, 32)


def check_round_trip(candidate: RunAdapter, staged: Path, device: torch.device) -> float | None:
    """Loads what is staged as others will, and compares it with what was trained.

    Args:
        candidate: What it should be.
        staged: Folder with the adapter's config and weights.
        device: To compute on.

    Returns:
        Largest difference of any token's log-probability from the trained policy's, in nats; None for an adapter other
        than the run's final one, of whose policy there is no probe.

    Raises:
        PerlError: The base cannot be loaded, or is not the one that the adapter was trained on.
        BrokenPromiseError: What is staged is not the trained adapter.
    """
    run, facts = candidate.run, candidate.run.facts
    with safe_open(staged / WEIGHTS, framework="pt") as file:
        dtype = (file.metadata() or {}).get(BASE_DTYPE)
    # The run's base as it was: its commit, and the type of its numbers.
    section, changes = candidate.recipe.model if candidate.recipe else ModelSection(), {}
    if facts.get("revision") and not is_sandbox(section.name) and not Path(section.name).expanduser().is_dir():
        changes["revision"] = facts["revision"]
    if section.dtype == "auto" and dtype in _LOADED_AS:
        changes["dtype"] = dtype
    base, source = load_base(section.model_copy(update=changes), device), source_of_run(run)
    if source is not None and not is_the_base(base, source, dtype):
        hint = "its revision on the Hub, or the folder, has changed"
        raise PerlError(f"the base {facts.get('base')} is not the one it was trained on", str(run.path), hint)
    ours = facts.get("fingerprint", {}).get("adapter") == candidate.sha256
    probe = read_probe(run.path) if ours else None
    if probe is None:  # any tokens
        vocabulary = base.get_input_embeddings().weight.shape[0]
        ids_BT = torch.randint(vocabulary, _TEXT, generator=torch.Generator().manual_seed(0)).to(device)
    else:
        ids_BT = probe.input_ids_BT.to(device)
    mask_BT = torch.ones_like(ids_BT)
    with in_float32(base):  # as the probe was computed, so that rounding is no difference
        plain_BT = token_log_probs(base, ids_BT, mask_BT)
    with without_harmless_warnings():
        policy = PeftModel.from_pretrained(base, str(staged)).eval()
    with in_float32(policy):
        adapted_BT = token_log_probs(policy, ids_BT, mask_BT)
    _check_tensors(policy, staged, candidate.folder)
    if not bool(adapted_BT.isfinite().all()):
        raise BrokenPromiseError("the adapter's log-probabilities are non-finite", str(candidate.folder))
    if probe is None:
        if torch.equal(plain_BT, adapted_BT):
            raise BrokenPromiseError("the adapter changes nothing of its base", str(candidate.folder))
        return None
    difference = probe.difference(adapted_BT)
    if not difference <= RELOAD_TOLERANCE:
        raise BrokenPromiseError(
            f"loaded anew, its log-probabilities differ from the trained policy's by {difference:.2e} nats (at most "
            f"{RELOAD_TOLERANCE:.0e})",
            str(candidate.folder),
        )
    return difference


def check_files(folder: Path) -> None:
    """Whether a saved adapter can be one at all, without loading its base.

    Raises:
        ModelError: It cannot be read.
        BrokenPromiseError: Its tensors are not numbers.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot be read: {error}", str(folder / WEIGHTS)) from None
    wrong = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise BrokenPromiseError(f"the adapter holds non-finite numbers: {wrong[0]}", str(folder))


def _check_tensors(policy: PeftModel, staged: Path, trained: Path) -> None:
    """What was loaded is what was saved, bit for bit, and all of it.

    Raises:
        BrokenPromiseError: It is not.
    """
    wanted, there = load_file(trained / WEIGHTS), load_file(staged / WEIGHTS)
    if wanted.keys() != there.keys() or not all(torch.equal(wanted[name], there[name]) for name in wanted):
        raise BrokenPromiseError("what would be published are other tensors than the run's", str(trained))
    with without_harmless_warnings():
        loaded = get_peft_model_state_dict(policy, save_embedding_layers=False)
    lost = sorted(wanted.keys() - loaded.keys())
    if lost:
        raise BrokenPromiseError(f"PEFT does not load {len(lost)} of its tensors: {', '.join(lost[:3])}", str(trained))
    unequal = [n for n, t in wanted.items() if not torch.equal(loaded[n].cpu().to(t.dtype), t)]
    if unequal:
        raise BrokenPromiseError(f"PEFT loads other numbers than were saved: {', '.join(unequal[:3])}", str(trained))
