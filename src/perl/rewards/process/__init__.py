"""A reward for each step of a completion, which another model gives."""
