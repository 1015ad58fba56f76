"""What a model card says, and whether it is true."""
