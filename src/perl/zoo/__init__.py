"""The zoo: what is known of adapters, ours and others', and where they lie; ``policy/saved/download`` fetches them."""
