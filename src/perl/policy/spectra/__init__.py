"""What training changed of each weight matrix: read from files one module at a time, and measured."""
