"""The HTTP server: turns OpenAI's protocol into events of the bus and back.

Imports the core, aiohttp, PyAV and prometheus-client; never torch, transformers, stages' code or workers. Whatever takes longer
than a few milliseconds runs in threads, so that the loop stays free.
"""
