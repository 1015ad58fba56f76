"""What an adapter is worth: the base and the adapter under one protocol."""
