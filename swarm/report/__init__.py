"""Tables, curves and the report file of a run."""
