"""Qwen3-Omni: processor → thinker → talker → code2wav, from a checkpoint in the Hugging Face layout."""
