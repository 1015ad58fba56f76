"""What other people see of an adapter."""
