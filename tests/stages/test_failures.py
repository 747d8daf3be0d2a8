"""What exceptions of a stage mean to its process and to a client."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from omni_bus.errors import ModelRefused
from omni_bus.stages import failures


def test_a_lost_device_is_raised_again_and_nothing_else_is() -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        failures.raise_if_device_is_lost(lost)
    no_memory = torch.AcceleratorError("CUDA error: out of memory")
    no_memory.error_code = 2
    for error in (no_memory, torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("a shape"), ModelRefused("no")):
        failures.raise_if_device_is_lost(error)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("Tried to allocate 2 GiB in /srv/model")])
def test_a_client_is_told_of_lost_memory_by_name_and_not_in_its_words(error: Exception) -> None:
    told = failures.for_client(error, "it failed")
    assert (told.code, told.status) == ("out_of_memory", 503) and "/srv" not in told.message


@pytest.mark.parametrize("like", [torch.empty, numpy.empty])
def test_a_host_without_memory_is_told_as_such_whoever_asked_it_for_some(like: Callable[[int], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as met:
        like(1 << 50)  # elements: more than any address space
    assert failures.for_client(met.value, "it failed").code == "out_of_memory"


def test_our_own_errors_are_told_as_they_are_and_others_as_the_stage_says() -> None:
    own = ModelRefused("too long")
    assert failures.for_client(own, "it failed") is own
    told = failures.for_client(ValueError("/srv/model"), "it failed")
    assert (told.code, told.message) == ("stage_failed", "it failed")
