"""What runs on a machine that holds layers: its slice of the model, its optimizer, and the commands it obeys."""
