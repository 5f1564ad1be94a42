"""The same contract inside one process, on a virtual clock, with faults from a seed."""
