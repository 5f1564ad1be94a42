"""What runs on the other side of the fence. Modules here import the standard library and each other."""
