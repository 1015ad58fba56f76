"""Where rollouts come from: the engine, what is sampled ahead, the check of the engine, the rewards that were given."""
