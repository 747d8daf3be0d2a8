"""What every voice endpoint shares: conversation, turns, audio formats, sessions. No WebSocket, and no protocol's JSON but items'.

Conversation and turn detection are free of I/O and clocks: time is counted in samples.
"""
