"""What an exception of a stage means: one request is at fault, memory ran out, or the process has lost its device."""

from __future__ import annotations

import torch

from omni_bus.errors import OmniBusError, OutOfMemory, StageFailed

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: the context is as good as before
_HOST_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch's words; the error is a plain RuntimeError


def out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "error_code", 0) == _CUDA_OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and _HOST_OUT_OF_MEMORY in str(error)


def raise_if_device_is_lost(error: Exception) -> None:
    """Raises `error` again where nothing can be computed in this process any more.

    After an illegal access, a failed assertion in a kernel or a card that fell off the bus, every further call fails: a process that
    went on would fail whatever it is given, and soon look like the replica with the least to do.
    """
    if isinstance(error, torch.AcceleratorError) and not out_of_memory(error):
        raise error


def for_client(error: Exception, otherwise: str) -> OmniBusError:
    """What a client is told: an error of ours as it is, of others only their kind. `otherwise` is the sentence for any other."""
    if isinstance(error, OmniBusError):
        return error
    if out_of_memory(error):
        return OutOfMemory("the stage ran out of memory; send less at once, or try again later")
    return StageFailed(otherwise)
