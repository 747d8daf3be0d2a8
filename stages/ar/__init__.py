"""The autoregressive engine: continuous batching over a paged KV cache, for every model that makes one token after another.

It knows decoders, rows and samplers; a model family adds a Program (program.py) and never schedules by itself.
"""
