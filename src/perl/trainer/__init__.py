"""PeftGRPOTrainer; the only room that knows the private methods of TRL and transformers."""
