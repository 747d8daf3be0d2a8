"""OpenAI's Realtime protocol (GA) on a voice session: its JSON in, its JSON out, and the WebSocket between. No audio, no turns here."""
