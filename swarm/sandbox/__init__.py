"""Runs code that strangers and policies wrote, and services that read strangers' texts, in confined processes."""
