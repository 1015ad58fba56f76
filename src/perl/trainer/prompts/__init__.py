"""Which prompts are sampled: their order, what is remembered of them, what replaces groups without variance."""
