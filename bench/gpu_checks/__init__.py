"""What must hold on a GPU, one file for each part of the engine; `python -m bench.gpu_check` runs them.

Each file has `checks() -> Iterator[tuple[str, Callable[[], str]]]`: a name, and a function that raises AssertionError where the
GPU form differs from its plain equal, and returns one line of figures (largest error, time) where it does not.
"""
