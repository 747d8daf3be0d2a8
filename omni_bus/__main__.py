"""`omni-bus`, and `python -m omni_bus`, which is the same: imports what the commands need, and runs one."""

import signal
import sys


def run() -> int:
    """The exit code. Ctrl-C during the imports ends the process without a word: there is nothing yet to end in order."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from omni_bus.cli import main

    signal.signal(signal.SIGINT, interrupt)
    return main()


if __name__ == "__main__":
    sys.exit(run())
