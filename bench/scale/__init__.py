"""How the bus scales, and how soon it is whole again: `python -m bench.scale`."""
