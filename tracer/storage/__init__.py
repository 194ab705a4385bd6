"""Files in object stores and other file systems that a URL names."""
