"""BOFT's block-diagonal matrices by torch, so that nothing has to be compiled for them.

BOFT's config -> PEFT builds no extension in this process

PEFT would build a CUDA extension for each layer, again and again where it fails, and would then take one butterfly
instead of the number in the config, without changing that.
"""

import torch
from peft import BOFTConfig, PeftConfig
from peft.tuners.boft import layer as boft_layer

from perl.errors import warn


class BlockDiagonal:
    """What PEFT's extension offers, under the extension's names, for any device and type."""

    @staticmethod
    def forward(blocks_NDHH: torch.Tensor) -> list[torch.Tensor]:
        """(N, D H, D H) matrices with D blocks on their diagonal."""
        N, D, H, _ = blocks_NDHH.shape
        whole_NDHDH = blocks_NDHH.new_zeros(N, D, H, D, H)
        whole_NDHDH.diagonal(dim1=1, dim2=3).copy_(blocks_NDHH.permute(0, 2, 3, 1))
        return [whole_NDHDH.view(N, D * H, D * H)]

    @staticmethod
    def backward(grad_NSS: torch.Tensor, blocks_NDHH: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of the blocks, from that of the matrices."""
        N, D, H, _ = blocks_NDHH.shape
        return [grad_NSS.reshape(N, D, H, D, H).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()]


def without_extension(config: PeftConfig) -> None:
    """Has PEFT take :class:`BlockDiagonal` for its extension, so that it builds none.

    Args:
        config: Of the adapter that is about to be made; of other methods nothing happens.
    """
    if isinstance(config, BOFTConfig):
        boft_layer._FBD_CUDA = BlockDiagonal


def say_who_can_load(config: PeftConfig) -> None:
    """Warns of a BOFT that plain PEFT loads only where it can build its extension."""
    if isinstance(config, BOFTConfig) and config.boft_n_butterfly_factor > 1:
        warn(
            "PRL336",
            "boft with boft_n_butterfly_factor %d: plain PEFT loads it only on a GPU with nvcc, ninja and a C++ "
            "compiler; with 1 anywhere",
            config.boft_n_butterfly_factor,
        )
