"""The same contract within one process, on a virtual clock, with seeded faults."""
