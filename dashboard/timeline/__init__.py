"""The timeline: tracks, levels of detail, binary frames, its page and panels."""
