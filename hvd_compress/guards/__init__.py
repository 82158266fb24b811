"""Checks that only ask whether the user has erred: one file a kind of mistake."""
