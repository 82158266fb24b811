"""A compressor's state between steps: saved, loaded, and converted for another layout."""
