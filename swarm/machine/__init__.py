"""What a node needs from its machine: hardware, memory, files, child processes and signals."""
