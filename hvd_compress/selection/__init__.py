"""Selection: the entries that are sent, and who decides on them."""
