"""A pipeline without a model: it measures the bus, and with `faults = true` provokes failures, in real processes."""
