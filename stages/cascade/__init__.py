"""The CPU quickstart: Whisper tiny.en → SmolLM2-135M → hibari TTS, real small models that registry packages carry."""
