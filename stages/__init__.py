"""What a stage computes: the stage contract, the autoregressive engine, one folder per model family.

A stage is handed tensors and hands tensors back; it knows no socket, process or connector. `spec.py` of a family imports no torch.
"""
