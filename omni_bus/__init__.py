"""The bus: events, wire codec, broker, orchestrator, registry, client, config, supervisor and command line.

The core imports the standard library, msgspec and pyzmq only (and rich for the screen of `top`); torch may not be imported from here.
"""

__version__ = "0.1.0"
