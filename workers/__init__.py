"""The process that hosts stages: engine loop, stage hosts, outgoing edges. Stages know nothing of it, and it knows no model."""
