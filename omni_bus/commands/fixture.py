"""Write a random checkpoint in the layout of a model family, to run its pipeline without a hub."""

from __future__ import annotations

import argparse
import pathlib
import sys

from omni_bus.errors import ConfigError

NAME = "fixture"
EPILOG = "The weights are random: such a model babbles. It shows that everything runs, and how fast."
FAMILIES = ("qwen3-omni",)
STAGES = ("thinker", "talker", "code2wav")  # that hold weights


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", choices=FAMILIES, help="the model family")
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path, help="where to write; new or empty")
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny", help="tiny: for a CPU; full: 70 GB (default: tiny)")
    parser.add_argument(
        "--no-weights",
        action="store_true",
        help='leave the tensors out: for stages that say load = "random" and make them on their device',
    )
    parser.add_argument(
        "--tokenizer",
        choices=("qwen", "tiny"),
        help="of the full size: Qwen's (needs dashscope==2.0.2), or a byte-level one with its ids, for timings (default: qwen)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    directory: pathlib.Path = arguments.directory
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: is a file; name a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory}: is not empty; name a new directory")
    # torch comes in here, and only for this command.
    from omni_bus.stages.qwen3_omni.fixture import write

    shown = _Progress()
    try:
        write(
            directory,
            size=arguments.size,
            seed=arguments.seed,
            progress=shown.show,
            weights=not arguments.no_weights,
            vocabulary=arguments.tokenizer,
        )
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None
    finally:
        shown.close()
    config = "configs/qwen3_omni_tiny.toml" if arguments.size == "tiny" else "configs/qwen3_omni.toml"
    random = "".join(f" --set stages.{stage}.load=random" for stage in STAGES) if arguments.no_weights else ""
    print(f"omni-bus: wrote {directory}; serve it with: omni-bus up {config} --set model.path={directory}{random}")
    return 0


class _Progress:
    """On a terminal one line that is written over; elsewhere a line at the start and at each tenth of the way."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._tenths = -1

    def show(self, fraction: float, detail: str) -> None:
        """`fraction`: 0 to 1."""
        if self._terminal:
            print(f"\r\x1b[K{fraction:4.0%}  {detail}", end="", file=sys.stderr, flush=True)
        elif (tenths := int(fraction * 10)) > self._tenths:
            self._tenths = tenths
            print(f"omni-bus: {fraction:4.0%}  {detail}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
