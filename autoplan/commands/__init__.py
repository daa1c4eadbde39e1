"""The commands: each turns its arguments into calls of the Python interface and prints the result."""
