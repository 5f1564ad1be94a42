"""What a node needs of the machine that it runs on: hardware, memory, files, child processes, signals."""
