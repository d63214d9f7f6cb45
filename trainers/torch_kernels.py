"""The step mode's encoder in torch operations, for trainers whose weights are on an accelerator; same bytes as numpy.

Goes in: old and new bits on the host; comes out: the streams of ``schemas.delta_steps``. Comparing, counting and coding
run on the device, and only what changed comes back; the code is the same for every device. Applying stays numpy's: a
trainer never applies.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.schemas.delta_steps import CLASS_TABLE, I64, U16, Kernels, NumpyKernels, Steps

__all__ = ("TorchKernels", "kernels_on")


def kernels_on(device: torch.device) -> Kernels | None:
    """Kernels for weights on a device; None on the CPU, where numpy views and compiled loops are faster."""
    return None if device.type == "cpu" else TorchKernels(device)


class TorchKernels(NumpyKernels):
    """See ``delta_steps.Kernels``; ``scan`` and ``find`` run on ``device``. May be used from several threads."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def scan(self, old: U16, new: U16, bounds: I64) -> tuple[Steps, I64]:
        """The steps from old to new (see ``Kernels.scan``)."""
        before, after = self._bits(old), self._bits(new)
        positions = torch.nonzero(before != after).flatten()
        edges = torch.searchsorted(positions, torch.from_numpy(bounds).to(self._device))
        counts: I64 = edges.diff().cpu().numpy()
        before, after = before[positions], after[positions]
        step = _ordered(after).int() - _ordered(before).int()
        large = step.abs() > 1
        codes = (step < 0).to(torch.uint8) | (large.to(torch.uint8) << 1)
        beyond = step.abs()[large] - 2
        escapes = after[large][beyond >= 255]
        return (
            Steps(
                int(positions.numel()),
                _gaps(positions).cpu().numpy(),
                _packed(codes).cpu().numpy(),
                beyond.clamp(max=255).to(torch.uint8).cpu().numpy(),
                escapes.cpu().numpy().view(np.uint16),
            ),
            counts,
        )

    def find(self, old: U16, new: U16) -> tuple[I64, I64]:
        """Changed positions and their places within their class (see ``Kernels.find``)."""
        before = self._bits(old)
        positions = torch.nonzero(before != self._bits(new)).flatten()
        table = torch.from_numpy(CLASS_TABLE).to(self._device)
        classes = table[(before.int() >> 7) & 0x1FF].long()
        order = torch.argsort(classes, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=self._device)
        sizes = torch.bincount(classes, minlength=CLASS_TABLE.max() + 1)
        first = torch.cumsum(sizes, 0) - sizes
        ranks = place[positions] - first[classes[positions]]
        return positions.cpu().numpy(), ranks.cpu().numpy()

    def _bits(self, bits: U16) -> Tensor:
        """Bits as int16 on the device; torch knows few operations on uint16."""
        own: NDArray[np.int16] = bits.view(np.int16)
        return torch.from_numpy(own if own.flags.writeable else own.copy()).to(self._device)


def _ordered(bits: Tensor) -> Tensor:
    """``delta_steps.ordered`` of int16 bits."""
    return bits ^ ((bits >> 15) & 0x7FFF)


def _gaps(positions: Tensor) -> Tensor:
    """``delta_steps.gaps_of`` of ascending positions."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    full = gaps // 255
    ends = torch.cumsum(full, 0) + torch.arange(gaps.numel(), device=gaps.device)
    size = int(ends[-1]) + 1 if ends.numel() else 0
    stream = torch.full((size,), 255, dtype=torch.uint8, device=gaps.device)
    stream[ends] = (gaps - full * 255).to(torch.uint8)
    return stream


def _packed(codes: Tensor) -> Tensor:
    """Two-bit codes, four to a byte, lowest bits first."""
    room = codes.new_zeros(-(-codes.numel() // 4) * 4)
    room[: codes.numel()] = codes
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes.device)
    return (room.reshape(-1, 4) << shifts).sum(1).to(torch.uint8)
