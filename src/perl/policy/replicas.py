"""Whether every process holds the same trained tensors, told by one number for each.

trained tensors of this process -> sums of their bits -> the rank and the tensor that differ from the main process's

Processes start from the same tensors and take the same step with the mean of their gradients, so nothing but equal bits
is right. Where one of them missed an exchange they drift apart in silence: each looks healthy, and what is saved is the
main process's, trained on its own rows alone.
"""

from collections.abc import Mapping

import torch

from perl.errors import BrokenPromiseError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A sum in int64 is taken of a copy: of so many numbers at a time, 32 MB, whatever the tensor's size.
_AT_ONCE = 2**22


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
