"""One commit or none."""
