"""The page of a node, the overview of several, and the report of a finished run."""
