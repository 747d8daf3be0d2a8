"""Python runs it when it starts, where PYTHONPATH names this directory: SIGUSR2 then makes the main thread hang where it stands."""

import signal


def hang(number: int, frame: object) -> None:
    """Never returns, and holds the interpreter: as a step that hangs."""
    while True:
        pass


signal.signal(signal.SIGUSR2, hang)
