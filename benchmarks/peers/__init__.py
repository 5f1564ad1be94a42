"""Other systems that the benchmarks run beside this one, each in an environment of its own."""
