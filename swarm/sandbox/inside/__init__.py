"""The code that runs inside the sandbox. Modules here import the standard library and each other only."""
