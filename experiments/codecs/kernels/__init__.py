"""The torch side of the codecs: one file for each, and the arithmetic that they share."""
