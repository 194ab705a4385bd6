"""The rules of the synchronization axis: which worker waits, which update is applied when."""
