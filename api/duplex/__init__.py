"""The thin duplex protocol on a voice session: one kind byte before each message, raw audio both ways. No audio, no turns here."""
