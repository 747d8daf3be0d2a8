# mypy: allow-untyped-decorators, allow-untyped-calls
"""Programmatic dependent launch of the decode kernels: one starts while the kernel before it still runs, and fetches its weights.

A decode step of few rows is a chain of some hundred short kernels: most of their time is the start, and the first read of weights.
Cards of compute capability 9.0 and later begin a kernel as soon as every program of the one before has said `let_next_start`. What
makes that sound, for every kernel that takes `options`:

- each program calls `wait_for_earlier` before it reads anything that another kernel writes, and before it writes anything at all,
  since an earlier kernel may still read what lay there. No return stands before it;
- in front of it only constants are read: weights, scales, tables made when the model was loaded, and what a step is given by copies
  from the host before its first kernel starts (seeds, numbers of draws);
- the wait is for the end of the whole kernel before, its writes included, and that one has waited in the same way: so it is a wait
  for all earlier kernels. Kernels of others in between are started in the ordinary way, and need nothing.

A CUDA graph keeps these starts. Elsewhere (older cards, ROCm, Triton's interpreter) both calls are left out when a kernel is
compiled, and it is started as ever; results are the same bit for bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without these calls
    gdc_launch_dependents = gdc_wait = None

enabled = True  # the GPU checks turn it off to compare


@triton.jit
def let_next_start(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The kernel behind this one may start. First in a kernel: what the next one reads early are constants."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns when every earlier kernel has ended and what it wrote can be read."""
    if PDL:
        gdc_wait()


def options(x: torch.Tensor) -> dict[str, bool]:
    """Arguments of the launch of a kernel that keeps the rules above, on the device of x: its constant PDL, and Triton's option."""
    if enabled and x.is_cuda and _supports(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _supports(device: torch.device) -> bool:
    return gdc_wait is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
