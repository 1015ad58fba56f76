"""Proofs at run time that the run is what it says.

model, optimizer, files -> nothing, or an error that says what broke
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from trl import GRPOConfig

from perl.errors import BrokenPromiseError, DataError, warn
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import evaluating
from perl.policy.precision import in_float32
from perl.policy.published import check_published, other_tensors
from perl.policy.quantised import checkpoint_files
from perl.policy.reference import Reference, random_tokens, reference_log_probs, token_log_probs
from perl.policy.save_adapter import reload_difference

# Largest difference of a token's log-probability, in nats, between the trained adapter and the saved one. Adapters are
# saved in the type they are trained in and both compute in float32, so they differ by the order of additions at most.
RELOAD_TOLERANCE = 1e-4
# The same for the policy and its reference before the first step.
START_TOLERANCE = 1e-4
# Of a first step; what is smaller is no sign that an optimizer does not hold a tensor.
_SMALLEST_STEP = 0.01
# Updates within which every trained tensor must have had a gradient.
PATIENCE = 5
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A sum in int64 is taken of a copy: of so many numbers at a time, 32 MB, whatever the tensor's size.
_AT_ONCE = 2**22


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every trainable parameter must be in the optimizer.

    Raises:
        BrokenPromiseError: With the names of those that would never move.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        what = f"{len(missing)} trainable parameters are not in the optimizer and would not move"
        raise BrokenPromiseError(f"{what}: {', '.join(missing[:3])}")


def check_enough_prompts(args: GRPOConfig, *, enough: bool) -> None:
    """A data set must hold a step, or transformers ends the training before the first, or blames another argument.

    Args:
        args: The trainer's.
        enough: Whether it does.

    Raises:
        DataError: It does not.
    """
    if not enough:
        prompts = args.generation_batch_size // args.num_generations
        what = f"holds fewer prompts than one step takes, which are {prompts}"
        raise DataError(what, "train_dataset", "more, or a smaller batch")


def check_start(policy: PeftModel, reference: Reference, *, must: bool) -> float:
    """Before the first step the policy is the reference.

    Args:
        policy: The policy before its first step.
        reference: What the KL divergence is measured against.
        must: Whether the method promises it; where it does not, a difference is only logged.

    Returns:
        Largest difference of a token's log-probability, in nats, over random tokens, computed in float32.

    Raises:
        BrokenPromiseError: It must be, and is not.
    """
    ids = random_tokens(policy)
    with evaluating(policy), in_float32(policy):
        expected = reference_log_probs(policy, ids, torch.ones_like(ids), reference)
        difference = (token_log_probs(policy, ids, torch.ones_like(ids)) - expected).abs().max().item()
    if difference <= START_TOLERANCE:
        return difference
    message = f"before its first step the policy differs from its reference by {difference:.2e} nats"
    message += f" (at most {START_TOLERANCE:.0e})"
    if must:
        raise BrokenPromiseError(f"{message}: the KL divergence would be measured against another policy")
    warn("PRL324", "%s: this adapter does not start as the base", message)
    return difference


class Movement:
    """Every trained tensor gets a gradient and moves.

    A tensor is proven when a step with a gradient has changed it. Some methods give a gradient to a part only once
    another part has moved (LoRA's A waits for B), hence the patience. A step that is smaller than the spacing of the
    tensor's numbers changes nothing and is nobody's defect; it is logged once, and an error only if nothing else moves.

    Attributes:
        proven: Whether all of them are, so that no further step need be watched.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Watches what trains in the model."""
        self._unproven = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._about_to_move: dict[str, torch.Tensor] = {}
        self._too_coarse: set[str] = set()
        self._was_too_coarse: set[str] = set()
        self._moved = self._said = False
        self._updates = self._taught = 0
        self._real = self._teaches = False

    @property
    def updates(self) -> int:
        """Steps that had a gradient and were taken."""
        return self._updates

    @property
    def proven(self) -> bool:
        """Whether every tensor has moved, or was given up with a warning."""
        return not self._unproven

    def before_step(self, optimizer: torch.optim.Optimizer, *, taught: bool = True) -> None:
        """Keeps the tensors that have a gradient and a learning rate.

        Args:
            optimizer: About to step.
            taught: Whether the policy's own loss has a gradient. Without one, as where all rewards agree, a method's or
                a router's term alone moves some tensors, and others wait.
        """
        self._teaches = taught
        held = [p for group in optimizer.param_groups if group["lr"] > 0 for p in group["params"]]
        moving = {id(p) for p in held if p.grad is not None and bool(p.grad.any())}
        self._real = bool(moving)
        self._about_to_move = {name: p.detach().clone() for name, p in self._unproven.items() if id(p) in moving}
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        kept = {name: self._unproven[name] for name in self._about_to_move}
        self._too_coarse = {name for name, p in kept.items() if _below_spacing(p, groups[id(p)])}

    def after_step(self, *, skipped: bool) -> None:
        """Compares.

        Args:
            skipped: Whether the step was not taken, as mixed precision does on an overflow.

        Raises:
            BrokenPromiseError: A tensor with a gradient did not move, or one got none in several updates.
        """
        if skipped or not self._real:
            return
        self._updates += 1
        self._taught += self._teaches
        still = [name for name, before in self._about_to_move.items() if torch.equal(self._unproven[name], before)]
        self._moved |= len(still) < len(self._about_to_move)
        coarse = self._too_coarse.intersection(still)
        stuck = [name for name in still if name not in coarse]
        if stuck:
            what = f"{len(stuck)} trained tensors have a gradient and did not move in an optimizer step"
            raise BrokenPromiseError(f"{what}: {', '.join(stuck[:3])} (replaced after the optimizer was made?)")
        for name in self._about_to_move.keys() - coarse:
            del self._unproven[name]
        self._was_too_coarse |= coarse
        if coarse and not self._said:
            self._said = True
            dtypes = {str(self._unproven[name].dtype).removeprefix("torch.") for name in coarse}
            what = "%d trained tensors did not move: a step is smaller than the spacing of their numbers in %s (%s)"
            hint = "load the model in float32 and compute with bf16 (autocast), or raise the learning rate"
            shown = ", ".join(sorted(dtypes)), ", ".join(sorted(coarse)[:3])
            warn("PRL325", f"{what}; {hint}", len(coarse), *shown)
        if self._taught >= PATIENCE and self._unproven:
            self.at_end()
            without = sorted(self._unproven.keys() - self._was_too_coarse)
            message = f"{len(without)} trained tensors got no gradient in {PATIENCE} updates: {', '.join(without[:3])}"
            if not all("expert" in name for name in without):
                raise BrokenPromiseError(f"{message}; they are not part of what is computed")
            if without:
                warn("PRL326", "%s; their experts may not have been chosen yet", message)
            self._unproven = {}

    def at_end(self) -> None:
        """After the last step, however few there were.

        Raises:
            BrokenPromiseError: Every step was smaller than the spacing of the numbers: nothing was trained.
        """
        if self._said and not self._moved:
            what = (
                f"nothing that is trained has moved in {self._updates} updates: every step is smaller than the spacing"
            )
            hint = "load the model in float32 (bf16 autocast may stay), or raise the learning rate"
            raise BrokenPromiseError(f"{what} the spacing of the numbers; {hint}")


def _below_spacing(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether a step of this optimizer may be too small to change any number of a tensor.

    First steps of Adam and its relatives are of lr |g| / (|g| + eps), those of others of lr |g|; later ones may be far
    smaller, after gradients of other signs or sizes. A step below half the spacing of a number is lost.
    """
    if parameter.grad is None:
        return False
    values, step = parameter.detach().float().abs(), parameter.grad.detach().float().abs()
    if "betas" in group or "eps" in group:
        eps = group.get("eps") or 0.0
        step = step / (step + (eps if isinstance(eps, float) else 0.0)).clamp(min=torch.finfo(torch.float32).tiny)
    _, exponent = torch.frexp(values)  # values < 2^exponent, so the spacing is at least eps / 2 of that
    spacing = torch.finfo(parameter.dtype).eps / 2 * torch.ldexp(torch.ones_like(values), exponent)
    lost = (_SMALLEST_STEP * group["lr"] * step < spacing / 2) & (values > 0)  # beside 0 any number has its place
    return bool((lost | (step == 0)).all())


def check_base_unchanged(model: torch.nn.Module, fingerprint: str) -> None:
    """The base's weights must be, bit for bit, those that were loaded.

    Raises:
        BrokenPromiseError: They are not.
    """
    now = base_fingerprint(model)
    if now != fingerprint:
        what = f"the base's weights changed while the adapter was trained ({fingerprint[:12]} before, {now[:12]} now)"
        raise BrokenPromiseError(f"{what}: the adapter does not belong to the published base")


def check_saved_adapter(policy: PeftModel, adapter: Path, input_ids_BT: torch.Tensor) -> float:
    """The saved adapter must give the trained policy's log-probabilities, on the base that is published.

    Returns:
        The largest difference, in nats.

    Raises:
        BrokenPromiseError: It is above the tolerance.
        ModelError: The base in memory is not the published one.
    """
    check_published(policy, loaded_here=False)
    difference = reload_difference(policy, adapter, input_ids_BT)
    if not difference <= RELOAD_TOLERANCE:
        what = f"the adapter in {adapter} is not the one that was trained: log-probabilities differ by {difference:.2e}"
        raise BrokenPromiseError(f"{what} (at most {RELOAD_TOLERANCE:.0e})")
    return difference


def check_saved_model(model: torch.nn.Module, folder: Path) -> None:
    """A model that was saved whole must be, bit for bit, the one in memory.

    Raises:
        BrokenPromiseError: A tensor differs.
    """
    for changed in other_tensors(model, checkpoint_files(str(folder), None), shapes_only=False):
        raise BrokenPromiseError(f"the model in {folder} is not the one in memory: {changed}")


def check_replicas(tensors: Mapping[str, torch.Tensor], when: str) -> None:
    """Compares trained tensors over all processes, which call this at once; their bits are read once.

    Args:
        tensors: By name, the same names in the same order on each process.
        when: For the message, as ``after step 3``.

    Raises:
        BrokenPromiseError: On every process, if those of one of them differ.
    """
    if not tensors or torch.distributed.get_world_size() == 1:
        return
    device = next(iter(tensors.values())).device
    own_K = torch.stack([checksum(tensor).to(device) for tensor in tensors.values()])
    every = [torch.empty_like(own_K) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own_K)
    differs_RK = torch.stack(every) != every[0]
    if not differs_RK.any():
        return
    rank, tensor = (int(place) for place in differs_RK.nonzero()[0])
    count, names = int(differs_RK[rank].sum()), list(tensors)
    what = f"{when} rank {rank} holds another policy than rank 0: {count} of {len(names)} trained tensors differ, as"
    hint = "each process needs the mean of all gradients, and GPUs and libraries of one kind to round it alike"
    raise BrokenPromiseError(f"{what} {names[tensor]}", hint=hint)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """() int64, the sum of a tensor's numbers read as integers, modulo 2^64; another where one number is another."""
    numbers = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in numbers.split(_AT_ONCE)]).sum()
