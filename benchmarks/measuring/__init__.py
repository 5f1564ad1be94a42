"""Parts that the benchmarks share: processes of many nodes on one machine, their memory, processor time and traffic."""
