"""A run that verl trains: what is sent there, and what comes back."""
