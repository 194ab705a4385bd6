"""The torch code of the codecs: one file for each, and shared arithmetic."""
