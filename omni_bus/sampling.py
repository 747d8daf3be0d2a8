"""Sampling parameters of one generating stage; `None` means "not said here", so that layers of defaults merge."""

from __future__ import annotations

import msgspec

from omni_bus.errors import InvalidRequest

LEAST_TEMPERATURE = 1e-6  # scores divided by less leave the range of float32
_TEMPERATURE = f"a number from 0 to 100, and at least {LEAST_TEMPERATURE:f} where it is not 0"
_PENALTY = "a number from 0.01 to 100"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request values over TOML values over pipeline defaults; see `merged`."""

    temperature: float | None = None  # 0 = greedy
    top_k: int | None = None  # 0 or -1 = off
    top_p: float | None = None  # 1 = off
    repetition_penalty: float | None = None  # 1 = off
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None

    def merged(self, over: SamplingParams) -> SamplingParams:
        """`self` with every field that `over` says replaced."""
        said = {name: value for name in self.__struct_fields__ if (value := getattr(over, name)) is not None}
        return msgspec.structs.replace(self, **said)

    def check(self, where: str) -> None:
        """Raise InvalidRequest naming `where.field` for a value out of range."""
        rules = (
            ("temperature", self.temperature in (None, 0) or LEAST_TEMPERATURE <= self.temperature <= 100, _TEMPERATURE),
            ("top_k", self.top_k is None or self.top_k >= -1, "an integer, -1 or 0 for off"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "a number above 0 and up to 1"),
            ("repetition_penalty", self.repetition_penalty is None or 0.01 <= self.repetition_penalty <= 100, _PENALTY),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "an integer of at least 1"),
            ("min_tokens", self.min_tokens is None or self.min_tokens >= 0, "an integer of at least 0"),
            ("stop", self.stop is None or (len(self.stop) <= 16 and all(self.stop)), "up to 16 non-empty strings"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
        )
        for name, good, wanted in rules:
            if not good:
                raise InvalidRequest(f"{where}{name} must be {wanted}", param=f"{where}{name}")
