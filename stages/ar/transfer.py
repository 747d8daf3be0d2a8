"""From the host to a device without waiting for what the device is doing.

An ordinary copy to a card waits until all that was queued there before it is done; one from pinned memory is queued behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` on `device`, in `dtype` where one is given. The host's memory may be reused at once."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def ids_to_device(ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n]."""
    return to_device(torch.tensor(ids, dtype=torch.int64), device)
