"""How tensors move between stages: inline, local, shm. A connector knows bytes, slots and refs; no request, stage or socket."""
