"""The commands of `gemq`, one file a noun; each parses, calls and prints, and no more."""
