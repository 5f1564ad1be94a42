"""Signed records: who says what, in which bytes, and the one door through which it comes in."""
