"""The synchronization axis as pure rules: who waits for whom, whose update is applied when."""
