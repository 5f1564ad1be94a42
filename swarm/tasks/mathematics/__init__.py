"""The verifier of mathematical answers and its process."""
