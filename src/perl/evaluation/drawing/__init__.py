"""Who is asked and by which engine, and the completions that are drawn."""
