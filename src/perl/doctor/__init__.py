"""What keeps a run from starting, or makes it slow, on the machine at hand, and what each code of a line means."""
