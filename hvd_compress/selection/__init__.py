"""Which entries are sent, and who decides."""
